"""The events of a worker. Each is declared here, once: its fields, its log line, and what it counts.

A child emits the subclasses of :class:`ChildEvent`, which the listeners of an app receive (``@app.on(JobFailed)``),
about itself, its connections and its jobs; the supervisor emits the other events, and some of those. ``JobFailed`` and
``JobRetried`` are made in worker/outcomes.py, or in worker/recovery.py if the attempt was killed. ``LogListener`` in
log.py writes the lines, and ``MetricsListener`` in counters.py counts; the ends of attempts are counted by those who
write them, so that none is missed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from logging import DEBUG, ERROR, INFO, WARNING
from operator import attrgetter
from typing import Any, Final, TypeVar, cast, dataclass_transform

from bulltask.jobs.clock import share_refusals, value_class
from bulltask.observe.bus import Event

__all__ = [
    "CancelRequested",
    "ChildClosing",
    "ChildDied",
    "ChildEvent",
    "ChildExited",
    "ChildKilled",
    "ChildLimitReached",
    "ChildReady",
    "ChildStarted",
    "ChildStopped",
    "ConcurrencyChanged",
    "CrashLimitReached",
    "EventLoopMisused",
    "EventLoopStopped",
    "HeartbeatFailed",
    "HeartbeatSucceeded",
    "JobCompleted",
    "JobFailed",
    "JobIncompatible",
    "JobRecovered",
    "JobReleased",
    "JobRescheduled",
    "JobRetried",
    "JobRevoked",
    "JobStalled",
    "JobStarted",
    "JobThrottled",
    "JobWaitsForChildren",
    "LockLost",
    "MalformedJobFailed",
    "OrderExecuted",
    "OrderRejected",
    "RedisDisconnected",
    "RedisErrorReply",
    "RedisReconnected",
    "RedisReconnecting",
    "RedisRecovered",
    "RunningJobLostLock",
    "SchedulingFailed",
    "ServiceFailed",
    "SignalIgnored",
    "StacksDumped",
    "StalledCheckSkipped",
    "WorkerPaused",
    "WorkerRestarting",
    "WorkerResumed",
    "WorkerStarted",
    "WorkerStopped",
    "WorkerStopping",
]

_ERROR_CHARS: Final = 2_000
_TRACEBACK_CHARS: Final = 32_000
_STACKS_CHARS: Final = 100_000
_JOB_IDS: Final = 10

E = TypeVar("E", bound=type[Event])
Fields = Callable[[Any], dict[str, Any]]


def shorten(text: str, chars: int = _ERROR_CHARS) -> str:
    """Return at most ``chars`` characters of the text."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def seconds(ms: float) -> float:
    """Return a duration in seconds."""
    return round(ms / 1000, 6)


def _iso_time(epoch_ms: int | None) -> str | None:
    """Return a time in ISO 8601 format, in UTC."""
    if epoch_ms is None:
        return None
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_power_of_two(number: int) -> bool:
    """Whether the number is 1, 2, 4, 8 …, so that a long outage does not flood the log."""
    return number & (number - 1) == 0


@value_class
class Declaration:
    """The log line of an event class, and what it counts.

    Attributes:
        text: The text of the line.
        level: The level, as in ``logging``.
        fields: Returns the line's fields.
        hint: The last field: what the line means, and what to do; a function if it depends on the event.
        when: Whether an event has a line, by default each.
        info_if: Whether the line has level ``INFO`` instead.
        count: Counts an event in a :class:`bulltask.observe.counters.MetricsBlock`.
    """

    text: str
    level: int
    fields: Fields
    hint: str | Callable[[Any], str]
    when: Callable[[Any], bool] | None
    info_if: Callable[[Any], bool] | None
    count: Callable[[Any, Any], None] | None


