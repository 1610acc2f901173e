"""A failing test prints the command to run the test again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.rerun_command import rerun_command

FAILS = """
import pytest

@pytest.mark.parametrize("name", ["it's"])
def test_fails(name, record_property):
    record_property("seed", 17)
    assert not name

def test_other():
    pass
"""


@pytest.mark.slow
def test_a_failing_test_prints_the_command_to_rerun_with_its_seed(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(FAILS)
    args = ["-p", "tests.support.rerun_command", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_fails.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "BULLTASK_TEST_SERVER": "redis"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *args], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    printed = [line for line in run.stdout.splitlines() if line.startswith("BULLTASK_TEST_SERVER=redis ")]
    assert [line.partition(" ")[2] for line in printed] == [
        """BULLTASK_TEST_SEED=17 .venv/bin/python -m pytest 'test_fails.py::test_fails[it'"'"'s]'"""
    ], run.stdout


def test_a_test_without_a_seed_is_rerun_by_its_name() -> None:
    assert rerun_command("tests/unit/test_a.py::test_b", [("jobs", 5)], {}) == (
        ".venv/bin/python -m pytest tests/unit/test_a.py::test_b"
    )
