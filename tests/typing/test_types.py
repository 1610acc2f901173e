"""The public API as type checkers see it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
RIGHT, WRONG = HERE / "right_calls.py", HERE / "wrong_calls.py"
COMMENT = re.compile(r"\s*# type: ignore\[(.*)\]")


def mypy(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def pyright(*files: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        pytest.fail(f"pyright did not run (it needs Node.js, or the network once to get it): {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def expected() -> dict[int, set[str]]:
    """Line of the wrong calls to the codes of mypy's errors there."""
    lines = enumerate(WRONG.read_text().splitlines(), 1)
    return {number: set(found[1].split(", ")) for number, text in lines if (found := COMMENT.search(text))}


@pytest.fixture(scope="module")
def uncommented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wrong calls without their comments."""
    path = tmp_path_factory.mktemp("typing") / "uncommented.py"
    text = "\n".join(COMMENT.sub("", line) for line in WRONG.read_text().splitlines())
    path.write_text(text.replace("# pyright: reportUnnecessaryTypeIgnoreComment=true", ""))
    return path


@pytest.fixture(scope="module")
def by_mypy(uncommented: Path) -> list[str]:
    """What mypy says of all three files: it reads bulltask once, which is nearly all of its time."""
    return mypy(RIGHT, WRONG, uncommented).stdout.splitlines()


def test_mypy_in_its_strict_mode_understands_every_right_call(by_mypy: list[str]) -> None:
    assert [line for line in by_mypy[:-1] if "uncommented.py:" not in line] == []
    assert "checked 3 source files" in by_mypy[-1]


def test_mypy_refuses_every_wrong_call(by_mypy: list[str]) -> None:
    found: dict[int, set[str]] = {}
    for line, code in re.findall(r"uncommented\.py:(\d+): error: .*\[(.+)\]$", "\n".join(by_mypy), re.MULTILINE):
        found.setdefault(int(line), set()).add(code)
    assert found == expected()


def test_pyright_agrees_with_mypy(uncommented: Path) -> None:
    report = pyright(RIGHT, WRONG, uncommented)
    assert report["summary"]["filesAnalyzed"] == 3
    wrong = [entry for entry in report["generalDiagnostics"] if Path(entry["file"]) == uncommented]
    assert [entry for entry in report["generalDiagnostics"] if entry not in wrong] == []
    assert {entry["range"]["start"]["line"] + 1 for entry in wrong} == set(expected())
