"""The lifecycle of jobs, derived from their queues' events: the rows of ``silver.attempts`` and ``silver.jobs``.

`derive_silver` is the only derivation: the pipeline calls it in the driver for each batch, and a rebuild calls it in
Spark's executors (`derive_rows`), for the events of some jobs at a time. It computes with NumPy arrays, takes and
returns Arrow tables, and accesses no files. ``tests/support/lifecycle_oracle.py`` states the same rules in plain
Python, one event at a time, and property tests compare both.

The rules follow from the events that BullMQ's scripts write:

* An attempt begins with ``active``, and its number is the count of these events, without releases: BullMQ's ``ats``.
* ``released`` says that bulltask's worker gave the job back unstarted (because of a rate limit, a shutdown, a dead or a
  full child). That is no attempt: its row has the outcome ``released``, no start, and a negative number. The same
  script then writes ``waiting`` or ``delayed``. The job has waited since before the release.
* A job that was given back after its start looks like a retry without delay: ``waiting`` with ``prev=active``, without
  a reason. So does a release by Node's worker. The number of ended attempts can therefore be greater than BullMQ's
  ``atm``.
* A stalled job is recorded as ``waiting`` with ``prev=active`` and then ``stalled``, in one script. The attempt ended
  when the job was waiting again.
* ``delayed`` and ``waiting-children`` are also recorded for jobs that no worker runs; in that case they end no attempt.
* ``added`` begins a new incarnation: the id was free because the earlier job was removed after it had finished. Adding
  an existing id again emits ``duplicated`` and changes nothing. A finished job that is retried continues its
  incarnation and its count.
* ``removed`` ends the incarnation of an unfinished job. For a finished job, and for a job without other events, it adds
  no information.
* A stream has gaps where it was trimmed. An attempt whose last event is missing is ``open``, like a running attempt. An
  attempt whose ``active`` event is missing has no start time.

Times come from the stream, by Redis' clock. The times in a job's hash come from the clients' clocks.

Each row has a version: ``as_of`` is the time of the last event from which the row is derived. If the same row is
derived again later, from more events, it has the same or a later ``as_of``, and the latest row counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulltask.jobs.failure_reasons import error_fingerprint, plain_reason
from bulltask.lake.storage import arrow_schema
from bulltask.lake.tables import ATTEMPTS, FINISHED, JOBS, MAX_TIME_MS, Table

LIFECYCLE_COLUMNS: Final = ("queue", "job_id", "event_ms", "event_seq", "event", "name", "prev", "failed_reason")
"""The columns of an event that the lifecycle of its job is derived from."""

STATE_AFTER: Final = {
    "added": "unknown",  # the same script writes another event, unless the stream has a gap
    "waiting": "waiting",
    "active": "active",
    "completed": "completed",
    "failed": "failed",
    "delayed": "delayed",
    "stalled": "waiting",
    "released": "unknown",  # as after `added`
    "waiting-children": "waiting-children",
    "removed": "removed",
}
"""The state of a job after an event. Other events do not belong to the lifecycle."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_ROWS_PER_ARRAY: Final = 10_000

FindEarlier = Callable[[pa.Table], pa.Table | None]
"""A function that returns the events of jobs (``queue``, ``job_id``) in all earlier batches, or ``None``."""


# The rows of a batch
#
# A batch's events are combined with those of the jobs that were open before it. An attempt is written in the batch that
# decides its outcome, and a job in the batch in which it finishes, so nothing is written twice. If a finished job is
# later retried manually, it gets a new row with the same key and a later ``as_of``.
#
# A job in the batch may be neither new nor open: it had finished and was retried manually, it had timed out, or some of
# its events were lost. Its earlier events are looked up, and its whole lifecycle is derived again. Open jobs without
# events in the batch stay unchanged.


