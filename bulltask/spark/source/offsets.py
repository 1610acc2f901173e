"""How far a queue's event stream has been read, and what was lost before it could be.

A stream of events is a ring: Redis trims its beginning whenever BullMQ adds. A reader that remembers only the last id
cannot tell a quiet hour from a lost one. So a position holds beside the id how many entries were ever added up to it,
and Redis says (from 7.0 on) how many were ever added and how many are left: the difference is what was trimmed.

A position is a cut, which makes both halves agree: *exactly ``ordinal`` entries were ever added whose id is not behind
``id``*. Where a stream contradicts that, it is not the one that was read: it was deleted and made again, or a fail-over
brought an older copy. The ``generation`` counts these, and is what makes the numbers of one stream comparable.

Of a stream that is gone nobody can say what it had. So a position that does not stand at the end of its stream keeps
that end too, a second cut: what lay between the two is lost for certain when the stream is.

Nothing here knows Redis or Spark; :mod:`bulltask.spark.source.planning` makes plans of these values.
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
"""The greatest number within a millisecond."""

_VERSION: Final = 1
_ID = re.compile(r"(\d{1,20})-(\d{1,20})")


class StreamId(NamedTuple):
    """An id of a stream's entry: the server's clock in milliseconds, and a number within the millisecond."""

    ms: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Read ``1760010061025-3``.

        Raises:
            DecodeError: the text is no such id.
        """
        if not (found := _ID.fullmatch(text)):
            raise DecodeError(f"{text!r} is no id of a stream's entry; one looks like 1760010061025-0")
        return cls(int(found[1]), int(found[2]))

    @property
    def before(self) -> StreamId:
        """The greatest id that is smaller; of ``0-0`` there is none, and it stays."""
        if self.seq:
            return StreamId(self.ms, self.seq - 1)
        return StreamId(self.ms - 1, LAST_SEQ) if self.ms else self

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


BEGINNING: Final = StreamId(0, 0)
"""Comes before every entry."""


class StreamEnd(NamedTuple):
    """Exactly ``ordinal`` entries were ever added whose id is not behind ``id``."""

    id: StreamId
    ordinal: int


@dataclass(frozen=True, slots=True)
class QueueOffset:
    """How far one queue's events have been read.

    Attributes:
        id: everything up to it is done; what is read next comes behind it.
        ordinal: how many entries were ever added up to ``id``; ``None`` where that is not known (Redis before 7.0, a
            start at an id of the user's, entries deleted by hand), until the reader has caught up.
        lost: how many entries were trimmed unread, in all lives together.
        life: how often the stream turned out to be another one.
        seen: the stream's end, when it was asked for this position; ``None`` where that is ``id``, or is not known.
    """

    id: StreamId = BEGINNING
    ordinal: int | None = 0
    lost: int = 0
    generation: int = 0
    seen: StreamEnd | None = None

    @property
    def pending(self) -> int:
        """How many entries are known to have been there behind ``id``."""
        return 0 if self.seen is None or self.ordinal is None else max(0, self.seen.ordinal - self.ordinal)


START: Final = QueueOffset()
"""Before the first entry that a stream will ever have: of a queue that is newer than the reader."""

StartAt = Literal["earliest", "latest"] | StreamId
"""Where to begin: with the oldest entry, with the next one, or behind an id."""

Offsets = Mapping[str, QueueOffset]
"""The position of each queue, by BullMQ's spelling of its name."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream says of itself at one moment (``XINFO STREAM``).

    Attributes:
        first: id of the oldest entry that is there; ``None`` when there is none.
        last: id of the newest entry that ever was there.
        length: how many entries are there.
        added: how many were ever added; ``None`` where that says nothing: before Redis 7.0, and after ``XDEL``.
    """

    first: StreamId | None
    last: StreamId
    length: int
    added: int | None

    @property
    def trimmed(self) -> int | None:
        """How many entries are gone from the beginning."""
        return None if self.added is None else self.added - self.length

    @property
    def end(self) -> QueueOffset:
        """Behind everything that was ever added, in the first life."""
        return QueueOffset(self.last, self.added)


