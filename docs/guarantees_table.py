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
        f"{results['jobs']:,} jobs. {results['lost'] or 'No'} jobs were lost. {results['repeated']:,} ran more than "
        "once, because a fault had interrupted their first attempt. Locks expired after "
        f"{results['lock_s']} s, and stalled checks ran every {results['stalled_s']} s (default: 30 s). "
        f"{results['note']}"
    ).strip()
    columns = ["fault", "process", "jobs", "lost", "run more than once", "longest recovery"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["rows"]:
        key = _TOGETHER.get(row["fault"], row["fault"]), _PROCESSES.get(row["process"], row["process"])
        groups.setdefault(key, []).append(row)
    body = [_line(fault, process, rows) for (fault, process), rows in groups.items()]
    return "\n".join([*textwrap.wrap(head, 120), "", *lines, *body, "", *_topologies(results["topologies"])]) + "\n"


def _topologies(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the faults of servers: a line for those with the same topology and numbers."""
    columns = ["topology", "faults of the servers, and the longest time without a start", "lost", "run more than once"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    groups: dict[tuple[str, int, int], list[str]] = {}
    for row in rows:
        key = row["topology"].partition(",")[0], row["lost"], row["repeated"]
        groups.setdefault(key, []).append(f"{row['fault']}: {row['pause_s']:.2f} s")
    lines += [
        f"| {topology} | {'; '.join(faults)} | {lost} | {runs} |" for (topology, lost, runs), faults in groups.items()
    ]
    jobs, count = (sum(row[name] for row in rows) for name in ("jobs", "faults"))
    return [*lines, "", f"These are {count} faults, during which {jobs:,} jobs were sent."]


def replace_table(page: str, text: str) -> str:
    """Return the text of a page with the updated table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _line(fault: str, process: str, rows: list[dict[str, Any]]) -> str:
    counts = [f"{sum(row[name] for row in rows):,}" for name in _COUNTS]
    recovery = max((row["recovery_max_s"] for row in rows if row["recovery_max_s"] is not None), default=None)
    return f"| {' | '.join([fault, process, *counts, '' if recovery is None else f'{recovery:.2f} s'])} |"


_TOGETHER = {
    "kill -9": "`kill -9`",
    "os._exit": "`os._exit`, segfault, `MemoryError`",
    "segfault": "`os._exit`, segfault, `MemoryError`",
    "MemoryError": "`os._exit`, segfault, `MemoryError`",
    "SIGSTOP": "`SIGSTOP`, GIL held",
    "GIL held": "`SIGSTOP`, GIL held",
}
_PROCESSES = {"relay": "relay or sender", "sender": "relay or sender"}
"""The names of faults and processes in the table; those with the same name are added up."""
_COUNTS = ("jobs", "lost", "repeated")


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(), table(json.loads(RESULTS.read_text()))))
