"""Offsets of a queue's event stream, and the detection of lost events.

An event stream is bounded: Redis trims its beginning whenever BullMQ adds an entry. A reader that stores only the last
id cannot distinguish an hour without events from an hour of lost events. An offset therefore also has the number of
entries that were ever added up to that id. Redis (since 7.0) reports how many entries were ever added and how many are
left; the difference is the number of trimmed entries.

An offset is a position in the stream: *of all entries ever added, exactly ``ordinal`` have an id not greater than
``id``*. If a stream contradicts that, it was *replaced*: deleted and created again, or restored to an older copy by a
failover. ``generation`` counts these cases, so that only numbers of the same stream are compared.

After a stream is deleted, Redis has no information about it. For this case, an offset that is not at the end of its
stream also stores that end as a second position: if the stream is deleted, the entries between the two positions are
lost.

This module depends neither on Redis nor on Spark; :mod:`bulltask.spark.source.planning` plans batches with these
values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

from bulltask.jobs.errors import DecodeError
from bulltask.lake.formatting import pluralize

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
        """Parse ``1760010061025-3``; raise ``DecodeError`` if the text is not the id of a stream entry."""
        if not (match := _ID.fullmatch(text)):
            raise DecodeError(f"{text!r} is not the id of a stream entry; an id looks like 1760010061025-0")
        return cls(int(match[1]), int(match[2]))

    @property
    def before(self) -> StreamId:
        """The greatest smaller id; ``0-0`` is returned unchanged."""
        if self.seq:
            return StreamId(self.ms, self.seq - 1)
        return StreamId(self.ms - 1, LAST_SEQ) if self.ms else self

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


BEGINNING: Final = StreamId(0, 0)
"""The position before all entries."""


class StreamEnd(NamedTuple):
    """Of all entries ever added, exactly ``ordinal`` have an id that is not greater than ``id``."""

    id: StreamId
    ordinal: int


@dataclass(frozen=True, slots=True)
class QueueOffset:
    """The position up to which a queue's events have been read.

    Attributes:
        id: All entries up to this id have been read; the next entry has a greater id.
        ordinal: The number of entries ever added up to ``id``. ``None`` if unknown (Redis before 7.0, a start at an id
            chosen by the user, manually deleted entries), until the reader has caught up.
        lost: The number of entries that were trimmed before they were read, in all generations of the stream.
        generation: How many times the stream was replaced.
        seen: The end of the stream when it was queried for this offset; ``None`` if it equals ``id`` or is unknown.
        missed: The number of entries that were trimmed before the reader began; only in the offset before the first
            entry.
    """

    id: StreamId = BEGINNING
    ordinal: int | None = 0
    lost: int = 0
    generation: int = 0
    seen: StreamEnd | None = None
    missed: int = 0

    @property
    def pending(self) -> int:
        """The number of entries after ``id`` that are known to have existed."""
        return 0 if self.seen is None or self.ordinal is None else max(0, self.seen.ordinal - self.ordinal)

    def trim_reason(self, lost: int) -> LossReason:
        """Return why the next ``lost`` entries, which were trimmed before a batch was planned, are lost."""
        return LossReason.TRIMMED_BEFORE_START if 0 < lost <= self.missed else LossReason.TRIMMED


START: Final = QueueOffset()
"""The offset before the first entry of a stream, for a queue that is newer than the reader."""

StartAt = Literal["earliest", "latest"] | StreamId
"""Where to begin: at the oldest entry, at the next new entry, or after an id."""

Offsets = Mapping[str, QueueOffset]
"""The offset of each queue, by BullMQ's name for the queue."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of a stream at one moment (``XINFO STREAM``).

    Attributes:
        first: The id of the oldest remaining entry; ``None`` if the stream is empty.
        last: The id of the newest entry that was ever added.
        length: The number of remaining entries.
        added: The number of entries ever added; ``None`` if it is not reliable: before Redis 7.0, and after ``XDEL``.
    """

    first: StreamId | None
    last: StreamId
    length: int
    added: int | None

    @property
    def trimmed(self) -> int | None:
        """The number of entries that were removed from the beginning."""
        return None if self.added is None else self.added - self.length

    @property
    def end(self) -> QueueOffset:
        """The offset after all entries, in the first generation."""
        return QueueOffset(self.last, self.added)


class LossReason(StrEnum):
    """Why entries could not be read."""

    TRIMMED_BEFORE_START = "trimmed-before-start"  # dropped before the reader began with the oldest entry
    TRIMMED = "trimmed"  # dropped by the stream's length limit before they were read
    TRIMMED_DURING_READ = "trimmed-during-read"  # trimmed after planning, before the tasks read them
    STREAM_RECREATED = "stream-recreated"  # the stream was deleted and created again
    STREAM_DELETED = "stream-deleted"  # the stream was deleted
    FAILOVER_ROLLBACK = "failover-rollback"  # a failover: Redis has lost entries that had been read, and perhaps others


@dataclass(frozen=True, slots=True)
class EventGap:
    """Entries of one queue that can no longer be read.

    Attributes:
        queue: BullMQ's name for the queue.
        last_id_before: The last id before the gap.
        first_id_after: The first id after it; ``None`` if no entry is left.
        lost: The number of entries that are known to be lost.
        exact: Whether ``lost`` is exact. If the stream was deleted, it is a lower bound, because the stream's length at
            that moment is unknown.
        loss_reason: Why the events were lost.
    """

    queue: str
    last_id_before: StreamId
    first_id_after: StreamId | None
    lost: int
    exact: bool
    loss_reason: LossReason

    @property
    def message(self) -> str:
        """A line with a code, for the error that stops a query and for the log of a query that continues."""
        left = f"the first remaining event is {self.first_id_after}" if self.first_id_after else "no event is left"
        return (
            f"[BULLTASK_EVENTS_LOST] queue={self.queue} last_id_before={self.last_id_before}: "
            f"{'' if self.exact else 'at least '}{pluralize(self.lost, 'event', 'd')} lost "
            f"({_DESCRIPTIONS[self.loss_reason]}), {left}. "
            "To record the gap and continue, use on_loss='gap' (pipeline run: --on-loss gap; "
            "format('bulltask'): failOnDataLoss=false, gapRows=true); to prevent losses, increase "
            "streams.events.maxLen of the queue"
        )


_DESCRIPTIONS: Final[Mapping[LossReason, str]] = {
    LossReason.TRIMMED_BEFORE_START: "trimmed before the first batch",
    LossReason.TRIMMED: "trimmed before they were read",
    LossReason.TRIMMED_DURING_READ: "trimmed between planning and reading",
    LossReason.STREAM_RECREATED: "the stream was deleted and created again",
    LossReason.STREAM_DELETED: "the stream was deleted",
    LossReason.FAILOVER_ROLLBACK: "Redis restored an older copy of the stream",
}


def reconcile(queue: str, offset: QueueOffset, state: StreamState | None) -> tuple[QueueOffset, EventGap | None]:
    """Adjust an offset to the current stream: skip trimmed entries, or begin the stream's next generation.

    Return the offset at which to continue, and the gap. The offset of a new generation is at its beginning.
    """
    if state is None and offset.id == BEGINNING and offset.seen is None:
        return offset, None
    if state is None or not same_stream(offset, state):
        adjusted = _next_generation(offset, state)
        return adjusted, replacement_gap(queue, offset, adjusted, state)
    return _reconcile_trimmed(queue, offset, state)


def same_stream(offset: QueueOffset, state: StreamState) -> bool:
    """Return whether the stream is consistent with the offset; otherwise it must have been replaced."""
    if not _is_consistent(offset.id, offset.ordinal, state):
        return False
    seen = offset.seen
    # Before the first read, every stream is consistent. An older copy may still have unread entries: continue.
    return seen is None or _is_consistent(*seen, state) or (state.first is not None and state.first <= seen.id)


def _is_consistent(entry: StreamId, ordinal: int | None, state: StreamState) -> bool:
    """Return whether ``ordinal`` can be the number of entries up to this entry."""
    if entry > state.last:
        return False
    added, trimmed = state.added, state.trimmed
    if ordinal is None or added is None or trimmed is None:
        return True
    if entry == state.last or ordinal >= added:
        return entry == state.last and ordinal == added
    # Trimming removes entries from the beginning: all entries before the first remaining one were trimmed.
    return state.first is None or (entry >= state.first) == (ordinal > trimmed)


def _next_generation(offset: QueueOffset, state: StreamState | None) -> QueueOffset:
    """Return the offset in a replaced stream: an older copy if it has entries that were read, else a new stream."""
    adjusted = QueueOffset(lost=offset.lost + offset.pending, generation=offset.generation + 1)
    if state is None or state.first is None or state.first > offset.id:
        return adjusted
    if state.last <= offset.id:
        return replace(adjusted, id=state.last, ordinal=state.added)
    return replace(adjusted, id=offset.id, ordinal=None)


def replacement_gap(queue: str, start: QueueOffset, end: QueueOffset, state: StreamState | None) -> EventGap:
    """Return the gap between two offsets, of which the second one is in a later generation of the stream."""
    reason = LossReason.STREAM_RECREATED if end.id == BEGINNING else LossReason.FAILOVER_ROLLBACK
    if state is None:
        reason = LossReason.STREAM_DELETED
    first = None if state is None else state.first
    return EventGap(queue, start.id, first, end.lost - start.lost, exact=False, loss_reason=reason)


def _reconcile_trimmed(queue: str, offset: QueueOffset, state: StreamState) -> tuple[QueueOffset, EventGap | None]:
    """Return the offset after the trimmed entries of the same stream."""
    if state.added is None or offset.ordinal is None:
        return _reconcile_uncounted(queue, offset, state)
    trimmed = state.added - state.length
    if trimmed <= offset.ordinal:
        return offset, None
    lost = trimmed - offset.ordinal
    adjusted = replace(offset, id=_before_first(state), ordinal=trimmed, lost=offset.lost + lost, missed=0)
    return adjusted, EventGap(queue, offset.id, state.first, lost, exact=True, loss_reason=offset.trim_reason(lost))


def _reconcile_uncounted(queue: str, offset: QueueOffset, state: StreamState) -> tuple[QueueOffset, EventGap | None]:
    """Reconcile without counts: an entry at or before the offset proves that no later entry was trimmed."""
    offset = replace(offset, ordinal=None, seen=None, missed=0)
    if offset.id == state.last:
        return replace(offset, ordinal=state.added), None
    if state.first is not None and (offset.id == BEGINNING or state.first <= offset.id):
        return offset, None
    adjusted = replace(offset, id=_before_first(state))
    return adjusted, EventGap(queue, offset.id, state.first, 0, exact=False, loss_reason=LossReason.TRIMMED)


def _before_first(state: StreamState) -> StreamId:
    return state.last if state.first is None else state.first.before


def first_offset(state: StreamState | None, start: StartAt) -> QueueOffset:
    """Return the first offset of a queue that is older than the reader.

    With ``earliest``, entries that were trimmed earlier are lost, but not an error: the reader could not prevent it.
    """
    if state is None:
        return START
    if start == "latest" or (start != "earliest" and start >= state.last):
        return state.end
    if not isinstance(start, StreamId) or start == BEGINNING:
        # Without counts, it is unknown whether entries were trimmed.
        return QueueOffset(_before_first(state), None) if state.trimmed is None else QueueOffset(missed=state.trimmed)
    if state.trimmed == 0 and state.first is not None and start < state.first:
        return QueueOffset(_before_first(state), 0)
    return QueueOffset(start, None)


def with_stream_end(offset: QueueOffset, state: StreamState | None) -> QueueOffset:
    """Return the offset with the end of its stream in ``seen``."""
    ordinal, added = offset.ordinal, None if state is None else state.added
    if state is None or ordinal is None or added is None or added <= ordinal:
        return replace(offset, seen=None)
    return replace(offset, seen=StreamEnd(state.last, added))


def encode_offsets(offsets: Offsets, begin: Offsets | None = None) -> dict[str, Any]:
    """Return the offset that Spark stores.

    Spark compares offsets as text, so equal offsets always give the same text: queues are sorted. ``begin`` is the
    start of the first batch of a query: Spark stores only the ends of batches, and requests the start of the first
    batch again, when the stream may have been trimmed.
    """
    encoded = {"version": _VERSION, "queues": _encode_queues(offsets)}
    return encoded if begin is None else {**encoded, "begin": _encode_queues(begin)}


def _encode_queues(offsets: Offsets) -> dict[str, Any]:
    return {name: _encode_offset(offsets[name]) for name in sorted(offsets)}


def _encode_offset(offset: QueueOffset) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "id": str(offset.id), "ordinal": offset.ordinal, "lost": offset.lost, "generation": offset.generation,
    }  # fmt: skip
    if offset.seen is not None:
        encoded["seen"] = {"id": str(offset.seen.id), "ordinal": offset.seen.ordinal}
    if offset.missed:
        encoded["missed"] = offset.missed
    return encoded


def decode_offsets(stored: Mapping[str, Any]) -> dict[str, QueueOffset]:
    """Decode the result of :func:`encode_offsets`; raise ``DecodeError`` if it is invalid or of a newer version."""
    return _decode_section(stored, "queues")


def batch_start(start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> dict[str, QueueOffset] | None:
    """Return the start offsets of a batch, given Spark's start and end.

    Spark stores no start (``None``) for a query's first batch. The result is ``None`` if an older version of bulltask
    planned that batch.
    """
    if "begin" in end and start != end:
        return _decode_section(end, "begin")
    return None if start is None else decode_offsets(start)


def _decode_section(stored: Mapping[str, Any], section: str) -> dict[str, QueueOffset]:
    if stored.get("version") != _VERSION:
        raise DecodeError(
            f"the checkpoint's offset has version {stored.get('version')!r}; this version of bulltask reads version 1"
        )
    try:
        return {str(name): _decode_offset(fields) for name, fields in stored[section].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise DecodeError(f"the checkpoint does not contain a bulltask offset: {exc}") from exc


def _decode_offset(fields: Mapping[str, Any]) -> QueueOffset:
    ordinal, seen = fields["ordinal"], fields.get("seen")
    return QueueOffset(
        StreamId.parse(fields["id"]),
        None if ordinal is None else int(ordinal),
        int(fields["lost"]),
        int(fields["generation"]),
        None if seen is None else StreamEnd(StreamId.parse(seen["id"]), int(seen["ordinal"])),
        int(fields.get("missed", 0)),
    )
