"""Generate ``reference/celery-parity.md`` from the scenarios in ``tests/celery_parity``.

Run this file to update the page; ``tests/celery_parity/test_parity.py`` fails if it is out of date.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.celery_parity.areas import AREAS
from tests.celery_parity.scenario import Area, Scenario

PAGE = Path(__file__).parent / "reference/celery-parity.md"

HEAD = """# Celery's behavior, compared

What does Celery 5.7 do, and what does bulltask do with the same code? Each row is a test with real workers, whose code
was also run with Celery. Of {total} rows, {same} are the same. In {better}, we think that bulltask's behavior is
better; {differs} differ for another reason, often because BullMQ's format has no place for what a Celery message
contains. To migrate a project, read [Migrate from Celery](../how-to/coming-from-celery.md).

{contents}
"""


def page() -> str:
    """Return the page's text."""
    verdicts = Counter(scenario.verdict for area in AREAS for scenario in area.scenarios)
    contents = "\n".join(f"* [{area.title}](#{_anchor(area.title)})" for area in AREAS)
    head = HEAD.format(
        total=verdicts.total(),
        same=verdicts["same"],
        better=verdicts["better"],
        differs=verdicts["differs"],
        contents=contents,
    )
    return "\n".join([head, *map(_section, AREAS)])


def _section(area: Area) -> str:
    lines = [f"## {area.title}", "", "| Celery 5.7 | bulltask |", "|---|---|"]
    return "\n".join([*lines, *map(_line, area.scenarios)]) + "\n"


def _line(scenario: Scenario) -> str:
    verdict = {"same": "same", "better": "better: ", "differs": "differs: "}[scenario.verdict]
    cells = [scenario.sentence, verdict + scenario.because]
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
