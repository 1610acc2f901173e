"""Event streams, asked of Redis: what they say of themselves, where so many entries end, and the entries in pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bulltask.errors import BulltaskError
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import StreamId, StreamState
from bulltask.transport.call import Call
from bulltask.transport.faults import is_wrong_type
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.stream import SPAN, RawEntry, StreamInfo, page, span_end, stream_exists, stream_info

__all__ = ["find_end", "parse_state", "read_pages", "read_states"]


def read_states(
    connection: Connection, queues: Sequence[QueueKeys], foreign: list[QueueKeys] | None = None
) -> list[StreamState | None]:
    """What each stream says of itself; ``None`` for one that is not there.

    Args:
        connection: to the server.
        queues: whose streams.
        foreign: gets those whose key holds something else, as if there were no stream; if left out, that is an error.
    """
    calls: list[Call[Any]] = []
    for keys in queues:
        calls += [stream_exists(keys), stream_info(keys)]
    replies = connection.try_many(calls) if calls else []
    if foreign is not None:
        foreign += [keys for keys, info in zip(queues, replies[1::2], strict=True) if is_wrong_type(info)]
    pairs = zip(replies[::2], replies[1::2], strict=True)
    return [parse_state(there, info, skip_foreign=foreign is not None) for there, info in pairs]


def parse_state(
    there: bool | BulltaskError, info: StreamInfo | BulltaskError, *, skip_foreign: bool = False
) -> StreamState | None:
    """What ``exists`` and ``stream_info`` answered, made one; Redis refuses the second where there is no stream."""
    if isinstance(there, BulltaskError):
        raise there
    if not there or (skip_foreign and is_wrong_type(info)):
        return None
    if isinstance(info, BulltaskError):
        raise info
    added = None if info.deleted else info.added
    first = StreamId.parse(info.first) if info.first else None
    return StreamState(first, StreamId.parse(info.last), info.length, added)


def find_end(
    connection: Connection, keys: QueueKeys, after: StreamId, until: StreamId, max_entries: int
) -> tuple[StreamId | None, int]:
    """The last of up to ``max_entries`` entries behind ``after``, and how many they are; ``None`` and 0 for none.

    Redis looks at a bounded number of them at a time, so that nobody else has to wait long.
    """
    last, count = after, 0
    while count < max_entries:
        wanted = min(SPAN, max_entries - count)
        found = connection.run(span_end(keys, str(last), str(until), wanted))
        if found.count:
            last, count = StreamId.parse(found.last), count + found.count
        if found.count < wanted:
            break
    return (last, count) if count else (None, 0)


def read_pages(
    connection: Connection, keys: QueueKeys, after: StreamId, upto: StreamId, size: int
) -> Iterator[list[RawEntry]]:
    """The entries behind ``after``, up to ``upto`` and with it, in lists of up to ``size``; ends when none is left."""
    place = str(after)
    while found := connection.run(page(keys, place, str(upto), size)):
        yield found
        if len(found) < size:
            return
        place = found[-1][0].decode()
