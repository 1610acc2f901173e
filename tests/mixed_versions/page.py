"""The tables of docs/reference/mixed-versions.md, which contain the expected outcomes of the tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from tests.support.programs import ROOT

__all__ = [
    "NEWEST_5",
    "NEWEST_6",
    "PAGE",
    "PINNED",
    "PYTHON_6",
    "VERSIONS",
    "PauseSequence",
    "documented_outcomes",
    "installed",
    "pause_sequences",
]

PAGE: Final = ROOT / "docs" / "reference" / "mixed-versions.md"
CLIENTS: Final = ROOT / "tests" / "interop"


def installed(package: str) -> str:
    """Return the installed version of a package of tests/interop/package.json."""
    version: str = json.loads((CLIENTS / "node_modules" / package / "package.json").read_text())["version"]
    return version


def _pinned(line: str) -> str:
    """Return the version that package.json or a requirements file pins."""
    files = [CLIENTS / "package.json", *sorted((CLIENTS / "official").glob("requirements-*.txt"))]
    found = next(match for file in files if (match := re.search(line, file.read_text(), re.MULTILINE)))
    return found[1]


PINNED: Final = _pinned(r'"bullmq": "([\d.]+)"')
NEWEST_5: Final = _pinned(r'"bullmq-5-newest": "npm:bullmq@([\d.]+)"')
NEWEST_6: Final = _pinned(r'"bullmq-6-newest": "npm:bullmq@([\d.]+)"')
PYTHON_6: Final = _pinned(r"^bullmq==(3[\d.]+)")
VERSIONS: Final = (NEWEST_5, NEWEST_6)


@dataclass(frozen=True, slots=True)
class PauseSequence:
    """A row of the first table.

    Attributes:
        label: ``"T1"`` …
        steps: Clients and their actions in order: ``("5.62.0", "pauses")``.
        last_action: The last action, by the client of a column: ``"resumes"`` or ``"pauses"``.
        outcomes: ``"safe"`` or ``"loses 3"``, by the client of the last action.
    """

    label: str
    steps: tuple[tuple[str, str], ...]
    last_action: str
    outcomes: dict[str, str]


def pause_sequences() -> list[PauseSequence]:
    """Return the first table: sequences of pauses, additions and resumes."""
    found = []
    for row in _table("#"):
        label, sequence, *_ = row.values()
        *steps, (client, last_action) = re.findall(r"`([^`]+)` (pauses|adds|resumes)", sequence)
        assert client == "X", sequence
        outcomes = {name.strip("`"): cell for name, cell in list(row.items())[2:]}
        found.append(PauseSequence(label, tuple(steps), last_action, outcomes))
    return found


def documented_outcomes() -> dict[str, dict[str, str]]:
    """Return the outcomes by version from the other tables, by the name of the test in the last column."""
    rows = _table("Operation")
    return {row["Test"].strip("`"): {name.strip("`"): cell for name, cell in row.items()} for row in rows}


def _table(first: str) -> list[dict[str, str]]:
    """Return the rows of all tables whose first column has this title, without bold markup."""
    found = []
    for header, body in re.findall(r"^(\|.*)\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE):
        names = _cells(header)
        if names[0] == first:
            found += [dict(zip(names, _cells(line), strict=True)) for line in body.splitlines()]
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
