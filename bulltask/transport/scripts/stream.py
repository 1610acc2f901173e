"""The commands that read and write a queue's event stream; packing only (PROTOCOL 4.13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bulltask.lua import loader
from bulltask.transport.call import Arg, Call, command, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import text

__all__ = [
    "BEGINNING",
    "LONGEST_BLOCK_MS",
    "PAGE",
    "READING",
    "SPAN",
    "Entry",
    "SpanEnd",
    "StreamInfo",
    "entries_since",
    "is_retained",
    "last_id",
    "page",
    "publish",
    "read_blocking",
    "read_now",
    "span_end",
    "stream_exists",
    "stream_info",
]

BEGINNING: Final = "0-0"
"""What comes before every entry."""

LONGEST_BLOCK_MS: Final = 5_000
"""A read waits this long at the most, so that a connection that died silently is noticed."""

PAGE: Final = 1_000
"""Entries of one read."""

Entry = tuple[str, dict[bytes, bytes]]
"""Id and fields."""

SPAN: Final = 10_000
"""Entries that one :func:`span_end` looks at, at the most: a few milliseconds in which Redis does nothing else."""

READING: Final = frozenset({"spanEnd"})
"""Scripts that write nothing."""

RawEntry = tuple[bytes, Sequence[bytes]]
"""Id and fields of an entry, as Redis sends them: name, value, name, value …"""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a stream says of itself (``XINFO STREAM``).

    Attributes:
        length: entries that are there.
        last: id of the newest entry that ever was there.
        added: how many entries were ever added; ``None`` before Redis 7.0, which does not count.
        deleted: entries were deleted one by one (``XDEL``), which BullMQ never does.
        first: id of the oldest entry that is there; ``""`` when there is none.
    """

    length: int
    last: str
    added: int | None
    deleted: bool
    first: str = ""

    @property
    def trimmed(self) -> int | None:
        """How many entries were trimmed off the beginning; ``None`` where that is not known."""
        return None if self.added is None or self.deleted else self.added - self.length


def last_id(keys: QueueKeys) -> Call[str]:
    """The id of the newest entry; :data:`BEGINNING` when there is none."""

    def parse_reply(reply: Any) -> str:
        return reply[0][0].decode() if reply else BEGINNING

    return command("XREVRANGE", keys.events, "+", "-", "COUNT", 1, parse_reply=parse_reply)


def read_blocking(keys: QueueKeys, cursor: str, block_ms: int) -> Call[list[Entry]]:
    """What comes after ``cursor``; waits for it up to ``block_ms``, which is at least 1: 0 would mean for ever."""
    block = max(1, min(block_ms, LONGEST_BLOCK_MS))
    return command("XREAD", "COUNT", PAGE, "BLOCK", block, "STREAMS", keys.events, cursor, parse_reply=_read)


def read_now(keys: QueueKeys, cursor: str) -> Call[list[Entry]]:
    """What comes after ``cursor`` and is there already."""
    return command("XREAD", "COUNT", PAGE, "STREAMS", keys.events, cursor, parse_reply=_read)


def entries_since(keys: QueueKeys, since: str) -> Call[list[Entry]]:
    """All entries from ``since`` on, that one included."""
    return command("XRANGE", keys.events, since, "+", parse_reply=_entries)


def is_retained(keys: QueueKeys, cursor: str) -> Call[bool]:
    """True when an entry at or before ``cursor`` is still there: none after it was trimmed then."""
    return command("XREVRANGE", keys.events, cursor, "-", "COUNT", 1, parse_reply=bool)


def stream_exists(keys: QueueKeys) -> Call[bool]:
    """True when there is a stream."""
    return command("EXISTS", keys.events, parse_reply=bool)


def stream_info(keys: QueueKeys) -> Call[StreamInfo]:
    """The numbers of the stream; Redis refuses when there is none."""

    def parse_reply(reply: Any) -> StreamInfo:
        said = dict(zip(reply[::2], reply[1::2], strict=True))
        return StreamInfo(
            length=int(said[b"length"]),
            last=said[b"last-generated-id"].decode(),
            added=int(said[b"entries-added"]) if b"entries-added" in said else None,
            deleted=said.get(b"max-deleted-entry-id", b"0-0") != b"0-0",
            first=said[b"first-entry"][0].decode() if said.get(b"first-entry") else "",
        )

    return command("XINFO", "STREAM", keys.events, parse_reply=parse_reply)


def publish(keys: QueueKeys, event: str, fields: Mapping[str, str], max_events: int) -> Call[str]:
    """Add an event of one's own, trim the stream to about ``max_events``; the result is the entry's id."""
    words: list[Arg] = [word for pair in fields.items() for word in pair]
    limit: tuple[Arg, ...] = ("MAXLEN", "~", max_events, "*")
    return command("XADD", keys.events, *limit, "event", event, *words, parse_reply=lambda reply: str(reply.decode()))


def _read(reply: Any) -> list[Entry]:
    return _entries(reply[0][1]) if reply else []


def _entries(reply: Any) -> list[Entry]:
    return [(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in reply or ()]


@dataclass(frozen=True, slots=True)
class SpanEnd:
    """Where some entries of a stream end.

    Attributes:
        last: id of the last one; ``""`` when there is none.
        count: how many there are.
    """

    last: str
    count: int


def span_end(keys: QueueKeys, after: str, until: str, most: int) -> Call[SpanEnd]:
    """``spanEnd``: where the next ``most`` entries end; no more than :data:`SPAN` of them are looked at.

    Args:
        keys: the queue.
        after: id behind which they begin; ``0-0`` for the first.
        until: id of the last one that may count; ``+`` for no bound, ``1760010061025`` for a whole millisecond.
        most: how many at the most.
    """

    def parse_reply(reply: Any) -> SpanEnd:
        return SpanEnd(text(reply[0]), int(reply[1]))

    return script_call(loader.own("spanEnd"), (keys.events,), (after, until, min(most, SPAN)), parse_reply)


def page(keys: QueueKeys, after: str, until: str, size: int) -> Call[list[RawEntry]]:
    """Up to ``size`` entries behind ``after``, up to ``until`` and with it; undecoded."""
    return command("XRANGE", keys.events, f"({after}", until, "COUNT", size)
