"""mypy and pyright accept valid calls of the public API and reject invalid calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT

# Half a minute. `make lint` checks the same files with the same programs, and fails if they accept an invalid call.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

FOLDER = Path(__file__).parent
VALID, INVALID = FOLDER / "valid_calls.py", FOLDER / "invalid_calls.py"
COMMENT = re.compile(r"\s*# type: ignore\[(.*)\]")


def mypy(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def pyright(*files: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, files)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not run.stdout.startswith("{"):
        pytest.fail(f"pyright did not run (it needs Node.js, or the network once to download it): {run.stderr}")
    report: dict[str, Any] = json.loads(run.stdout)
    return report


def expected() -> dict[int, set[str]]:
    """Return the expected codes of mypy's errors by line of the invalid calls."""
    lines = enumerate(INVALID.read_text().splitlines(), 1)
    return {number: set(match[1].split(", ")) for number, text in lines if (match := COMMENT.search(text))}


@pytest.fixture(scope="module")
def uncommented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the invalid calls without their comments."""
    path = tmp_path_factory.mktemp("typing") / "uncommented.py"
    text = "\n".join(COMMENT.sub("", line) for line in INVALID.read_text().splitlines())
    path.write_text(text.replace("# pyright: reportUnnecessaryTypeIgnoreComment=true", ""))
    return path


@pytest.fixture(scope="module")
def mypy_output(uncommented: Path) -> list[str]:
    """Return mypy's output for all three files; one run reads bulltask only once, which takes most of the time."""
    return mypy(VALID, INVALID, uncommented).stdout.splitlines()


def test_mypy_in_strict_mode_accepts_every_valid_call(mypy_output: list[str]) -> None:
    assert [line for line in mypy_output[:-1] if "uncommented.py:" not in line] == []
    assert "checked 3 source files" in mypy_output[-1]


def test_mypy_rejects_every_invalid_call(mypy_output: list[str]) -> None:
    errors: dict[int, set[str]] = {}
    for line, code in re.findall(r"uncommented\.py:(\d+): error: .*\[(.+)\]$", "\n".join(mypy_output), re.MULTILINE):
        errors.setdefault(int(line), set()).add(code)
    assert errors == expected()


def test_pyright_agrees_with_mypy(uncommented: Path) -> None:
    report = pyright(VALID, INVALID, uncommented)
    assert report["summary"]["filesAnalyzed"] == 3
    expected_errors = [entry for entry in report["generalDiagnostics"] if Path(entry["file"]) == uncommented]
    assert [entry for entry in report["generalDiagnostics"] if entry not in expected_errors] == []
    assert {entry["range"]["start"]["line"] + 1 for entry in expected_errors} == set(expected())
