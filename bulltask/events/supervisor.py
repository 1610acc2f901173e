"""Events that the supervisor emits about jobs, its children and the worker."""

from __future__ import annotations

from dataclasses import dataclass

from bulltask.events.bus import Event

__all__ = [
    "CancelRequested",
    "ChildDied",
    "ChildExited",
    "ChildKilled",
    "ChildStarted",
    "ConcurrencyChanged",
    "CrashLimitReached",
    "HeartbeatFailed",
    "HeartbeatSucceeded",
    "JobRecovered",
    "JobRevoked",
    "JobStalled",
    "RunningJobLostLock",
    "ServiceFailed",
    "SignalIgnored",
    "StalledCheckSkipped",
    "WorkerPaused",
    "WorkerRestarting",
    "WorkerResumed",
    "WorkerStarted",
    "WorkerStopped",
    "WorkerStopping",
]


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
    """The job has failed, because it has crashed too many children (:mod:`bulltask.worker.quarantine`)."""

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
