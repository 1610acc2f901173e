"""Generate ``reference/celery-parity.md`` from ``tests/celery_parity`` and ``tools/celery_suite/classes.toml``.

Run this file to update the page; ``tests/celery_parity/test_parity.py`` fails if it is out of date.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.celery_parity.areas import AREAS
from tests.celery_parity.scenario import Area, Scenario

PAGE = Path(__file__).parent / "reference/celery-parity.md"
CLASSES = Path(__file__).parents[1] / "tools/celery_suite/classes.toml"

HEAD = """# Celery's behavior, compared

Does your code do the same with bulltask as with Celery 5.7? {total} situations were tested with real workers of both:
{same} have the same outcome. The tables list the others. In {better}, we think that bulltask's behavior is better;
{differs} differ for another reason, often because BullMQ's format has no place for what a Celery message contains. To
migrate a project, read [Migrate from Celery](../how-to/coming-from-celery.md).
"""

SUITE = """## Celery's own tests and examples

`python -m tools celery-suite` runs Celery's integration tests of tasks and canvas with bulltask and a worker, and all
examples of five pages of Celery's user guide. So many of them work:

| file | bulltask | Celery | total |
|---|---|---|---|
{files}

[`classes.toml`](../../tools/celery_suite/classes.toml) names each failure, with its class and its reason:

{classes}

The differences that the tables above do not have, with the number of tests and examples:

{differences}
"""

KINDS: Final = {
    "gap": "bulltask should do the same, but does not yet",
    "difference": "bulltask does something else on purpose",
    "internals": "it uses a part of Celery that projects do not use",
    "broker": "it needs RabbitMQ or another broker",
    "example": "the example is not complete, or does something else in Celery, too",
}
"""The classes of failures, and what they mean."""


def page() -> str:
    """Return the page's text."""
    verdicts = Counter(scenario.verdict for area in AREAS for scenario in area.scenarios)
    head = HEAD.format(
        total=verdicts.total(),
        same=verdicts["same"],
        better=verdicts["better"],
        differs=verdicts["differs"],
    )
    return "\n".join([head, *map(_section, AREAS), _suite()])


def _section(area: Area) -> str:
    same = [scenario for scenario in area.scenarios if scenario.verdict == "same"]
    file = f"{area.scenarios[0].run.__module__.replace('.', '/')}.py"
    text = f"[{len(same)} situations](../../{file}) have the same outcome. These have not:"
    head = [f"## {area.title}", "", text, ""]
    lines = [*head, "| Celery 5.7 | bulltask |", "|---|---|"]
    return "\n".join([*lines, *(_line(scenario) for scenario in area.scenarios if scenario not in same)]) + "\n"


def _line(scenario: Scenario) -> str:
    cells = [scenario.sentence, f"{scenario.verdict}: {scenario.because}"]
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _suite() -> str:
    recorded = tomllib.loads(CLASSES.read_text())
    reasons: dict[tuple[str, str], list[str]] = {}
    for reason in recorded["reason"]:
        reasons.setdefault((reason["class"], reason["because"]), []).extend(reason["names"].split())
    counts: Counter[str] = Counter()
    for (kind, _), names in reasons.items():
        counts[kind] += len(names)
    rows = {reason["because"] for reason in recorded["reason"] if reason.get("is_row")}
    differences = sorted(
        (because, len(names))
        for (kind, because), names in reasons.items()
        if kind == "difference" and because not in rows
    )
    return SUITE.format(
        files="\n".join(_file(name, numbers, reasons.values()) for name, numbers in recorded["files"].items()),
        classes="\n".join(f"* **{kind}** ({counts[kind]}): {KINDS[kind]}" for kind in KINDS if counts[kind]),
        differences="\n".join(f"* {because} ({number})" for because, number in differences),
    )


def _file(file: str, numbers: dict[str, int], failures: Iterable[list[str]]) -> str:
    failed = sum(name.startswith(f"{file}:") for names in failures for name in names)
    works = numbers["total"] - numbers["skipped"] - failed
    cells = [f"`{file}`", works, numbers.get("celery", ""), numbers["total"]]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    PAGE.write_text(page())
