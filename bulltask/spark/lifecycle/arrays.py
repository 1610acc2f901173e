"""The lifecycle of each job, derived from events: the fold of :mod:`~bulltask.spark.lifecycle.fold`, on NumPy arrays.

If the events fit into one process, this is a hundred times faster than :mod:`~bulltask.spark.lifecycle.sql` in Spark.
It takes the same steps: sort the events of each job; find each event's neighbors; compute running sums, and the last
event of a kind up to each event. :mod:`~bulltask.spark.lifecycle.arrow_rows` converts the result to rows.

An index of -1 means no event. Arrays that are looked up by index have an additional last element, the value for "no
event". A time of -1 means no time, because stream times start at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulltask.spark.lifecycle.fold import FINISHED, LIFECYCLE_COLUMNS, STATE_AFTER

__all__ = [
    "KINDS",
    "OUTCOMES",
    "Bools",
    "DerivedColumns",
    "Ints",
    "Lifecycles",
    "derive",
    "in_order",
    "is_one_of",
    "job_numbers",
    "lifecycle_events",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KINDS: Final = tuple(STATE_AFTER)
"""The kinds of events, by number."""

OUTCOMES: Final = ("open", "requeued", "stalled", "completed", "failed", "waiting-children")
"""The outcomes of attempts, by number."""

_KIND_NUMBERS: Final = {kind: number for number, kind in enumerate(KINDS)}
_ADDED, _WAITING, _ACTIVE, _FAILED = (_KIND_NUMBERS[kind] for kind in ("added", "waiting", "active", "failed"))
_DELAYED, _STALLED, _WAITING_CHILDREN, _REMOVED = (
    _KIND_NUMBERS[kind] for kind in ("delayed", "stalled", "waiting-children", "removed")
)
_NONE: Final = -1

_OUTCOME_OF_KIND: Final = np.array([OUTCOMES.index(kind) if kind in OUTCOMES else 0 for kind in KINDS] + [0])
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
        outcome: The outcome of this attempt, an index of `OUTCOMES`.
        end: The event that ended the attempt; also set if the attempt's end is unknown but another event follows.
        queued_ms, started_ms, ended_ms: The times of this attempt.
        as_of_event: The last event from which the row of the attempt is derived.
        deciding_event: The event after which the outcome no longer changes; -1 if it is not known yet.
        added: The added event of this incarnation.
        attempt_count, stalls, wait_ms, run_ms: The number of attempts of this incarnation so far, the number of stalled
            attempts, the sums of wait and run times; -1 for an empty sum.
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
    wait_ms: Ints
    run_ms: Ints
    kept: Ints
    first_started_ms: Ints
    is_last: Bools


def lifecycle_events(events: pa.Table) -> pa.Table:
    """Return the events that belong to a job's lifecycle, with the columns `LIFECYCLE_COLUMNS`."""
    event, was_finished = events["event"], is_in(events["prev"], FINISHED)
    is_needed = pc.invert(pc.and_(pc.equal(event, "removed"), was_finished))
    is_relevant = pc.and_(pc.and_(is_in(event, KINDS), is_needed), pc.is_valid(events["job_id"]))
    return events.select(LIFECYCLE_COLUMNS).filter(is_relevant)


def job_numbers(events: pa.Table) -> Ints:
    """Number the jobs from 0 in order of appearance, and return the number of each event's job."""
    queues, ids = (_dictionary_encode(events[name]) for name in ("queue", "job_id"))
    # Jobs in different queues can have the same id.
    both = queues.indices.to_numpy().astype(np.int64) * len(ids.dictionary) + ids.indices.to_numpy()
    return np.asarray(_dictionary_encode(pa.array(both)).indices.to_numpy().astype(np.int64))