@dataclass(frozen=True, slots=True)
class SilverBatch:
    """The new rows of silver, with the partition ``dt``, and the events of jobs that are still open."""

    attempts: pa.Table
    jobs: pa.Table
    open_events: pa.Table


def derive_silver(
    new: pa.Table, open_events: pa.Table | None, find_earlier: FindEarlier, time_out_before_ms: int
) -> SilverBatch:
    """Derive the rows that a batch's events add to silver, given the previous batch's open events, if there are any.

    An open job without events since ``time_out_before_ms`` times out.
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


def derive_rows(structs: Iterator[pa.StructArray], *, time_out_before_ms: int) -> Iterator[pa.Array]:
    """Derive the rows of the jobs of a partition of Spark, from all of their events, in an executor.

    A function of columns returns as many elements as it gets. There are at most as many attempts, and as many jobs, as
    events; the other elements are null.
    """
    batches = list(map(pa.RecordBatch.from_struct_array, structs))
    if not batches:
        return
    events = pa.Table.from_batches(batches)
    silver = derive_silver(events, None, lambda _: None, time_out_before_ms)
    columns = []
    for table, rows in ((ATTEMPTS, silver.attempts), (JOBS, silver.jobs)):
        found = rows.select(arrow_schema(table).names).to_struct_array().combine_chunks()
        columns.append(pa.concat_arrays([found, pa.nulls(events.num_rows - len(found), found.type)]))
    result = pa.StructArray.from_arrays(columns, [ATTEMPTS.name, JOBS.name])
    for at in range(0, len(result), _ROWS_PER_ARRAY):
        yield result.slice(at, _ROWS_PER_ARRAY)


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
    is_late = np.logical_and.reduceat(lifecycles.is_new[:-1], starts) & ~_is_one_of(lifecycles.kind[starts], ("added",))
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

    They are three masks of events: those that begin an attempt whose outcome is known since this batch; those whose
    incarnation ends in this batch; those whose incarnation continues.
    """
    lifecycles = derived.lifecycles
    kind, last = lifecycles.kind[:-1], lifecycles.last
    is_removed, was_finished = _is_one_of(kind, ("removed",)), _is_one_of(lifecycles.kind[derived.kept], FINISHED)
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


# Columns that are derived from the events in order
#
# Sort the events of each job; find each event's neighbors; compute running sums, and the last event of a kind up to
# each event. An index of -1 means no event. Arrays that are looked up by index have an additional last element, the
# value for "no event". A time of -1 means no time, because stream times start at 0.


_KINDS: Final = tuple(STATE_AFTER)
_KIND_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}
_ADDED, _WAITING, _ACTIVE = (_KIND_NUMBERS[kind] for kind in ("added", "waiting", "active"))
_DELAYED, _STALLED, _RELEASED, _WAITING_CHILDREN, _REMOVED = (
    _KIND_NUMBERS[kind] for kind in ("delayed", "stalled", "released", "waiting-children", "removed")
)
_NONE: Final = -1

_OUTCOMES: Final = ("open", "requeued", "stalled", "released", "completed", "failed", "waiting-children")
_OUTCOME_OF_KIND: Final = np.array([_OUTCOMES.index(kind) if kind in _OUTCOMES else 0 for kind in _KINDS] + [0])
"""The outcome of an attempt that ends with an event of each kind, independent of earlier events."""


@dataclass(frozen=True, slots=True)
class Lifecycles:
    """Events in order. The events of a job are adjacent.

    Attributes:
        table: The events in input order, with the columns `LIFECYCLE_COLUMNS`.
        order: The row number of each event in the table.
        kind, ms, seq, from_active, is_new: The values of each event; the last element is the value for "no event".
        first, last: The index of the first and of the last event of the same job.
        previous, next: The index of the job's previous and next event.
    """

    table: pa.Table
    order: Ints
    kind: Ints
    ms: Ints
    seq: Ints
    from_active: Bools
    is_new: Bools
    first: Ints
    last: Ints
    previous: Ints
    next: Ints


