"""Events that the supervisor emits about jobs, its children and the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

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


# Events that a child emits about itself, its connections and its jobs. The supervisor emits some of them, too.


class ChildEvent(Event):
    """Base class of the events that children emit; a listener for this class receives all of them."""

    __slots__ = ()


# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobStarted(ChildEvent):
    """A child has acquired the job and is starting to run it."""

    job_id: str
    queue: str
    task: str
    attempt: int
    """Started attempts, including this attempt (``ats``)."""


@dataclass(frozen=True, slots=True)
class JobCompleted(ChildEvent):
    """The job has completed and Redis has stored the result."""

    job_id: str
    queue: str
    task: str
    duration_ms: float
    result: object


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class JobThrottled(ChildEvent):
    """The job's task has reached its ``rate_limit``, so the job is delayed until its turn. No attempt has started."""

    job_id: str
    queue: str
    task: str
    delay_ms: int


@dataclass(frozen=True, slots=True)
class JobReleased(ChildEvent):
    """The job was released and is waiting again; the attempt does not count.

    Its task requested the release, or its child was stopped: at a shutdown, or to end another job's attempt. If the
    child was stopped, the supervisor emits the event, and listeners do not receive it.
    """

    job_id: str
    queue: str
    task: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobRescheduled(ChildEvent):
    """The task has rescheduled its job: the job is delayed. The attempt does not count."""

    job_id: str
    queue: str
    task: str
    delay_ms: int


@dataclass(frozen=True, slots=True)
class JobWaitsForChildren(ChildEvent):
    """At the request of its task, the job waits for its child jobs and then runs again. The attempt does not count."""

    job_id: str
    queue: str
    task: str


@dataclass(frozen=True, slots=True)
class JobIncompatible(ChildEvent):
    """This worker cannot run a job, which waits for a worker that can: the job is delayed.

    After ``incompatible_timeout`` the job fails, and the event is ``JobFailed``.
    """

    job_id: str
    queue: str
    task: str
    reason: str
    delay_ms: int


@dataclass(frozen=True, slots=True)
class SchedulingFailed(ChildEvent):
    """A job scheduler's job was not run, because the next iteration could not be added; the job is delayed."""

    job_id: str
    queue: str
    scheduler: str
    error: str
    delay_ms: int


@dataclass(frozen=True, slots=True)
class MalformedJobFailed(ChildEvent):
    """A job with a malformed hash could not be acquired. It has failed, so that it blocks no other job.

    The supervisor emits this event for a job that it could not recover after a child died.
    """

    job_id: str
    queue: str
    reason: str


@dataclass(frozen=True, slots=True)
class LockLost(ChildEvent):
    """A job's outcome was discarded, because its lock had expired and another worker has the job."""

    job_id: str
    queue: str
    task: str


# ---- the process and its connections ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildReady(ChildEvent):
    """A child is about to acquire its first job; emitted by the child (see also ``ChildStarted``)."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class ChildClosing(ChildEvent):
    """A child that is stopping has finished its last job. A child that is killed does not emit this event."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class ChildLimitReached(ChildEvent):
    """A child has reached a limit: it acquires no more jobs, is replaced now, and exits when its jobs have finished."""

    index: int
    pid: int
    limit: str
    """``"max_tasks_per_child"`` or ``"max_memory_per_child"``."""
    jobs: int
    """Number of jobs that the child has acquired."""
    running: int
    """How many of these jobs are still running."""
    memory_kib: int | None
    """The child's resident memory after its last task; ``None`` if memory is not limited."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class EventLoopStopped(ChildEvent):
    """Other code has stopped and closed the event loop that all async tasks of a child share; the child is replaced.

    Attributes:
        jobs: Ids of the child's async jobs.
        error: The exception that ended the loop, if any.
    """

    pid: int
    jobs: tuple[str, ...]
    error: str


@dataclass(frozen=True, slots=True)
class RedisDisconnected(ChildEvent):
    """This process has lost its connection to Redis."""

    error: str


@dataclass(frozen=True, slots=True)
class RedisReconnecting(ChildEvent):
    """This process is trying to reconnect to Redis."""

    attempt: int
    """1 for the first attempt after the connection was lost."""


@dataclass(frozen=True, slots=True)
class RedisReconnected(ChildEvent):
    """Redis is responding again."""

    attempt: int
    """The attempt that succeeded."""
    duration_ms: float
    """Time since the connection was lost."""


@dataclass(frozen=True, slots=True)
class RedisErrorReply(ChildEvent):
    """Redis returns an error: it is out of memory, it is read-only, a queue's keys are malformed …"""

    queue: str
    """The affected queue; ``""`` if all of this process's commands are affected."""
    error: str


@dataclass(frozen=True, slots=True)
class RedisRecovered(ChildEvent):
    """Commands are succeeding again, after Redis had returned errors for them."""

    queue: str
    attempt: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class StacksDumped(ChildEvent):
    """A process's stacks, after ``USR1``."""

    index: int | None
    """The child's index in the pool, ``None`` for the supervisor."""
    pid: int
    stacks: str
    """Its threads, innermost call first, and its asyncio tasks, outermost call first. The text can be long."""


# Events that the supervisor emits about jobs, its children and the worker.


