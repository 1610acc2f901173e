"""Commands that read and write a queue's event stream."""

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
    "MAX_RANGE",
    "PAGE",
    "READ_ONLY_SCRIPTS",
    "Entry",
    "RangeEnd",
    "StreamInfo",
    "entries_since",
    "is_retained",
    "last_id",
    "last_id_of_range",
    "page",
    "publish",
    "read_blocking",
    "read_now",
    "stream_exists",
    "stream_info",
]

BEGINNING: Final = "0-0"
"""An id that precedes every entry."""

LONGEST_BLOCK_MS: Final = 5_000
"""Maximum time that a read blocks, so that a connection that died silently is noticed."""

PAGE: Final = 1_000
"""Maximum number of entries in one read."""

Entry = tuple[str, dict[bytes, bytes]]
"""Id and fields."""

MAX_RANGE: Final = 10_000
"""Maximum number of entries that one call to :func:`last_id_of_range` reads, which takes a few milliseconds."""

READ_ONLY_SCRIPTS: Final = frozenset({"lastIdOfRange"})
"""bulltask's scripts that write nothing."""

RawEntry = tuple[bytes, Sequence[bytes]]
"""Id and fields of an entry as Redis sends them: name, value, name, value …"""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """State of a stream (``XINFO STREAM``).

    Attributes:
        length: Number of entries.
        last: Id of the newest entry that was ever added.
        added: Number of entries that were ever added; ``None`` before Redis 7.0, which does not count them.
        deleted: True if individual entries were deleted (``XDEL``), which BullMQ never does.
        first: Id of the oldest entry, ``""`` if there is none.
    """

    length: int
    last: str
    added: int | None
    deleted: bool
    first: str = ""

    @property
    def trimmed(self) -> int | None:
        """Number of entries that were trimmed from the beginning; ``None`` if unknown."""
        return None if self.added is None or self.deleted else self.added - self.length


def last_id(keys: QueueKeys) -> Call[str]:
    """Return the id of the newest entry, :data:`BEGINNING` if there is none."""

    def parse_reply(reply: Any) -> str:
        return reply[0][0].decode() if reply else BEGINNING

    return command("XREVRANGE", keys.events, "+", "-", "COUNT", 1, parse_reply=parse_reply)


def read_blocking(keys: QueueKeys, cursor: str, block_ms: int) -> Call[list[Entry]]:
    """Read the entries after ``cursor``; wait up to ``block_ms`` for them, at least 1 because 0 would mean forever."""
    block = max(1, min(block_ms, LONGEST_BLOCK_MS))
    return command("XREAD", "COUNT", PAGE, "BLOCK", block, "STREAMS", keys.events, cursor, parse_reply=_read)


def read_now(keys: QueueKeys, cursor: str) -> Call[list[Entry]]:
    """Read the entries after ``cursor`` that exist now."""
    return command("XREAD", "COUNT", PAGE, "STREAMS", keys.events, cursor, parse_reply=_read)


def entries_since(keys: QueueKeys, since: str) -> Call[list[Entry]]:
    """Read all entries from ``since`` on, inclusive."""
    return command("XRANGE", keys.events, since, "+", parse_reply=_entries)


def is_retained(keys: QueueKeys, cursor: str) -> Call[bool]:
    """Return True if an entry at or before ``cursor`` still exists: then no entry after it was trimmed."""
    return command("XREVRANGE", keys.events, cursor, "-", "COUNT", 1, parse_reply=bool)


def stream_exists(keys: QueueKeys) -> Call[bool]:
    """Return True if the queue has a stream."""
    return command("EXISTS", keys.events, parse_reply=bool)


def stream_info(keys: QueueKeys) -> Call[StreamInfo]:
    """Read the state of the stream; Redis returns an error if it does not exist."""

    def parse_reply(reply: Any) -> StreamInfo:
        reply_map = dict(zip(reply[::2], reply[1::2], strict=True))
        return StreamInfo(
            length=int(reply_map[b"length"]),
            last=reply_map[b"last-generated-id"].decode(),
            added=int(reply_map[b"entries-added"]) if b"entries-added" in reply_map else None,
            deleted=reply_map.get(b"max-deleted-entry-id", b"0-0") != b"0-0",
            first=reply_map[b"first-entry"][0].decode() if reply_map.get(b"first-entry") else "",
        )

    return command("XINFO", "STREAM", keys.events, parse_reply=parse_reply)


def publish(keys: QueueKeys, event: str, fields: Mapping[str, str], max_events: int) -> Call[str]:
    """Add a custom event and trim the stream to about ``max_events``. Returns the entry's id."""
    args: list[Arg] = [arg for pair in fields.items() for arg in pair]
    limit: tuple[Arg, ...] = ("MAXLEN", "~", max_events, "*")
    return command("XADD", keys.events, *limit, "event", event, *args, parse_reply=lambda reply: str(reply.decode()))


def _read(reply: Any) -> list[Entry]:
    return _entries(reply[0][1]) if reply else []


def _entries(reply: Any) -> list[Entry]:
    return [(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in reply or ()]


@dataclass(frozen=True, slots=True)
class RangeEnd:
    """The end of a range in a stream.

    Attributes:
        last: Id of the last entry, ``""`` if there is none.
        count: Number of entries.
    """

    last: str
    count: int


def last_id_of_range(keys: QueueKeys, after: str, until: str, max_entries: int) -> Call[RangeEnd]:
    """bulltask's ``lastIdOfRange``: find the last of the next ``max_entries`` (up to :data:`MAX_RANGE`) entries.

    Args:
        keys: The queue.
        after: Id before the first entry; ``0-0`` for the beginning.
        until: Maximum id; ``+`` for none, ``1760010061025`` for the last entry of that millisecond.
        max_entries: Maximum number of entries.
    """

    def parse_reply(reply: Any) -> RangeEnd:
        return RangeEnd(text(reply[0]), int(reply[1]))

    return script_call(
        loader.bulltask_script("lastIdOfRange"),
        (keys.events,),
        (after, until, min(max_entries, MAX_RANGE)),
        parse_reply,
    )


def page(keys: QueueKeys, after: str, until: str, size: int) -> Call[list[RawEntry]]:
    """Read up to ``size`` entries after ``after``, up to and including ``until``, without decoding them."""
    return command("XRANGE", keys.events, f"({after}", until, "COUNT", size)
