"""How far a queue's event stream has been read, and what was lost before it could be.

A stream of events is a ring: Redis trims its beginning whenever BullMQ adds. A reader that remembers only the last id
cannot tell a quiet hour from a lost one. So a position holds beside the id how many entries were ever added up to it,
and Redis says (from 7.0 on) how many were ever added and how many are left: the difference is what was trimmed.

A position is a cut, which makes both halves agree: *exactly ``ordinal`` entries were ever added whose id is not behind
``id``*. Where a stream contradicts that, it is not the one that was read: it was deleted and made again, or a fail-over
brought an older copy. The ``life`` counts these, and is what makes the numbers of one stream comparable.

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
from bulltask.lake.plural import counted

__all__ = [
    "BEGINNING",
    "LAST_SEQ",
    "START",
    "Cut",
    "Facts",
    "Gap",
    "LossReason",
    "Offsets",
    "Position",
    "StartAt",
    "StreamId",
    "begin_of",
    "decode",
    "encode",
    "same_stream",
    "seeing",
    "settle",
    "starting",
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


class Cut(NamedTuple):
    """Exactly ``ordinal`` entries were ever added whose id is not behind ``id``."""

    id: StreamId
    ordinal: int


@dataclass(frozen=True, slots=True)
class Position:
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
    life: int = 0
    seen: Cut | None = None

    @property
    def waiting(self) -> int:
        """How many entries are known to have been there behind ``id``."""
        return 0 if self.seen is None or self.ordinal is None else max(0, self.seen.ordinal - self.ordinal)


START: Final = Position()
"""Before the first entry that a stream will ever have: of a queue that is newer than the reader."""

StartAt = Literal["earliest", "latest"] | StreamId
"""Where to begin: with the oldest entry, with the next one, or behind an id."""

Offsets = Mapping[str, Position]
"""The position of each queue, by BullMQ's spelling of its name."""


@dataclass(frozen=True, slots=True)
class Facts:
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
    def end(self) -> Position:
        """Behind everything that was ever added, in the first life."""
        return Position(self.last, self.added)


class LossReason(StrEnum):
    """Why entries could not be read."""

    TRIMMED = "trimmed"  # the ring went round before the reader came
    AT_READ = "at-read"  # planned, and trimmed before the tasks read them
    RECREATED = "recreated"  # the stream was deleted, and there is another one
    GONE = "gone"  # the stream was deleted
    ROLLED_BACK = "rolled-back"  # a fail-over: Redis has forgotten entries that were read, and perhaps others


@dataclass(frozen=True, slots=True)
class Gap:
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
            f"{'' if self.exact else 'at least '}{counted(self.lost, 'event', 'd')} lost, "
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


def settle(queue: str, position: Position, facts: Facts | None) -> tuple[Position, Gap | None]:
    """Bring a position to the stream as it is now: behind what was trimmed, or into the stream's next life.

    Args:
        queue: BullMQ's spelling of its name.
        position: how far was read.
        facts: the stream now; ``None`` when there is none.

    Returns:
        From where to read on, and what cannot be read. In a new life nothing was read yet.
    """
    if facts is None:
        if position.id == BEGINNING and position.seen is None:
            return position, None
        lost = position.waiting
        return _next_life(position), Gap(queue, position.id, None, lost, exact=False, reason=LossReason.GONE)
    if not same_stream(position, facts):
        return _reborn(queue, position, facts)
    return _trimmed(queue, position, facts)


def same_stream(position: Position, facts: Facts) -> bool:
    """False when the stream cannot be the one in which ``ordinal`` entries come up to ``id``, and others behind it."""
    if not _fits(position.id, position.ordinal, facts):
        return False
    seen = position.seen
    # Where nothing was read yet any stream fits. Of an older copy some of what was seen may be left, and is read on.
    return seen is None or _fits(*seen, facts) or (facts.first is not None and facts.first <= seen.id)


def _fits(entry: StreamId, ordinal: int | None, facts: Facts) -> bool:
    """False when there cannot be ``ordinal`` entries up to this one."""
    if entry > facts.last:
        return False
    added, trimmed = facts.added, facts.trimmed
    if ordinal is None or added is None or trimmed is None:
        return True
    if entry == facts.last or ordinal >= added:
        return entry == facts.last and ordinal == added
    # Behind the first entry that is left come entries that are read; before it, only trimmed ones.
    return facts.first is None or (entry >= facts.first) == (ordinal > trimmed)


def _reborn(queue: str, position: Position, facts: Facts) -> tuple[Position, Gap]:
    """A position in another stream: the same one, but older, if it has entries that were read; else a new one."""
    new, lost = _next_life(position), position.waiting
    if facts.first is None or facts.first > position.id:
        return new, Gap(queue, position.id, facts.first, lost, exact=False, reason=LossReason.RECREATED)
    if facts.last <= position.id:
        new = replace(new, id=facts.last, ordinal=facts.added)
    else:
        new = replace(new, id=position.id, ordinal=None)
    return new, Gap(queue, position.id, None, lost, exact=False, reason=LossReason.ROLLED_BACK)