# ---- jobs and their locks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobStalled(Event):
    """An active job had no lock; the stalled check has moved it back to waiting."""

    job_id: str
    queue: str
    lock_expired_at_ms: int | None
    """Server time in epoch milliseconds. If the lock had expired before the previous check, the time of that check;
    ``None`` if another client's worker made that check."""


@dataclass(frozen=True, slots=True)
class JobRecovered(Event):
    """The child that was running the job died; the job is waiting again."""

    job_id: str
    queue: str
    crashes: int
    """Number of child crashes while this job was active."""
    waited_ms: float
    """Time from the child's death to the release."""


@dataclass(frozen=True, slots=True)
class CrashLimitReached(Event):
    """The job has failed, because it has crashed too many children (:mod:`bulltask.worker.broker_backoff`)."""

    job_id: str
    queue: str
    crashes: int
    failed_reason: str


@dataclass(frozen=True, slots=True)
class CancelRequested(Event):
    """A cancel request was sent for a running job; the event of its outcome follows, such as ``JobFailed``."""

    job_id: str
    index: int
    """The child's index in the pool."""
    reason: str
    """``"soft_limit"``, ``"hard_limit"``, ``"revoked"``, or ``"shutdown"``: the worker will soon kill its children."""


@dataclass(frozen=True, slots=True)
class JobRevoked(Event):
    """A revoked job that no worker was running has failed; for a running job the event is ``JobFailed``."""

    job_id: str
    queue: str


@dataclass(frozen=True, slots=True)
class HeartbeatSucceeded(Event):
    """All locks of one queue were renewed with one call."""

    queue: str
    locks: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class HeartbeatFailed(Event):
    """A queue's heartbeat failed, so none of its locks was renewed."""

    queue: str
    job_ids: tuple[str, ...]
    error: str
    attempt: int
    """Number of consecutive failures, including this failure; only the first is logged."""


@dataclass(frozen=True, slots=True)
class RunningJobLostLock(Event):
    """A heartbeat has found that a running job has lost its lock: another worker may run the job again."""

    job_id: str
    queue: str


@dataclass(frozen=True, slots=True)
class StalledCheckSkipped(Event):
    """Stalled checks were skipped, because the previous check was still running."""

    queue: str
    checks: int
    """Number of skipped checks."""


@dataclass(frozen=True, slots=True)
class ServiceFailed(Event):
    """One of the supervisor's services raised an unexpected exception; it runs again at its next interval."""

    service: str
    """``"Heartbeat"``, ``"Recovery"`` …"""
    failures: int
    """Failures of this service, including this failure."""
    exception: Exception


# ---- children and the worker -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildStarted(Event):
    """A child process was started."""

    index: int
    """Its index in the pool: the lowest that is free."""
    pid: int


@dataclass(frozen=True, slots=True)
class ChildDied(Event):
    """A child process died unexpectedly."""

    index: int
    pid: int
    exit_reason: str
    """``"SIGKILL"``, ``"exit code 3"`` …"""
    jobs: int
    """Number of its jobs."""


@dataclass(frozen=True, slots=True)
class ChildKilled(Event):
    """The supervisor killed a child; the child is replaced.

    An attempt did not respond to a cancel request, the child exceeded the hard memory limit, or its ``atexit``
    functions and threads did not end.
    """

    index: int
    pid: int
    reason: str
    """Why an attempt was cancelled, ``"hard_limit"`` or ``"revoked"``; or ``"hard_memory_limit"`` or
    ``"exit_timeout"``."""
    jobs: int
    """Number of its jobs."""


@dataclass(frozen=True, slots=True)
class ChildExited(Event):
    """A child exited without being stopped by the supervisor: its jobs have finished, and it is replaced."""

    index: int
    pid: int
    reason: str
    """The limit that the child reached, ``"max_tasks_per_child"`` or ``"max_memory_per_child"``; or ``"signal"``, sent
    from outside the worker."""


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """The worker is starting to acquire jobs."""

    worker_id: str
    app: str
    queues: tuple[str, ...]
    concurrency: int
    broker: str
    """The broker's URL without its password (``bulltask.config.urls.redact_url``)."""


@dataclass(frozen=True, slots=True)
class WorkerStopping(Event):
    """The worker is stopping and acquires no more jobs."""

    mode: str
    """``"warm"``, ``"cold"``, ``"burst"``, ``"max_jobs"``, or ``"restart"`` (a warm shutdown, then a start)."""
    running: int
    """Number of running jobs."""


@dataclass(frozen=True, slots=True)
class WorkerStopped(Event):
    """All children have exited, and the worker is about to exit."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class WorkerRestarting(Event):
    """The worker has stopped and is about to start again in the same process."""

    command: str
    """The program and its arguments, without passwords in URLs."""


@dataclass(frozen=True, slots=True)
class WorkerPaused(Event):
    """The worker is paused: it acquires no jobs, and running jobs continue."""

    running: int
    """Number of running jobs."""


@dataclass(frozen=True, slots=True)
class WorkerResumed(Event):
    """The worker is no longer paused."""

    paused_ms: float
    """Length of the pause."""


@dataclass(frozen=True, slots=True)
class ConcurrencyChanged(Event):
    """The number of children was changed."""

    children: int
    reason: str
    """``"signal"`` or ``"autoscale"``."""


@dataclass(frozen=True, slots=True)
class SignalIgnored(Event):
    """The worker ignored a signal that it never handles, or cannot handle in its current state."""

    signal: str
    """``"SIGUSR2"`` …"""
    reason: str
