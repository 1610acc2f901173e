"""The events in a queue's event stream: one class for each of BullMQ's events.

An event has the fields that BullMQ's scripts write, under Python names. To get the whole job, read it from the queue.

Malformed events do not stop a reader. If the JSON is malformed, the event contains its text and an ``error``. An event
that lacks a field is returned as :class:`Custom`.
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
    """A queue's event; a callback for this class receives all events.

    Attributes:
        id: The entry's id in the stream, ``"<milliseconds>-<number>"``; ids increase.
        queue: The queue's name in the app.
    """

    event: ClassVar[str] = ""
    """BullMQ's name."""

    id: str
    queue: str

    @property
    def timestamp_ms(self) -> int:
        """When the event happened, in epoch milliseconds by the server's clock."""
        return int(self.id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class JobEvent(QueueEvent):
    """A job's event; a callback for this class receives all job events."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Added(JobEvent):
    """A job was added; ``name`` is the job's name, which is also its task's name."""

    event: ClassVar[str] = "added"
    name: str


@dataclass(frozen=True, slots=True)
class Waiting(JobEvent):
    """A job is waiting. ``prev`` is its previous state, ``None`` for a new job.

    ``prev="active"`` means an immediate retry, a stalled job, or a released job; BullMQ has no separate event for
    retries.
    """

    event: ClassVar[str] = "waiting"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Active(JobEvent):
    """A worker acquired the job. BullMQ 5.62 always writes ``prev="waiting"``, whatever the previous state was."""

    event: ClassVar[str] = "active"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Completed(JobEvent):
    """A job completed.

    Attributes:
        returnvalue: The return value; also ``None`` if its JSON is malformed.
        text: The return value as it is stored, JSON.
        error: Why the JSON cannot be decoded, ``None`` if it can.
    """

    event: ClassVar[str] = "completed"
    returnvalue: Any
    text: str
    error: DecodeError | None
    prev: str | None


@dataclass(frozen=True, slots=True)
class Failed(JobEvent):
    """A job failed and will not be retried; a failed attempt that is retried has no such event."""

    event: ClassVar[str] = "failed"
    failed_reason: str
    prev: str | None


@dataclass(frozen=True, slots=True)
class RetriesExhausted(JobEvent):
    """A job failed because it had no attempts left; follows :class:`Failed`."""

    event: ClassVar[str] = "retries-exhausted"
    attempts_made: int


@dataclass(frozen=True, slots=True)
class WaitingChildren(JobEvent):
    """A job is waiting for its child jobs. ``prev`` is ``"active"`` if it was running, ``None`` for a new job."""

    event: ClassVar[str] = "waiting-children"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Stalled(JobEvent):
    """A job was active without a lock and is waiting again; its worker has died, or cannot reach Redis."""

    event: ClassVar[str] = "stalled"


@dataclass(frozen=True, slots=True)
class Delayed(JobEvent):
    """A job was added with a delay, or will be retried later. ``due_ms``: epoch milliseconds."""

    event: ClassVar[str] = "delayed"
    due_ms: int


@dataclass(frozen=True, slots=True)
class Progress(JobEvent):
    """A job reported progress.

    Attributes:
        data: The progress; also ``None`` if its JSON is malformed.
        text: The progress as it is stored, JSON.
        error: Why the JSON cannot be decoded, ``None`` if it can.
    """

    event: ClassVar[str] = "progress"
    data: Any
    text: str
    error: DecodeError | None


@dataclass(frozen=True, slots=True)
class Removed(JobEvent):
    """A client removed a job; ``prev`` is its previous state. Removal by retention has no event."""

    event: ClassVar[str] = "removed"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Duplicated(JobEvent):
    """A job was added with the id of an existing job; nothing was stored."""

    event: ClassVar[str] = "duplicated"


@dataclass(frozen=True, slots=True)
class Deduplicated(JobEvent):
    """Two jobs had the same deduplication id.

    Attributes:
        job_id: The job that is kept.
        deduplication_id: Their common id.
        deduplicated_job_id: The job that was not added, or (if debounced) was replaced.
    """

    event: ClassVar[str] = "deduplicated"
    deduplication_id: str
    deduplicated_job_id: str


@dataclass(frozen=True, slots=True)
class Debounced(JobEvent):
    """The older version of :class:`Deduplicated`; BullMQ 5 emits both."""

    event: ClassVar[str] = "debounced"
    debounce_id: str


@dataclass(frozen=True, slots=True)
class Cleaned(QueueEvent):
    """``clean`` removed ``count`` jobs."""

    event: ClassVar[str] = "cleaned"
    count: int


@dataclass(frozen=True, slots=True)
class Drained(QueueEvent):
    """The last waiting job has finished.

    BullMQ does not emit this event if a delayed job exists and the worker fetched the next job.
    """

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
    """An event that is not one of BullMQ 5.62's, or that lacks one of its fields.

    Attributes:
        name: Its name.
        fields: Its fields, as strings.
        job_id: Its field ``jobId``, ``""`` for none; callbacks for that job receive the event, too.
    """

    event: ClassVar[str] = "custom"
    name: str
    fields: Mapping[str, str]
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class EventsLost(QueueEvent):
    """Events were trimmed before this reader read them. The reader creates this event; it is not in the stream.

    Its ``id`` is the id of the last event before the gap, so a later reader can start at it.

    Attributes:
        last_id_before: Id of the last event that was read before the gap, or the reader's start position.
        first_id_after: Id of the first event after the gap, ``None`` if no event has followed yet.
        count: How many events were lost; ``None`` if the number is unknown, and may be 0. It is unknown with Redis
            before 7.0, if the reader started at an id that had been trimmed, and if the stream was deleted
            (``obliterate``).
    """

    event: ClassVar[str] = "events-lost"
    last_id_before: str
    first_id_after: str | None
    count: int | None

    def __str__(self) -> str:
        subject = "events may have been" if self.count is None else f"{self.count:,} events were"
        stream = f"the stream of queue {self.queue}"
        return f"{subject} trimmed from {stream} after {self.last_id_before} before they were read"


class _Fields:
    """The fields of an entry, by type; a missing field raises ``KeyError``."""

    def __init__(self, raw: Mapping[bytes, bytes]) -> None:
        self._raw = raw

    def id(self, name: bytes = b"jobId") -> str:
        """Return an id, with any bytes in it unchanged."""
        return text(self._raw[name])

    def text(self, name: bytes) -> str:
        return codec.decode_text(self._raw[name])

    def number(self, name: bytes) -> int:
        return int(float(self._raw[name]))

    @property
    def prev(self) -> str | None:
        return codec.decode_text(self._raw[b"prev"]) if b"prev" in self._raw else None

    def json(self, name: bytes) -> tuple[Any, str, DecodeError | None]:
        """Return the value, its text, and the error if it is malformed."""
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
"""Event classes by name."""


def read_event(queue: str, entry: Entry) -> QueueEvent:
    """Return a stream entry as an event; never raises."""
    entry_id, raw = entry
    name = codec.decode_text(raw.get(b"event"))
    read = _READERS.get(KINDS.get(name, Custom))
    if read is not None:
        try:
            return read(entry_id, queue, _Fields(raw))
        except (KeyError, ValueError, OverflowError):
            pass  # another program's event with the same name, or a malformed event
    fields = {codec.decode_text(key): codec.decode_text(value) for key, value in raw.items() if key != b"event"}
    return Custom(entry_id, queue, name, fields, text(raw.get(b"jobId", b"")))


def lost_events(queue: str, gap: StreamGap) -> EventsLost:
    """Return a gap in the stream as an event."""
    return EventsLost(gap.last_id_before, queue, gap.last_id_before, gap.first_id_after, gap.count)
