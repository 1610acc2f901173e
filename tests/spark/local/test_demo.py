"""``make demo-spark``: it ends well, and it touches only directories that it has made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import need_java, settings
from tests.support.programs import ROOT
from tests.support.spark_jvm import spark_home

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(900)]

DEMO = [sys.executable, str(ROOT / "examples" / "history" / "run.py"), "--jobs", "400", "--root", "lake"]


def run(where: Path, spark: Path) -> tuple[int, str]:
    """Run the demo in a directory; what Spark needs besides is in another one."""
    conf = [word for name, value in settings(spark).items() for word in ("--conf", f"{name}={value}")]
    environ = {**os.environ, "SPARK_HOME": str(spark_home(spark / "home"))}
    ran = subprocess.run(
        [*DEMO, *conf], cwd=where, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return ran.returncode, ran.stdout


@pytest.fixture(scope="module")
def spark_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_java()
    return tmp_path_factory.mktemp("spark-of-the-demo")


def test_the_demo_checks_every_job_and_leaves_a_lake_and_a_report(
    tmp_path: Path, spark_place: Path, session_id: str
) -> None:
    code, said = run(tmp_path, spark_place)
    assert code == 0, said
    assert "✓ The tables say of every job what became of it" in said
    assert "lost" not in said
    assert (tmp_path / "lake" / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]


def test_the_demo_does_not_touch_a_directory_that_is_not_its_own(tmp_path: Path, spark_place: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "mine").touch()
    code, said = run(tmp_path, spark_place)
    assert code == 1
    assert "lake is not empty: choose another --root DIR" in said
    assert (tmp_path / "lake" / "mine").exists()
