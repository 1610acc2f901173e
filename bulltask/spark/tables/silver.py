"""A batch's ``silver.attempts`` and ``silver.jobs``, and the open jobs that it leaves for the next batch.

A batch's events are combined with those of the jobs that were open before it. An attempt is written in the batch that
decides its outcome, and a job in the batch in which it finishes, so nothing is written twice. If a finished job is
later retried manually, it gets a new row with the same key and a later ``as_of``.

A job in the batch may be neither new nor open: it had finished and was retried manually, it had timed out, or some of
its events were lost. Its earlier events are looked up, and its whole lifecycle is derived again.

A batch is bounded, so this module uses NumPy arrays, in the process that runs the batch. Open jobs without events in
the batch stay unchanged. The functions take and return Arrow tables; they do not access files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulltask.spark.lifecycle.arrays import (
    Bools,
    DerivedColumns,
    Lifecycles,
    derive,
    in_order,
    is_one_of,
    job_numbers,
    lifecycle_events,
)
from bulltask.spark.lifecycle.arrow_rows import attempts_of, jobs_of
from bulltask.spark.lifecycle.fold import FINISHED

__all__ = ["FindEarlier", "SilverBatch", "derive_silver"]

FindEarlier = Callable[[pa.Table], pa.Table | None]
"""A function that returns the events of jobs (``queue``, ``job_id``) in all earlier batches, or ``None``."""


@dataclass(frozen=True, slots=True)
class SilverBatch:
    """The tables that are derived from a batch.

    Attributes:
        attempts: New rows of ``silver.attempts``, with their partitions ``dt`` and ``queue``.
        jobs: New rows of ``silver.jobs``, with the same partitions.
        open_events: The events of jobs that are still open, with the columns `LIFECYCLE_COLUMNS`.
    """

    attempts: pa.Table
    jobs: pa.Table
    open_events: pa.Table


def derive_silver(
    new: pa.Table, open_events: pa.Table | None, find_earlier: FindEarlier, time_out_before_ms: int
) -> SilverBatch:
    """Derive the rows that a batch adds to silver.

    Args:
        new: The batch's events, as in ``bronze.events``.
        open_events: The open events of the previous batch; ``None`` for the first batch.
        find_earlier: The function that finds earlier events.
        time_out_before_ms: An open job without events since this time times out.
    """
    lifecycles, unchanged = _merge_open_jobs(lifecycle_events(new), open_events, time_out_before_ms)
    derived = derive(_add_earlier_events(lifecycles, find_earlier))
    is_attempt, is_job, is_open = _select_rows(derived, time_out_before_ms)
    continues = derived.lifecycles.table.take(derived.lifecycles.order[is_open])
    return SilverBatch(
        _by_day(attempts_of(derived, is_attempt), "ended_at"),
        _by_day(jobs_of(derived, is_job), "finished_at"),
        continues if unchanged is None else pa.concat_tables([unchanged, continues]),
    )


def _merge_open_jobs(
    events: pa.Table, open_events: pa.Table | None, time_out_before_ms: int
) -> tuple[Lifecycles, pa.Table | None]:
    """Merge the events with the open events of the same jobs; return the other open events unchanged."""
    count = events.num_rows
    if open_events is None:
        return in_order(events, job_numbers(events), np.ones(count, bool)), None
    merged = pa.concat_tables([events, open_events.select(events.column_names).cast(events.schema)])
    jobs, is_new = job_numbers(merged), np.arange(merged.num_rows) < count
    # The batch's jobs come first, so they have the lowest numbers.
    chosen = jobs <= np.max(jobs[:count], initial=-1)
    if time_out_before_ms:
        last_ms, ms = np.zeros(np.max(jobs, initial=-1) + 1, np.int64), merged["event_ms"].to_numpy()
        np.maximum.at(last_ms, jobs, ms)
        chosen |= last_ms[jobs] < time_out_before_ms
    return in_order(merged.filter(chosen), jobs[chosen], is_new[chosen]), merged.filter(~chosen)


def _add_earlier_events(lifecycles: Lifecycles, find_earlier: FindEarlier) -> Lifecycles:
    """Add earlier events of jobs that have only new events but were added before this batch."""
    count = lifecycles.table.num_rows
    starts = np.flatnonzero(lifecycles.first == np.arange(count))
    if not count:
        return lifecycles
    is_late = np.logical_and.reduceat(lifecycles.is_new[:-1], starts) & ~is_one_of(lifecycles.kind[starts], ("added",))
    keys = lifecycles.table.select(["queue", "job_id"]).take(lifecycles.order[starts[is_late]])
    earlier = find_earlier(keys) if keys.num_rows else None
    if earlier is None:
        return lifecycles
    merged = pa.concat_tables([lifecycles.table, lifecycle_events(earlier).cast(lifecycles.table.schema)])
    is_new = np.zeros(merged.num_rows, bool)
    is_new[lifecycles.order] = lifecycles.is_new[:-1]
    return in_order(merged, job_numbers(merged), is_new)


def _select_rows(derived: DerivedColumns, time_out_before_ms: int) -> tuple[Bools, Bools, Bools]:
    """Select the events from which rows are written.

    Returns:
        Three masks of events: those that begin an attempt whose outcome is known since this batch; those whose
        incarnation ends in this batch; those whose incarnation continues.
    """
    lifecycles = derived.lifecycles
    kind, last = lifecycles.kind[:-1], lifecycles.last
    is_removed, was_finished = is_one_of(kind, ("removed",)), is_one_of(lifecycles.kind[derived.kept], FINISHED)
    continues = (derived.added == derived.added[last]) & ~(was_finished | is_removed)[last]
    is_old = lifecycles.ms[last] < time_out_before_ms
    timed_out = continues & is_old
    decided = np.where(derived.deciding_event >= 0, lifecycles.is_new[derived.deciding_event], timed_out)
    # Whether the incarnation ends in this batch. If so, no earlier batch has written its row.
    ends_now = np.select(
        [was_finished, is_removed, lifecycles.next >= 0],
        [lifecycles.is_new[derived.kept], lifecycles.is_new[:-1], lifecycles.is_new[lifecycles.next]],
        timed_out,
    )
    return derived.has_attempt & decided, derived.is_last & ends_now, continues & ~is_old


def _by_day(rows: pa.Table, ended_at: str) -> pa.Table:
    """Add the partition ``dt``: the day (UTC) on which the row's attempt or job ended, or of its last event."""
    day: Any = pc.coalesce(rows[ended_at], rows["as_of"]).cast(pa.date32())
    return rows.append_column("dt", day.cast(pa.string()))