def in_order(events: pa.Table, jobs: Ints, is_new: Bools) -> Lifecycles:
    """Sort events.

    Args:
        events: The result of `lifecycle_events`, without duplicates.
        jobs: The `job_numbers` of the events.
        is_new: Whether each event belongs to this batch.
    """
    ms, seq = (events[name].fill_null(0).to_numpy() for name in ("event_ms", "event_seq"))
    order = np.lexsort((seq, ms, jobs))
    kind = pc.index_in(events["event"], pa.array(KINDS, events["event"].type)).to_numpy()
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
    outcome, released = _outcome(lifecycles, end, next_event)
    # An event of another incarnation decides nothing in this incarnation.
    continues = (lifecycles.kind[next_event] != _ADDED) & (next_event >= 0)
    end_or_self = np.where((end < 0) | (lifecycles.kind[end] == _ADDED), index, end)
    queued_at_event = np.append(_last_index(kind != _STALLED, lifecycles.first), -1)[lifecycles.previous]
    queued = is_seen & (lifecycles.kind[queued_at_event] == _WAITING)
    queued_ms = np.where(queued, lifecycles.ms[queued_at_event], -1)
    started_ms = np.where(is_seen, ms, -1)
    ended_ms = np.where(outcome > 0, lifecycles.ms[end], -1)
    added_events, kept = _last_index(kind == _ADDED, lifecycles.first), _last_index(kind != _REMOVED, lifecycles.first)
    first_event = np.where(added_events >= 0, added_events, lifecycles.first)
    active = _running_sum(is_seen, first_event)
    first_start = _last_index(is_seen & (active == 1), lifecycles.first)
    next_kind = lifecycles.kind[lifecycles.next]
    return DerivedColumns(
        lifecycles, begins, outcome, end, queued_ms, started_ms, ended_ms,
        np.where(released & continues, next_event, end_or_self), np.where(released, next_event, end), added_events,
        _running_sum(begins, first_event), _running_sum(begins & (outcome == OUTCOMES.index("stalled")), first_event),
        _total(started_ms - queued_ms, queued, first_event),
        _total(ended_ms - ms, is_seen & (outcome > 0), first_event),
        kept, np.where(active > 0, lifecycles.ms[first_start], -1),
        ((next_kind == _NONE) | (next_kind == _ADDED)) & (kept >= 0),
    )  # fmt: skip


def is_in(column: Any, values: tuple[str, ...]) -> Any:
    """Return whether each string of an Arrow column is one of ``values``; null is not."""
    return pc.is_in(column, pa.array(values, column.type))


def is_one_of(kind: Ints, names: tuple[str, ...]) -> Bools:
    """Return whether each number in ``kind``, an index of `KINDS`, is the number of one of these kinds."""
    return np.isin(kind, [_KIND_NUMBERS[name] for name in names])


def _ends_unknown_attempt(lifecycles: Lifecycles) -> Bools:
    """Return whether an attempt with an unknown start ended with this event."""
    kind, from_active = lifecycles.kind[:-1], lifecycles.from_active[:-1]
    previous, released = lifecycles.kind[lifecycles.previous], lifecycles.from_active[lifecycles.previous]
    ends = is_one_of(kind, FINISHED)
    # After `stalled`, this event only repeats the state.
    ends |= (kind == _WAITING) & from_active & (previous != _STALLED)
    ends |= (kind == _WAITING_CHILDREN) & from_active
    ends |= (kind == _STALLED) & ~((previous == _WAITING) & released)
    return np.asarray((previous != _ACTIVE) & ends)


def _outcome(lifecycles: Lifecycles, end: Ints, next_event: Ints) -> tuple[Ints, Bools]:
    """Return the outcomes of attempts, given their next two events, and whether each attempt was released."""
    end_kind = lifecycles.kind[end]
    released = (end_kind == _WAITING) & lifecycles.from_active[end]
    outcome = _OUTCOME_OF_KIND[end_kind]
    outcome = np.where(released | (end_kind == _DELAYED), OUTCOMES.index("requeued"), outcome)
    stalled = released & (lifecycles.kind[next_event] == _STALLED)
    return np.where(stalled, OUTCOMES.index("stalled"), outcome), released


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


def _dictionary_encode(column: Any) -> Any:
    """Return a dictionary-encoded column."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.dictionary_encode()
