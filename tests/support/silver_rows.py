"""Events as an Arrow table, and rows of silver as tuples with times in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from bulltask.spark.lifecycle.fold import MAX_TIME_MS, AttemptRow, JobRow, LifecycleEvent

__all__ = ["COLUMNS", "arrow_rows", "assert_same", "attempt_row", "events_table", "job_row"]

TEXT, NUMBER = pa.string(), pa.int64()
COLUMNS = pa.schema({
    "queue": TEXT, "job_id": TEXT, "event_ms": NUMBER, "event_seq": NUMBER, "event": TEXT, "name": TEXT, "prev": TEXT,
    "failed_reason": TEXT,
})  # fmt: skip

Row = tuple[Any, ...]


def events_table(events: Iterable[LifecycleEvent]) -> pa.Table:
    return pa.Table.from_pylist([asdict(event) for event in events], COLUMNS)


def at(ms: int | None) -> int | None:
    return None if ms is None else min(ms, MAX_TIME_MS) * 1000


def attempt_row(one: AttemptRow) -> Row:
    """Return the queue and the columns of ``silver.attempts``."""
    return (
        one.queue, one.job_id, one.incarnation, one.attempt, one.name, at(one.queued_ms), at(one.started_ms),
        at(one.ended_ms), one.wait_ms, one.run_ms, one.outcome, one.reason, one.error_fingerprint, None, "events",
        one.as_of_us,
    )  # fmt: skip


def job_row(job: JobRow) -> Row:
    """Return the queue and the columns of ``silver.jobs``."""
    return (
        job.queue, job.job_id, job.incarnation, job.name, at(job.created_ms), at(job.first_started_ms),
        at(job.finished_ms), job.state, len(job.attempts), job.stalls, job.wait_ms, job.run_ms, job.total_ms,
        job.final_reason, job.error_fingerprint, None, None, "events", job.as_of_us,
    )  # fmt: skip


def arrow_rows(table: pa.Table) -> list[Row]:
    """Return the rows of a silver table with the same order of columns."""
    names = ["queue", *(name for name in table.column_names if name not in {"queue", "dt"})]
    columns = (table[name] for name in names)
    plain = (one.cast(NUMBER) if pa.types.is_timestamp(one.type) else one for one in columns)
    return list(zip(*(one.to_pylist() for one in plain), strict=True))


def assert_same(found: Sequence[Row], expected: Sequence[Row]) -> None:
    found, expected = sorted(found, key=repr), sorted(expected, key=repr)
    for is_row, should_be in zip(found, expected, strict=False):
        assert is_row == should_be
    assert len(found) == len(expected)
