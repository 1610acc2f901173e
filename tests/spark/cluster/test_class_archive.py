"""The archive of classes that the tests' JVMs begin with: they start without it, too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.spark.conftest import need_java
from tests.support.spark_jvm import ARCHIVED, QUICK, java

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_a_jvm_starts_without_a_warning_whatever_its_archive_path_holds(tmp_path: Path, content: bytes | None) -> None:
    need_java()
    where = tmp_path / "classes.jsa"
    if content is not None:
        where.write_bytes(content)
    options = f"{QUICK} -XX:SharedArchiveFile={where} {ARCHIVED}".split()
    done = subprocess.run([java(), *options, "-version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 3, done.stderr
