"""Writes a log line for each event.

Field names are snake_case; durations and delays are in seconds, times are ISO 8601 in UTC.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from structlog.typing import FilteringBoundLogger

from bulltask import events

__all__ = ["LogListener"]

RESULT_CHARS = 200
ERROR_CHARS = 2_000
TRACEBACK_CHARS = 32_000
STACKS_CHARS = 100_000
JOB_IDS = 10

NATIVE_CRASH = "Native code crashed: run the task alone with python -X faulthandler"
EXIT_HINTS = {
    "SIGKILL": "Probably the OOM killer: check dmesg or the container's memory limit, lower --concurrency, or send "
    "such jobs to a separate queue",
    "SIGSEGV": NATIVE_CRASH,
    "SIGBUS": NATIVE_CRASH,
    "SIGILL": NATIVE_CRASH,
    "SIGABRT": NATIVE_CRASH,
}

_Line = tuple[int, type[events.Event], Callable[[Any], None]]
"""A level, an event class, and the function that writes its line."""


class LogListener:
    """Writes the log lines of one process.

    Args:
        log: The logger from ``bulltask.observe.log.configure``.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log

    def attach(self, bus: events.Bus) -> None:
        """Subscribe to the events that the logger's level includes, and to no others.

        Therefore, at level ``warning``, `JobCompleted` has no listener, and a child does not even create that event.
        """
        for level, kind, line in (*self._job_lines(), *self._process_lines()):
            if self._log.is_enabled_for(level):
                bus.subscribe(kind, line)

    def _job_lines(self) -> tuple[_Line, ...]:
        return (
            (logging.INFO, events.JobStarted, self._job_started),
            (logging.INFO, events.JobCompleted, self._completed),
            (logging.ERROR, events.JobFailed, self._failed),
            (logging.WARNING, events.JobRetried, self._retried),
            (logging.INFO, events.JobReleased, self._released),
            (logging.INFO, events.JobRescheduled, self._rescheduled),
            (logging.INFO, events.JobWaitsForChildren, self._waits_for_children),
            (logging.WARNING, events.TaskNotRegistered, self._not_registered),
            (logging.ERROR, events.SchedulingFailed, self._not_scheduled),
            (logging.WARNING, events.LockLost, self._lock_lost),
            (logging.WARNING, events.JobStalled, self._stalled),
            (logging.WARNING, events.JobRecovered, self._recovered),
            (logging.ERROR, events.CrashLimitReached, self._crashed),
            (logging.ERROR, events.MalformedJobFailed, self._malformed_job),
            (logging.INFO, events.CancelRequested, self._cancel_requested),
            (logging.INFO, events.JobRevoked, self._revoked),
        )

    def _process_lines(self) -> tuple[_Line, ...]:
        return (
            (logging.DEBUG, events.HeartbeatSucceeded, self._heartbeat),
            (logging.WARNING, events.HeartbeatFailed, self._heartbeat_failed),
            (logging.WARNING, events.RunningJobLostLock, self._running_job_lost_lock),
            (logging.WARNING, events.StalledCheckSkipped, self._check_skipped),
            (logging.ERROR, events.ServiceFailed, self._service_failed),
            (logging.INFO, events.ChildStarted, self._child_started),
            (logging.DEBUG, events.ChildReady, self._child_ready),
            (logging.DEBUG, events.ChildClosing, self._child_closing),
            (logging.ERROR, events.EventLoopStopped, self._loop_stopped),
            (logging.WARNING, events.ChildDied, self._child_died),
            (logging.WARNING, events.ChildKilled, self._child_killed),
            (logging.INFO, events.ChildExited, self._child_exited),
            (logging.ERROR, events.RedisDisconnected, self._disconnected),
            (logging.INFO, events.RedisReconnecting, self._reconnecting),
            (logging.INFO, events.RedisReconnected, self._reconnected),
            (logging.ERROR, events.RedisErrorReply, self._error_reply),
            (logging.INFO, events.RedisRecovered, self._recovered_redis),
            (logging.INFO, events.WorkerStarted, self._started),
            (logging.INFO, events.WorkerStopping, self._stopping),
            (logging.ERROR, events.WorkerStopped, self._stopped),
            (logging.INFO, events.WorkerRestarting, self._restarting),
            (logging.INFO, events.WorkerPaused, self._paused),
            (logging.INFO, events.WorkerResumed, self._resumed),
            (logging.INFO, events.ConcurrencyChanged, self._concurrency_changed),
            (logging.WARNING, events.StacksDumped, self._stacks_dumped),
            (logging.INFO, events.SignalIgnored, self._signal_ignored),
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
            duration=_seconds(event.duration_ms),
            result=_shorten(_REPR.repr(event.result), RESULT_CHARS),
        )

    def _failed(self, event: events.JobFailed) -> None:
        self._log.error(
            "Job failed",
            job_id=event.job_id,
            queue=event.queue,
            task=event.task,
            duration=_seconds(event.duration_ms),
            error=_shorten(event.error, ERROR_CHARS),
            category=event.category,
            attempts_made=event.attempts_made,
            traceback=event.traceback[-TRACEBACK_CHARS:],  # the end of a traceback is the most useful part
        )

    def _retried(self, event: events.JobRetried) -> None:
        self._log.warning(
            "Job retried",
            job_id=event.job_id,
            queue=event.queue,
            task=event.task,
            duration=_seconds(event.duration_ms),
            error=_shorten(event.error, ERROR_CHARS),
            category=event.category,
            attempts_made=event.attempts_made,
            delay=_seconds(event.delay_ms),
        )

    def _released(self, event: events.JobReleased) -> None:
        self._log.info("Job released", job_id=event.job_id, queue=event.queue, task=event.task, reason=event.reason)

    def _rescheduled(self, event: events.JobRescheduled) -> None:
        delay = _seconds(event.delay_ms)
        self._log.info("Job rescheduled", job_id=event.job_id, queue=event.queue, task=event.task, delay=delay)

    def _waits_for_children(self, event: events.JobWaitsForChildren) -> None:
        self._log.info("Job waiting for child jobs", job_id=event.job_id, queue=event.queue, task=event.task)

    def _not_registered(self, event: events.TaskNotRegistered) -> None:
        self._log.warning(
            "Task not registered",
            job_id=event.job_id,
            queue=event.queue,
            task=event.name,
            delay=_seconds(event.delay_ms),
            hint="Import the module of the task in this app, or send its jobs to a separate queue",
        )

    def _not_scheduled(self, event: events.SchedulingFailed) -> None:
        self._log.error(
            "Scheduling failed",
            job_id=event.job_id,
            queue=event.queue,
            scheduler=event.scheduler,
            error=_shorten(event.error, ERROR_CHARS),
            delay=_seconds(event.delay_ms),
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
            lock_expired_at=None if expired is None else _iso_time(expired),
            hint="The job runs again, or fails if it has stalled more than max_stalled_count times. Its worker died, "
            "or could not reach Redis for longer than lock_duration",
        )

    def _recovered(self, event: events.JobRecovered) -> None:
        self._log.warning(
            "Job recovered",
            job_id=event.job_id,
            queue=event.queue,
            crashes=event.crashes,
            waited=_seconds(event.waited_ms),
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
            reason=_shorten(event.reason, ERROR_CHARS),
            hint="The job's hash in Redis is malformed, so the job failed. Other jobs are not affected",
        )

    def _cancel_requested(self, event: events.CancelRequested) -> None:
        self._log.info("Cancel requested", job_id=event.job_id, index=event.index, reason=event.reason)

    def _revoked(self, event: events.JobRevoked) -> None:
        self._log.info("Job revoked", job_id=event.job_id, queue=event.queue)

    # ---- the supervisor's services ----

    def _heartbeat(self, event: events.HeartbeatSucceeded) -> None:
        self._log.debug("Heartbeat", queue=event.queue, locks=event.locks, duration=_seconds(event.duration_ms))

    def _heartbeat_failed(self, event: events.HeartbeatFailed) -> None:
        if event.attempt > 1:  # one line per outage
            return
        self._log.warning(
            "Heartbeat failed",
            queue=event.queue,
            locks=len(event.job_ids),
            job_ids=event.job_ids[:JOB_IDS],
            error=_shorten(event.error, ERROR_CHARS),
            hint="If the locks expire, other workers acquire the jobs: check Redis and the network",
        )

    def _running_job_lost_lock(self, event: events.RunningJobLostLock) -> None:
        hint = "Another worker may run the job again; the task is still running here"
        self._log.warning("Running job lost its lock", job_id=event.job_id, queue=event.queue, hint=hint)

    def _check_skipped(self, event: events.StalledCheckSkipped) -> None:
        self._log.warning(
            "Stalled check skipped",
            queue=event.queue,
            cycles=event.cycles,
            hint="The previous check is still running: Redis is slow, or too many jobs are active in this queue",
        )

    def _service_failed(self, event: events.ServiceFailed) -> None:
        if event.failures & (event.failures - 1) == 0:  # 1, 2, 4, 8 …
            self._log.error(
                "Service failed",
                service=event.service,
                failures=event.failures,
                exc_info=event.exception,
                hint="The supervisor continues and tries again. This is a bug in bulltask: please report it",
            )

    def _child_started(self, event: events.ChildStarted) -> None:
        self._log.info("Child started", index=event.index, pid=event.pid)

    def _child_ready(self, event: events.ChildReady) -> None:
        self._log.debug("Child ready", index=event.index, pid=event.pid)

    def _child_closing(self, event: events.ChildClosing) -> None:
        self._log.debug("Child closing", index=event.index, pid=event.pid)

    def _loop_stopped(self, event: events.EventLoopStopped) -> None:
        self._log.error(
            "Event loop stopped",
            pid=event.pid,
            jobs=event.jobs,
            error=_shorten(event.error, ERROR_CHARS),
            hint="A task stopped the event loop that the child's async tasks share. A new child starts, and the jobs "
            "run again",
        )

    def _child_died(self, event: events.ChildDied) -> None:
        fields: dict[str, object] = {"index": event.index, "pid": event.pid, "exit_reason": event.exit_reason}
        if event.exit_reason in EXIT_HINTS:
            fields["hint"] = EXIT_HINTS[event.exit_reason]
        self._log.warning("Child died", **fields, jobs=event.jobs)

    def _child_killed(self, event: events.ChildKilled) -> None:
        self._log.warning(
            "Child killed",
            index=event.index,
            pid=event.pid,
            reason=event.reason,
            jobs=event.jobs,
            hint="A running task did not end: its attempt has failed, and the child's other jobs run again",
        )

    def _child_exited(self, event: events.ChildExited) -> None:
        self._log.info("Child exited", index=event.index, pid=event.pid)

    # ---- connections and the worker ----

    def _disconnected(self, event: events.RedisDisconnected) -> None:
        self._log.error(
            "Redis disconnected",
            error=_shorten(event.error, ERROR_CHARS),
            hint="The worker reconnects, and running jobs continue. If this persists, check Redis and the URL",
        )

    def _reconnecting(self, event: events.RedisReconnecting) -> None:
        if event.attempt & (event.attempt - 1) == 0:  # 1, 2, 4, 8 …, so that a long outage does not flood the log
            self._log.info("Redis reconnecting", attempt=event.attempt)

    def _reconnected(self, event: events.RedisReconnected) -> None:
        self._log.info("Redis reconnected", attempt=event.attempt, duration=_seconds(event.duration_ms))

    def _error_reply(self, event: events.RedisErrorReply) -> None:
        self._log.error(
            "Redis error reply",
            queue=event.queue or None,
            error=_shorten(event.error, ERROR_CHARS),
            hint="This process retries after at most run_retry_delay, and running jobs continue",
        )

    def _recovered_redis(self, event: events.RedisRecovered) -> None:
        duration = _seconds(event.duration_ms)
        self._log.info("Redis recovered", queue=event.queue or None, attempt=event.attempt, duration=duration)

    def _started(self, event: events.WorkerStarted) -> None:
        self._log.info(
            "Worker started",
            worker_id=event.worker_id,
            app=event.app,
            queues=list(event.queues),
            concurrency=event.concurrency,
            broker=event.broker,
        )

    def _stopping(self, event: events.WorkerStopping) -> None:
        self._log.info("Worker stopping", mode=event.mode, running=event.running)

    def _stopped(self, event: events.WorkerStopped) -> None:
        write = self._log.error if event.exit_code else self._log.info
        write("Worker stopped", exit_code=event.exit_code)

    def _restarting(self, event: events.WorkerRestarting) -> None:
        self._log.info("Worker restarting", command=event.command)

    def _paused(self, event: events.WorkerPaused) -> None:
        self._log.info("Worker paused", running=event.running, hint="Send CONT to resume it")

    def _resumed(self, event: events.WorkerResumed) -> None:
        self._log.info("Worker resumed", paused=_seconds(event.paused_ms))

    def _concurrency_changed(self, event: events.ConcurrencyChanged) -> None:
        self._log.info("Concurrency changed", children=event.children)

    def _stacks_dumped(self, event: events.StacksDumped) -> None:
        self._log.warning(
            "Stacks",
            index=event.index,
            pid=event.pid,
            traceback=_shorten(event.stacks, STACKS_CHARS),
            hint="These stacks were requested with USR1",
        )

    def _signal_ignored(self, event: events.SignalIgnored) -> None:
        self._log.info("Signal ignored", signal=event.signal, reason=event.reason)


_REPR = reprlib.Repr()  # reads only the first elements, because a result may be large
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = RESULT_CHARS
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _REPR.maxfrozenset = 50


def _shorten(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def _seconds(ms: float) -> float:
    return round(ms / 1000, 6)


def _iso_time(epoch_ms: int) -> str:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