EVENTS: Final[dict[type[Event], Declaration]] = {}
"""The declarations of all event classes below."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def event(  # noqa: PLR0913 - what a line may have
    text: str,
    level: int,
    *,
    hint: str | Callable[[Any], str] = "",
    fields: Fields | None = None,
    when: Callable[[Any], bool] | None = None,
    info_if: Callable[[Any], bool] | None = None,
    count: Callable[[Any, Any], None] | None = None,
) -> Callable[[E], E]:
    """Declare an event class; :class:`Declaration` describes the arguments.

    Without ``fields``, a line has the event's fields: those in milliseconds (``_ms``) in seconds, a time (``_at_ms``)
    in ISO 8601, and a text of any length (``error``, ``problem``) shortened.
    """

    def declare(kind: E) -> E:
        made: Any = dataclass(frozen=True, slots=True, eq=False, repr=False)(kind)
        share_refusals(kind, made)
        EVENTS[made] = Declaration(text, level, fields or _fields_of(made), hint, when, info_if, count)
        return cast("E", made)

    return declare


def _fields_of(kind: type[Event]) -> Fields:
    names = [item.name for item in fields(kind) if item.repr]  # type: ignore[arg-type]  # a dataclass
    get = attrgetter(*names) if len(names) > 1 else lambda event: (getattr(event, names[0]),)
    shown = [name.removesuffix("_ms") for name in names]
    changes: dict[str, Callable[[Any], Any]] = {name: shorten for name in shown if name in {"error", "problem"}}
    changes |= {
        name.removesuffix("_ms"): _iso_time if name.endswith("_at_ms") else seconds
        for name in names
        if name.endswith("_ms")
    }

    def read(event: Event) -> dict[str, Any]:
        values = dict(zip(shown, get(event), strict=True))
        for name, change in changes.items():
            values[name] = change(values[name])
        return values

    return read


OUT_OF_MEMORY: Final = "SIGKILL (out of memory)"
"""The exit reason of a child that the kernel has killed because memory was used up."""
_NATIVE_CRASH: Final = "Native code crashed: run the task alone with python -X faulthandler"
_EXIT_HINTS: Final = {
    OUT_OF_MEMORY: "The kernel killed it because memory was used up: lower --concurrency, raise the "
    "container's memory limit, or move memory-hungry jobs to a separate queue",
    "SIGKILL": "Perhaps the OOM killer: check dmesg or the container's memory limit, lower --concurrency, or move "
    "memory-hungry jobs to a separate queue",
    "SIGKILL (not for memory)": "Another process has killed it: the kernel has counted no kill for lack of memory",
    "SIGSEGV": _NATIVE_CRASH,
    "SIGBUS": _NATIVE_CRASH,
    "SIGILL": _NATIVE_CRASH,
    "SIGABRT": _NATIVE_CRASH,
}
_CANCEL_HINT: Final = (
    "A sync task reached its hard time limit, or a task did not stop when it was cancelled, so its child was killed: "
    "the attempt has failed, and the child's other jobs run again"
)
_KILL_HINTS: Final = {
    "hard_memory_limit": "The child's memory exceeded worker_hard_memory_limit. Its jobs run again; a job that exceeds "
    "the limit on its own fails after max_crashes. Raise the limit, or reduce the task's memory use",
    "unresponsive": "It was stopped (SIGSTOP), or hung, as its stacks show: it had not asked Redis for a job for "
    "longer than its timeouts allow. It ran no job; those that Redis had given it run in other children",
    "exit_timeout": "Its jobs had ended, but a thread or an atexit function had not: a thread that need not end should "
    "be a daemon",
}


class ChildEvent(Event):
    """Base class of the events that children emit; a listener for this class receives all of them."""

    __slots__ = ()


@event(
    "Job started",
    INFO,
    # Written out, like those of JobCompleted, because that is faster.
    fields=lambda e: {"job_id": e.job_id, "queue": e.queue, "task": e.task, "attempt": e.attempt},
)
class JobStarted(ChildEvent):
    """A child has acquired the job and is starting to run it."""

    job_id: str
    queue: str
    task: str
    attempt: int
    """Started attempts, including this attempt (``ats``)."""


@event(
    "Job completed",
    INFO,
    fields=lambda e: {  # LogListener adds the result
        "job_id": e.job_id,
        "queue": e.queue,
        "task": e.task,
        "duration": round(e.duration_ms / 1000, 6),
    },
)
class JobCompleted(ChildEvent):
    """The job has completed and Redis has stored the result."""

    job_id: str
    queue: str
    task: str
    duration_ms: float
    result: object


@event(
    "Job failed",
    ERROR,
    info_if=lambda e: e.expected,
    fields=lambda e: {
        "job_id": e.job_id,
        "queue": e.queue,
        "task": e.task,
        "duration": seconds(e.duration_ms),
        "error": shorten(e.error),
        "category": e.category,
        "attempts_made": e.attempts_made,
        **({} if e.expected else {"traceback": e.traceback[-_TRACEBACK_CHARS:]}),  # its end is the most useful part
    },
)
class JobFailed(ChildEvent):
    """The job has failed and will not be retried."""

    job_id: str
    queue: str
    task: str
    duration_ms: float
    error: str
    category: str
    """Category of the error: ``transient``, ``permanent`` or ``unknown``; or ``revoked``."""
    attempts_made: int
    traceback: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception from the task, or from bulltask; ``None`` if the result could not be stored."""
    expected: bool = False
    """Whether the exception is one of the task's ``throws``."""


