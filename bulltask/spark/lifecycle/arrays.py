"""What became of each job, from its queue's events: the fold of :mod:`~bulltask.spark.lifecycle.fold` over arrays.

For as many events as fit into a process this takes a hundredth of the time that Spark takes to plan and to run
:mod:`~bulltask.spark.lifecycle.sql`. It goes the same way: the events of each job in their order; of an event its
neighbours; sums, and the last event of some kind, up to an event. :mod:`~bulltask.spark.lifecycle.arrow_rows` makes
rows of it.

An index of -1 is none. Arrays that are asked by index have one element more than there are events, the last, which says
what holds where there is no event. A time of -1 is none as well: those of streams begin with 0.
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
"""Of what kind an event is, by number."""

OUTCOMES: Final = ("open", "retry", "stalled", "completed", "failed", "waiting-children")
"""How an attempt ended, by number."""

_NUMBER: Final = {kind: number for number, kind in enumerate(KINDS)}
_ADDED, _WAITING, _ACTIVE, _FAILED = (_NUMBER[kind] for kind in ("added", "waiting", "active", "failed"))
_DELAYED, _STALLED, _CHILDREN, _REMOVED = (
    _NUMBER[kind] for kind in ("delayed", "stalled", "waiting-children", "removed")
)
_NONE: Final = -1

_OUTCOME_OF: Final = np.array([OUTCOMES.index(kind) if kind in OUTCOMES else 0 for kind in KINDS] + [0])
"""The outcome of an attempt that an event of a kind ends, whatever came before it."""


@dataclass(frozen=True, slots=True)
class Lifecycles:
    """Events in order: those of a job beside each other.

    Attributes:
        table: the events, as they were given: the columns `LIFECYCLE_COLUMNS`.
        order: the place of each in the table.
        kind, ms, seq, from_active, is_new: of each event and, behind them, of none.
        first, last: index of the first and of the last event of the same job.
        back, next: index of the event before it and of the one behind it.
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
    """What the events say, each up to itself.

    Attributes:
        lives: the events.
        begins: an attempt begins with it; if it is not ``active``, one that nobody saw begin ends with it.
        outcome: how this attempt ended, an index of `OUTCOMES`.
        end: the event that ended it; not none, though it has not ended, where another one is next.
        queued_ms, started_ms, ended_ms: of this attempt.
        decided: the event that decided its outcome, or the last that is known of it.
        decider: the event that has to be known to decide it.
        added: the event that added the job, of this life.
        begun, stalls, wait_ms, run_ms: how many attempts of this life there were, how many stalled, how long they
            waited and ran; a sum of nothing is none.
        kept: the last event but ``removed``.
        first_started_ms: when the job was taken for the first time in this life.
        is_last: it is the last of a life that is known by more than its end.
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
    """Return the events that say something of a job's life, and the columns `LIFECYCLE_COLUMNS`, which say it."""
    event, was_done = events["event"], is_in(events["prev"], FINISHED)
    says_more = pc.invert(pc.and_(pc.equal(event, "removed"), was_done))
    tells = pc.and_(pc.and_(is_in(event, KINDS), says_more), pc.is_valid(events["job_id"]))
    return events.select(LIFECYCLE_COLUMNS).filter(tells)


def job_numbers(events: pa.Table) -> Ints:
    """Number the jobs of events from 0 on, in the order in which they come up; return each event's."""
    queues, ids = (_encoded(events[name]) for name in ("queue", "job_id"))
    # Ids of different queues may be the same.
    both = queues.indices.to_numpy().astype(np.int64) * len(ids.dictionary) + ids.indices.to_numpy()
    return np.asarray(_encoded(pa.array(both)).indices.to_numpy().astype(np.int64))


def in_order(events: pa.Table, jobs: Ints, is_new: Bools) -> Lifecycles:
    """Put events in order.

    Args:
        events: what `lifecycle_events` returned, each once.
        jobs: their `job_numbers`.
        is_new: which of them are of this batch.
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
    """Give each event the attempt that begins with it, and the sums up to it."""
    kind, ms = lifecycles.kind[:-1], lifecycles.ms[:-1]
    begins = (kind == _ACTIVE) | _ends_unseen_attempt(lifecycles)
    is_seen = kind == _ACTIVE
    here = np.arange(len(kind))
    behind = np.append(lifecycles.next, -1)[lifecycles.next]
    end, then = np.where(is_seen, lifecycles.next, here), np.where(is_seen, behind, lifecycles.next)
    outcome, released = _outcome(lifecycles, end, then)
    # Of another life's event nothing follows for this one.
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
    """Whether each text of an Arrow column is one of some words; none is not."""
    return pc.is_in(column, pa.array(words, column.type))


def is_one_of(kind: Ints, words: tuple[str, ...]) -> Bools:
    """Whether each of some numbers of `KINDS` is one of these."""
    return np.isin(kind, [_NUMBER[word] for word in words])


def _ends_unseen_attempt(lifecycles: Lifecycles) -> Bools:
    """Whether an attempt ended with an event that nobody saw begin."""
    kind, from_active = lifecycles.kind[:-1], lifecycles.from_active[:-1]
    previous, released = lifecycles.kind[lifecycles.previous], lifecycles.from_active[lifecycles.previous]
    ends = is_one_of(kind, FINISHED)
    # After `stalled` this only tells once more where the job is.
    ends |= (kind == _WAITING) & from_active & (previous != _STALLED)
    ends |= (kind == _CHILDREN) & from_active
    ends |= (kind == _STALLED) & ~((previous == _WAITING) & released)
    return np.asarray((previous != _ACTIVE) & ends)


def _outcome(lifecycles: Lifecycles, end: Ints, then: Ints) -> tuple[Ints, Bools]:
    """How attempts ended by the events that are next, and which were given back."""
    ended_by = lifecycles.kind[end]
    released = (ended_by == _WAITING) & lifecycles.from_active[end]
    outcome = _OUTCOME_OF[ended_by]
    outcome = np.where(released | (ended_by == _DELAYED), OUTCOMES.index("retry"), outcome)
    stalled = released & (lifecycles.kind[then] == _STALLED)
    return np.where(stalled, OUTCOMES.index("stalled"), outcome), released


def _last_index(which: Bools, first: Ints) -> Ints:
    """Index of the last event up to each one, of the same job, that is one of ``which``."""
    found = np.maximum.accumulate(np.where(which, np.arange(len(which)), -1))
    return np.where(found >= first, found, -1)


def _running_sum(counted: Any, since: Ints) -> Ints:
    """Add up from an event on, up to each one."""
    sums = np.append(0, np.cumsum(counted, dtype=np.int64))
    return np.asarray(sums[1:] - sums[since])


def _total(times_ms: Ints, which: Bools, since: Ints) -> Ints:
    """The same of times, as far as they are known; of none, none."""
    return np.where(_running_sum(which, since) > 0, _running_sum(np.where(which, times_ms, 0), since), -1)


def _encoded(column: Any) -> Any:
    """A column as a dictionary and an index for each value."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole.dictionary_encode()
