"""Writes a log line for each event.

Field names are snake_case; durations and delays are in seconds, times are ISO 8601 in UTC.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from bulltask import events
from bulltask.observe.log_values import ERROR_CHARS, Line, iso_time, seconds, shorten
from bulltask.observe.process_lines import ProcessLines

__all__ = ["LogListener"]

RESULT_CHARS = 200
TRACEBACK_CHARS = 32_000


class LogListener:
    """Writes the log lines of one process.

    Args:
        log: The logger from ``bulltask.observe.log.configure``.
        encrypts: Whether a queue's payloads are encrypted, so that results are not logged.
    """

    def __init__(self, log: FilteringBoundLogger, encrypts: Callable[[str], bool] = lambda _: False) -> None:
        self._log, self._encrypts = log, encrypts

    def attach(self, bus: events.Bus) -> None:
        """Subscribe to the events that the logger's level includes, and to no others.

        Therefore, at level ``warning``, `JobCompleted` has no listener, and a child does not even create that event.
        """
        for level, kind, line in (*self._job_lines(), *ProcessLines(self._log).lines()):
            if self._log.is_enabled_for(level):
                bus.subscribe(kind, line)

    def _job_lines(self) -> tuple[Line, ...]:
        return (
            (logging.INFO, events.JobStarted, self._job_started),
            (logging.INFO, events.JobCompleted, self._completed),
            (logging.ERROR, events.JobFailed, self._failed),
            (logging.WARNING, events.JobRetried, self._retried),
            (logging.DEBUG, events.JobThrottled, self._throttled),
            (logging.INFO, events.JobReleased, self._released),
            (logging.INFO, events.JobRescheduled, self._rescheduled),
            (logging.INFO, events.JobWaitsForChildren, self._waits_for_children),
            (logging.WARNING, events.JobIncompatible, self._incompatible),
            (logging.ERROR, events.SchedulingFailed, self._not_scheduled),
            (logging.WARNING, events.LockLost, self._lock_lost),
            (logging.WARNING, events.JobStalled, self._stalled),
            (logging.WARNING, events.JobRecovered, self._recovered),
            (logging.ERROR, events.CrashLimitReached, self._crashed),
            (logging.ERROR, events.MalformedJobFailed, self._malformed_job),
            (logging.INFO, events.CancelRequested, self._cancel_requested),
            (logging.INFO, events.JobRevoked, self._revoked),
        )

    # ---- jobs ----

    def _job_started(self, event: events.JobStarted) -> None:
        self._log.info("Job started", job_id=event.job_id, queue=event.queue, task=event.task, attempt=event.attempt)

    def _completed(self, event: events.JobCompleted) -> None:
        self._log.info(
            "Job completed",
            job_id=event.job_id,
            queue=event.queue,
            task=event.task,
            duration=seconds(event.duration_ms),
            result="***" if self._encrypts(event.queue) else shorten(_REPR.repr(event.result), RESULT_CHARS),
        )

    def _failed(self, event: events.JobFailed) -> None:
        log = self._log.info if event.expected else self._log.error
        # The end of a traceback is the most useful part.
        traceback = {} if event.expected else {"traceback": event.traceback[-TRACEBACK_CHARS:]}
        log(
            "Job failed",
            job_id=event.job_id,
            queue=event.queue,
            task=event.task,
            duration=seconds(event.duration_ms),
            error=shorten(event.error, ERROR_CHARS),
            category=event.category,
            attempts_made=event.attempts_made,
            **traceback,
        )

    def _retried(self, event: events.JobRetried) -> None:
        self._log.warning(
            "Job retried",
            job_id=event.job_id,
            queue=event.queue,
            task=event.task,
            duration=seconds(event.duration_ms),
            error=shorten(event.error, ERROR_CHARS),
            category=event.category,
            attempts_made=event.attempts_made,
            delay=seconds(event.delay_ms),
        )

    def _throttled(self, event: events.JobThrottled) -> None:
        delay = seconds(event.delay_ms)
        self._log.debug("Job throttled", job_id=event.job_id, queue=event.queue, task=event.task, delay=delay)

    def _released(self, event: events.JobReleased) -> None:
        self._log.info("Job released", job_id=event.job_id, queue=event.queue, task=event.task, reason=event.reason)

    def _rescheduled(self, event: events.JobRescheduled) -> None:
        delay = seconds(event.delay_ms)
        self._log.info("Job rescheduled", job_id=event.job_id, queue=event.queue, task=event.task, delay=delay)

    def _waits_for_children(self, event: events.JobWaitsForChildren) -> None:
        self._log.info("Job waiting for child jobs", job_id=event.job_id, queue=event.queue, task=event.task)

    def _incompatible(self, event: events.JobIncompatible) -> None:
        self._log.warning(
            "Job incompatible",
            job_id=event.job_id,
            queue=event.queue,
            task=event.task,
            reason=event.reason,
            delay=seconds(event.delay_ms),
            hint="It waits for a worker that can run it: deploy one, or send such jobs to a separate queue",
        )

    def _not_scheduled(self, event: events.SchedulingFailed) -> None:
        self._log.error(
            "Scheduling failed",
            job_id=event.job_id,
            queue=event.queue,
            scheduler=event.scheduler,
            error=shorten(event.error, ERROR_CHARS),
            delay=seconds(event.delay_ms),
            hint="The job is delayed: its scheduler's next iteration could not be added, and running the job now would "
            "end the scheduler. Fix or remove the job scheduler",
        )

    def _lock_lost(self, event: events.LockLost) -> None:
        self._log.warning(
            "Lock lost",
            job_id=event.job_id,
            queue=event.queue,
            task=event.task,
            hint="The outcome was discarded, because another worker has the job: Redis could not be reached, or this "
            "machine was suspended, for longer than lock_duration. If 'Redis error reply' was logged just before, a "
            "script failed: fix that error",
        )

    def _stalled(self, event: events.JobStalled) -> None:
        expired = event.lock_expired_at_ms
        self._log.warning(
            "Job stalled",
            job_id=event.job_id,
            queue=event.queue,
            lock_expired_at=None if expired is None else iso_time(expired),
            hint="The job runs again, or fails if it has stalled more than max_stalled_count times. Its worker died, "
            "or could not reach Redis for longer than lock_duration",
        )

    def _recovered(self, event: events.JobRecovered) -> None:
        self._log.warning(
            "Job recovered",
            job_id=event.job_id,
            queue=event.queue,
            crashes=event.crashes,
            waited=seconds(event.waited_ms),
            hint="The job runs again, because the child process that ran it died",
        )

    def _crashed(self, event: events.CrashLimitReached) -> None:
        self._log.error(
            "Crash limit reached",
            job_id=event.job_id,
            queue=event.queue,
            crashes=event.crashes,
            failed_reason=event.failed_reason,
            hint="The job failed. Run its task alone to find out why its process dies",
        )

    def _malformed_job(self, event: events.MalformedJobFailed) -> None:
        self._log.error(
            "Malformed job failed",
            job_id=event.job_id,
            queue=event.queue,
            reason=shorten(event.reason, ERROR_CHARS),
            hint="The job's hash in Redis is malformed, so the job failed. Other jobs are not affected",
        )

    def _cancel_requested(self, event: events.CancelRequested) -> None:
        self._log.info("Cancel requested", job_id=event.job_id, index=event.index, reason=event.reason)

    def _revoked(self, event: events.JobRevoked) -> None:
        self._log.info("Job revoked", job_id=event.job_id, queue=event.queue)


_REPR = reprlib.Repr()  # reads only the first elements, because a result may be large
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = RESULT_CHARS
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _REPR.maxfrozenset = 50
