"""What became of each job, from the events of its queue: the fold in plain Python.

This is the reference. :mod:`~bulltask.spark.lifecycle.arrays` says the same with arrays, for the events of a batch, and
:mod:`~bulltask.spark.lifecycle.sql` in Spark's words, for whole tables; property tests keep the three equal. What
BullMQ's scripts write, and what follows from it:

* An attempt begins with ``active`` and its number is the count of those: BullMQ's ``ats``. A job taken away and given
  back (a rate limit, a stop, a dead child) looks like a retry without delay: ``waiting`` with ``prev=active``, without
  a reason. So the number of ended attempts can be above BullMQ's ``atm``.
* A stall is ``waiting`` with ``prev=active`` and then ``stalled``, in one script. It ended when it waited again.
* ``delayed`` and ``waiting-children`` are also told of jobs that nobody runs: then they end no attempt.
* ``added`` begins a new life: the id was free, as that of a job removed when it was done. A living id that is added
  again makes ``duplicated`` and nothing else. A finished job that is retried goes on with its life and its count.
* ``removed`` ends the life of a job that was not done. Of one that was done it tells nothing new, and neither does it
  of a job of which nothing else is known.
* A stream has holes where it was trimmed. An attempt whose end is missing is ``open``, as is one that still runs; an
  end whose beginning is missing is an attempt of its own, without a start. No time is made up.

Times are those of the stream, Redis' clock. The job's hash has those of the clients' clocks.

A row says how far it knows: ``as_of`` is the last event that it is told from. The same row told later, with more
events, has the same ``as_of`` or a later one, and the later one is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from bulltask.spark.lifecycle.error_keys import error_key, plain_reason

__all__ = [
    "FINISHED",
    "LIFECYCLE_COLUMNS",
    "MAX_TIME_MS",
    "STATE_AFTER",
    "AttemptRow",
    "JobRow",
    "JobState",
    "LifecycleEvent",
    "Outcome",
    "lifecycle",
]

Outcome = Literal["completed", "failed", "retry", "stalled", "waiting-children", "open"]
JobState = Literal["waiting", "active", "delayed", "waiting-children", "completed", "failed", "removed", "unknown"]

#: The end of the year 9999, the last that Python and Spark can show. Ids of events may be of any time.
MAX_TIME_MS = 253_402_300_799_999

#: The columns of an event that its job's life is told from.
LIFECYCLE_COLUMNS = ("queue", "job_id", "event_ms", "event_seq", "event", "name", "prev", "failed_reason")

#: The states of a job that is done.
FINISHED: tuple[JobState, ...] = ("completed", "failed")

#: What an event says of its job's state. Other events say nothing of its life.
STATE_AFTER: dict[str, JobState] = {
    "added": "unknown",  # in the same script another event follows, unless the stream has a hole
    "waiting": "waiting",
    "active": "active",
    "completed": "completed",
    "failed": "failed",
    "delayed": "delayed",
    "stalled": "waiting",
    "waiting-children": "waiting-children",
    "removed": "removed",
}
#: How an attempt ends that one of these finds open.
_ENDS: dict[str, Outcome] = {
    "completed": "completed",
    "failed": "failed",
    "delayed": "retry",
    "waiting": "retry",
    "stalled": "stalled",
    "waiting-children": "waiting-children",
}


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """What the fold needs of a row of ``bronze.events``; the names are the columns'."""

    queue: str
    job_id: str
    event_ms: int
    event_seq: int
    event: str
    name: str | None = None
    prev: str | None = None
    failed_reason: str | None = None

    @property
    def event_id(self) -> str:
        """The id of the entry in its stream."""
        return f"{self.event_ms}-{self.event_seq}"

    @property
    def as_of_us(self) -> int:
        """Its time in microseconds; events of one millisecond are kept apart as far as there is room."""
        return min(self.event_ms, MAX_TIME_MS) * 1000 + min(self.event_seq, 999)


