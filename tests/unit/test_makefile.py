"""``make test TESTS=…`` installs what the selected tests need, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ALL = {"npm", "official", "celery", "django"}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")


def installed(tests: str, directory: Path) -> set[str]:
    """Return what ``make test`` would install on a new machine, except for the tests' own environment."""
    words = ["make", "-n", "-W", "tests/interop/package.json", "externals", f"TESTS={tests}", f"VENV={directory}"]
    output = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds = re.findall(r"(npm) ci|installing into \S+/(official|celery|django)", output)
    return {first or second for first, second in kinds}


@pytest.mark.parametrize(
    ("tests", "needed"),
    [
        ("tests", ALL),
        ("tests/redis tests/lake", set()),
        ("tests/unit/test_cron.py", set()),
        ("tests/unit", {"npm"}),
        ("tests/process/", {"npm", "celery"}),
        ("tests/process/test_from_celery.py", {"celery"}),
        ("tests/django/test_official.py", {"django"}),
        ("tests/redis tests/mixed_versions", {"npm", "official"}),
    ],
)
def test_only_what_the_selected_tests_need_is_installed(tests: str, needed: set[str], tmp_path: Path) -> None:
    expected = needed if shutil.which("npm") else needed - {"npm"}
    assert installed(tests, tmp_path / "venv") == expected