@dataclass(frozen=True, slots=True)
class DerivedColumns:
    """Values that are derived from each event and the job's earlier events.

    Attributes:
        lifecycles: The events.
        has_attempt: Whether the event has an attempt's row: it starts the attempt, or ends an attempt whose start is
            unknown.
        outcome: The outcome of this attempt, an index of `_OUTCOMES`.
        end: The event that ended the attempt; also set if the attempt's end is unknown but another event follows.
        queued_ms, started_ms, ended_ms: The times of this attempt.
        as_of_event: The last event from which the row of the attempt is derived.
        deciding_event: The event after which the outcome no longer changes; -1 if it is not known yet.
        added: The added event of this incarnation.
        attempt_count, stalls, releases, wait_ms, run_ms: The number of attempts of this incarnation so far, of stalled
            attempts, and of releases, the sums of wait and run times; -1 for an empty sum.
        kept: The last event except ``removed``.
        first_started_ms: When the job was first acquired in this incarnation.
        is_last: Whether the event is the last one of an incarnation that has events other than its removal.
    """

    lifecycles: Lifecycles
    has_attempt: Bools
    outcome: Ints
    end: Ints
    queued_ms: Ints
    started_ms: Ints
    ended_ms: Ints
    as_of_event: Ints
    deciding_event: Ints
    added: Ints
    attempt_count: Ints
    stalls: Ints
    releases: Ints
    wait_ms: Ints
    run_ms: Ints
    kept: Ints
    first_started_ms: Ints
    is_last: Bools


def lifecycle_events(events: pa.Table) -> pa.Table:
    """Return the events that belong to a job's lifecycle, with the columns `LIFECYCLE_COLUMNS`."""
    event, was_finished = events["event"], _is_in(events["prev"], FINISHED)
    is_needed = pc.invert(pc.and_(pc.equal(event, "removed"), was_finished))
    is_relevant = pc.and_(pc.and_(_is_in(event, _KINDS), is_needed), pc.is_valid(events["job_id"]))
    return events.select(LIFECYCLE_COLUMNS).filter(is_relevant)


def job_numbers(events: pa.Table) -> Ints:
    """Number the jobs from 0 in order of appearance, and return the number of each event's job."""
    queues, ids = (events[name].combine_chunks().dictionary_encode() for name in ("queue", "job_id"))
    # Jobs in different queues can have the same id.
    both = queues.indices.to_numpy().astype(np.int64) * len(ids.dictionary) + ids.indices.to_numpy()
    return np.asarray(pa.array(both).dictionary_encode().indices.to_numpy().astype(np.int64))


def in_order(events: pa.Table, jobs: Ints, is_new: Bools) -> Lifecycles:
    """Sort events, which are the result of `lifecycle_events`, without duplicates, by their `job_numbers`."""
    ms, seq = (events[name].fill_null(0).to_numpy() for name in ("event_ms", "event_seq"))
    order = np.lexsort((seq, ms, jobs))
    kind = pc.index_in(events["event"], pa.array(_KINDS, events["event"].type)).to_numpy()
    from_active = pc.fill_null(pc.equal(events["prev"], "active"), fill_value=False).to_numpy()
    job, index = jobs[order], np.arange(len(order))
    begins = np.append(np.ones(min(len(job), 1), bool), job[1:] != job[:-1])
    ends = np.append(begins[1:], np.ones(min(len(job), 1), bool))
    starts, stops = index[begins], index[ends]
    number = np.cumsum(begins) - 1
    return Lifecycles(
        events, order,
        np.append(kind[order].astype(np.int64), _NONE), np.append(ms[order], -1), np.append(seq[order], -1),
        np.append(from_active[order], False), np.append(is_new[order], False),
        starts[number], stops[number], np.where(begins, -1, index - 1), np.where(ends, -1, index + 1),
    )  # fmt: skip


