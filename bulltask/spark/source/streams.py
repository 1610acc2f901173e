"""Queries about event streams in Redis: their state, where a number of entries ends, and the entries in pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bulltask.errors import BulltaskError
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import StreamId, StreamState
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.redis_errors import is_wrong_type
from bulltask.transport.scripts.stream import SPAN, RawEntry, StreamInfo, page, span_end, stream_exists, stream_info

__all__ = ["find_end", "parse_state", "read_pages", "read_states"]


def read_states(
    connection: Connection, queues: Sequence[QueueKeys], foreign: list[QueueKeys] | None = None
) -> list[StreamState | None]:
    """Return the state of each stream; ``None`` for one that does not exist.

    Args:
        connection: To the server.
        queues: Whose streams.
        foreign: Collects queues whose key holds another type, which then count as having no stream. If omitted, such a
            key is an error.
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
    """Combine the replies of ``exists`` and ``stream_info``; Redis refuses the second if there is no stream."""
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
    """Return the last of up to ``max_entries`` entries after ``after``, and how many they are; ``None`` and 0 for none.

    Redis scans a bounded number at a time, so that other clients do not wait long.
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
    """Yield the entries after ``after``, up to and including ``upto``, in lists of at most ``size``."""
    place = str(after)
    while found := connection.run(page(keys, place, str(upto), size)):
        yield found
        if len(found) < size:
            return
        place = found[-1][0].decode()