@event("Job retried", WARNING)
class JobRetried(ChildEvent):
    """An attempt has failed and the job will be retried."""

    job_id: str
    queue: str
    task: str
    duration_ms: float
    error: str
    category: str
    attempts_made: int
    delay_ms: int
    exception: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception from the task."""


@event("Job throttled", DEBUG, count=lambda block, e: block.add(e.queue, "task_limited"))
class JobThrottled(ChildEvent):
    """The job's task has reached its ``rate_limit``, so the job is delayed until its turn. No attempt has started."""

    job_id: str
    queue: str
    task: str
    delay_ms: int


@event("Job released", INFO)
class JobReleased(ChildEvent):
    """The job was released and is waiting again; the attempt does not count.

    Its task requested the release, or its child was stopped: at a shutdown, or to end another job's attempt. If the
    child was stopped, the supervisor emits the event, and listeners do not receive it.
    """

    job_id: str
    queue: str
    task: str
    reason: str


@event("Job rescheduled", INFO)
class JobRescheduled(ChildEvent):
    """The task has rescheduled its job: the job is delayed. The attempt does not count."""

    job_id: str
    queue: str
    task: str
    delay_ms: int


@event("Job waiting for child jobs", INFO)
class JobWaitsForChildren(ChildEvent):
    """At the request of its task, the job waits for its child jobs and then runs again. The attempt does not count."""

    job_id: str
    queue: str
    task: str


@event(
    "Job incompatible",
    WARNING,
    hint="It waits for a worker that can run it: deploy one, or send such jobs to a separate queue",
    count=lambda block, e: block.add(e.queue, "retried"),  # the job never ran, so it has no duration
)
class JobIncompatible(ChildEvent):
    """This worker cannot run a job, which waits for a worker that can: the job is delayed.

    After ``incompatible_timeout`` the job fails, and the event is ``JobFailed``.
    """

    job_id: str
    queue: str
    task: str
    reason: str
    delay_ms: int


@event(
    "Scheduling failed",
    ERROR,
    hint="The job is delayed: its scheduler's next iteration could not be added, and running the job now would end "
    "the scheduler. Fix or remove the job scheduler",
)
class SchedulingFailed(ChildEvent):
    """A job scheduler's job was not run, because the next iteration could not be added; the job is delayed."""

    job_id: str
    queue: str
    scheduler: str
    error: str
    delay_ms: int