def derive(lifecycles: Lifecycles) -> DerivedColumns:
    """Derive the attempt that begins with each event, and the sums up to that event."""
    kind, ms = lifecycles.kind[:-1], lifecycles.ms[:-1]
    begins = (kind == _ACTIVE) | _ends_unknown_attempt(lifecycles)
    is_seen = kind == _ACTIVE
    index = np.arange(len(kind))
    after_next = np.append(lifecycles.next, -1)[lifecycles.next]
    end, next_event = np.where(is_seen, lifecycles.next, index), np.where(is_seen, after_next, lifecycles.next)
    outcome, waits_again = _outcome(lifecycles, end, next_event)
    is_release = begins & (outcome == _OUTCOMES.index("released"))
    is_start = is_seen & ~is_release
    # An event of another incarnation decides nothing in this incarnation.
    continues = (lifecycles.kind[next_event] != _ADDED) & (next_event >= 0)
    end_or_self = np.where((end < 0) | (lifecycles.kind[end] == _ADDED), index, end)
    queued_at_event = np.append(_last_index(_changes_queueing(lifecycles), lifecycles.first), -1)[lifecycles.previous]
    queued = is_seen & (lifecycles.kind[queued_at_event] == _WAITING)
    queued_ms = np.where(queued, lifecycles.ms[queued_at_event], -1)
    started_ms = np.where(is_start, ms, -1)
    ended_ms = np.where(outcome > 0, lifecycles.ms[end], -1)
    added_events, kept = _last_index(kind == _ADDED, lifecycles.first), _last_index(kind != _REMOVED, lifecycles.first)
    first_event = np.where(added_events >= 0, added_events, lifecycles.first)
    active = _running_sum(is_start, first_event)
    first_start = _last_index(is_start & (active == 1), lifecycles.first)
    next_kind = lifecycles.kind[lifecycles.next]
    return DerivedColumns(
        lifecycles, begins, outcome, end, queued_ms, started_ms, ended_ms,
        np.where(waits_again & continues, next_event, end_or_self), np.where(waits_again, next_event, end),
        added_events, _running_sum(begins & ~is_release, first_event),
        _running_sum(begins & (outcome == _OUTCOMES.index("stalled")), first_event),
        _running_sum(is_release, first_event), _total(started_ms - queued_ms, queued & is_start, first_event),
        _total(ended_ms - ms, is_start & (outcome > 0), first_event),
        kept, np.where(active > 0, lifecycles.ms[first_start], -1),
        ((next_kind == _NONE) | (next_kind == _ADDED)) & (kept >= 0),
    )  # fmt: skip


def _ends_unknown_attempt(lifecycles: Lifecycles) -> Bools:
    """Return whether an attempt with an unknown start ended with this event."""
    kind, from_active = lifecycles.kind[:-1], lifecycles.from_active[:-1]
    previous, was_active = lifecycles.kind[lifecycles.previous], lifecycles.from_active[lifecycles.previous]
    ends = _is_one_of(kind, (*FINISHED, "released"))
    # After `stalled` and `released`, this event only repeats the state.
    ends |= (kind == _WAITING) & from_active & ~_is_one_of(previous, ("stalled", "released"))
    ends |= (kind == _WAITING_CHILDREN) & from_active
    ends |= (kind == _STALLED) & ~((previous == _WAITING) & was_active)
    return np.asarray((previous != _ACTIVE) & ends)


def _changes_queueing(lifecycles: Lifecycles) -> Bools:
    """Return whether a job begins or ends to wait with an event: not with ``stalled``, nor with those of a release."""
    kind, previous = lifecycles.kind[:-1], lifecycles.kind[lifecycles.previous]
    of_release = (kind == _ACTIVE) & (lifecycles.kind[lifecycles.next] == _RELEASED)
    of_release |= (kind == _RELEASED) | ((kind == _WAITING) & (previous == _RELEASED))
    return np.asarray((kind != _STALLED) & ~of_release)


