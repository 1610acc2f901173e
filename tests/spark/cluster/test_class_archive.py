"""The tests' JVMs also start without the class data archive."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.spark.conftest import need_java
from tests.support.spark_jvm import ARCHIVED, QUICK, java

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_a_jvm_starts_without_warnings_if_the_archive_is_missing_or_invalid(
    tmp_path: Path, content: bytes | None
) -> None:
    need_java()
    archive = tmp_path / "classes.jsa"
    if content is not None:
        archive.write_bytes(content)
    options = f"{QUICK} -XX:SharedArchiveFile={archive} {ARCHIVED}".split()
    done = subprocess.run([java(), *options, "-version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 3, done.stderr