@dataclass(slots=True)
class AttemptRow:
    """A row of ``silver.attempts``.

    Attributes:
        queue: BullMQ's spelling.
        job_id: of the job.
        life: id of the event that added the job; ``None`` when it was not seen. An id can have several lives.
        attempt: from 1.
        name: of the task; ``None`` when the event that added the job was not seen.
        queued_ms: since when it waited; ``None`` when that was not seen, as the next two.
        started_ms: when it was taken.
        ended_ms: when it ended.
        outcome: ``retry`` is every way back to the queue but a stall; ``open`` has no end that was seen.
        reason: why it failed for good. Events do not have the reason of an attempt that is made again.
        as_of_us: `LifecycleEvent.as_of_us` of the event that decided the outcome, or of the last one that is known.
    """

    queue: str
    job_id: str
    life: str | None
    attempt: int
    name: str | None
    queued_ms: int | None
    started_ms: int | None
    ended_ms: int | None = None
    outcome: Outcome = "open"
    reason: str | None = None
    as_of_us: int = 0

    @property
    def wait_ms(self) -> int | None:
        """How long it waited to be taken."""
        return _between(self.queued_ms, self.started_ms)

    @property
    def run_ms(self) -> int | None:
        """How long it ran."""
        return _between(self.started_ms, self.ended_ms)

    @property
    def error_key(self) -> str | None:
        """The reason without its particulars."""
        return error_key(self.reason)


@dataclass(slots=True)
class JobRow:
    """A row of ``silver.jobs``: one life of a job, and the attempts it consists of.

    Attributes:
        queue: as in `AttemptRow`, and the next two.
        job_id: of the job.
        life: id of the event that added it.
        name: of the task.
        created_ms: when it was added.
        state: the last that was seen; a finished job keeps its state when it is removed.
        finished_ms: when it was done, if it is.
        final_reason: why it failed, if it did.
        attempts: its attempts, in order.
        as_of_us: `LifecycleEvent.as_of_us` of its last event; that a finished job was removed does not count.
    """

    queue: str
    job_id: str
    life: str | None = None
    name: str | None = None
    created_ms: int | None = None
    state: JobState = "unknown"
    finished_ms: int | None = None
    final_reason: str | None = None
    attempts: list[AttemptRow] = field(default_factory=list)
    as_of_us: int = 0

    @property
    def first_started_ms(self) -> int | None:
        """When it was taken for the first time."""
        return min((one.started_ms for one in self.attempts if one.started_ms is not None), default=None)

    @property
    def stalls(self) -> int:
        """How many of its attempts stalled: BullMQ's ``stc``."""
        return sum(one.outcome == "stalled" for one in self.attempts)

    @property
    def wait_ms(self) -> int | None:
        """How long it waited for a worker, in all attempts; delays do not count."""
        return _total(one.wait_ms for one in self.attempts)

    @property
    def run_ms(self) -> int | None:
        """How long it ran, in all attempts."""
        return _total(one.run_ms for one in self.attempts)

    @property
    def total_ms(self) -> int | None:
        """From when it was added until it was done."""
        return _between(self.created_ms, self.finished_ms)

    @property
    def error_key(self) -> str | None:
        """The final reason without its particulars."""
        return error_key(self.final_reason)


def lifecycle(events: Iterable[LifecycleEvent]) -> list[JobRow]:
    """Tell what became of the jobs that these events are about.

    Args:
        events: each once, in any order, of any number of jobs and queues.

    Returns:
        A row for each life of each job, in order of queue, job id and time.
    """
    relevant = sorted(
        (event for event in events if _is_lifecycle_event(event)),
        key=lambda event: (event.queue, event.job_id, event.event_ms, event.event_seq),
    )
    folds: list[_Fold] = []
    for (queue, job_id), of_job in groupby(relevant, key=lambda event: (event.queue, event.job_id)):
        fold: _Fold | None = None
        for event in of_job:
            if fold is None or event.event == "added":
                fold = _Fold(JobRow(queue, job_id))
                folds.append(fold)
            fold.take(event)
    return [fold.job for fold in folds if fold.is_known]


