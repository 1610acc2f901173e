"""Kill a pipeline's driver with ``kill -9`` at a chosen step, and find the interrupted step in its lake."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

from bulltask.lake.storage import Layout, Ledger, batch_ingest_id, batch_of
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS

__all__ = ["STEPS", "interrupted_step", "is_running", "kill_before"]

STEPS = ("plan", "bronze", "silver", "publish", "ledger", "commit")
"""The steps of a batch in order. During ``commit`` the batch is done, but Spark has not recorded it."""

_OPERATIONS = ("os.rename", "os.remove", "shutil.rmtree")


def kill_before(pattern: str, number: int, *others: int) -> None:
    """Kill this process before its n-th matching file operation, as a ``kill -9`` from outside would.

    Args:
        pattern: A regular expression that the operation's name and arguments match.
        number: The number of the matching operation, starting at 1.
        others: The ids of processes that are killed just before it.
    """
    left = number

    def audit(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event in _OPERATIONS and re.search(pattern, " ".join(map(str, (event, *args)))):
            left -= 1
            if not left:
                for pid in (*others, os.getpid()):
                    os.kill(pid, signal.SIGKILL)

    sys.addaudithook(audit)


def interrupted_step(layout: Layout) -> tuple[str, str]:
    """Return the step in `STEPS` that a dead driver was in, and the evidence."""
    left = Ledger(layout).publishing()
    if left is None or batch_of(left)[1] <= _last(layout.checkpoint / "commits"):
        return _in_spark(layout)  # publishing.json is from an earlier kill; the next batch replaces it
    return _in_tables(layout, left)


def _in_tables(layout: Layout, left: str) -> tuple[str, str]:
    head = Ledger(layout).head()
    if head is not None and head.ingest_id == left:
        return "ledger", "the head is written, but publishing.json has not been removed"
    if Ledger(layout).get(left) is not None:
        return "ledger", "the record is written, but the head is not"
    written = sum(1 for table in (EVENTS, GAPS, ATTEMPTS, JOBS) for _ in layout.written_directories(table, left))
    return "publish", f"{written} directories are in the tables"


def _in_spark(layout: Layout) -> tuple[str, str]:
    planned, committed = _last(layout.checkpoint / "offsets"), _last(layout.checkpoint / "commits")
    if planned == committed:
        return "plan", f"Spark has committed batch {committed} and has planned no other"
    query, head = json.loads((layout.checkpoint / "metadata").read_text())["id"], Ledger(layout).head()
    if head is not None and head.ingest_id == batch_ingest_id(query, planned):
        return "commit", f"batch {planned} is done, but Spark has only committed {committed}"
    staged = sorted(path.name for path in layout.internal("staging").glob("*/*"))
    if EVENTS.full_name in staged:
        return "silver", f"staged: {', '.join(staged)}"
    return ("bronze", "rows are being read") if staged else ("plan", f"batch {planned} is planned")


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _last(directory: Path) -> int:
    """Return the number of the last batch for which Spark has a file, or -1."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)