def _next_life(position: Position) -> Position:
    return Position(lost=position.lost + position.waiting, life=position.life + 1)


def _trimmed(queue: str, position: Position, facts: Facts) -> tuple[Position, Gap | None]:
    """A position behind what was trimmed, in the same stream."""
    if facts.added is None or position.ordinal is None:
        return _uncounted(queue, position, facts)
    trimmed = facts.added - facts.length
    if trimmed <= position.ordinal:
        return position, None
    lost = trimmed - position.ordinal
    settled = replace(position, id=_before_first(facts), ordinal=trimmed, lost=position.lost + lost)
    return settled, Gap(queue, position.id, facts.first, lost, exact=True, reason=LossReason.TRIMMED)


def _uncounted(queue: str, position: Position, facts: Facts) -> tuple[Position, Gap | None]:
    """Where ordinals say nothing: an entry at or before the position proves that none behind it was trimmed."""
    position = replace(position, ordinal=None, seen=None)
    if position.id == facts.last:
        return replace(position, ordinal=facts.added), None
    if facts.first is not None and (position.id == BEGINNING or facts.first <= position.id):
        return position, None
    settled = replace(position, id=_before_first(facts))
    return settled, Gap(queue, position.id, facts.first, 0, exact=False, reason=LossReason.TRIMMED)


def _before_first(facts: Facts) -> StreamId:
    return facts.last if facts.first is None else facts.first.before


def starting(facts: Facts | None, where: StartAt) -> Position:
    """Where to begin with a queue that was there before the reader; what was trimmed until now does not count as lost.

    Args:
        facts: the stream now; ``None`` when there is none.
        where: before its oldest entry, behind its newest, or behind an id.
    """
    if facts is None:
        return START
    if where == "latest" or (isinstance(where, StreamId) and where >= facts.last):
        return facts.end
    if where == "earliest" or facts.first is None or where < facts.first:
        return Position(_before_first(facts), facts.trimmed)
    return Position(where, None)


def seeing(position: Position, facts: Facts | None) -> Position:
    """Return the position with the end of its stream in ``seen``."""
    ordinal, added = position.ordinal, None if facts is None else facts.added
    if facts is None or ordinal is None or added is None or added <= ordinal:
        return replace(position, seen=None)
    return replace(position, seen=Cut(facts.last, added))


def encode(offsets: Offsets, begin: Offsets | None = None) -> dict[str, Any]:
    """Return the offset that Spark stores.

    Spark compares offsets as texts, so equal positions always give the same text: queues are sorted.

    Args:
        offsets: the position of each queue.
        begin: where the batch began that ends there, if it is a query's first one. Spark stores the ends of batches
            only, and asks anew where the first one begins whenever it needs to know; the stream may have been trimmed
            since.
    """
    made = {"version": _VERSION, "queues": _encoded_all(offsets)}
    return made if begin is None else {**made, "begin": _encoded_all(begin)}


def _encoded_all(offsets: Offsets) -> dict[str, Any]:
    return {name: _encoded(offsets[name]) for name in sorted(offsets)}


def _encoded(position: Position) -> dict[str, Any]:
    made = {"id": str(position.id), "ordinal": position.ordinal, "lost": position.lost, "life": position.life}
    if position.seen is None:
        return made
    return {**made, "seen": {"id": str(position.seen.id), "ordinal": position.seen.ordinal}}


def decode(stored: Mapping[str, Any]) -> dict[str, Position]:
    """Read what :func:`encode` returned.

    Raises:
        DecodeError: it is something else, or was written by a newer bulltask.
    """
    return _decoded_all(stored, "queues")


def begin_of(start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> dict[str, Position] | None:
    """Return where a batch begins.

    Args:
        start: the offset in which it begins, as Spark has it; ``None`` where Spark stores none: of a query's first.
        end: the offset in which it ends.

    Returns:
        The positions; ``None`` of a first batch that an older bulltask planned.

    Raises:
        DecodeError: as :func:`decode`.
    """
    if "begin" in end and start != end:
        return _decoded_all(end, "begin")
    return None if start is None else decode(start)


def _decoded_all(stored: Mapping[str, Any], part: str) -> dict[str, Position]:
    if stored.get("version") != _VERSION:
        raise DecodeError(f"the checkpoint's offset has version {stored.get('version')!r}; this bulltask reads 1")
    try:
        return {str(name): _decoded(fields) for name, fields in stored[part].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise DecodeError(f"the checkpoint's offset is no offset of bulltask: {exc}") from exc


def _decoded(fields: Mapping[str, Any]) -> Position:
    ordinal, seen = fields["ordinal"], fields.get("seen")
    return Position(
        StreamId.parse(fields["id"]),
        None if ordinal is None else int(ordinal),
        int(fields["lost"]),
        int(fields["life"]),
        None if seen is None else Cut(StreamId.parse(seen["id"]), int(seen["ordinal"])),
    )
