"""Environments of the official Python client: a separate one for each major version."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

__all__ = ["python_of"]

ROOT = Path(__file__).parent.parent.parent.parent


def python_of(major: int) -> Path:
    """Return the Python with the packages of ``requirements-{major}.txt``, which make installs if necessary.

    Args:
        major: The client's major version.
    """
    home = ROOT / ".venv" / f"official-{major}"
    stamp = home.relative_to(ROOT) / "installed.stamp"
    with Path(__file__).with_name(f"requirements-{major}.txt").open() as requirements:
        fcntl.flock(requirements, fcntl.LOCK_EX)  # one of pytest-xdist's workers installs, the others wait
        completed = subprocess.run(["make", str(stamp)], cwd=ROOT, capture_output=True, text=True, check=False)
        if completed.returncode:
            pytest.fail(f"make {stamp} failed:\n{completed.stdout}{completed.stderr}", pytrace=False)
    return home / "bin" / "python"
