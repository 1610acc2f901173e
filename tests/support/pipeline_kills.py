"""End a pipeline's driver with ``kill -9`` at a chosen moment, and say from its lake what it was doing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

from bulltask.lake.layout import Layout, batch_of, ingest_id
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS

__all__ = ["STEPS", "interrupted_step", "is_running", "kill_before"]

STEPS = ("plan", "bronze", "silver", "publish", "ledger", "commit")
"""Of a batch, in their order; during ``commit`` the batch is done, and Spark has not noted it."""

_OPERATIONS = ("os.rename", "os.remove", "shutil.rmtree")


def kill_before(pattern: str, number: int, *others: int) -> None:
    """Kill this process before its n-th file operation of a kind, as if somebody had done so from outside.

    Args:
        pattern: found in the operation's name and its arguments.
        number: which of those.
        others: processes that are killed just before.
    """
    left = number

    def look(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event in _OPERATIONS and re.search(pattern, " ".join(map(str, (event, *args)))):
            left -= 1
            if not left:
                for pid in (*others, os.getpid()):
                    os.kill(pid, signal.SIGKILL)

    sys.addaudithook(look)


def interrupted_step(layout: Layout) -> tuple[str, str]:
    """Return one of `STEPS` and what shows it, of a driver that is dead."""
    left = Ledger(layout).publishing()
    if left is None or batch_of(left)[1] <= _last(layout.checkpoint / "commits"):
        return _in_spark(layout)  # what is left is of an earlier kill: the next batch that is written takes its place
    return _in_tables(layout, left)


def _in_tables(layout: Layout, left: str) -> tuple[str, str]:
    head = Ledger(layout).head()
    if head is not None and head.ingest == left:
        return "ledger", "the head is written, what was announced is not taken back"
    if Ledger(layout).get(left) is not None:
        return "ledger", "the record is written, the head is not"
    there = sum(1 for table in (EVENTS, GAPS, ATTEMPTS, JOBS) for _ in layout.written(table, left))
    return "publish", f"{there} directories are in the tables"


def _in_spark(layout: Layout) -> tuple[str, str]:
    planned, noted = _last(layout.checkpoint / "offsets"), _last(layout.checkpoint / "commits")
    if planned == noted:
        return "plan", f"Spark has noted batch {noted} and not planned another one"
    query, head = json.loads((layout.checkpoint / "metadata").read_text())["id"], Ledger(layout).head()
    if head is not None and head.ingest == ingest_id(query, planned):
        return "commit", f"batch {planned} is done, Spark has noted {noted}"
    staged = sorted(path.name for path in layout.own("staging").glob("*/*"))
    if EVENTS.full_name in staged:
        return "silver", f"staged are {', '.join(staged)}"
    return ("bronze", "rows are being read") if staged else ("plan", f"batch {planned} is planned")


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be reaped does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _last(directory: Path) -> int:
    """The number of the last batch that Spark has a file of; -1 for none."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)
