"""How far a queue's event stream has been read, and what was lost before it could be.

An event stream is bounded: Redis trims its beginning whenever BullMQ adds an entry. A reader that remembers only the
last id cannot distinguish a quiet hour from a lost one. So an offset also holds how many entries were ever added up to
that id. Redis reports (since 7.0) how many were ever added and how many are left; the difference is what was trimmed.

An offset is a cut through the stream: *exactly ``ordinal`` entries were ever added whose id is not greater than
``id``*. If a stream contradicts that, it is not the stream that was read: it was deleted and created again, or a
failover restored an older copy. ``generation`` counts these events, so that only numbers of the same stream are
compared.

Once a stream is gone, Redis cannot say what it held. So an offset that is not at the end of its stream also stores that
end, a second cut: what lay between the two is certainly lost if the stream is.

Nothing here depends on Redis or Spark; :mod:`bulltask.spark.source.planning` plans batches with these values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

from bulltask.errors import DecodeError
from bulltask.lake.formatting import pluralize

__all__ = [
    "BEGINNING",
    "LAST_SEQ",
    "START",
    "EventGap",
    "LossReason",
    "Offsets",
    "QueueOffset",
    "StartAt",
    "StreamEnd",
    "StreamId",
    "StreamState",
    "batch_start",
    "decode_offsets",
    "encode_offsets",
    "first_offset",
    "reconcile",
    "same_stream",
    "with_stream_end",
]

LAST_SEQ: Final = 2**64 - 1
"""The greatest sequence number within a millisecond."""

_VERSION: Final = 1
_ID = re.compile(r"(\d{1,20})-(\d{1,20})")


class StreamId(NamedTuple):
    """The id of a stream entry: the server's clock in milliseconds, and a sequence number within the millisecond."""

    ms: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Parse ``1760010061025-3``.

        Raises:
            DecodeError: The text is not the id of a stream entry.
        """
        if not (found := _ID.fullmatch(text)):
            raise DecodeError(f"{text!r} is not the id of a stream entry; an id looks like 1760010061025-0")
        return cls(int(found[1]), int(found[2]))

    @property
    def before(self) -> StreamId:
        """The greatest smaller id; ``0-0`` has none and stays as it is."""
        if self.seq:
            return StreamId(self.ms, self.seq - 1)
        return StreamId(self.ms - 1, LAST_SEQ) if self.ms else self

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


BEGINNING: Final = StreamId(0, 0)
"""Comes before every entry."""


class StreamEnd(NamedTuple):
    """Exactly ``ordinal`` entries were ever added whose id is not greater than ``id``."""

    id: StreamId
    ordinal: int


@dataclass(frozen=True, slots=True)
class QueueOffset:
    """How far one queue's events have been read.

    Attributes:
        id: Everything up to it has been read; the next entry has a greater id.
        ordinal: How many entries were ever added up to ``id``; ``None`` if that is unknown (Redis before 7.0, a start
            at an id that the user gave, entries deleted by hand), until the reader has caught up.
        lost: How many entries were trimmed before they were read, in all generations of the stream together.
        generation: How often the stream turned out to be another one.
        seen: The end of the stream when it was queried for this offset; ``None`` if that is ``id``, or unknown.
    """

    id: StreamId = BEGINNING
    ordinal: int | None = 0
    lost: int = 0
    generation: int = 0
    seen: StreamEnd | None = None

    @property
    def pending(self) -> int:
        """How many entries after ``id`` are known to have existed."""
        return 0 if self.seen is None or self.ordinal is None else max(0, self.seen.ordinal - self.ordinal)


START: Final = QueueOffset()
"""Before the first entry that a stream will ever have: the offset of a queue that is newer than the reader."""

StartAt = Literal["earliest", "latest"] | StreamId
"""Where to begin: with the oldest entry, with the next one, or after an id."""

Offsets = Mapping[str, QueueOffset]
"""The offset of each queue, by BullMQ's name of the queue."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of a stream at one moment (``XINFO STREAM``).

    Attributes:
        first: Id of the oldest entry that is left; ``None`` if the stream is empty.
        last: Id of the newest entry that was ever added.
        length: How many entries are left.
        added: How many were ever added; ``None`` if the number is not reliable: before Redis 7.0, and after ``XDEL``.
    """

    first: StreamId | None
    last: StreamId
    length: int
    added: int | None

    @property
    def trimmed(self) -> int | None:
        """How many entries were removed from the beginning."""
        return None if self.added is None else self.added - self.length

    @property
    def end(self) -> QueueOffset:
        """The offset after everything that was ever added, in the first generation."""
        return QueueOffset(self.last, self.added)


class LossReason(StrEnum):
    """Why entries could not be read."""

    TRIMMED = "trimmed"  # dropped by the stream's length limit before they were read
    AT_READ = "at-read"  # trimmed after planning, before the tasks read them
    RECREATED = "recreated"  # the stream was deleted and created again
    GONE = "gone"  # the stream was deleted
    ROLLED_BACK = "rolled-back"  # a failover: Redis has lost entries that were read, and perhaps others


@dataclass(frozen=True, slots=True)
class EventGap:
    """Entries of one queue that can no longer be read.

    Attributes:
        queue: BullMQ's name of the queue.
        after: The last id before the gap.
        first: The first id after it; ``None`` if nothing is left.
        lost: How many entries are known to be lost.
        exact: ``lost`` is the whole number. It is not if a stream was deleted, because its length at that moment is
            unknown.
        reason: Why they were lost.
    """

    queue: str
    after: StreamId
    first: StreamId | None
    lost: int
    exact: bool
    reason: LossReason

    @property
    def message(self) -> str:
        """One line with a code, for the error that stops a query and for the log of one that continues."""
        return (
            f"[BULLTASK_EVENTS_LOST] queue={self.queue} after={self.after}: {_HAPPENED[self.reason]}; "
            f"{'' if self.exact else 'at least '}{pluralize(self.lost, 'event', 'd')} lost, "
            f"{f'the first one left is {self.first}' if self.first else 'none is left'}. Set failOnDataLoss=false to "
            "continue after the gap (gapRows=true records it) and give the queue a longer stream: streams.events.maxLen"
        )


_HAPPENED: Final[Mapping[LossReason, str]] = {
    LossReason.TRIMMED: "trimmed before they were read",
    LossReason.AT_READ: "trimmed between planning and reading",
    LossReason.RECREATED: "the stream was deleted and created again",
    LossReason.GONE: "the stream was deleted",
    LossReason.ROLLED_BACK: "Redis restored an older copy of the stream",
}


def reconcile(queue: str, offset: QueueOffset, state: StreamState | None) -> tuple[QueueOffset, EventGap | None]:
    """Adjust an offset to the stream as it is now: skip what was trimmed, or begin the stream's next generation.

    Args:
        queue: BullMQ's name of the queue.
        offset: How far the queue was read.
        state: The stream now; ``None`` if there is none.

    Returns:
        Where to continue reading, and what cannot be read. Of a new generation nothing has been read yet.
    """
    if state is None:
        if offset.id == BEGINNING and offset.seen is None:
            return offset, None
        lost = offset.pending
        return _next_generation(offset), EventGap(queue, offset.id, None, lost, exact=False, reason=LossReason.GONE)
    if not same_stream(offset, state):
        return _recreated(queue, offset, state)
    return _trimmed(queue, offset, state)


def same_stream(offset: QueueOffset, state: StreamState) -> bool:
    """Return False if the stream contradicts the offset, so that it must be another stream."""
    if not _is_consistent(offset.id, offset.ordinal, state):
        return False
    seen = offset.seen
    # If nothing was read yet, any stream is consistent. An older copy may still have some of what was seen: read on.
    return seen is None or _is_consistent(*seen, state) or (state.first is not None and state.first <= seen.id)


def _is_consistent(entry: StreamId, ordinal: int | None, state: StreamState) -> bool:
    """Return False if there cannot be ``ordinal`` entries up to this one."""
    if entry > state.last:
        return False
    added, trimmed = state.added, state.trimmed
    if ordinal is None or added is None or trimmed is None:
        return True
    if entry == state.last or ordinal >= added:
        return entry == state.last and ordinal == added
    # Trims remove from the beginning: entries from the first one on are left, all before it were trimmed.
    return state.first is None or (entry >= state.first) == (ordinal > trimmed)


def _recreated(queue: str, offset: QueueOffset, state: StreamState) -> tuple[QueueOffset, EventGap]:
    """Return the offset in another stream: an older copy if it has entries that were read, else a new stream."""
    new, lost = _next_generation(offset), offset.pending
    if state.first is None or state.first > offset.id:
        return new, EventGap(queue, offset.id, state.first, lost, exact=False, reason=LossReason.RECREATED)
    if state.last <= offset.id:
        new = replace(new, id=state.last, ordinal=state.added)
    else:
        new = replace(new, id=offset.id, ordinal=None)
    return new, EventGap(queue, offset.id, None, lost, exact=False, reason=LossReason.ROLLED_BACK)


def _next_generation(offset: QueueOffset) -> QueueOffset:
    return QueueOffset(lost=offset.lost + offset.pending, generation=offset.generation + 1)


def _trimmed(queue: str, offset: QueueOffset, state: StreamState) -> tuple[QueueOffset, EventGap | None]:
    """Return the offset after what was trimmed from the same stream."""
    if state.added is None or offset.ordinal is None:
        return _uncounted(queue, offset, state)
    trimmed = state.added - state.length
    if trimmed <= offset.ordinal:
        return offset, None
    lost = trimmed - offset.ordinal
    settled = replace(offset, id=_before_first(state), ordinal=trimmed, lost=offset.lost + lost)
    return settled, EventGap(queue, offset.id, state.first, lost, exact=True, reason=LossReason.TRIMMED)


def _uncounted(queue: str, offset: QueueOffset, state: StreamState) -> tuple[QueueOffset, EventGap | None]:
    """Without counts: an entry at or before the offset proves that nothing after the offset was trimmed."""
    offset = replace(offset, ordinal=None, seen=None)
    if offset.id == state.last:
        return replace(offset, ordinal=state.added), None
    if state.first is not None and (offset.id == BEGINNING or state.first <= offset.id):
        return offset, None
    settled = replace(offset, id=_before_first(state))
    return settled, EventGap(queue, offset.id, state.first, 0, exact=False, reason=LossReason.TRIMMED)


def _before_first(state: StreamState) -> StreamId:
    return state.last if state.first is None else state.first.before


def first_offset(state: StreamState | None, where: StartAt) -> QueueOffset:
    """Return where to begin with a queue that is older than the reader; earlier trims do not count as lost.

    Args:
        state: The stream now; ``None`` if there is none.
        where: Before its oldest entry, after its newest, or after an id.
    """
    if state is None:
        return START
    if where == "latest" or (isinstance(where, StreamId) and where >= state.last):
        return state.end
    if where == "earliest" or state.first is None or where < state.first:
        return QueueOffset(_before_first(state), state.trimmed)
    return QueueOffset(where, None)


def with_stream_end(offset: QueueOffset, state: StreamState | None) -> QueueOffset:
    """Return the offset with the end of its stream in ``seen``."""
    ordinal, added = offset.ordinal, None if state is None else state.added
    if state is None or ordinal is None or added is None or added <= ordinal:
        return replace(offset, seen=None)
    return replace(offset, seen=StreamEnd(state.last, added))


def encode_offsets(offsets: Offsets, begin: Offsets | None = None) -> dict[str, Any]:
    """Return the offset that Spark stores.

    Spark compares offsets as text, so equal offsets always give the same text: queues are sorted.

    Args:
        offsets: The offset of each queue.
        begin: Where the batch that ends here began, if it is the first of a query. Spark stores only the ends of
            batches and asks again where the first one begins; by then the stream may have been trimmed.
    """
    made = {"version": _VERSION, "queues": _encoded_offsets(offsets)}
    return made if begin is None else {**made, "begin": _encoded_offsets(begin)}


def _encoded_offsets(offsets: Offsets) -> dict[str, Any]:
    return {name: _encoded_offset(offsets[name]) for name in sorted(offsets)}


def _encoded_offset(offset: QueueOffset) -> dict[str, Any]:
    made = {"id": str(offset.id), "ordinal": offset.ordinal, "lost": offset.lost, "generation": offset.generation}
    if offset.seen is None:
        return made
    return {**made, "seen": {"id": str(offset.seen.id), "ordinal": offset.seen.ordinal}}


def decode_offsets(stored: Mapping[str, Any]) -> dict[str, QueueOffset]:
    """Read what :func:`encode_offsets` returned.

    Raises:
        DecodeError: The value is something else, or was written by a newer bulltask.
    """
    return _decoded_offsets(stored, "queues")


def batch_start(start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> dict[str, QueueOffset] | None:
    """Return where a batch begins.

    Args:
        start: The offset at its beginning as Spark has it; ``None`` for a query's first batch, for which Spark stores
            none.
        end: The offset at its end.

    Returns:
        The offsets; ``None`` for a first batch that an older bulltask planned.

    Raises:
        DecodeError: As :func:`decode_offsets`.
    """
    if "begin" in end and start != end:
        return _decoded_offsets(end, "begin")
    return None if start is None else decode_offsets(start)


def _decoded_offsets(stored: Mapping[str, Any], part: str) -> dict[str, QueueOffset]:
    if stored.get("version") != _VERSION:
        raise DecodeError(f"the checkpoint's offset has version {stored.get('version')!r}; this bulltask reads 1")
    try:
        return {str(name): _decoded_offset(fields) for name, fields in stored[part].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise DecodeError(f"the checkpoint does not contain an offset of bulltask: {exc}") from exc


def _decoded_offset(fields: Mapping[str, Any]) -> QueueOffset:
    ordinal, seen = fields["ordinal"], fields.get("seen")
    return QueueOffset(
        StreamId.parse(fields["id"]),
        None if ordinal is None else int(ordinal),
        int(fields["lost"]),
        int(fields["generation"]),
        None if seen is None else StreamEnd(StreamId.parse(seen["id"]), int(seen["ordinal"])),
    )