def _is_lifecycle_event(event: LifecycleEvent) -> bool:
    """Whether an event says something of its job's life."""
    return event.event in STATE_AFTER and not (event.event == "removed" and event.prev in FINISHED)


class _Fold:
    """Responsible for one life of one job: its row, and what the next event is judged by."""

    def __init__(self, job: JobRow) -> None:
        self.job = job
        self.is_known = False
        self._open: AttemptRow | None = None
        self._undecided: AttemptRow | None = None
        self._queued_ms: int | None = None
        self._last: LifecycleEvent | None = None

    def take(self, event: LifecycleEvent) -> None:
        """Go on by one event."""
        self.is_known = self.is_known or event.event != "removed"
        before, released = self._undecided, _is_release(event)
        if before is not None:
            before.as_of_us = event.as_of_us
            if self._open is None or not released:
                self._undecided = None
        if event.event == "added":
            self.job.life, self.job.name, self.job.created_ms = event.event_id, event.name, event.event_ms
        elif event.event == "active":
            self._begin(event, event.event_ms)
        elif event.event == "stalled" and self._follows_release():
            self.job.attempts[-1].outcome = "stalled"
        else:
            self._end(event)
        self._queue_up(event)
        self._settle(event)
        self._last = event

    def _begin(self, event: LifecycleEvent, started_ms: int | None) -> None:
        job = self.job
        number = len(job.attempts) + 1
        queued_ms = self._queued_ms if started_ms is not None else None
        self._open = AttemptRow(job.queue, job.job_id, job.life, number, job.name, queued_ms, started_ms)
        self._open.as_of_us = event.as_of_us
        job.attempts.append(self._open)
        if started_ms is not None or _is_release(event):  # what comes next decides: its end, or why it was given back
            self._undecided = self._open

    def _end(self, event: LifecycleEvent) -> None:
        if self._open is None and self._ends_unseen_attempt(event):
            self._begin(event, None)
        if self._open is not None and _ends_attempt(event):
            self._open.ended_ms = event.event_ms
            self._open.outcome = _ENDS[event.event]
            self._open.reason = plain_reason(event.failed_reason) if event.event == "failed" else None
        self._open = None

    def _ends_unseen_attempt(self, event: LifecycleEvent) -> bool:
        """Whether an attempt ended here that nobody saw begin."""
        if event.event == "waiting":
            # After `stalled` this only tells once more where the job is.
            return event.prev == "active" and (self._last is None or self._last.event != "stalled")
        if event.event == "waiting-children":
            return event.prev == "active"
        return event.event in {"completed", "failed", "stalled"}

    def _follows_release(self) -> bool:
        return self._last is not None and _is_release(self._last)

    def _queue_up(self, event: LifecycleEvent) -> None:
        if event.event == "waiting":
            self._queued_ms = event.event_ms
        elif event.event != "stalled":  # it tells why the job waits, not since when
            self._queued_ms = None

    def _settle(self, event: LifecycleEvent) -> None:
        job = self.job
        if event.event == "removed" and job.state in FINISHED:
            return
        job.as_of_us = event.as_of_us
        job.state = STATE_AFTER[event.event]
        job.finished_ms = event.event_ms if job.state in FINISHED else None
        job.final_reason = plain_reason(event.failed_reason) if job.state == "failed" else None


def _is_release(event: LifecycleEvent) -> bool:
    return event.event == "waiting" and event.prev == "active"


def _ends_attempt(event: LifecycleEvent) -> bool:
    """Whether this ends an open attempt; after anything else its end was missed."""
    return event.event in _ENDS and (event.event != "waiting" or event.prev == "active")


def _between(first_ms: int | None, last_ms: int | None) -> int | None:
    return None if first_ms is None or last_ms is None else last_ms - first_ms


def _total(parts_ms: Iterable[int | None]) -> int | None:
    known_ms = [part for part in parts_ms if part is not None]
    return sum(known_ms) if known_ms else None
