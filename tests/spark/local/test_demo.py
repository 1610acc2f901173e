"""``make demo-spark``: it ends well, and it touches only directories that it has made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(900)]

DEMO = [sys.executable, str(ROOT / "examples" / "history" / "run.py"), "--jobs", "400", "--root", "lake"]


def run(where: Path) -> tuple[int, str]:
    ran = subprocess.run(DEMO, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return ran.returncode, ran.stdout


def test_the_demo_checks_every_job_and_leaves_a_lake_and_a_report(tmp_path: Path, session_mark: str) -> None:
    code, said = run(tmp_path)
    assert code == 0, said
    assert "✓ The tables say of every job what became of it" in said
    assert "lost" not in said
    assert (tmp_path / "lake" / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]


def test_the_demo_leaves_a_directory_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "mine").touch()
    code, said = run(tmp_path)
    assert code == 1
    assert "lake is not empty: choose another --root DIR" in said
    assert (tmp_path / "lake" / "mine").exists()
