"""``make demo-spark`` succeeds, and changes only directories that it created."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import need_java, settings
from tests.support.programs import ROOT
from tests.support.spark_jvm import conf_options, spark_home

pytestmark = [pytest.mark.extended, pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(900)]

DEMO = [sys.executable, str(ROOT / "examples" / "history" / "run.py"), "--jobs", "400", "--lake", "lake"]


def run(directory: Path, spark: Path) -> tuple[int, str]:
    """Run the demo in a directory, with Spark's files in another one; return the exit code and the output."""
    environ = {**os.environ, "SPARK_HOME": str(spark_home(spark / "home"))}
    done = subprocess.run(
        [*DEMO, *conf_options(settings(spark))],
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def spark_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_java()
    return tmp_path_factory.mktemp("spark-of-the-demo")


def test_the_demo_checks_every_job_and_writes_a_lake_and_a_report(
    tmp_path: Path, spark_directory: Path, session_id: str
) -> None:
    code, output = run(tmp_path, spark_directory)
    assert code == 0, output
    assert "✓ The tables have the outcome of every job" in output
    assert "lost" not in output
    assert (tmp_path / "lake" / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]


def test_the_demo_does_not_change_a_directory_that_it_did_not_create(tmp_path: Path, spark_directory: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "mine").touch()
    code, output = run(tmp_path, spark_directory)
    assert code == 1
    assert "lake is not empty: choose another --lake DIR" in output
    assert (tmp_path / "lake" / "mine").exists()
