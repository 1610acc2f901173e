"""The commands that read and write a queue's event stream; packing only (PROTOCOL 4.13)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bulltask.transport.call import Arg, Call, command
from bulltask.transport.keys import QueueKeys

__all__ = [
    "BEGINNING",
    "LONGEST_BLOCK_MS",
    "PAGE",
    "Entry",
    "StreamInfo",
    "exists",
    "history",
    "last_id",
    "publish",
    "read_now",
    "read_on",
    "stream_info",
    "was_kept",
]

BEGINNING: Final = "0-0"
"""What comes before every entry."""

LONGEST_BLOCK_MS: Final = 5_000
"""A read waits this long at the most, so that a connection that died silently is noticed."""

PAGE: Final = 1_000
"""Entries of one read."""

Entry = tuple[str, dict[bytes, bytes]]
"""Id and fields."""


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

    def judge(reply: Any) -> str:
        return reply[0][0].decode() if reply else BEGINNING

    return command("XREVRANGE", keys.events, "+", "-", "COUNT", 1, judge=judge)


def read_on(keys: QueueKeys, cursor: str, block_ms: int) -> Call[list[Entry]]:
    """What comes after ``cursor``; waits for it up to ``block_ms``, which is at least 1: 0 would mean for ever."""
    block = max(1, min(block_ms, LONGEST_BLOCK_MS))
    return command("XREAD", "COUNT", PAGE, "BLOCK", block, "STREAMS", keys.events, cursor, judge=_read)


def read_now(keys: QueueKeys, cursor: str) -> Call[list[Entry]]:
    """What comes after ``cursor`` and is there already."""
    return command("XREAD", "COUNT", PAGE, "STREAMS", keys.events, cursor, judge=_read)


def history(keys: QueueKeys, since: str) -> Call[list[Entry]]:
    """All entries from ``since`` on, that one included."""
    return command("XRANGE", keys.events, since, "+", judge=_entries)


def was_kept(keys: QueueKeys, cursor: str) -> Call[bool]:
    """True when an entry at or before ``cursor`` is still there: none after it was trimmed then."""
    return command("XREVRANGE", keys.events, cursor, "-", "COUNT", 1, judge=bool)


def exists(keys: QueueKeys) -> Call[bool]:
    """True when there is a stream."""
    return command("EXISTS", keys.events, judge=bool)


def stream_info(keys: QueueKeys) -> Call[StreamInfo]:
    """The numbers of the stream; Redis refuses when there is none."""

    def judge(reply: Any) -> StreamInfo:
        said = dict(zip(reply[::2], reply[1::2], strict=True))
        return StreamInfo(
            length=int(said[b"length"]),
            last=said[b"last-generated-id"].decode(),
            added=int(said[b"entries-added"]) if b"entries-added" in said else None,
            deleted=said.get(b"max-deleted-entry-id", b"0-0") != b"0-0",
            first=said[b"first-entry"][0].decode() if said.get(b"first-entry") else "",
        )

    return command("XINFO", "STREAM", keys.events, judge=judge)


def publish(keys: QueueKeys, event: str, fields: Mapping[str, str], max_events: int) -> Call[str]:
    """Add an event of one's own, trim the stream to about ``max_events``; the result is the entry's id."""
    words: list[Arg] = [word for pair in fields.items() for word in pair]
    limit: tuple[Arg, ...] = ("MAXLEN", "~", max_events, "*")
    return command("XADD", keys.events, *limit, "event", event, *words, judge=lambda reply: str(reply.decode()))


def _read(reply: Any) -> list[Entry]:
    return _entries(reply[0][1]) if reply else []


def _entries(reply: Any) -> list[Entry]:
    return [(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in reply or ()]