class LossReason(StrEnum):
    """Why entries could not be read."""

    TRIMMED = "trimmed"  # the ring went round before the reader came
    AT_READ = "at-read"  # planned, and trimmed before the tasks read them
    RECREATED = "recreated"  # the stream was deleted, and there is another one
    GONE = "gone"  # the stream was deleted
    ROLLED_BACK = "rolled-back"  # a fail-over: Redis has forgotten entries that were read, and perhaps others


@dataclass(frozen=True, slots=True)
class EventGap:
    """Entries of one queue that nobody can read any more.

    Attributes:
        queue: BullMQ's spelling of its name.
        after: the last id before the gap.
        first: the first id behind it; ``None`` when nothing is there.
        lost: how many entries; those of them that can be counted.
        exact: ``lost`` is the whole number. It is not where a stream was deleted, because nobody knows what it had.
        reason: what happened.
    """

    queue: str
    after: StreamId
    first: StreamId | None
    lost: int
    exact: bool
    reason: LossReason

    @property
    def message(self) -> str:
        """One line, with a code, for the error that stops a query and for the log of one that goes on."""
        return (
            f"[BULLTASK_EVENTS_LOST] queue={self.queue} after={self.after}: {_HAPPENED[self.reason]}; "
            f"{'' if self.exact else 'at least '}{pluralize(self.lost, 'event', 'd')} lost, "
            f"{f'the first one left is {self.first}' if self.first else 'none is left'}. Set failOnDataLoss=false to "
            "go on behind the gap (gapRows=true records it), and give the queue a longer stream: streams.events.maxLen"
        )


_HAPPENED: Final[Mapping[LossReason, str]] = {
    LossReason.TRIMMED: "trimmed before they were read",
    LossReason.AT_READ: "trimmed between planning and reading",
    LossReason.RECREATED: "the stream was deleted and made anew",
    LossReason.GONE: "the stream was deleted",
    LossReason.ROLLED_BACK: "Redis came back with an older copy of the stream",
}


