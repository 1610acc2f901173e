"""Rows of gold tables, with defaults for all columns that a test does not set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from bulltask.lake.log_histogram import bucket_of
from tests.support.lake import at

__all__ = ["queue_minute", "task_minute"]

_COUNTS = (
    "added started completed failed requeued stalled waiting_children released finished removed busy_ms wasted_ms"
    " events_lost"
).split()


def task_minute(
    minute: str | datetime,
    name: str | None = "send",
    *,
    waits: Iterable[int] = (),
    runs: Iterable[int] = (),
    **values: Any,
) -> dict[str, Any]:
    """Return a row of gold.task_minute for the queue ``mail``.

    Args:
        minute: A time such as ``10:00`` on 22 November 2026, or any datetime.
        name: The task's name.
        waits: The wait time of each job in milliseconds.
        runs: The run time of each job in milliseconds.
        values: Other columns; counts are 0 by default.
    """
    waits, runs = list(waits), list(runs)
    row = {"queue": "mail", "name": name, "minute": _minute(minute), "complete": True, **dict.fromkeys(_COUNTS, 0)}
    sizes = {
        "wait_histogram_ms": _sizes(waits), "run_histogram_ms": _sizes(runs), "started": len(waits),
        "busy_ms": sum(runs),
    }  # fmt: skip
    return {**row, **sizes, **values}


def queue_minute(minute: str | datetime, **values: Any) -> dict[str, Any]:
    """Return a row of gold.capacity_minute for the queue ``mail``."""
    counts = dict.fromkeys(("added", "finished_or_removed", "backlog_delta", "peak_slots"), 0)
    row = {"queue": "mail", "minute": _minute(minute), "busy_slots": 0.0, "complete": True}
    return {**row, **counts, **values}


def _minute(minute: str | datetime) -> datetime:
    return at(f"2026-11-22 {minute}") if isinstance(minute, str) else minute


def _sizes(values: list[int]) -> list[tuple[int, int]]:
    return sorted(Counter(map(bucket_of, values)).items())
