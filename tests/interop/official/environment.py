"""Where the official Python client is installed: an environment of its own for each of its major versions."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

__all__ = ["python_of"]

ROOT = Path(__file__).parent.parent.parent.parent


def python_of(major: int) -> Path:
    """Return the Python that has ``requirements-{major}.txt``; make installs it, unless it is there.

    Args:
        major: the client's major version.
    """
    home = ROOT / ".venv" / f"official-{major}"
    stamp = home.relative_to(ROOT) / "installed.stamp"
    with Path(__file__).with_name(f"requirements-{major}.txt").open() as requirements:
        fcntl.flock(requirements, fcntl.LOCK_EX)  # one of pytest-xdist's workers installs, the others wait
        done = subprocess.run(["make", str(stamp)], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.fail(f"make {stamp} failed:\n{done.stdout}{done.stderr}", pytrace=False)
    return home / "bin" / "python"
