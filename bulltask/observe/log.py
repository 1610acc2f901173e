"""Logs the exceptions that listeners raise."""

from __future__ import annotations

import contextlib
import json as jsonlib
import logging
import os
import re
import reprlib
import secrets
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from bulltask.config.process import anonymous_file
from bulltask.config.urls import redact_text
from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import ConfigError
from bulltask.jobs.names import UNSEEN
from bulltask.observe import events
from bulltask.observe.bus import Bus, Event, OnError
from bulltask.observe.signals import setup_logging
from bulltask.registry.request import current_job, share_with_structlog

__all__ = [
    "ERROR_CHARS",
    "NAME_CHARS",
    "JobAttributes",
    "Line",
    "LineWriter",
    "LogListener",
    "ProcessLines",
    "add_attributes_to_handlers",
    "add_job_fields",
    "configure",
    "configure_logging",
    "drop_job_attributes",
    "iso_time",
    "level_number",
    "listener_errors",
    "redact_fields",
    "seconds",
    "shorten",
    "worker_id",
]


# Log lines of events, and the values of their fields.


ERROR_CHARS = 2_000
NAME_CHARS = 200

Line = tuple[int, type[Event], Callable[[Any], None]]
"""A level, an event class, and the function that writes its line."""


def shorten(text: str, chars: int) -> str:
    """Return at most ``chars`` characters of the text."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def seconds(ms: float) -> float:
    """Return a duration in seconds."""
    return round(ms / 1000, 6)


def iso_time(epoch_ms: int) -> str:
    """Return a time in ISO 8601 format, in UTC."""
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Writes complete lines to a stream that several processes share.


if sys.platform != "win32":
    import fcntl


ATOMIC = 4096  # PIPE_BUF of Linux: a pipe that polls as writable accepts this much without blocking


class LineWriter:
    """Writes log lines that are never mixed with those of other processes, and never block the worker for long.

    A write of more than 4 KiB to a pipe may be mixed with other processes' lines, and in a container every traceback is
    written to a pipe. Therefore, while a writer writes a line, it holds a lock that all forks share. It also removes
    passwords from URLs.

    A reader that stops (``| less``, a stuck log shipper) would block the supervisor, which would renew no locks, and
    every running job would run twice. Therefore, a line waits for about a second at most; after that, it and the
    following lines are dropped until the reader continues. Then the writer first writes a line with the number of
    dropped lines.

    Args:
        stream: Where the lines are written. Its file descriptor is used if it has one (without buffering), its
            ``write`` otherwise. Create the writer before the fork, so that the processes share the lock.
        dropped_line: Returns the line that reports a number of dropped lines.
    """

    timeout_ms = 1000

    def __init__(self, stream: TextIO, dropped_line: Callable[[int], str] = "{} log lines were dropped".format) -> None:
        self._stream = stream
        self._dropped_line = dropped_line
        self._fd = _descriptor(stream)
        # True for a pipe, a socket or a terminal. The kernel writes a line to a file atomically, without blocking.
        self._may_block = self._fd is not None and not stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._lock_fd = _anonymous_file() if self._may_block else None
        self._lock_stuck = False
        if self._fd is not None and self._may_block:
            self._writable = select.poll()
            self._writable.register(self._fd, select.POLLOUT)
        self._enter_process()

    def _enter_process(self) -> None:
        self._pid = os.getpid()
        self._threads = threading.RLock()  # a file lock is per process; reentrant for signal handlers
        self._late = False  # the previous line was dropped: do not wait again
        self._torn = False  # the previous line was only partially written
        self.dropped = 0
        """The number of lines dropped since the last line that was written."""

    def close(self) -> None:
        """Close the lock's file; the stream stays open."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write(self, line: str) -> None:
        """Write ``line`` and a newline, or drop it if that takes longer than about a second. Never raises."""
        text = redact_text(line, json=True)
        if self._pid != os.getpid():  # one of the parent's threads may have held the lock
            self._enter_process()
        if not self._threads.acquire(timeout=self.timeout_ms / 1000):
            self.dropped += 1
            return
        try:
            self._write(text)
        except (OSError, ValueError):  # closed, or a full disk; neither must fail a job
            self.dropped += 1
        finally:
            self._threads.release()

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._stream.write(f"{text}\n")
            self._stream.flush()
            return
        lines = [self._dropped_line(self.dropped), text, ""] if self.dropped else [text, ""]
        if self._torn:
            lines.insert(0, "")
        data = "\n".join(lines).encode(errors="backslashreplace")
        deadline = mono_s() + self.timeout_ms / 1000
        locked = self._acquire_lock(deadline)
        try:
            sent = self._send(self._fd, data, deadline)
        finally:
            if locked and self._lock_fd is not None:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)
        self._late = sent < len(data)
        self._torn = self._late and sent > 0
        self.dropped = self.dropped + 1 if self._late else 0

    def _send(self, fd: int, data: bytes, deadline: float) -> int:
        """Write ``data`` in parts that do not block; return the number of bytes written before the deadline."""
        if not self._may_block:
            return os.write(fd, data)
        sent = 0
        while sent < len(data):
            timeout = 0.0 if self._late else max(0.0, deadline - mono_s())
            if not self._writable.poll(timeout * 1000):
                break
            with contextlib.suppress(BlockingIOError):  # another process that shares the stream has set O_NONBLOCK
                sent += os.write(fd, data[sent : sent + ATOMIC])
        return sent

    def _acquire_lock(self, deadline: float) -> bool:
        """Wait for the lock until the deadline, because a process that was stopped (SIGSTOP) may hold it.

        A line without the lock may be mixed with others, but a supervisor that waits would lose its jobs' locks.
        """
        if self._lock_fd is None:
            return False
        while True:
            try:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if self._lock_stuck or mono_s() >= deadline:
                    self._lock_stuck = True  # the next line does not wait
                    return False
                select.select([], [], [], 0.001)  # file locks have no wait with a timeout
            else:
                self._lock_stuck = False
                return True


