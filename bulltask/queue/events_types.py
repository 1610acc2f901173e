"""Everything that a queue's event stream tells, as values: one class for each of BullMQ's events (PROTOCOL 4.13).

An event carries what its script wrote, under Python's names, and nothing more: the job itself has to be read from
the queue. What others wrote may be broken: JSON that cannot be read leaves its text and an ``error`` behind, and an
event of a known name that lacks a field is passed on as :class:`Custom`, so that no event ends a listener.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.transport.follow import StreamGap
from bulltask.transport.replies import text
from bulltask.transport.scripts.stream import Entry

__all__ = [
    "KINDS",
    "Active",
    "Added",
    "Cleaned",
    "Completed",
    "Custom",
    "Debounced",
    "Deduplicated",
    "Delayed",
    "Drained",
    "Duplicated",
    "EventsLost",
    "Failed",
    "JobEvent",
    "Paused",
    "Progress",
    "QueueEvent",
    "Removed",
    "Resumed",
    "RetriesExhausted",
    "Stalled",
    "Waiting",
    "WaitingChildren",
    "lost_events",
    "read_event",
]


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """Something that happened in a queue; a callback of this class hears every event.

    Attributes:
        id: the entry's id in the stream, ``"<milliseconds>-<number>"``; what comes later is larger.
        queue: the queue as the user spells it.
    """

    event: ClassVar[str] = ""
    """BullMQ's name."""

    id: str
    queue: str

    @property
    def timestamp_ms(self) -> int:
        """When it happened, epoch milliseconds of the server."""
        return int(self.id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class JobEvent(QueueEvent):
    """Something that happened to a job; a callback of this class hears every event of jobs."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Added(JobEvent):
    """A job was stored; ``name`` is its name, which is the task's."""

    event: ClassVar[str] = "added"
    name: str


@dataclass(frozen=True, slots=True)
class Waiting(JobEvent):
    """A job may be taken. ``prev`` is the state it comes from, ``None`` for a new one.

    With ``prev="active"`` it is an immediate retry, a stall, or a job that was given back; BullMQ has no event of its
    own for a retry.
    """

    event: ClassVar[str] = "waiting"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Active(JobEvent):
    """A worker took the job. ``prev`` is always ``"waiting"`` in BullMQ 5.62, wherever it came from."""

    event: ClassVar[str] = "active"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Completed(JobEvent):
    """A job ended well.

    Attributes:
        returnvalue: what it returned; ``None`` as well when its text cannot be read.
        text: the return value as it is in Redis, JSON.
        error: why the text cannot be read; ``None`` when it can.
    """

    event: ClassVar[str] = "completed"
    returnvalue: Any
    text: str
    error: DecodeError | None
    prev: str | None


@dataclass(frozen=True, slots=True)
class Failed(JobEvent):
    """A job failed for good; an attempt that is tried again is no such event."""

    event: ClassVar[str] = "failed"
    failed_reason: str
    prev: str | None


@dataclass(frozen=True, slots=True)
class RetriesExhausted(JobEvent):
    """A job failed for good because it had no attempt left; comes after :class:`Failed`."""

    event: ClassVar[str] = "retries-exhausted"
    attempts_made: int


@dataclass(frozen=True, slots=True)
class WaitingChildren(JobEvent):
    """A job waits for its children. ``prev`` is ``"active"`` when it ran before, ``None`` for a new one."""

    event: ClassVar[str] = "waiting-children"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Stalled(JobEvent):
    """A job was active without a lock and waits again; its worker is gone, or cannot reach Redis."""

    event: ClassVar[str] = "stalled"


@dataclass(frozen=True, slots=True)
class Delayed(JobEvent):
    """A job was put off: added with a delay, or to be retried later. ``due_ms``: epoch milliseconds."""

    event: ClassVar[str] = "delayed"
    due_ms: int


@dataclass(frozen=True, slots=True)
class Progress(JobEvent):
    """A job reported how far it is.

    Attributes:
        data: what it reported; ``None`` as well when its text cannot be read.
        text: the report as it is in Redis, JSON.
        error: why the text cannot be read; ``None`` when it can.
    """

    event: ClassVar[str] = "progress"
    data: Any
    text: str
    error: DecodeError | None


@dataclass(frozen=True, slots=True)
class Removed(JobEvent):
    """A job was removed by hand; ``prev`` is the state it was in. Jobs that are not kept go without this event."""

    event: ClassVar[str] = "removed"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Duplicated(JobEvent):
    """A job was added again under an id that is there; nothing was stored."""

    event: ClassVar[str] = "duplicated"


@dataclass(frozen=True, slots=True)
class Deduplicated(JobEvent):
    """Two jobs had the same deduplication id.

    Attributes:
        job_id: the job that stays.
        deduplication_id: what they have in common.
        deduplicated_job_id: the other one: refused, or (in a debounce) replaced.
    """

    event: ClassVar[str] = "deduplicated"
    deduplication_id: str
    deduplicated_job_id: str


@dataclass(frozen=True, slots=True)
class Debounced(JobEvent):
    """The older form of :class:`Deduplicated`; BullMQ 5 writes both."""

    event: ClassVar[str] = "debounced"
    debounce_id: str


@dataclass(frozen=True, slots=True)
class Cleaned(QueueEvent):
    """``clean`` removed so many jobs."""

    event: ClassVar[str] = "cleaned"
    count: int


@dataclass(frozen=True, slots=True)
class Drained(QueueEvent):
    """The last waiting job has ended. Not written while a delayed job exists and the worker looked for the next."""

    event: ClassVar[str] = "drained"


@dataclass(frozen=True, slots=True)
class Paused(QueueEvent):
    """The queue was paused."""

    event: ClassVar[str] = "paused"


@dataclass(frozen=True, slots=True)
class Resumed(QueueEvent):
    """The queue was resumed."""

    event: ClassVar[str] = "resumed"


@dataclass(frozen=True, slots=True)
class Custom(QueueEvent):
    """An event that BullMQ 5.62 does not have, or one without its fields.

    Attributes:
        name: what its writer called it.
        fields: what its writer gave it, as text.
        job_id: its field ``jobId``, ``""`` for none; callbacks for one job hear it too.
    """

    event: ClassVar[str] = "custom"
    name: str
    fields: Mapping[str, str]
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class EventsLost(QueueEvent):
    """Events were trimmed away before this listener read them; it is not in the stream, the listener makes it.

    Its ``id`` is that of the last event before the gap, so it is the right place to go on from.

    Attributes:
        from_id: id of the last event that was read before the gap, or where the listener began.
        to_id: id of the first event that is there after it, ``None`` when none is there yet.
        count: how many were lost. ``None``: nobody can know, and it may be none. That is so before Redis 7.0, which
            does not count; when a listener begins at an id that was trimmed away; and when the stream was deleted
            (``obliterate``).
    """

    event: ClassVar[str] = "events-lost"
    from_id: str
    to_id: str | None
    count: int | None

    def __str__(self) -> str:
        many = "events may have been" if self.count is None else f"{self.count:,} events were"
        return f"{many} trimmed from the stream of queue {self.queue} after {self.from_id} before they were read"


class _Fields:
    """The fields of one entry, each asked for by its kind; a missing one is a ``KeyError``."""

    def __init__(self, raw: Mapping[bytes, bytes]) -> None:
        self._raw = raw

    def id(self, name: bytes = b"jobId") -> str:
        """An id goes out as it came in, whatever bytes it is made of."""
        return text(self._raw[name])

    def text(self, name: bytes) -> str:
        return codec.decode_text(self._raw[name])

    def number(self, name: bytes) -> int:
        return int(float(self._raw[name]))

    @property
    def prev(self) -> str | None:
        return codec.decode_text(self._raw[b"prev"]) if b"prev" in self._raw else None

    def json(self, name: bytes) -> tuple[Any, str, DecodeError | None]:
        """The value, its text, and what is wrong with it."""
        raw = self._raw[name]
        try:
            return codec.decode(raw, what=f"{name.decode()} of job {self.id()}"), codec.decode_text(raw), None
        except DecodeError as exc:
            return None, codec.decode_text(raw), exc


_Read = Callable[[str, str, _Fields], QueueEvent]

_READERS: Final[Mapping[type[QueueEvent], _Read]] = {
    Added: lambda at, queue, its: Added(at, queue, its.id(), its.text(b"name")),
    Waiting: lambda at, queue, its: Waiting(at, queue, its.id(), its.prev),
    Active: lambda at, queue, its: Active(at, queue, its.id(), its.prev),
    Completed: lambda at, queue, its: Completed(at, queue, its.id(), *its.json(b"returnvalue"), its.prev),
    Failed: lambda at, queue, its: Failed(at, queue, its.id(), its.text(b"failedReason"), its.prev),
    RetriesExhausted: lambda at, queue, its: RetriesExhausted(at, queue, its.id(), its.number(b"attemptsMade")),
    WaitingChildren: lambda at, queue, its: WaitingChildren(at, queue, its.id(), its.prev),
    Stalled: lambda at, queue, its: Stalled(at, queue, its.id()),
    Delayed: lambda at, queue, its: Delayed(at, queue, its.id(), its.number(b"delay")),
    Progress: lambda at, queue, its: Progress(at, queue, its.id(), *its.json(b"data")),
    Removed: lambda at, queue, its: Removed(at, queue, its.id(), its.prev),
    Duplicated: lambda at, queue, its: Duplicated(at, queue, its.id()),
    Deduplicated: lambda at, queue, its: Deduplicated(
        at, queue, its.id(), its.text(b"deduplicationId"), its.id(b"deduplicatedJobId")
    ),
    Debounced: lambda at, queue, its: Debounced(at, queue, its.id(), its.text(b"debounceId")),
    Cleaned: lambda at, queue, its: Cleaned(at, queue, its.number(b"count")),
    Drained: lambda at, queue, _: Drained(at, queue),
    Paused: lambda at, queue, _: Paused(at, queue),
    Resumed: lambda at, queue, _: Resumed(at, queue),
}

KINDS: Final[Mapping[str, type[QueueEvent]]] = {
    **{kind.event: kind for kind in _READERS},
    Custom.event: Custom,
    EventsLost.event: EventsLost,
}
"""Every class of events by its name."""


def read_event(queue: str, entry: Entry) -> QueueEvent:
    """Return an entry of the stream as its event; never raises, whatever is in it."""
    entry_id, raw = entry
    name = codec.decode_text(raw.get(b"event"))
    read = _READERS.get(KINDS.get(name, Custom))
    if read is not None:
        try:
            return read(entry_id, queue, _Fields(raw))
        except (KeyError, ValueError, OverflowError):
            pass  # somebody else's event of the same name, or a broken one: as it is
    fields = {codec.decode_text(key): codec.decode_text(value) for key, value in raw.items() if key != b"event"}
    return Custom(entry_id, queue, name, fields, text(raw.get(b"jobId", b"")))


def lost_events(queue: str, gap: StreamGap) -> EventsLost:
    """Return a gap in the stream as an event."""
    return EventsLost(gap.after, queue, gap.after, gap.before, gap.count)
