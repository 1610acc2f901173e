"""Generate the table of measurements in ``explanation/guarantees.md`` from ``tests/chaos/results.json``.

``make kill-matrix`` writes the measurements. Run this file to update the table; ``tests/chaos/test_table.py`` fails if
it is out of date.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "explanation/guarantees.md"
RESULTS = Path(__file__).parent.parent / "tests/chaos/results.json"
BEGIN, END = "<!-- kill matrix: written by docs/guarantees_table.py -->\n", "<!-- /kill matrix -->"


def table(results: dict[str, Any]) -> str:
    """Return the table as Markdown, with a sentence on the run."""
    head = (
        f"Measured with {results['server']}: {results['faults']:,} faults at {results['points']:,} points, and "
        f"{results['jobs']:,} jobs. {results['lost'] or 'No'} jobs were lost. {results['repeated']:,} ran more than "
        "once, because a fault had interrupted their first attempt. Locks expired after "
        f"{results['lock_s']} s, and the interval of stalled checks was {results['stalled_s']} s. With the default "
        "settings, both are 30 s, so the times after the death of a supervisor are longer."
    )
    columns = [
        "fault",
        "process",
        "when",
        "faults",
        "jobs",
        "lost",
        "run more than once",
        "recovery: median",
        "longest",
    ]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*textwrap.wrap(head, 120), "", *lines, *map(_line, results["rows"])]) + "\n"


def replace_table(page: str, text: str) -> str:
    """Return the text of a page with the updated table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _line(row: dict[str, Any]) -> str:
    times = ["" if row[name] is None else f"{row[name]:.2f} s" for name in ("recovery_median_s", "recovery_max_s")]
    fault = f"`{row['fault']}`" if row["fault"] in _CODE else row["fault"]
    cells = [fault, row["process"], row["phase"], *(f"{row[name]:,}" for name in _COUNTS), *times]
    return f"| {' | '.join(cells)} |"


_CODE = {"kill -9", "os._exit", "SIGSTOP"}
_COUNTS = ("faults", "jobs", "lost", "repeated")


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(), table(json.loads(RESULTS.read_text()))))