@event(
    "Malformed job failed",
    ERROR,
    hint="The job's hash in Redis is malformed, so the job failed. Other jobs are not affected",
    fields=lambda e: {"job_id": e.job_id, "queue": e.queue, "reason": shorten(e.reason)},
    count=lambda block, e: block.add(e.queue, "permanent"),
)
class MalformedJobFailed(ChildEvent):
    """A job with a malformed hash could not be acquired. It has failed, so that it blocks no other job.

    The supervisor emits this event for a job that it could not recover after a child died.
    """

    job_id: str
    queue: str
    reason: str


@event(
    "Lock lost",
    WARNING,
    hint="The outcome was discarded, because another worker has the job: Redis could not be reached, or this machine "
    "was suspended, for longer than lock_duration. If 'Redis error reply' was logged just before, a script "
    "failed: fix that error",
)
class LockLost(ChildEvent):
    """A job's outcome was discarded, because its lock had expired and another worker has the job."""

    job_id: str
    queue: str
    task: str


@event("Child ready", DEBUG)
class ChildReady(ChildEvent):
    """A child is about to acquire its first job; emitted by the child (see also ``ChildStarted``)."""

    index: int
    pid: int


@event("Child closing", DEBUG)
class ChildClosing(ChildEvent):
    """A child that is stopping has finished its last job. A child that is killed does not emit this event."""

    index: int
    pid: int


@event(
    "Child limit reached",
    INFO,
    fields=lambda e: {
        "index": e.index,
        "pid": e.pid,
        "limit": e.limit,
        "jobs": e.jobs,
        "running": e.running,
        **({} if e.memory_kib is None else {"memory_kib": e.memory_kib}),
    },
)
class ChildLimitReached(ChildEvent):
    """A child has reached a limit: it acquires no more jobs, is replaced now, and exits when its jobs have finished."""

    index: int
    pid: int
    limit: str
    """``"max_tasks_per_child"`` or ``"max_memory_per_child"``."""
    jobs: int
    """Number of jobs that the child has acquired."""
    running: int
    """How many of these jobs are running, or have ended and are being written."""
    memory_kib: int | None
    """The child's resident memory after its last task; ``None`` if memory is not limited."""


@event("Event loop misused", WARNING, hint="All async jobs of a child share its event loop: docs/how-to/async-tasks.md")
class EventLoopMisused(ChildEvent):
    """The code of a job did something that affects the other async jobs of its child, or its end.

    Attributes:
        job_id, queue, task: The job; ``""`` if it is unknown.
        problem: What the code did.
        where: The file and the line, ``""`` if unknown.
    """

    job_id: str
    queue: str
    task: str
    problem: str
    where: str


@event(
    "Event loop stopped",
    ERROR,
    hint="The event loop that the child's async tasks share was closed. A new child starts, and the jobs run again",
)
class EventLoopStopped(ChildEvent):
    """Other code has stopped and closed the event loop that all async tasks of a child share; the child is replaced.

    Attributes:
        jobs: Ids of the child's async jobs.
        error: The exception that ended the loop, if any.
    """

    pid: int
    jobs: tuple[str, ...]
    error: str


@event(
    "Redis disconnected",
    ERROR,
    hint="The worker reconnects, and running jobs continue. If this persists, check Redis and the URL",
    count=lambda block, _: block.set_connected(False),
)
class RedisDisconnected(ChildEvent):
    """This process has lost its connection to Redis."""

    error: str


@event(
    "Redis reconnecting",
    INFO,
    when=lambda e: _is_power_of_two(e.attempt),
    count=lambda block, _: block.reconnecting(),
)
class RedisReconnecting(ChildEvent):
    """This process is trying to reconnect to Redis."""

    attempt: int
    """1 for the first attempt after the connection was lost."""


