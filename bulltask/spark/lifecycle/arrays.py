"""The lifecycle of each job, derived from events: the fold of :mod:`~bulltask.spark.lifecycle.fold` on arrays.

As long as the events fit into one process, this takes a hundredth of the time that Spark takes to plan and run
:mod:`~bulltask.spark.lifecycle.sql`. It uses the same steps: the events of each job in order; an event's neighbours;
running sums, and the last event of some kind up to each event. :mod:`~bulltask.spark.lifecycle.arrow_rows` turns the
result into rows.

An index of -1 means none. Arrays that are looked up by index have one more element than there are events; this last one
is the value for "no event". A time of -1 also means none, because times of streams begin with 0.
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

OUTCOMES: Final = ("open", "retry", "stalled", "completed", "failed", "waiting-children")
"""The outcomes of attempts, by number."""

_NUMBER: Final = {kind: number for number, kind in enumerate(KINDS)}
_ADDED, _WAITING, _ACTIVE, _FAILED = (_NUMBER[kind] for kind in ("added", "waiting", "active", "failed"))
_DELAYED, _STALLED, _CHILDREN, _REMOVED = (
    _NUMBER[kind] for kind in ("delayed", "stalled", "waiting-children", "removed")
)
_NONE: Final = -1

_OUTCOME_OF: Final = np.array([OUTCOMES.index(kind) if kind in OUTCOMES else 0 for kind in KINDS] + [0])
"""The outcome of an attempt that ends with an event of each kind, whatever came before."""


@dataclass(frozen=True, slots=True)
class Lifecycles:
    """Events in order: those of a job are adjacent.

    Attributes:
        table: The events as they were given: the columns `LIFECYCLE_COLUMNS`.
        order: The row of each event in the table.
        kind, ms, seq, from_active, is_new: Of each event and, in the last element, of none.
        first, last: Index of the first and of the last event of the same job.
        previous, next: Index of the event before and after it.
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
    """What each event and those before it say about the job.

    Attributes:
        lifecycles: The events.
        begins: An attempt begins with it; if it is not ``active``, an attempt that was not seen to begin ends with it.
        outcome: The outcome of this attempt, an index of `OUTCOMES`.
        end: The event that ended it; also set if it has not ended but another event follows.
        queued_ms, started_ms, ended_ms: Of this attempt.
        decided: The event that decided its outcome, or the last one known.
        decider: The event that must be known to decide it.
        added: The event that added the job, in this incarnation.
        begun, stalls, wait_ms, run_ms: How many attempts this incarnation had so far, how many stalled, how long they
            waited and ran; -1 for a sum of nothing.
        kept: The last event except ``removed``.
        first_started_ms: When the job was acquired for the first time in this incarnation.
        is_last: It is the last event of an incarnation of which more than the removal is known.
    """

    lifecycles: Lifecycles
    begins: Bools
    outcome: Ints
    end: Ints
    queued_ms: Ints
    started_ms: Ints
    ended_ms: Ints
    decided: Ints
    decider: Ints
    added: Ints
    begun: Ints
    stalls: Ints
    wait_ms: Ints
    run_ms: Ints
    kept: Ints
    first_started_ms: Ints
    is_last: Bools


def lifecycle_events(events: pa.Table) -> pa.Table:
    """Return the events that belong to a job's lifecycle, with the columns `LIFECYCLE_COLUMNS`."""
    event, was_done = events["event"], is_in(events["prev"], FINISHED)
    is_needed = pc.invert(pc.and_(pc.equal(event, "removed"), was_done))
    is_relevant = pc.and_(pc.and_(is_in(event, KINDS), is_needed), pc.is_valid(events["job_id"]))
    return events.select(LIFECYCLE_COLUMNS).filter(is_relevant)


def job_numbers(events: pa.Table) -> Ints:
    """Number the jobs from 0 in order of appearance; return the number of each event's job."""
    queues, ids = (_encoded(events[name]) for name in ("queue", "job_id"))
    # Different queues can have the same ids.
    both = queues.indices.to_numpy().astype(np.int64) * len(ids.dictionary) + ids.indices.to_numpy()
    return np.asarray(_encoded(pa.array(both)).indices.to_numpy().astype(np.int64))


def in_order(events: pa.Table, jobs: Ints, is_new: Bools) -> Lifecycles:
    """Put events in order.

    Args:
        events: What `lifecycle_events` returned, each once.
        jobs: Their `job_numbers`.
        is_new: Which of them belong to this batch.
    """
    ms, seq = (events[name].fill_null(0).to_numpy() for name in ("event_ms", "event_seq"))
    order = np.lexsort((seq, ms, jobs))
    kind = pc.index_in(events["event"], pa.array(KINDS, events["event"].type)).to_numpy()
    from_active = pc.fill_null(pc.equal(events["prev"], "active"), fill_value=False).to_numpy()
    job, place = jobs[order], np.arange(len(order))
    begins = np.append(np.ones(min(len(job), 1), bool), job[1:] != job[:-1])
    ends = np.append(begins[1:], np.ones(min(len(job), 1), bool))
    starts, stops = place[begins], place[ends]
    number = np.cumsum(begins) - 1
    return Lifecycles(
        events, order,
        np.append(kind[order].astype(np.int64), _NONE), np.append(ms[order], -1), np.append(seq[order], -1),
        np.append(from_active[order], False), np.append(is_new[order], False),
        starts[number], stops[number], np.where(begins, -1, place - 1), np.where(ends, -1, place + 1),
    )  # fmt: skip


