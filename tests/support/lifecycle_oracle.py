"""The oracle of `bulltask.spark.lifecycle`: the same rules in plain Python, one event at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, cast

from bulltask.jobs.failure_reasons import error_fingerprint, plain_reason
from bulltask.lake.tables import FINISHED, MAX_TIME_MS
from bulltask.spark.lifecycle import STATE_AFTER

__all__ = ["AttemptRow", "JobRow", "JobState", "LifecycleEvent", "Outcome", "lifecycle"]

Outcome = Literal["completed", "failed", "requeued", "stalled", "released", "waiting-children", "open"]
JobState = Literal["waiting", "active", "delayed", "waiting-children", "completed", "failed", "removed", "unknown"]

#: The outcome of an open attempt that one of these events ends.
_ENDS: dict[str, Outcome] = {
    "completed": "completed",
    "failed": "failed",
    "delayed": "requeued",
    "waiting": "requeued",
    "stalled": "stalled",
    "released": "released",
    "waiting-children": "waiting-children",
}


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """The columns of ``bronze.events`` that the fold needs."""

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
        """The event's time in microseconds; the sequence number, up to 999, distinguishes events of one millisecond."""
        return min(self.event_ms, MAX_TIME_MS) * 1000 + min(self.event_seq, 999)


@dataclass(slots=True)
class AttemptRow:
    """A row of ``silver.attempts``.

    Attributes:
        queue: BullMQ's name for the queue.
        job_id: The id of the job.
        incarnation: The id of the added event; ``None`` if that event is missing. A job id can have several
            incarnations.
        attempt: Its number, from 1; for a release, which is no attempt, its number below 0, from -1.
        name: The task's name; ``None`` if the added event is missing.
        queued_ms: When the job began to wait; ``None`` if unknown, like the next two.
        started_ms: When a worker acquired it; ``None`` for a release, which has no start.
        ended_ms: When it ended.
        outcome: ``requeued``: the job runs again, because the attempt failed, was released after its start or
            rescheduled, or its child crashed, which events do not distinguish; ``released``: it was released before;
            ``open``: the outcome is unknown.
        failed_reason: The reason for the final failure. Events do not contain the reason for a requeued attempt.
        as_of_us: `LifecycleEvent.as_of_us` of the event that decided the outcome, or of the last event.
    """

    queue: str
    job_id: str
    incarnation: str | None
    attempt: int
    name: str | None
    queued_ms: int | None
    started_ms: int | None
    ended_ms: int | None = None
    outcome: Outcome = "open"
    failed_reason: str | None = None
    as_of_us: int = 0

    @property
    def wait_ms(self) -> int | None:
        """How long the job waited for a worker."""
        return _between(self.queued_ms, self.started_ms)

    @property
    def run_ms(self) -> int | None:
        """How long the attempt ran."""
        return _between(self.started_ms, self.ended_ms)

    @property
    def error_fingerprint(self) -> str | None:
        """The reason without its variable parts."""
        return error_fingerprint(self.failed_reason)


@dataclass(slots=True)
class JobRow:
    """A row of ``silver.jobs``: one incarnation of a job, and its attempts.

    Attributes:
        queue: BullMQ's name for the queue.
        job_id: The id of the job.
        incarnation: As in `AttemptRow`.
        name: As in `AttemptRow`.
        created_ms: When it was added.
        state: The last state; a finished job keeps its state when it is removed.
        finished_ms: When it finished; ``None`` if it has not.
        failed_reason: The reason for the failure, if the job failed.
        attempts: The attempts, in order.
        as_of_us: `LifecycleEvent.as_of_us` of the job's last event; the removal of a finished job does not count.
    """

    queue: str
    job_id: str
    incarnation: str | None = None
    name: str | None = None
    created_ms: int | None = None
    state: JobState = "unknown"
    finished_ms: int | None = None
    failed_reason: str | None = None
    attempts: list[AttemptRow] = field(default_factory=list)
    as_of_us: int = 0

    @property
    def first_started_ms(self) -> int | None:
        """When a worker first acquired the job."""
        return min((attempt.started_ms for attempt in self.attempts if attempt.started_ms is not None), default=None)

    @property
    def attempt_count(self) -> int:
        """The number of attempts, without releases: BullMQ's ``ats``."""
        return len(self.attempts) - self.releases

    @property
    def releases(self) -> int:
        """The number of releases."""
        return sum(attempt.outcome == "released" for attempt in self.attempts)

    @property
    def stalls(self) -> int:
        """The number of stalled attempts: BullMQ's ``stc``."""
        return sum(attempt.outcome == "stalled" for attempt in self.attempts)

    @property
    def wait_ms(self) -> int | None:
        """How long the job waited for a worker, in all attempts; delays do not count."""
        return _total(attempt.wait_ms for attempt in self.attempts)

    @property
    def run_ms(self) -> int | None:
        """How long the job ran, in all attempts."""
        return _total(attempt.run_ms for attempt in self.attempts)

    @property
    def total_ms(self) -> int | None:
        """The time from when the job was added until it finished."""
        return _between(self.created_ms, self.finished_ms)

    @property
    def error_fingerprint(self) -> str | None:
        """The reason without its variable parts."""
        return error_fingerprint(self.failed_reason)


