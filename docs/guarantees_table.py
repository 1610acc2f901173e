"""Generate the table of measurements in ``explanation/guarantees.md`` from ``tests/chaos/results.json``.

``python -m tools fault-injection`` writes the measurements, with a row for each fault, process and phase of a job's
path. The page shows the sums for each fault and process. Run this file to update the table;
``tests/chaos/test_table.py`` fails if it is out of date.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "explanation/guarantees.md"
RESULTS = Path(__file__).parent.parent / "tests/chaos/results.json"
BEGIN, END = "<!-- fault injection: written by docs/guarantees_table.py -->\n", "<!-- /fault injection -->"


def table(results: dict[str, Any]) -> str:
    """Return the table as Markdown, with a sentence on the run."""
    head = (
        f"Measured with {results['server']}: {results['faults']:,} faults at {results['points']:,} points, and "
        f"{results['jobs']:,} jobs. {results['lost'] or 'No'} jobs were lost; {results['repeated']:,} ran more than "
        "once, because a fault had interrupted their first attempt. Locks expired after "
        f"{results['lock_s']} s, with a stalled check every {results['stalled_s']} s. By default, both are 30 s, so "
        f"recovery from the death of a supervisor takes longer. {results['note']}"
    ).strip()
    columns = ["fault", "process", "faults", "jobs", "lost", "run more than once", "longest recovery"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["rows"]:
        groups.setdefault((row["fault"], row["process"]), []).append(row)
    body = [_line(fault, process, rows) for (fault, process), rows in groups.items()]
    return "\n".join([*textwrap.wrap(head, 120), "", *lines, *body, "", *_topologies(results["topologies"])]) + "\n"


def _topologies(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the faults of servers, for each topology."""
    columns = ["topology", "fault of the servers", "faults", "jobs", "lost", "run more than once"]
    columns += ["longest time without a start", "… of other queues"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        times = ["" if row[name] is None else f"{row[name]:.2f} s" for name in ("pause_s", "others_s")]
        counts = [f"{row[name]:,}" for name in _COUNTS]
        lines.append(f"| {' | '.join([row['topology'], row['fault'], *counts, *times])} |")
    return lines


def replace_table(page: str, text: str) -> str:
    """Return the text of a page with the updated table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _line(fault: str, process: str, rows: list[dict[str, Any]]) -> str:
    counts = [f"{sum(row[name] for row in rows):,}" for name in _COUNTS]
    recovery = max((row["recovery_max_s"] for row in rows if row["recovery_max_s"] is not None), default=None)
    name = f"`{fault}`" if fault in _CODE else fault
    return f"| {' | '.join([name, process, *counts, '' if recovery is None else f'{recovery:.2f} s'])} |"


_CODE = {"kill -9", "os._exit", "SIGSTOP"}
_COUNTS = ("faults", "jobs", "lost", "repeated")


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(), table(json.loads(RESULTS.read_text()))))