def _outcome(lifecycles: Lifecycles, end: Ints, next_event: Ints) -> tuple[Ints, Bools]:
    """Return the outcomes of attempts, given their next two events, and whether the job waits again after each."""
    end_kind = lifecycles.kind[end]
    waits_again = (end_kind == _WAITING) & lifecycles.from_active[end]
    outcome = _OUTCOME_OF_KIND[end_kind]
    outcome = np.where(waits_again | (end_kind == _DELAYED), _OUTCOMES.index("requeued"), outcome)
    stalled = waits_again & (lifecycles.kind[next_event] == _STALLED)
    return np.where(stalled, _OUTCOMES.index("stalled"), outcome), waits_again


def _is_in(column: Any, values: tuple[str, ...]) -> Any:
    """Return whether each string of an Arrow column is one of ``values``; null is not."""
    return pc.is_in(column, pa.array(values, column.type))


def _is_one_of(kind: Ints, names: tuple[str, ...]) -> Bools:
    """Return whether each number in ``kind``, an index of `_KINDS`, is the number of one of these kinds."""
    return np.isin(kind, [_KIND_NUMBERS[name] for name in names])


def _last_index(which: Bools, first: Ints) -> Ints:
    """Return, for each event, the index of the job's last event up to it for which ``which`` is true."""
    indexes = np.maximum.accumulate(np.where(which, np.arange(len(which)), -1))
    return np.where(indexes >= first, indexes, -1)


def _running_sum(counted: Any, since: Ints) -> Ints:
    """Return the sums from the event ``since`` up to each event."""
    sums = np.append(0, np.cumsum(counted, dtype=np.int64))
    return np.asarray(sums[1:] - sums[since])


def _total(times_ms: Ints, which: Bools, since: Ints) -> Ints:
    """Return the sums of the times for which ``which`` is true; -1 for an empty sum."""
    return np.where(_running_sum(which, since) > 0, _running_sum(np.where(which, times_ms, 0), since), -1)


# Rows


def attempts_of(derived: DerivedColumns, chosen: Bools) -> pa.Table:
    """Return the rows of ``silver.attempts`` for attempts that begin with the chosen events."""
    rows = _Rows(derived, np.flatnonzero(chosen))
    at = rows.at
    outcome = derived.outcome[at]
    failed = np.where(outcome == _OUTCOMES.index("failed"), derived.end[at], -1)
    failed_reason, fingerprint = plain_reasons(rows.texts("failed_reason", failed))
    number = np.where(outcome == _OUTCOMES.index("released"), -derived.releases[at], derived.attempt_count[at])
    columns = {
        "attempt": pa.array(number, pa.int32()),
        "queued_at": _times(derived.queued_ms[at]),
        "started_at": _times(derived.started_ms[at]),
        "ended_at": _times(derived.ended_ms[at]),
        "wait_ms": _between(derived.queued_ms[at], derived.started_ms[at]),
        "run_ms": _between(derived.started_ms[at], derived.ended_ms[at]),
        "outcome": _take_strings(_OUTCOMES, outcome),
        "failed_reason": failed_reason,
        "error_fingerprint": fingerprint,
        "as_of": rows.as_of(derived.as_of_event[at]),
    }
    return rows.table(ATTEMPTS, columns)


