"""Events as an Arrow table, and rows of silver as tuples with times in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from bulltask.lake.tables import MAX_TIME_MS
from bulltask.spark.lifecycle import (
    DerivedColumns,
    attempts_of,
    derive,
    in_order,
    job_numbers,
    jobs_of,
    lifecycle_events,
)
from tests.support.lifecycle_oracle import AttemptRow, JobRow, LifecycleEvent

__all__ = ["COLUMNS", "arrow_rows", "assert_same", "attempt_row", "attempts", "events_table", "job_row", "jobs"]

TEXT, NUMBER = pa.string(), pa.int64()
COLUMNS = pa.schema({
    "queue": TEXT, "job_id": TEXT, "event_ms": NUMBER, "event_seq": NUMBER, "event": TEXT, "name": TEXT, "prev": TEXT,
    "failed_reason": TEXT,
})  # fmt: skip

Row = tuple[Any, ...]


def attempts(events: pa.Table) -> pa.Table:
    """Derive all attempts of the jobs with these events, with `bulltask.spark.lifecycle`."""
    derived = derived_columns(events)
    return attempts_of(derived, derived.has_attempt)


def jobs(events: pa.Table) -> pa.Table:
    """Derive all incarnations of the jobs with these events, with `bulltask.spark.lifecycle`."""
    derived = derived_columns(events)
    return jobs_of(derived, derived.is_last)


def derived_columns(events: pa.Table) -> DerivedColumns:
    relevant = lifecycle_events(events)
    return derive(in_order(relevant, job_numbers(relevant), np.ones(relevant.num_rows, bool)))


def events_table(events: Iterable[LifecycleEvent]) -> pa.Table:
    return pa.Table.from_pylist([asdict(event) for event in events], COLUMNS)


def at(ms: int | None) -> int | None:
    return None if ms is None else min(ms, MAX_TIME_MS) * 1000


def attempt_row(row: AttemptRow) -> Row:
    """Return the queue and the columns of ``silver.attempts``."""
    return (
        row.queue, row.job_id, row.incarnation, row.attempt, row.name, at(row.queued_ms), at(row.started_ms),
        at(row.ended_ms), row.wait_ms, row.run_ms, row.outcome, row.failed_reason, row.error_fingerprint, None,
        "events", row.as_of_us,
    )  # fmt: skip


def job_row(job: JobRow) -> Row:
    """Return the queue and the columns of ``silver.jobs``."""
    return (
        job.queue, job.job_id, job.incarnation, job.name, at(job.created_ms), at(job.first_started_ms),
        at(job.finished_ms), job.state, job.attempt_count, job.stalls, job.wait_ms, job.run_ms, job.total_ms,
        job.failed_reason, job.error_fingerprint, None, None, "events", job.as_of_us,
    )  # fmt: skip


def arrow_rows(table: pa.Table) -> list[Row]:
    """Return the rows of a silver table, with their columns in the same order."""
    names = ["queue", *(name for name in table.column_names if name not in {"queue", "dt"})]
    columns = (table[name] for name in names)
    plain = (column.cast(NUMBER) if pa.types.is_timestamp(column.type) else column for column in columns)
    return list(zip(*(column.to_pylist() for column in plain), strict=True))


def assert_same(actual: Sequence[Row], expected: Sequence[Row]) -> None:
    """Compare rows in any order; the first difference fails."""
    actual, expected = sorted(actual, key=repr), sorted(expected, key=repr)
    for row, expected_row in zip(actual, expected, strict=False):
        assert row == expected_row
    assert len(actual) == len(expected)
