"""``make`` has few targets, and ``python -m tools`` the rest; both install what they need, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.__main__ import TOOLS

ROOT = Path(__file__).parent.parent.parent
ALL = {"npm", "official", "celery", "django"}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")


def installed(tests: str, directory: Path) -> set[str]:
    """Return what ``make test`` would install on a new machine, except for the tests' own environment."""
    words = ["make", "-n", "-W", "tests/interop/package.json", "externals", f"TESTS={tests}", f"VENV={directory}"]
    output = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds = re.findall(r"(npm) ci|installing into \S+/(official|celery|django)", output)
    return {first or second for first, second in kinds}


@pytest.mark.slow
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


def test_the_makefile_has_what_a_contributor_types_and_lists_it() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    documented = set(re.findall(r"^  make ([\w-]+)  ", listed, re.MULTILINE))
    assert targets - documented == {"externals", "cds-archive"}, "CI runs these"
    assert len(targets) <= 12


def test_the_tools_are_listed_and_documented() -> None:
    command = [sys.executable, "-m", "tools", "--help"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  ([\w-]+)  ", listed, re.MULTILINE) == sorted(TOOLS)
    documented = re.findall(r"`tools ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert TOOLS.keys() - documented == {"audit", "bench-quick", "lock", "sbom"}, "parts of others, or documented there"
    assert set(documented) <= TOOLS.keys()


def test_make_can_create_what_the_tools_need(tmp_path: Path) -> None:
    needs = sorted({need for tool in TOOLS.values() for need in tool.needs})
    make = ["make", "-n", f"VENV={tmp_path}", *(need.replace(".venv", str(tmp_path), 1) for need in needs)]
    assert subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=False).returncode == 0


def test_an_unknown_tool_is_reported() -> None:
    command = [sys.executable, "-m", "tools", "soap"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "tools: no tool 'soap': .venv/bin/python -m tools --help lists them\n")


def test_the_slow_tests_exist() -> None:
    for line in (ROOT / "tests/slow_tests.txt").read_text().split():
        file, *_, name = line.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), line
