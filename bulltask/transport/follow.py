"""Following a queue's event stream without missing an entry that is still there, and knowing what was trimmed away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bulltask.errors import BulltaskError
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation
from bulltask.transport.scripts.stream import (
    BEGINNING,
    Entry,
    StreamInfo,
    is_retained,
    read_blocking,
    read_now,
    stream_exists,
    stream_info,
)
from bulltask.transport.transaction import transaction

__all__ = ["NEWEST", "EventPage", "Follower", "StreamGap"]

NEWEST: Final = "$"
"""Where to begin: behind everything that is there."""

_LAST_OF_A_MS: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StreamGap:
    """Entries that nobody can read any more.

    Attributes:
        after: id of the last entry that was read before them.
        before: id of the first entry that is there after them, ``None`` while there is none.
        count: how many; ``None``: not known, and possibly none.
    """

    after: str
    before: str | None
    count: int | None


@dataclass(frozen=True, slots=True)
class EventPage:
    """What one read brought: the gap comes before the entries."""

    entries: list[Entry]
    gap: StreamGap | None = None


class Follower:
    """Responsible for one reader's place in a stream; carried by the sync or the async client.

    After every read it asks whether an entry at or before its place is still there. As streams are trimmed from their
    beginning, nothing behind its place can be missing then. Otherwise the numbers of the stream tell, in the same
    transaction as one more read: Redis counts all entries that it ever added (from 7.0 on), and the follower counts
    what it has read.

    Args:
        keys: the queue.
        start: :data:`NEWEST`, :data:`~bulltask.transport.scripts.stream.BEGINNING` for the oldest entry that is
            there, or the id of the last entry that was read.
        where: the server, for error messages.
    """

    def __init__(self, keys: QueueKeys, start: str, where: str) -> None:
        self._keys, self._start, self._where = keys, start, where
        self._place: str | None = None
        self._count: int | None = None
        """How many entries were added up to the place, that one included; ``None`` while that is not known."""
        self._counting = True
        self._doubtful = False

    def open(self) -> Operation[str]:
        """Take the place and return it: an id. Later calls change nothing."""
        if self._place is not None:
            return self._place
        info, _ = yield from self._look(None)
        if info is None:
            self._place, self._count = (BEGINNING if self._start == NEWEST else self._start), 0
        elif self._start == NEWEST:
            self._place, self._count = info.last, info.added
        elif self._start == BEGINNING:
            # What was trimmed before the oldest entry is not missing: nobody asked for it.
            self._place, self._count = BEGINNING, info.trimmed
        else:
            self._place = self._start
        self._counting = info is None or info.added is not None
        return self._place

    def read(self, block_ms: int) -> Operation[EventPage]:
        """Read what comes next; wait for it up to ``block_ms``. A read that failed may simply be repeated."""
        try:
            place = yield from self._sure_place()
            entries, kept = yield [read_blocking(self._keys, place, block_ms), is_retained(self._keys, place)]
            page = EventPage(entries)
            if not kept or (self._count is None and self._counting and not entries):
                page = yield from self._compare(place, kept)
        except BulltaskError:
            self._doubtful = True
            raise
        if page.entries:
            self._place = page.entries[-1][0]
            self._count = None if self._count is None else self._count + len(page.entries)
        return page

    def _sure_place(self) -> Operation[str]:
        """The place, after an outage compared with what the server has: it may be another one now."""
        place = yield from self.open()
        if self._doubtful:
            info, _ = yield from self._look(None)
            if info is not None and _number(info.last) < _number(place):
                # A replica took over that had not seen everything. What it has was read already, and if its clock is
                # behind as well, what it adds would never come after the place.
                self._place = place = info.last
                self._count = info.added
            self._doubtful = False
        return place

    def _compare(self, place: str, kept: bool) -> Operation[EventPage]:
        """Read again, together with the numbers of the stream, and set the count of what lies before the entries."""
        info, entries = yield from self._look(place)
        if info is None:
            self._place, self._count = BEGINNING, 0
            return EventPage([], None if place == BEGINNING else StreamGap(place, None, None))
        self._counting = info.added is not None
        if kept:
            self._count = None if entries else info.added
            return EventPage(entries)
        gap = self._gap(place, info, entries)
        self._count = info.trimmed
        if not entries:
            self._place = info.last
        return EventPage(entries, gap)

    def _gap(self, place: str, info: StreamInfo, entries: list[Entry]) -> StreamGap | None:
        """What is missing between the place, of which nothing is there any more, and the first entry."""
        first = entries[0][0] if entries else None
        if place == info.last or (first is not None and _follows(place, first)):
            return None
        if info.trimmed is None:
            # Where the server does not count, a stream that is new to us counts as complete.
            return None if place == BEGINNING else StreamGap(place, first, None)
        if self._count is None:
            return StreamGap(place, first, None) if info.trimmed else None
        missing = info.trimmed - self._count
        if missing < 0:  # the stream was deleted, and another one of the same name has begun to count anew
            return StreamGap(place, first, None)
        return StreamGap(place, first, missing) if missing else None

    def _look(self, place: str | None) -> Operation[tuple[StreamInfo | None, list[Entry]]]:
        """The stream's numbers, and what comes after ``place``, of one and the same moment."""
        calls = [stream_exists(self._keys), stream_info(self._keys)]
        if place is not None:
            calls.append(read_now(self._keys, place))
        results: list[Any] = yield from transaction(calls, self._where)
        there, info, entries = (*results, [])[:3]
        if there is False:
            return None, []
        for result in (there, info, entries):
            if isinstance(result, BulltaskError):
                raise result
        return info, entries


def _number(entry_id: str) -> tuple[int, int]:
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence or 0)


def _follows(place: str, entry_id: str) -> bool:
    """True when no id fits between the two."""
    (ms, sequence), (next_ms, next_sequence) = _number(place), _number(entry_id)
    if ms == next_ms:
        return next_sequence == sequence + 1
    return next_ms == ms + 1 and next_sequence == 0 and sequence == _LAST_OF_A_MS
