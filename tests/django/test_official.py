"""Django's own tests of tasks and backends pass with bulltask's backend, on Django 6."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.redis

ROOT = Path(__file__).parent.parent.parent
HOME = ROOT / ".venv/django-6"


@pytest.fixture
def python() -> Path:
    """The Python with Django 6, which make installs if necessary."""
    stamp = str((HOME / "installed.stamp").relative_to(ROOT))
    with Path(__file__).with_name("requirements-6.txt").open() as requirements:
        fcntl.flock(requirements, fcntl.LOCK_EX)
        completed = subprocess.run(["make", stamp], cwd=ROOT, capture_output=True, text=True, check=False)
    if completed.returncode:
        pytest.fail(f"make {stamp} failed:\n{completed.stdout}{completed.stderr}", pytrace=False)
    if not (HOME / "bin/python").exists():
        (pytest.fail if "CI" in os.environ else pytest.skip)("Django 6 needs Python 3.12 or newer")
    return HOME / "bin/python"


@pytest.mark.slow
def test_djangos_tests_of_tasks_and_backends_pass(python: Path, broker_url: str) -> None:
    completed = subprocess.run(
        [python, Path(__file__).with_name("official.py"), HOME / "tests", broker_url],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    found = json.loads(completed.stdout)
    assert found["passed"], found["output"]
    assert found["django"].startswith("6.")
    assert found["unknown"] == [], "Django has no such tests; remove them from SKIPPED"
    assert (found["run"], found["skipped"]) == (65, 6)
    assert found["enqueued"]["WaitingBackend"] > 15
    assert found["enqueued"]["RunningBackend"] > 15
