"""Kill a pipeline's driver with ``kill -9`` at a chosen step, and find the interrupted step in its lake."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bulltask.lake.ledger import BatchRecord, last_record
from bulltask.lake.storage import Lake
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, Table
from bulltask.spark.batches import query_of
from bulltask.testing.worker import RedisServer

__all__ = [
    "STEPS",
    "executors",
    "interrupted_step",
    "is_running",
    "kill_before",
    "kill_executors",
    "kill_redis",
    "last_batch_of",
    "planned_batch_of",
]

STEPS = ("plan", "read", "fold", "silver", "commit")
"""The steps of a batch in order. During ``commit`` the batch is complete, but Spark has not recorded it."""

_OPERATIONS = ("write", "commit", "delete")


def kill_before(pattern: str, number: int, *others: int) -> None:
    """Kill this process before its n-th matching operation on a lake, as a ``kill -9`` from outside would.

    Args:
        pattern: A regular expression that the operation matches, such as ``begin commit silver.jobs``: the beginning
            or the end of a method of `Lake` (`_OPERATIONS`), and a table.
        number: The number of the matching operation, starting at 1.
        others: The ids of processes that are killed just before it.
    """
    left = number

    def count(operation: str) -> None:
        nonlocal left
        if re.fullmatch(pattern, operation):
            left -= 1
            if not left:
                for pid in (*others, os.getpid()):
                    os.kill(pid, signal.SIGKILL)

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(lake: Lake, table: Table, *args: Any, **options: Any) -> Any:
            count(f"begin {name} {table.full_name}")
            result = method(lake, table, *args, **options)
            count(f"end {name} {table.full_name}")
            return result

        return call

    for name in _OPERATIONS:
        setattr(Lake, name, counted(name, getattr(Lake, name)))


def interrupted_step(lake: Lake, checkpoint: Path) -> tuple[str, str]:
    """Return the step in `STEPS` that a dead driver was in, and the evidence."""
    head = last_record(lake) or BatchRecord()
    events, attempts, jobs = (_batch(lake, table) for table in (EVENTS, ATTEMPTS, JOBS))
    if events > head.number:
        found = f"batches: bronze {events}, silver.attempts {attempts}, silver.jobs {jobs}, records {head.number}"
        return ("silver" if max(attempts, jobs) == events else "fold"), found
    planned, committed = planned_batch_of(checkpoint), last_batch_of(checkpoint / "commits")
    if planned == committed:
        return "plan", f"Spark has committed batch {committed} and has planned no other"
    if head.queries.get(query_of(checkpoint)) == planned:
        return "commit", f"batch {planned} is complete, but Spark has only committed {committed}"
    return "read", f"batch {planned} is planned"


def executors(directory: Path) -> list[int]:
    """Return the executor processes of a cluster, whose working directories are below the cluster's directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_in_cluster = (process / "cwd").readlink().is_relative_to(directory)
            if is_in_cluster and b"CoarseGrainedExecutorBackend" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def kill_executors(directory: Path) -> None:
    """Kill all executors of a cluster."""
    killed = executors(directory)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)


def kill_redis(server: RedisServer, pause_s: float) -> None:
    """Kill a server, and start it again after a pause."""
    server.kill()
    threading.Event().wait(pause_s)
    server.restart()


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def planned_batch_of(checkpoint: Path) -> int:
    """Return the number of the last batch that Spark has planned, or -1."""
    return last_batch_of(checkpoint / "offsets")


def last_batch_of(directory: Path) -> int:
    """Return the number of the last batch for which Spark has a file, or -1."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def _batch(lake: Lake, table: Table) -> int:
    snapshot = lake.open(table)
    return -1 if snapshot is None else snapshot.batch
