"""The log lines of events about a worker's processes: the supervisor, its services, its children, connections."""

from __future__ import annotations

import logging

from structlog.typing import FilteringBoundLogger

from bulltask import events
from bulltask.observe.log_values import ERROR_CHARS, Line, seconds, shorten

__all__ = ["ProcessLines"]

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
    """Writes the lines of :class:`~bulltask.observe.log_listener.LogListener` that are not about a job's outcome.

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