@event("Redis reconnected", INFO, count=lambda block, _: block.set_connected(True))
class RedisReconnected(ChildEvent):
    """Redis is responding again."""

    attempt: int
    """The attempt that succeeded."""
    duration_ms: float
    """Time since the connection was lost."""


@event(
    "Redis error reply",
    ERROR,
    hint="This process retries after at most run_retry_delay, and running jobs continue",
    fields=lambda e: {"queue": e.queue or None, "error": shorten(e.error)},
    count=lambda block, e: block.set_connected(bool(e.queue)),
)
class RedisErrorReply(ChildEvent):
    """Redis returns an error: it is out of memory, it is read-only, a queue's keys are malformed …"""

    queue: str
    """The affected queue; ``""`` if all of this process's commands are affected."""
    error: str


@event(
    "Redis recovered",
    INFO,
    fields=lambda e: {"queue": e.queue or None, "attempt": e.attempt, "duration": seconds(e.duration_ms)},
    count=lambda block, _: block.set_connected(True),
)
class RedisRecovered(ChildEvent):
    """Commands are succeeding again, after Redis had returned errors for them."""

    queue: str
    attempt: int
    duration_ms: float


@event(
    "Stacks",
    WARNING,
    hint="These stacks were requested with USR1",
    fields=lambda e: {"index": e.index, "pid": e.pid, "traceback": shorten(e.stacks, _STACKS_CHARS)},
)
class StacksDumped(ChildEvent):
    """A process's stacks, after ``USR1``."""

    index: int | None
    """The child's index in the pool, ``None`` for the supervisor."""
    pid: int
    stacks: str
    """Its threads, innermost call first, and its asyncio tasks, outermost call first. The text can be long."""


@event(
    "Job stalled",
    WARNING,
    hint="The job runs again, or fails if it has stalled more than max_stalled_count times. Its worker died, or could "
    "not reach Redis for longer than lock_duration",
    count=lambda block, e: block.add(e.queue, "stalled"),
)
class JobStalled(Event):
    """An active job had no lock; the stalled check has moved it back to waiting."""

    job_id: str
    queue: str
    lock_expired_at_ms: int | None
    """Server time in epoch milliseconds. If the lock had expired before the previous check, the time of that check;
    ``None`` if another client's worker made that check."""


@event(
    "Job recovered",
    WARNING,
    hint="The job runs again, because the child process that ran it died",
    count=lambda block, e: block.add(e.queue, "stalled"),  # the supervisor found it before the stalled check did
)
class JobRecovered(Event):
    """The child that was running the job died; the job is waiting again."""

    job_id: str
    queue: str
    crashes: int
    """Number of child crashes while this job was active."""
    waited_ms: float
    """Time from the child's death to the release."""


@event(
    "Crash limit reached",
    ERROR,
    hint="The job failed. Run its task alone to find out why its process dies",
    count=lambda block, e: block.add(e.queue, "crashed"),
)
class CrashLimitReached(Event):
    """The job has failed, because it has crashed too many children (:mod:`bulltask.worker.broker_backoff`)."""

    job_id: str
    queue: str
    crashes: int
    failed_reason: str


@event("Cancel requested", INFO)
class CancelRequested(Event):
    """A cancel request was sent for a running job; the event of its outcome follows, such as ``JobFailed``."""

    job_id: str
    index: int
    """The child's index in the pool."""
    reason: str
    """``"soft_limit"``, ``"hard_limit"``, ``"revoked"``, or ``"shutdown"``: the worker will soon kill its children."""


@event("Job revoked", INFO, count=lambda block, e: block.add(e.queue, "revoked"))
class JobRevoked(Event):
    """A revoked job that no worker was running has failed; for a running job the event is ``JobFailed``."""

    job_id: str
    queue: str


@event("Heartbeat", DEBUG, count=lambda block, e: block.locks_renewed(e.queue, e.locks, e.duration_ms))
class HeartbeatSucceeded(Event):
    """All locks of one queue were renewed with one call."""

    queue: str
    locks: int
    duration_ms: float