def reconcile(queue: str, offset: QueueOffset, state: StreamState | None) -> tuple[QueueOffset, EventGap | None]:
    """Bring a position to the stream as it is now: behind what was trimmed, or into the stream's next life.

    Args:
        queue: BullMQ's spelling of its name.
        position: how far was read.
        state: the stream now; ``None`` when there is none.

    Returns:
        From where to read on, and what cannot be read. In a new life nothing was read yet.
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
    """False when the stream cannot be the one in which ``ordinal`` entries come up to ``id``, and others behind it."""
    if not _is_consistent(offset.id, offset.ordinal, state):
        return False
    seen = offset.seen
    # Where nothing was read yet any stream fits. Of an older copy some of what was seen may be left, and is read on.
    return seen is None or _is_consistent(*seen, state) or (state.first is not None and state.first <= seen.id)


def _is_consistent(entry: StreamId, ordinal: int | None, state: StreamState) -> bool:
    """False when there cannot be ``ordinal`` entries up to this one."""
    if entry > state.last:
        return False
    added, trimmed = state.added, state.trimmed
    if ordinal is None or added is None or trimmed is None:
        return True
    if entry == state.last or ordinal >= added:
        return entry == state.last and ordinal == added
    # Behind the first entry that is left come entries that are read; before it, only trimmed ones.
    return state.first is None or (entry >= state.first) == (ordinal > trimmed)


def _recreated(queue: str, offset: QueueOffset, state: StreamState) -> tuple[QueueOffset, EventGap]:
    """A position in another stream: the same one, but older, if it has entries that were read; else a new one."""
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
    """A position behind what was trimmed, in the same stream."""
    if state.added is None or offset.ordinal is None:
        return _uncounted(queue, offset, state)
    trimmed = state.added - state.length
    if trimmed <= offset.ordinal:
        return offset, None
    lost = trimmed - offset.ordinal
    settled = replace(offset, id=_before_first(state), ordinal=trimmed, lost=offset.lost + lost)
    return settled, EventGap(queue, offset.id, state.first, lost, exact=True, reason=LossReason.TRIMMED)


def _uncounted(queue: str, offset: QueueOffset, state: StreamState) -> tuple[QueueOffset, EventGap | None]:
    """Where ordinals say nothing: an entry at or before the position proves that none behind it was trimmed."""
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
    """Where to begin with a queue that was there before the reader; what was trimmed until now does not count as lost.

    Args:
        state: the stream now; ``None`` when there is none.
        where: before its oldest entry, behind its newest, or behind an id.
    """
    if state is None:
        return START
    if where == "latest" or (isinstance(where, StreamId) and where >= state.last):
        return state.end
    if where == "earliest" or state.first is None or where < state.first:
        return QueueOffset(_before_first(state), state.trimmed)
    return QueueOffset(where, None)


def with_stream_end(offset: QueueOffset, state: StreamState | None) -> QueueOffset:
    """Return the position with the end of its stream in ``seen``."""
    ordinal, added = offset.ordinal, None if state is None else state.added
    if state is None or ordinal is None or added is None or added <= ordinal:
        return replace(offset, seen=None)
    return replace(offset, seen=StreamEnd(state.last, added))


def encode_offsets(offsets: Offsets, begin: Offsets | None = None) -> dict[str, Any]:
    """Return the offset that Spark stores.

    Spark compares offsets as texts, so equal positions always give the same text: queues are sorted.

    Args:
        offsets: the position of each queue.
        begin: where the batch began that ends there, if it is a query's first one. Spark stores the ends of batches
            only, and asks anew where the first one begins whenever it needs to know; the stream may have been trimmed
            since.
    """
    made = {"version": _VERSION, "queues": _encoded_offsets(offsets)}
    return made if begin is None else {**made, "begin": _encoded_offsets(begin)}


def _encoded_offsets(offsets: Offsets) -> dict[str, Any]:
    return {name: _encoded_offset(offsets[name]) for name in sorted(offsets)}


def _encoded_offset(offset: QueueOffset) -> dict[str, Any]:
    made = {"id": str(offset.id), "ordinal": offset.ordinal, "lost": offset.lost, "life": offset.generation}
    if offset.seen is None:
        return made
    return {**made, "seen": {"id": str(offset.seen.id), "ordinal": offset.seen.ordinal}}


def decode_offsets(stored: Mapping[str, Any]) -> dict[str, QueueOffset]:
    """Read what :func:`encode_offsets` returned.

    Raises:
        DecodeError: it is something else, or was written by a newer bulltask.
    """
    return _decoded_offsets(stored, "queues")


def batch_start(start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> dict[str, QueueOffset] | None:
    """Return where a batch begins.

    Args:
        start: the offset in which it begins, as Spark has it; ``None`` where Spark stores none: of a query's first.
        end: the offset in which it ends.

    Returns:
        The positions; ``None`` of a first batch that an older bulltask planned.

    Raises:
        DecodeError: as :func:`decode_offsets`.
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
        raise DecodeError(f"the checkpoint's offset is no offset of bulltask: {exc}") from exc


def _decoded_offset(fields: Mapping[str, Any]) -> QueueOffset:
    ordinal, seen = fields["ordinal"], fields.get("seen")
    return QueueOffset(
        StreamId.parse(fields["id"]),
        None if ordinal is None else int(ordinal),
        int(fields["lost"]),
        int(fields["life"]),
        None if seen is None else StreamEnd(StreamId.parse(seen["id"]), int(seen["ordinal"])),
    )
