"""What a child tells of itself and of the jobs that it runs; the supervisor tells of its own Redis with these, too."""

from __future__ import annotations

from dataclasses import dataclass, field

from bulltask.events.bus import Event

__all__ = [
    "ChildClosing",
    "ChildEvent",
    "ChildReady",
    "EventLoopStopped",
    "JobCompleted",
    "JobFailed",
    "JobPickedUp",
    "JobReleased",
    "JobRetried",
    "LockLost",
    "MalformedJobFailed",
    "RedisDisconnected",
    "RedisReconnected",
    "RedisReconnecting",
    "RedisRecovered",
    "RedisRefused",
    "SchedulingFailed",
    "StacksDumped",
    "UnknownTaskSeen",
]


class ChildEvent(Event):
    """What a child tells of itself and its jobs; a listener of this class hears all of it."""

    __slots__ = ()


# ---- the life of one job ---------------------------------------------------------------------------------------------


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
class JobReleased(ChildEvent):
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
class MalformedJobFailed(ChildEvent):
    """A job could not be taken or settled because of what stands in its hash: it was failed, so that the others go on.

    The supervisor tells of it, too.
    """

    job_id: str
    queue: str
    reason: str


@dataclass(frozen=True, slots=True)
class LockLost(ChildEvent):
    """The outcome of a job was discarded: its lock ran out and another worker has the job."""

    job_id: str
    queue: str
    task: str


# ---- the process and its connections ---------------------------------------------------------------------------------


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
class EventLoopStopped(ChildEvent):
    """A task has ended the event loop that it shares with the other async tasks of its child; the child is replaced.

    Attributes:
        jobs: ids of the async jobs that the child had.
        error: what ended the loop; ``""`` where a task has called ``loop.stop()``.
    """

    pid: int
    jobs: tuple[str, ...]
    error: str


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
class RedisRecovered(ChildEvent):
    """Redis does again what it had refused."""

    queue: str
    attempt: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class StacksDumped(ChildEvent):
    """A process was asked what it is doing."""

    index: int | None
    """The child's place in the fleet, ``None`` for the supervisor."""
    pid: int
    stacks: str
    """Its threads, innermost call first, and its asyncio tasks, outermost call first; they can be long."""
