"""What happens in a worker, as values, and the bus that hands them to whoever listens.

Events are the only side channel of the core: it emits, and logs, metrics and users' own listeners subscribe. The
classes below are the documentation of everything that can be heard. In all of them ``queue`` is the user's spelling
of the queue, durations end in ``_ms`` and ``attempt`` or ``attempts_made`` are BullMQ's ``ats`` and ``atm``.

A bus belongs to one process. A child makes its own after the fork, so a listener of the supervisor hears what the
supervisor does and a listener of a child hears the jobs of that child. Listeners of an app (``app.on(…)``) are in the
children; what these tell is a :class:`ChildEvent`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bulltask.bus import Bus, Event, Listener, OnError

__all__ = [
    "Bus",
    "ChildClosing",
    "ChildDied",
    "ChildEvent",
    "ChildLeft",
    "ChildReady",
    "ChildStarted",
    "ConcurrencyChanged",
    "Event",
    "HeartbeatFailed",
    "HeartbeatSucceeded",
    "JobCompleted",
    "JobCrashed",
    "JobFailed",
    "JobPickedUp",
    "JobRecovered",
    "JobRetried",
    "JobReturned",
    "JobStalled",
    "Listener",
    "LockLost",
    "OnError",
    "RedisAccepted",
    "RedisDisconnected",
    "RedisReconnected",
    "RedisReconnecting",
    "RedisRefused",
    "SchedulingFailed",
    "SignalIgnored",
    "StacksDumped",
    "StalledCheckSkipped",
    "UnknownTaskSeen",
    "WorkerPaused",
    "WorkerRestarting",
    "WorkerResumed",
    "WorkerStarted",
    "WorkerStopped",
    "WorkerStopping",
]


class ChildEvent(Event):
    """What a child tells of itself and its jobs; a listener of this class hears all of it."""

    __slots__ = ()


# ---- the life of one job, told by the child that runs it ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobPickedUp(ChildEvent):
    """A child took the job and starts to run it."""

    job_id: str
    queue: str
    task: str
    attempt: int
    """Attempts started, this one included (``ats``)."""


@dataclass(frozen=True, slots=True)
class JobCompleted(ChildEvent):
    """The job ended well and Redis took the result."""

    job_id: str
    queue: str
    task: str
    duration_ms: float
    result: object


@dataclass(frozen=True, slots=True)
class JobFailed(ChildEvent):
    """The job ended badly and for good: it is in ``failed``."""

    job_id: str
    queue: str
    task: str
    duration_ms: float
    error: str
    category: str
    """Of the error: ``transient``, ``permanent`` or ``unknown``."""
    attempts_made: int
    traceback: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)
    """What the task raised, or bulltask in its place; ``None`` when it was the result that could not be stored."""


@dataclass(frozen=True, slots=True)
class JobRetried(ChildEvent):
    """An attempt failed and the job will be tried again."""

    job_id: str
    queue: str
    task: str
    duration_ms: float
    error: str
    category: str
    attempts_made: int
    delay_ms: int
    exception: BaseException | None = field(default=None, compare=False, repr=False)
    """What the task raised."""


@dataclass(frozen=True, slots=True)
class JobReturned(ChildEvent):
    """The job went back unfinished, as at a shutdown or because its task asked for it; it costs no attempt."""

    job_id: str
    queue: str
    task: str
    reason: str


@dataclass(frozen=True, slots=True)
class UnknownTaskSeen(ChildEvent):
    """A job names a task that this app does not have."""

    job_id: str
    queue: str
    name: str
    delay_ms: int | None
    """When it is tried again; ``None``: the job was failed by policy."""


@dataclass(frozen=True, slots=True)
class SchedulingFailed(ChildEvent):
    """The job of a job scheduler was not run, because the next one could not be added; it is tried again."""

    job_id: str
    queue: str
    scheduler: str
    error: str
    delay_ms: int


@dataclass(frozen=True, slots=True)
class LockLost(ChildEvent):
    """The outcome of a job was discarded: its lock ran out and another worker has the job."""

    job_id: str
    queue: str
    task: str


# ---- what the supervisor sees of jobs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobStalled(Event):
    """A job was active without a lock and went back to ``wait``."""

    job_id: str
    queue: str
    lock_expired_at_ms: int | None
    """Server's epoch milliseconds, ``None`` when that is not known."""


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
class HeartbeatSucceeded(Event):
    """All locks of one queue were renewed with one call."""

    queue: str
    locks: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class HeartbeatFailed(Event):
    """The lock of one job could not be renewed; one event per job."""

    queue: str
    job_id: str
    error: str


@dataclass(frozen=True, slots=True)
class StalledCheckSkipped(Event):
    """A look for stalled jobs was due while the one before still ran."""

    queue: str
    cycles: int
    """Cycles skipped in this go."""


# ---- processes and connections --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildReady(ChildEvent):
    """A child has its connections and will take its first job now; told by itself (see also ``ChildStarted``)."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class ChildClosing(ChildEvent):
    """A child that was told to end has settled its last job; one that is killed cannot say so."""

    index: int
    pid: int


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
class ChildLeft(Event):
    """A child process was told to end by somebody else than its supervisor: it has ended its jobs, and is replaced."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class RedisDisconnected(ChildEvent):
    """Redis does not answer this process any more."""

    error: str


@dataclass(frozen=True, slots=True)
class RedisReconnecting(ChildEvent):
    """Another attempt to reach Redis begins."""

    attempt: int
    """1 for the first after the loss."""


@dataclass(frozen=True, slots=True)
class RedisReconnected(ChildEvent):
    """Redis answers again."""

    attempt: int
    """The attempt that succeeded."""
    duration_ms: float
    """From the loss to this moment."""


@dataclass(frozen=True, slots=True)
class RedisRefused(ChildEvent):
    """Redis answers with an error: it is full, read-only, the keys of a queue are broken …"""

    queue: str
    """Whose jobs it does not hand out; ``""``: it serves this process nothing."""
    error: str


@dataclass(frozen=True, slots=True)
class RedisAccepted(ChildEvent):
    """Redis does again what it had refused."""

    queue: str
    attempt: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """The worker takes jobs from now on."""

    worker_id: str
    app: str
    queues: tuple[str, ...]
    concurrency: int
    broker: str
    """The broker's URL without its password (``bulltask.urls.redact_url``)."""


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
class StacksDumped(ChildEvent):
    """A process was asked what it is doing."""

    index: int | None
    """The child's place in the fleet, ``None`` for the supervisor."""
    pid: int
    stacks: str
    """Its threads, innermost call first, and its asyncio tasks, outermost call first; they can be long."""


@dataclass(frozen=True, slots=True)
class SignalIgnored(Event):
    """The worker was sent a signal that does nothing, or nothing now."""

    signal: str
    """``"SIGUSR2"`` …"""
    reason: str