def jobs_of(derived: DerivedColumns, chosen: Bools) -> pa.Table:
    """Return the rows of ``silver.jobs`` for incarnations whose last events are chosen."""
    rows = _Rows(derived, np.flatnonzero(chosen))
    at, lifecycles = rows.at, derived.lifecycles
    kept, added_ms = derived.kept[at], lifecycles.ms[derived.added[at]]
    # A finished job stays finished when it is removed.
    decisive = np.where(_is_one_of(lifecycles.kind[kept], FINISHED), kept, at)
    state = lifecycles.kind[decisive]
    finished_ms = np.where(_is_one_of(state, FINISHED), lifecycles.ms[decisive], -1)
    failed = np.where(_is_one_of(state, ("failed",)), decisive, -1)
    failed_reason, fingerprint = plain_reasons(rows.texts("failed_reason", failed))
    columns = {
        "created_at": _times(added_ms),
        "first_started_at": _times(derived.first_started_ms[at]),
        "finished_at": _times(finished_ms),
        "state": _take_strings(tuple(STATE_AFTER.values()), state),
        "attempt_count": pa.array(derived.attempt_count[at], pa.int32()),
        "stalls": pa.array(derived.stalls[at], pa.int32()),
        "wait_ms": _known(derived.wait_ms[at]),
        "run_ms": _known(derived.run_ms[at]),
        "total_ms": _between(added_ms, finished_ms),
        "failed_reason": failed_reason,
        "error_fingerprint": fingerprint,
        "as_of": rows.as_of(decisive),
    }
    return rows.table(JOBS, columns)


class _Rows:
    """The common columns of the rows of both tables; ``at`` is the event from which each row is derived."""

    def __init__(self, derived: DerivedColumns, at: Ints) -> None:
        self._lifecycles = derived.lifecycles
        self._added = derived.added[at]
        self.at = at

    def as_of(self, decisive: Ints) -> pa.Array:
        """Return the times of events; sequence numbers, up to 999, distinguish those of one millisecond."""
        ms, seq = self._lifecycles.ms[decisive], self._lifecycles.seq[decisive]
        us = np.minimum(ms, MAX_TIME_MS) * 1000 + np.minimum(seq, 999)
        return pa.array(us).cast(pa.timestamp("us", "UTC"))

    def table(self, table: Table, columns: dict[str, pa.Array]) -> pa.Table:
        """Return the table with these columns; columns that cannot be derived from events are null."""
        ms, seq = (_known(part[self._added]).cast(pa.string()) for part in (self._lifecycles.ms, self._lifecycles.seq))
        columns |= {
            "queue": self.texts("queue", self.at),
            "job_id": self.texts("job_id", self.at),
            "name": self.texts("name", self._added),
            "incarnation": pc.binary_join_element_wise(ms, seq, "-"),  # the id of the added event
            "source": pa.repeat(pa.scalar("events"), len(self.at)),
        }
        schema = pa.schema([field for field in arrow_schema(table) if field.name != "dt"])
        arrays = [columns.get(field.name, pa.nulls(len(self.at), field.type)) for field in schema]
        return pa.Table.from_arrays(arrays, schema=schema)

    def texts(self, column: str, at: Ints) -> pa.Array:
        """Return a string column of events; null where there is no event."""
        indexes = np.append(self._lifecycles.order, 0)[at]
        return self._lifecycles.table[column].take(pa.array(indexes, mask=at < 0)).combine_chunks()


def _known(numbers: Ints) -> pa.Array:
    return pa.array(numbers, mask=numbers < 0)


def _between(first_ms: Ints, last_ms: Ints) -> pa.Array:
    return pa.array(last_ms - first_ms, mask=(first_ms < 0) | (last_ms < 0))


def _times(ms: Ints) -> pa.Array:
    return pa.array(np.minimum(ms, MAX_TIME_MS) * 1000, mask=ms < 0).cast(pa.timestamp("us", "UTC"))


def _take_strings(strings: tuple[str, ...], numbers: Ints) -> pa.Array:
    return pa.array(strings, pa.string()).take(pa.array(numbers))


def plain_reasons(reasons: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return failure reasons as plain text, and their fingerprints, computed once per reason."""
    encoded = reasons.dictionary_encode()
    plain = [plain_reason(reason) for reason in encoded.dictionary.to_pylist()]
    columns = pa.array(plain, pa.string()), pa.array([error_fingerprint(reason) for reason in plain], pa.string())
    return columns[0].take(encoded.indices), columns[1].take(encoded.indices)