@event(
    "Heartbeat failed",
    WARNING,
    hint="If the locks expire, other workers acquire the jobs: check Redis and the network",
    when=lambda e: e.attempt == 1,
    fields=lambda e: {
        "queue": e.queue,
        "locks": len(e.job_ids),
        "job_ids": e.job_ids[:_JOB_IDS],
        "error": shorten(e.error),
    },
    count=lambda block, e: block.add(e.queue, "heartbeat_failures", len(e.job_ids)),
)
class HeartbeatFailed(Event):
    """A queue's heartbeat failed, so none of its locks was renewed."""

    queue: str
    job_ids: tuple[str, ...]
    error: str
    attempt: int
    """Number of consecutive failures, including this failure; only the first is logged."""


@event(
    "Running job lost its lock",
    WARNING,
    hint="Another worker may run the job again; the task is still running here",
    count=lambda block, e: block.add(e.queue, "heartbeat_failures"),
)
class RunningJobLostLock(Event):
    """A heartbeat has found that a running job has lost its lock: another worker may run the job again."""

    job_id: str
    queue: str


@event(
    "Stalled check skipped",
    WARNING,
    hint="The previous check is still running: Redis is slow, or too many jobs are active in this queue",
    count=lambda block, e: block.add(e.queue, "skipped", e.checks),
)
class StalledCheckSkipped(Event):
    """Stalled checks were skipped, because the previous check was still running."""

    queue: str
    checks: int
    """Number of skipped checks."""


@event(
    "Supervisor service failed",
    ERROR,
    hint="The supervisor continues and tries again. This is a bug in bulltask: please report it",
    when=lambda e: _is_power_of_two(e.failures),
    fields=lambda e: {"service": e.service, "failures": e.failures, "exc_info": e.exception},
)
class ServiceFailed(Event):
    """One of the supervisor's services raised an unexpected exception; it runs again at its next interval."""

    service: str
    """``"Heartbeat"``, ``"Recovery"`` …"""
    failures: int
    """Failures of this service, including this failure."""
    exception: Exception


@event("Child started", INFO)
class ChildStarted(Event):
    """A child process was started."""

    index: int
    """Its index in the pool: the lowest that is free."""
    pid: int


@event(
    "Child died",
    WARNING,
    hint=lambda e: _EXIT_HINTS.get(f"{e.exit_reason}{' (not for memory)' * e.oom_counted}", ""),
    count=lambda block, e: block.child_crashed(e.exit_reason),
)
class ChildDied(Event):
    """A child process died unexpectedly."""

    index: int
    pid: int
    exit_reason: str
    """``"SIGKILL"``, :data:`OUT_OF_MEMORY`, ``"exit code 3"`` …"""
    jobs: int
    """Number of its slots that had a job, or could have received one: it was asking Redis."""
    job_ids: tuple[str, ...] = ()
    """The ids of its jobs, at most ten."""
    oom_counted: bool = field(default=False, repr=False)
    """Whether the kernel counts the processes that it kills because memory is used up, and has not counted this."""


@event(
    "Child killed",
    WARNING,
    hint=lambda e: _KILL_HINTS.get(e.reason, _CANCEL_HINT),
    count=lambda block, e: block.child_replaced(e.reason),
)
class ChildKilled(Event):
    """The supervisor killed a child; the child is replaced.

    An attempt did not respond to a cancel request, the child exceeded the hard memory limit, it did not ask for jobs,
    or its ``atexit`` functions and threads did not end.
    """

    index: int
    pid: int
    reason: str
    """Why an attempt was cancelled, ``"hard_limit"`` or ``"revoked"``; or ``"hard_memory_limit"``, ``"unresponsive"``
    or ``"exit_timeout"``."""
    jobs: int
    """Number of its slots that had a job, or could have received one: it was asking Redis."""
    job_ids: tuple[str, ...] = ()
    """The ids of its jobs, at most ten."""