def derive(lifecycles: Lifecycles) -> DerivedColumns:
    """Derive the attempt that begins with each event, and the sums up to it."""
    kind, ms = lifecycles.kind[:-1], lifecycles.ms[:-1]
    begins = (kind == _ACTIVE) | _ends_unseen_attempt(lifecycles)
    is_seen = kind == _ACTIVE
    here = np.arange(len(kind))
    after_next = np.append(lifecycles.next, -1)[lifecycles.next]
    end, then = np.where(is_seen, lifecycles.next, here), np.where(is_seen, after_next, lifecycles.next)
    outcome, released = _outcome(lifecycles, end, then)
    # An event of another incarnation decides nothing here.
    continues = (lifecycles.kind[then] != _ADDED) & (then >= 0)
    of_end = np.where((end < 0) | (lifecycles.kind[end] == _ADDED), here, end)
    waits_from = np.append(_last_index(kind != _STALLED, lifecycles.first), -1)[lifecycles.previous]
    queued = is_seen & (lifecycles.kind[waits_from] == _WAITING)
    queued_ms = np.where(queued, lifecycles.ms[waits_from], -1)
    started_ms = np.where(is_seen, ms, -1)
    ended_ms = np.where(outcome > 0, lifecycles.ms[end], -1)
    added, kept = _last_index(kind == _ADDED, lifecycles.first), _last_index(kind != _REMOVED, lifecycles.first)
    since = np.where(added >= 0, added, lifecycles.first)
    active = _running_sum(is_seen, since)
    first_start = _last_index(is_seen & (active == 1), lifecycles.first)
    next_kind = lifecycles.kind[lifecycles.next]
    return DerivedColumns(
        lifecycles, begins, outcome, end, queued_ms, started_ms, ended_ms,
        np.where(released & continues, then, of_end), np.where(released, then, end), added,
        _running_sum(begins, since), _running_sum(begins & (outcome == OUTCOMES.index("stalled")), since),
        _total(started_ms - queued_ms, queued, since), _total(ended_ms - ms, is_seen & (outcome > 0), since),
        kept, np.where(active > 0, lifecycles.ms[first_start], -1),
        ((next_kind == _NONE) | (next_kind == _ADDED)) & (kept >= 0),
    )  # fmt: skip


def is_in(column: Any, words: tuple[str, ...]) -> Any:
    """Return whether each string of an Arrow column is one of ``words``; null is not."""
    return pc.is_in(column, pa.array(words, column.type))


def is_one_of(kind: Ints, words: tuple[str, ...]) -> Bools:
    """Return whether each number in ``kind``, an index of `KINDS`, is one of ``words``."""
    return np.isin(kind, [_NUMBER[word] for word in words])


def _ends_unseen_attempt(lifecycles: Lifecycles) -> Bools:
    """Return whether an attempt ended with this event whose beginning was not seen."""
    kind, from_active = lifecycles.kind[:-1], lifecycles.from_active[:-1]
    previous, released = lifecycles.kind[lifecycles.previous], lifecycles.from_active[lifecycles.previous]
    ends = is_one_of(kind, FINISHED)
    # After `stalled` this only repeats where the job is.
    ends |= (kind == _WAITING) & from_active & (previous != _STALLED)
    ends |= (kind == _CHILDREN) & from_active
    ends |= (kind == _STALLED) & ~((previous == _WAITING) & released)
    return np.asarray((previous != _ACTIVE) & ends)


def _outcome(lifecycles: Lifecycles, end: Ints, then: Ints) -> tuple[Ints, Bools]:
    """Return the outcomes of attempts, given the events that follow them, and which attempts were released."""
    ended_by = lifecycles.kind[end]
    released = (ended_by == _WAITING) & lifecycles.from_active[end]
    outcome = _OUTCOME_OF[ended_by]
    outcome = np.where(released | (ended_by == _DELAYED), OUTCOMES.index("retry"), outcome)
    stalled = released & (lifecycles.kind[then] == _STALLED)
    return np.where(stalled, OUTCOMES.index("stalled"), outcome), released


def _last_index(which: Bools, first: Ints) -> Ints:
    """Return the index of the last event up to each one, of the same job, for which ``which`` is true."""
    found = np.maximum.accumulate(np.where(which, np.arange(len(which)), -1))
    return np.where(found >= first, found, -1)


def _running_sum(counted: Any, since: Ints) -> Ints:
    """Return the sums from the event ``since`` up to each event."""
    sums = np.append(0, np.cumsum(counted, dtype=np.int64))
    return np.asarray(sums[1:] - sums[since])


def _total(times_ms: Ints, which: Bools, since: Ints) -> Ints:
    """Return the sums of the times in ``which``; -1 for a sum of nothing."""
    return np.where(_running_sum(which, since) > 0, _running_sum(np.where(which, times_ms, 0), since), -1)


def _encoded(column: Any) -> Any:
    """Return a column as a dictionary and an index for each value."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole.dictionary_encode()