def _descriptor(stream: TextIO) -> int | None:
    if sys.platform == "win32":  # without a worker, no processes share the stream
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # io.StringIO, pytest's capture, sys.stderr of a daemon
        return None


def _anonymous_file() -> int | None:
    """Return an anonymous file for the lock; the kernel releases the lock when its holder dies."""
    try:
        return anonymous_file("bulltask-log-lock")
    except OSError:  # no file can be created: long lines may be mixed
        return None


# Adds the current job to log lines: as fields, or as attributes for the handlers of an app.


_ADDED = "bulltask_attributes"


def add_job_fields(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Add ``job_id`` and ``task`` (a processor of structlog)."""
    if (job := current_job()) is not None:
        fields.setdefault("job_id", job.id)
        fields.setdefault("task", job.name)
    return fields


def drop_job_attributes(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Drop what :class:`JobAttributes` has added for another handler, because the line already has these fields."""
    for name in (*fields.pop(_ADDED, ()),):
        del fields[name]
    return fields


class JobAttributes(logging.Filter):
    """Gives every record the attributes ``job_id``, ``task_id`` (the same) and ``task_name``, ``""`` outside of a job.

    A filter rather than a record factory: with a factory, ``extra={"job_id": …}`` in a log call would raise an error.
    Attributes that a record already has are kept.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; no record is dropped."""
        if not hasattr(record, _ADDED):
            job = current_job()
            job_id, task = ("", "") if job is None else (job.id, job.name)
            values = {"job_id": job_id, "task_id": job_id, "task_name": task}
            missing = {name: value for name, value in values.items() if not hasattr(record, name)}
            record.__dict__.update(missing)
            setattr(record, _ADDED, tuple(missing))
        return True


def add_attributes_to_handlers() -> None:
    """Add :class:`JobAttributes` to all handlers that the app has configured so far."""
    for handler in _handlers():
        if not any(isinstance(existing, JobAttributes) for existing in handler.filters):
            handler.addFilter(JobAttributes())


def _handlers() -> Iterator[logging.Handler]:
    root = logging.getLogger()
    for logger in (root, *root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield from logger.handlers


# The log lines of events about a worker's processes: the supervisor, its services, its children, connections.


STACKS_CHARS = 100_000
JOB_IDS = 10

NATIVE_CRASH = "Native code crashed: run the task alone with python -X faulthandler"
EXIT_HINTS = {
    "SIGKILL": "Probably the OOM killer: check dmesg or the container's memory limit, lower --concurrency, or "
    "move memory-hungry jobs to a separate queue",
    "SIGSEGV": NATIVE_CRASH,
    "SIGBUS": NATIVE_CRASH,
    "SIGILL": NATIVE_CRASH,
    "SIGABRT": NATIVE_CRASH,
}


CANCEL_HINT = (
    "A sync task reached its hard time limit, or a task did not stop when it was cancelled, so its child was killed: "
    "the attempt has failed, and the child's other jobs run again"
)
MEMORY_HINT = (
    "The child's memory exceeded worker_hard_memory_limit. Its jobs run again; a job that "
    "exceeds the limit on its own fails after max_crashes. Raise the limit, or reduce the task's memory use"
)

_KILL_HINTS = {
    "hard_memory_limit": MEMORY_HINT,
    "exit_timeout": "Its jobs had ended, but a thread or an atexit function had not: a thread that need not end should "
    "be a daemon",
}


class ProcessLines:
    """Writes the lines of :class:`~bulltask.observe.log.LogListener` that are not about a job's outcome.

    Args:
        log: The logger.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log

    def lines(self) -> tuple[Line, ...]:
        """Return the lines, with their levels and events."""
        return (
            (logging.DEBUG, events.HeartbeatSucceeded, self._heartbeat),
            (logging.WARNING, events.HeartbeatFailed, self._heartbeat_failed),
            (logging.WARNING, events.RunningJobLostLock, self._running_job_lost_lock),
            (logging.WARNING, events.StalledCheckSkipped, self._check_skipped),
            (logging.ERROR, events.ServiceFailed, self._service_failed),
            (logging.INFO, events.ChildStarted, self._child_started),
            (logging.DEBUG, events.ChildReady, self._child_ready),
            (logging.DEBUG, events.ChildClosing, self._child_closing),
            (logging.INFO, events.ChildLimitReached, self._child_limit_reached),
            (logging.WARNING, events.EventLoopMisused, self._loop_misused),
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

    # ---- the supervisor's services ----

    def _heartbeat(self, event: events.HeartbeatSucceeded) -> None:
        self._log.debug("Heartbeat", queue=event.queue, locks=event.locks, duration=seconds(event.duration_ms))

    def _heartbeat_failed(self, event: events.HeartbeatFailed) -> None:
        if event.attempt > 1:  # one line per outage
            return
        self._log.warning(
            "Heartbeat failed",
            queue=event.queue,
            locks=len(event.job_ids),
            job_ids=event.job_ids[:JOB_IDS],
            error=shorten(event.error, ERROR_CHARS),
            hint="If the locks expire, other workers acquire the jobs: check Redis and the network",
        )

    def _running_job_lost_lock(self, event: events.RunningJobLostLock) -> None:
        hint = "Another worker may run the job again; the task is still running here"
        self._log.warning("Running job lost its lock", job_id=event.job_id, queue=event.queue, hint=hint)

    def _check_skipped(self, event: events.StalledCheckSkipped) -> None:
        self._log.warning(
            "Stalled check skipped",
            queue=event.queue,
            checks=event.checks,
            hint="The previous check is still running: Redis is slow, or too many jobs are active in this queue",
        )

    def _service_failed(self, event: events.ServiceFailed) -> None:
        if event.failures & (event.failures - 1) == 0:  # 1, 2, 4, 8 …
            self._log.error(
                "Supervisor service failed",
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

    def _child_limit_reached(self, event: events.ChildLimitReached) -> None:
        memory = {} if event.memory_kib is None else {"memory_kib": event.memory_kib}
        self._log.info(
            "Child limit reached",
            index=event.index,
            pid=event.pid,
            limit=event.limit,
            jobs=event.jobs,
            running=event.running,
            **memory,
        )

    def _loop_misused(self, event: events.EventLoopMisused) -> None:
        self._log.warning(
            "Event loop misused",
            job_id=event.job_id,
            queue=event.queue,
            task=event.task,
            problem=shorten(event.problem, ERROR_CHARS),
            where=event.where,
            hint="All async jobs of a child share its event loop: docs/how-to/async-tasks.md",
        )

    def _loop_stopped(self, event: events.EventLoopStopped) -> None:
        self._log.error(
            "Event loop stopped",
            pid=event.pid,
            jobs=event.jobs,
            error=shorten(event.error, ERROR_CHARS),
            hint="The event loop that the child's async tasks share was closed. A new child starts, and the jobs run "
            "again",
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
            hint=_KILL_HINTS.get(event.reason, CANCEL_HINT),
        )

    def _child_exited(self, event: events.ChildExited) -> None:
        self._log.info("Child exited", index=event.index, pid=event.pid, reason=event.reason)

    # ---- connections and the worker ----

    def _disconnected(self, event: events.RedisDisconnected) -> None:
        self._log.error(
            "Redis disconnected",
            error=shorten(event.error, ERROR_CHARS),
            hint="The worker reconnects, and running jobs continue. If this persists, check Redis and the URL",
        )

    def _reconnecting(self, event: events.RedisReconnecting) -> None:
        if event.attempt & (event.attempt - 1) == 0:  # 1, 2, 4, 8 …, so that a long outage does not flood the log
            self._log.info("Redis reconnecting", attempt=event.attempt)

    def _reconnected(self, event: events.RedisReconnected) -> None:
        self._log.info("Redis reconnected", attempt=event.attempt, duration=seconds(event.duration_ms))

    def _error_reply(self, event: events.RedisErrorReply) -> None:
        self._log.error(
            "Redis error reply",
            queue=event.queue or None,
            error=shorten(event.error, ERROR_CHARS),
            hint="This process retries after at most run_retry_delay, and running jobs continue",
        )

    def _recovered_redis(self, event: events.RedisRecovered) -> None:
        duration = seconds(event.duration_ms)
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
        self._log.info("Worker resumed", paused=seconds(event.paused_ms))

    def _concurrency_changed(self, event: events.ConcurrencyChanged) -> None:
        self._log.info("Concurrency changed", children=event.children, reason=event.reason)

    def _stacks_dumped(self, event: events.StacksDumped) -> None:
        self._log.warning(
            "Stacks",
            index=event.index,
            pid=event.pid,
            traceback=shorten(event.stacks, STACKS_CHARS),
            hint="These stacks were requested with USR1",
        )

    def _signal_ignored(self, event: events.SignalIgnored) -> None:
        self._log.info("Signal ignored", signal=event.signal, reason=event.reason)


# Writes a log line for each event.
#
# Field names are snake_case; durations and delays are in seconds, times are ISO 8601 in UTC.


RESULT_CHARS = 200
TRACEBACK_CHARS = 32_000


class LogListener:
    """Writes the log lines of one process.

    Args:
        log: The logger from ``bulltask.observe.log.configure``.
        encrypts: Whether a queue's payloads are encrypted, so that results are not logged.
    """

    def __init__(self, log: FilteringBoundLogger, encrypts: Callable[[str], bool] = lambda _: False) -> None:
        self._log = log
        self._encrypts = encrypts

    def attach(self, bus: Bus) -> None:
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


# Configures structlog for a worker: one line per event, with the worker's id on every line.
#
# On a terminal, lines are readable text (``key=value``, tracebacks below); otherwise they are JSON objects. Times are
# in UTC. The records that tasks log with the standard library's ``logging`` get the same format, unless the app has
# configured logging itself.


LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
# Without this, characters in a job's data could manipulate the operator's terminal (ESC), end the line (U+2028) or
# reverse the text after them (U+202E).
_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{UNSEEN}]")
_NAMES = frozenset({"job_id", "queue", "scheduler", "task"})  # Redis sets no limit, and any client may have chosen them


def configure(
    *,
    level: str,
    worker_id: str | None,
    json: bool | None = None,
    stream: TextIO | None = None,
    hijack_root: bool | None = None,
) -> FilteringBoundLogger:
    """Set up logging for this process and the children that it forks; call it once, before the first fork.

    This also sets structlog's global configuration, unless the app has already done so, so that
    ``structlog.get_logger()`` in a task writes the same lines.

    Args:
        level: ``debug``, ``info``, ``warning``, ``error`` or ``critical``; case does not matter.
        worker_id: Added to every line; ``None`` outside a worker.
        json: True for JSON lines, False for text; by default JSON unless ``stream`` is a terminal. Colors are used
            only on a terminal, and not if ``NO_COLOR`` is set.
        stream: Where lines are written, by default ``sys.stderr``.
        hijack_root: Whether to write the records of the standard library's ``logging``. True: write them, and replace
            the app's handlers. False: do not. ``None`` (default): write them if the root logger has no handler.

    Returns:
        The logger for bulltask's lines; it does not depend on the global configuration.

    Raises:
        ConfigError: The level does not exist.
    """
    number = level_number(level)
    out = stream if stream is not None else sys.stderr
    terminal = out.isatty()
    as_json = not terminal if json is None else json
    context = _context(worker_id)
    renderer = _renderer(as_json, colors=terminal and "NO_COLOR" not in os.environ)
    writer = LineWriter(out, lambda count: _dropped_line(count, context, renderer))
    stack = structlog.processors.StackInfoRenderer()
    processors: list[Processor] = [structlog.contextvars.merge_contextvars, add_job_fields, *context, stack, *renderer]
    wrapper = structlog.make_filtering_bound_logger(number)
    if not structlog.is_configured() or isinstance(structlog.get_config()["logger_factory"], _Factory):
        structlog.configure(
            processors=processors,
            wrapper_class=wrapper,
            logger_factory=_Factory(writer),
            cache_logger_on_first_use=False,  # the app may still configure structlog itself
        )
    else:
        share_with_structlog()
    add_attributes_to_handlers()
    if hijack_root or (hijack_root is None and all(isinstance(h, _Bridge) for h in logging.getLogger().handlers)):
        _bridge(number, context, renderer, writer)
    logger = structlog.wrap_logger(_Sink(writer), processors=processors, wrapper_class=wrapper)
    return cast("FilteringBoundLogger", logger.bind())


def level_number(level: str) -> int:
    """Return the standard library's number of a level.

    Raises:
        ConfigError: The level does not exist.
    """
    number = LEVELS.get(level.lower())
    if number is None:
        raise ConfigError(f"invalid log level {level!r}: use one of {', '.join(LEVELS)}")
    return number


class _Sink:
    """The last part of structlog's chain, which receives the rendered line."""

    def __init__(self, writer: LineWriter) -> None:
        self.msg = self.log = writer.write
        self.debug = self.info = self.warn = self.warning = writer.write
        self.error = self.exception = self.failure = self.err = self.critical = self.fatal = writer.write


class _Factory:
    """Returns structlog's sink; its class distinguishes bulltask's configuration from the app's."""

    def __init__(self, writer: LineWriter) -> None:
        self._sink = _Sink(writer)

    def __call__(self, *_: object) -> _Sink:
        return self._sink


class _Bridge(logging.Handler):
    """Writes a record of the standard library in the same format."""

    def __init__(self, formatter: logging.Formatter, writer: LineWriter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as exc:  # noqa: BLE001 - as in logging itself, an invalid log call must not fail a task
            record = logging.makeLogRecord(record.__dict__)
            record.msg = f"A log call could not be formatted: {record.msg!r} ({type(exc).__name__}: {exc})"
            record.args = record.exc_info = None
            line = self.format(record)
        self._writer.write(line)


def _bridge(level: int, context: list[Processor], renderer: list[Processor], writer: LineWriter) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            drop_job_attributes,
            add_job_fields,
            _trim,
            *context,
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    root = logging.getLogger()
    root.handlers[:] = [_Bridge(formatter, writer)]
    root.setLevel(level)
    logging.captureWarnings(capture=True)


def _trim(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    fields["event"] = str(fields["event"]).rstrip("\n")  # messages from the warnings module end with a newline
    return fields


def _context(worker_id: str | None) -> list[Processor]:
    """Return the processors that add the fields of every line."""

    def add_worker_id(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
        if worker_id is not None:
            fields.setdefault("worker_id", worker_id)
        return fields

    return [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True), add_worker_id]


def _renderer(as_json: bool, *, colors: bool) -> list[Processor]:
    """Return the processors that render a line, without its newline."""
    before: list[Processor] = [structlog.processors.format_exc_info, redact_fields]
    if as_json:
        return [*before, _render_json]
    # structlog's default shows local variables in tracebacks; these may contain passwords and personal data.
    plain = structlog.dev.plain_traceback
    return [
        *before,
        _for_terminals,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain, sort_keys=False),
    ]


def redact_fields(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Replace passwords in URLs, and shorten names and ids (a processor)."""
    for key in _NAMES & fields.keys():
        if isinstance(name := fields[key], str):
            fields[key] = shorten(name, NAME_CHARS)
    if job_ids := fields.get("job_ids"):
        fields["job_ids"] = [shorten(str(job_id), NAME_CHARS) for job_id in job_ids]
    for key, value in fields.items():
        if isinstance(value, str) and "://" in value:
            fields[key] = redact_text(value)
    return fields


def _for_terminals(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    if traceback := fields.pop("traceback", None):
        fields.setdefault("exception", str(traceback).rstrip())
    if "hint" in fields:
        fields["hint"] = fields.pop("hint")  # last, where it is easiest to see
    for key, value in fields.items():
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            fields[key] = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), value)
    return fields


def _render_json(_: WrappedLogger, __: str, fields: EventDict) -> str:
    first = {key: fields.pop(key) for key in ("timestamp", "level", "event", "worker_id") if key in fields}
    line = {**first, **fields}
    try:
        return jsonlib.dumps(line, default=_safe_repr, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # NaN, a key that is not a string, a circular reference
        return jsonlib.dumps({str(key): _plain(value) for key, value in line.items()})


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, str | int) else _safe_repr(value)


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as exc:  # noqa: BLE001 - user code; a broken repr() must not lose the line
        return f"<{type(value).__name__}: its repr() raised {type(exc).__name__}>"


def _dropped_line(count: int, context: Iterable[Processor], renderer: Iterable[Processor]) -> str:
    fields: Any = {"event": "Log lines dropped", "count": count, "hint": "The reader of this worker's log was blocked"}
    for step in (*context, *renderer):
        fields = step(None, "warning", fields)
    return str(fields)


# Configures logging for a worker's process, or lets the app do it: ``setup_logging``.


_LOGGER: Final = "bulltask.worker"
_RESERVED: Final = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime"})
_BELOW: Final = ("traceback",)
"""Fields that are too long for the line; they follow it."""


def worker_id(name: str = "") -> str:
    """Return a unique worker id: ``{hostname}-{pid}-{random}``, preceded by ``{name}@`` if ``name`` is set."""
    identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return f"{name}@{identity}" if name else identity


def configure_logging(*, level: str, worker_id: str) -> FilteringBoundLogger:
    """Configure logging as :func:`bulltask.observe.log.configure` does, unless ``setup_logging`` has a receiver.

    If it has, bulltask configures nothing, and its own lines are records of the logger ``bulltask.worker``, which the
    app's configuration formats. If every receiver raises, bulltask configures logging after all.

    Args:
        level: As for ``configure``.
        worker_id: Added to every line of bulltask.

    Returns:
        The logger for bulltask's lines.

    Raises:
        ConfigError: The level does not exist.
    """
    if not setup_logging.has_listeners():
        return configure(level=level, worker_id=worker_id)
    number, colorize = level_number(level), sys.stderr.isatty()
    responses = setup_logging.send(None, loglevel=number, logfile=None, format=None, colorize=colorize)
    if all(isinstance(response, Exception) for _, response in responses):
        return configure(level=level, worker_id=worker_id)
    add_attributes_to_handlers()
    share_with_structlog()

    def add_worker_id(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
        fields["worker_id"] = worker_id
        return fields

    processors: list[Processor] = [redact_fields, add_worker_id, _as_record]
    wrapper = structlog.make_filtering_bound_logger(number)
    logger = structlog.wrap_logger(logging.getLogger(_LOGGER), processors=processors, wrapper_class=wrapper)
    return cast("FilteringBoundLogger", logger.bind())


def _as_record(_: WrappedLogger, __: str, fields: EventDict) -> Mapping[str, Any]:
    """Return the arguments of a log call: the fields are part of the message, and attributes of the record."""
    event, exc_info = fields.pop("event"), fields.pop("exc_info", None)
    words = [str(event), *(f"{name}={value}" for name, value in fields.items() if name not in _BELOW)]
    below = [str(fields[name]).rstrip() for name in _BELOW if fields.get(name)]
    extra = {f"bulltask_{name}" if name in _RESERVED else name: value for name, value in fields.items()}
    return {"msg": "\n".join([" ".join(words), *below]), "extra": extra, "exc_info": exc_info}


# Logs the exceptions that listeners raise.


def listener_errors(log: FilteringBoundLogger) -> OnError:
    """Return a function for ``Bus(on_error=…)`` that logs the exceptions that listeners raise."""

    def report(listener: str, event: Event, exc: Exception) -> None:
        log.error(
            "Listener failed",
            listener=listener,
            on=type(event).__name__,
            exc_info=exc,
            hint="Further failures of this listener for this event are not logged",
        )

    return report