@event("Child stopped", WARNING, hint="Send CONT to the child to let its jobs continue, or KILL to run them again")
class ChildStopped(Event):
    """A child that runs jobs was stopped with ``SIGSTOP``. Its jobs keep their locks, and their time limits."""

    index: int
    pid: int
    jobs: int
    """Number of its slots that had a job, or could have received one: it was asking Redis."""


@event("Child exited", INFO, count=lambda block, e: block.child_replaced(e.reason))
class ChildExited(Event):
    """A child exited without being stopped by the supervisor: its jobs have finished, and it is replaced."""

    index: int
    pid: int
    reason: str
    """:attr:`ChildLimitReached.limit`; or ``"signal"``, sent from outside the worker."""


@event(
    "Worker started",
    INFO,
    fields=lambda e: {
        "worker_id": e.worker_id,
        "app": e.app,
        "queues": list(e.queues),
        "concurrency": e.concurrency,
        "broker": e.broker,
        "versions": dict(e.versions),
    },
)
class WorkerStarted(Event):
    """The worker is starting to acquire jobs."""

    worker_id: str
    app: str
    queues: tuple[str, ...]
    concurrency: int
    broker: str
    """The broker's URL without its password (``bulltask.config.urls.redact_url``)."""
    versions: tuple[tuple[str, str], ...]
    """Name and version of bulltask, Python, Redis and the app, as far as they are known."""


@event(
    "Worker stopping",
    INFO,
    hint=lambda e: (
        "Another Ctrl-C or TERM kills the running jobs, which go back to their queues"
        if e.mode == "warm" and e.running
        else ""
    ),
)
class WorkerStopping(Event):
    """The worker is stopping and acquires no more jobs."""

    mode: str
    """``"warm"``, ``"cold"``, ``"burst"``, ``"max_jobs"``, or ``"restart"`` (a warm shutdown, then a start)."""
    running: int
    """Number of running jobs."""


@event("Worker stopped", ERROR, info_if=lambda e: not e.exit_code)
class WorkerStopped(Event):
    """All children have exited, and the worker is about to exit."""

    exit_code: int
    uptime_ms: float
    """How long ago it started (:class:`WorkerStarted`)."""


@event("Worker restarting", INFO)
class WorkerRestarting(Event):
    """The worker has stopped and is about to start again in the same process."""

    command: str
    """The program and its arguments, without passwords in URLs."""


@event("Worker paused", INFO, hint=lambda _: f"To resume it: kill -CONT {os.getpid()}")
class WorkerPaused(Event):
    """The worker is paused: it acquires no jobs, and running jobs continue."""

    running: int
    """Number of running jobs."""


@event("Worker resumed", INFO)
class WorkerResumed(Event):
    """The worker is no longer paused."""

    paused_ms: float
    """Length of the pause."""


@event("Concurrency changed", INFO)
class ConcurrencyChanged(Event):
    """The number of children was changed."""

    children: int
    reason: str
    """``"signal"``, ``"control"`` or ``"autoscale"``."""


@event("Order executed", INFO)
class OrderExecuted(Event):
    """The worker has executed an order of ``bulltask control`` or ``app.control``. Questions are not logged."""

    order: str
    arguments: str
    """As JSON."""
    sender: str
    """``user@host``, as the sender has said."""
    app: str
    result: str


@event("Order rejected", WARNING, hint="Nothing was changed, and the sender was told")
class OrderRejected(Event):
    """The worker could not execute an order; its sender has received the error."""

    order: str
    sender: str
    app: str
    error: str


@event("Signal ignored", INFO)
class SignalIgnored(Event):
    """The worker ignored a signal that it never handles, or cannot handle in its current state."""

    signal: str
    """``"SIGUSR2"`` …"""
    reason: str
