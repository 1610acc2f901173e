"""What the supervisor tells of jobs, of its children and of the worker."""

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
    "HeartbeatFailed",
    "HeartbeatSucceeded",
    "JobCrashed",
    "JobRecovered",
    "JobRevoked",
    "JobStalled",
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
    """A job was active without a lock and went back to ``wait``."""

    job_id: str
    queue: str
    lock_expired_at_ms: int | None
    """Server's epoch milliseconds; that of the check before, if the lock was gone by then; ``None`` when a worker that
    is not bulltask's has made that check."""


@dataclass(frozen=True, slots=True)
class JobRecovered(Event):
    """The job of a dead child is back in ``wait``."""

    job_id: str
    queue: str
    crashes: int
    """How many children this job has seen die."""
    waited_ms: float
    """From the child's death to the job's return."""


@dataclass(frozen=True, slots=True)
class JobCrashed(Event):
    """The job was failed: it saw as many children die as it may, the last one with no other job in hand."""

    job_id: str
    queue: str
    crashes: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelRequested(Event):
    """A run that goes on was told to end; ``JobFailed``, ``JobRetried`` or ``JobCompleted`` say what became of it."""

    job_id: str
    index: int
    """The child's place in the fleet."""
    reason: str
    """``"soft_limit"``, ``"hard_limit"`` or ``"revoked"``."""


@dataclass(frozen=True, slots=True)
class JobRevoked(Event):
    """A job that was marked as revoked, and that nobody ran, was failed; of a run ``JobFailed`` tells."""

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
    """The locks of some jobs of a queue could not be renewed."""

    queue: str
    job_ids: tuple[str, ...]
    error: str
    attempt: int
    """How often in a row, this time included; only the first is logged."""


@dataclass(frozen=True, slots=True)
class StalledCheckSkipped(Event):
    """A look for stalled jobs was due while the one before still ran."""

    queue: str
    cycles: int
    """Cycles skipped in this go."""


@dataclass(frozen=True, slots=True)
class ServiceFailed(Event):
    """A duty of the supervisor ended with an error that nobody expected; it is tried again when it is due again."""

    service: str
    """``"Heartbeat"``, ``"Recovery"`` …"""
    failures: int
    """Of this duty, this one included."""
    exception: Exception


# ---- children and the worker -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildStarted(Event):
    """A child process was started."""

    index: int
    """Its place in the fleet; the child that replaces it has the same."""
    pid: int


@dataclass(frozen=True, slots=True)
class ChildDied(Event):
    """A child process ended without being asked to."""

    index: int
    pid: int
    reason: str
    """``"SIGKILL"``, ``"exit code 3"`` …"""
    jobs: int
    """Jobs it held."""


@dataclass(frozen=True, slots=True)
class ChildKilled(Event):
    """A child process was killed by its supervisor, to end a run that did not end otherwise; it is replaced."""

    index: int
    pid: int
    reason: str
    """Why the run was to end: ``"hard_limit"`` or ``"revoked"``."""
    jobs: int
    """Jobs it held."""


@dataclass(frozen=True, slots=True)
class ChildExited(Event):
    """A child process was told to end by somebody else than its supervisor: it has ended its jobs, and is replaced."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """The worker takes jobs from now on."""

    worker_id: str
    app: str
    queues: tuple[str, ...]
    concurrency: int
    broker: str
    """The broker's URL without its password (``bulltask.config.urls.redact_url``)."""


@dataclass(frozen=True, slots=True)
class WorkerStopping(Event):
    """The worker takes no more jobs."""

    how: str
    """``"warm"``, ``"cold"``, or ``"restart"``: warm, and then again."""
    running: int
    """Jobs that run at this moment."""


@dataclass(frozen=True, slots=True)
class WorkerStopped(Event):
    """The worker has ended all its children and leaves."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class WorkerRestarting(Event):
    """The worker has stopped and starts itself again, as the same process."""

    command: str
    """The program and its arguments, without passwords in URLs."""


@dataclass(frozen=True, slots=True)
class WorkerPaused(Event):
    """The worker takes no more jobs until it is told to go on; those that run are not concerned."""

    running: int
    """Jobs that run at this moment."""


@dataclass(frozen=True, slots=True)
class WorkerResumed(Event):
    """A worker that was paused takes jobs again."""

    paused_ms: float
    """How long it took none."""


@dataclass(frozen=True, slots=True)
class ConcurrencyChanged(Event):
    """The worker was told to have another number of children."""

    children: int


@dataclass(frozen=True, slots=True)
class SignalIgnored(Event):
    """The worker was sent a signal that does nothing, or nothing now."""

    signal: str
    """``"SIGUSR2"`` …"""
    reason: str
