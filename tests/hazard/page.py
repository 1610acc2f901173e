"""The tables of docs/reference/mixed-versions.md: what each test expects is read from there."""

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
    "Pausing",
    "installed",
    "pairings",
    "pausing",
]

PAGE: Final = ROOT / "docs" / "reference" / "mixed-versions.md"
CLIENTS: Final = ROOT / "tests" / "interop"


def installed(package: str) -> str:
    """The version of a package of tests/interop/package.json, by the name it has there."""
    version: str = json.loads((CLIENTS / "node_modules" / package / "package.json").read_text())["version"]
    return version


def _pinned(line: str) -> str:
    """The version that package.json or a requirements file asks for; it need not be installed for that."""
    files = [CLIENTS / "package.json", *sorted((CLIENTS / "official").glob("requirements-*.txt"))]
    found = next(match for file in files if (match := re.search(line, file.read_text(), re.MULTILINE)))
    return found[1]


PINNED: Final = _pinned(r'"bullmq": "([\d.]+)"')
NEWEST_5: Final = _pinned(r'"bullmq-5-newest": "npm:bullmq@([\d.]+)"')
NEWEST_6: Final = _pinned(r'"bullmq-6-newest": "npm:bullmq@([\d.]+)"')
PYTHON_6: Final = _pinned(r"^bullmq==(3[\d.]+)")
VERSIONS: Final = (NEWEST_5, NEWEST_6)


@dataclass(frozen=True, slots=True)
class Pausing:
    """A row of the first table.

    Attributes:
        label: ``"T1"`` …
        steps: who does what, in order: ``("5.62.0", "pauses")``.
        last: what the client of a column does in the end: ``"resumes"`` or ``"pauses"``.
        outcomes: ``"safe"`` or ``"loses 3"``, by the name of that client.
    """

    label: str
    steps: tuple[tuple[str, str], ...]
    last: str
    outcomes: dict[str, str]


def pausing() -> list[Pausing]:
    """The first table: who pauses, adds and resumes."""
    found = []
    for row in _table("#"):
        label, told, *_ = row.values()
        *steps, (who, last) = re.findall(r"`([^`]+)` (pauses|adds|resumes)", told)
        assert who == "X", told
        outcomes = {name.strip("`"): cell for name, cell in list(row.items())[2:]}
        found.append(Pausing(label, tuple(steps), last, outcomes))
    return found


def pairings() -> dict[str, dict[str, str]]:
    """The other tables: outcomes by version, by the name of the test that is in the last column."""
    rows = _table("Operation")
    return {row["Test"].strip("`"): {name.strip("`"): cell for name, cell in row.items()} for row in rows}


def _table(first: str) -> list[dict[str, str]]:
    """All rows of the tables whose first column has this title; markup for strong text is left out."""
    found = []
    for head, body in re.findall(r"^(\|.*)\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE):
        names = _cells(head)
        if names[0] == first:
            found += [dict(zip(names, _cells(line), strict=True)) for line in body.splitlines()]
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
