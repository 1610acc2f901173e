"""JVMs of the tests start without the class data archive too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.spark.conftest import need_java
from tests.support.spark_jvm import ARCHIVED, QUICK, java

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_a_jvm_starts_without_a_warning_for_a_missing_or_invalid_archive(tmp_path: Path, content: bytes | None) -> None:
    need_java()
    archive = tmp_path / "classes.jsa"
    if content is not None:
        archive.write_bytes(content)
    options = f"{QUICK} -XX:SharedArchiveFile={archive} {ARCHIVED}".split()
    done = subprocess.run([java(), *options, "-version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 3, done.stderr