def lifecycle(events: Iterable[LifecycleEvent]) -> list[JobRow]:
    """Derive the lifecycle of jobs from their events.

    Args:
        events: Events without duplicates, in any order, of any number of jobs and queues.

    Returns:
        A row for each incarnation of each job, in order of queue, job id and time.
    """
    relevant = sorted(
        (event for event in events if _is_lifecycle_event(event)),
        key=lambda event: (event.queue, event.job_id, event.event_ms, event.event_seq),
    )
    folds: list[_Fold] = []
    for (queue, job_id), job_events in groupby(relevant, key=lambda event: (event.queue, event.job_id)):
        fold: _Fold | None = None
        for event in job_events:
            if fold is None or event.event == "added":
                fold = _Fold(JobRow(queue, job_id))
                folds.append(fold)
            fold.apply(event)
    return [fold.job for fold in folds if fold.is_known]


def _is_lifecycle_event(event: LifecycleEvent) -> bool:
    """Return whether an event belongs to a job's lifecycle."""
    return event.event in STATE_AFTER and not (event.event == "removed" and event.prev in FINISHED)


class _Fold:
    """The fold of one incarnation of a job: its row, and the state in which the next event is interpreted."""

    def __init__(self, job: JobRow) -> None:
        self.job = job
        self.is_known = False
        self._open: AttemptRow | None = None
        self._undecided: AttemptRow | None = None
        self._queued_ms: int | None = None
        self._queued_before_ms: int | None = None
        self._last: LifecycleEvent | None = None

    def apply(self, event: LifecycleEvent) -> None:
        """Apply an event."""
        self.is_known = self.is_known or event.event != "removed"
        before, released = self._undecided, _is_release(event)
        if before is not None:
            before.as_of_us = event.as_of_us
            if self._open is None or not released:
                self._undecided = None
        if event.event == "added":
            self.job.incarnation = event.event_id
            self.job.name = event.name
            self.job.created_ms = event.event_ms
        elif event.event == "active":
            self._begin(event, event.event_ms)
        elif event.event == "stalled" and self._follows_release():
            if self.job.attempts[-1].outcome != "released":
                self.job.attempts[-1].outcome = "stalled"
        else:
            self._end(event)
        self._queue_up(event)
        self._update_job(event)
        self._last = event

    def _begin(self, event: LifecycleEvent, started_ms: int | None) -> None:
        job = self.job
        number = job.attempt_count + 1
        queued_ms = self._queued_ms if started_ms is not None else None
        self._open = AttemptRow(job.queue, job.job_id, job.incarnation, number, job.name, queued_ms, started_ms)
        self._open.as_of_us = event.as_of_us
        job.attempts.append(self._open)
        # The next event shows whether the attempt ended, or why the job was released.
        if started_ms is not None or _is_release(event):
            self._undecided = self._open

    def _end(self, event: LifecycleEvent) -> None:
        if self._open is None and self._ends_unknown_attempt(event):
            self._begin(event, None)
        if self._open is not None and _ends_attempt(event):
            self._open.ended_ms = event.event_ms
            self._open.outcome = _ENDS[event.event]
            self._open.failed_reason = plain_reason(event.failed_reason) if event.event == "failed" else None
            if event.event == "released":
                self._open.attempt, self._open.started_ms = -self.job.releases, None
        self._open = None

    def _ends_unknown_attempt(self, event: LifecycleEvent) -> bool:
        """Return whether an attempt with an unknown start ended with this event."""
        if event.event == "waiting":
            # After `stalled` and `released`, this event only repeats the state.
            return event.prev == "active" and (self._last is None or self._last.event not in {"stalled", "released"})
        if event.event == "waiting-children":
            return event.prev == "active"
        return event.event in {"completed", "failed", "stalled", "released"}

    def _follows_release(self) -> bool:
        return self._last is not None and _is_release(self._last)

    def _queue_up(self, event: LifecycleEvent) -> None:
        last = None if self._last is None else self._last.event
        # `stalled` and a release do not change when the job began to wait.
        if event.event == "released":
            self._queued_ms = self._queued_before_ms if last == "active" else self._queued_ms
        elif event.event == "waiting":
            self._queued_ms = self._queued_ms if last == "released" else event.event_ms
        elif event.event != "stalled":
            self._queued_before_ms, self._queued_ms = self._queued_ms, None

    def _update_job(self, event: LifecycleEvent) -> None:
        job = self.job
        if event.event == "removed" and job.state in FINISHED:
            return
        job.as_of_us = event.as_of_us
        job.state = cast("JobState", STATE_AFTER[event.event])
        job.finished_ms = event.event_ms if job.state in FINISHED else None
        job.failed_reason = plain_reason(event.failed_reason) if job.state == "failed" else None


def _is_release(event: LifecycleEvent) -> bool:
    return event.event == "waiting" and event.prev == "active"


def _ends_attempt(event: LifecycleEvent) -> bool:
    """Return whether this event ends an open attempt; after any other event the outcome is unknown."""
    return event.event in _ENDS and (event.event != "waiting" or event.prev == "active")


def _between(first_ms: int | None, last_ms: int | None) -> int | None:
    return None if first_ms is None or last_ms is None else last_ms - first_ms


def _total(parts_ms: Iterable[int | None]) -> int | None:
    known_ms = [part for part in parts_ms if part is not None]
    return sum(known_ms) if known_ms else None
