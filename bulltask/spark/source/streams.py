"""Queries on event streams in Redis: their state, the last of the next entries up to a limit, and pages of entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bulltask.jobs.errors import BulltaskError
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import StreamId, StreamState
from bulltask.transport.call import Call, QueueKeys
from bulltask.transport.redis_errors import is_wrong_type
from bulltask.transport.streams import (
    MAX_RANGE,
    RawEntry,
    StreamInfo,
    last_id_of_range,
    page,
    stream_exists,
    stream_info,
)

__all__ = ["find_end", "parse_state", "read_pages", "read_states"]


def read_states(
    connection: Connection, queues: Sequence[QueueKeys], unsupported: list[QueueKeys] | None = None
) -> list[StreamState | None]:
    """Return the state of each stream; ``None`` for a stream that does not exist.

    Args:
        connection: The connection to the server.
        queues: The queues.
        unsupported: Collects queues whose key is not a stream; their state is ``None``. If omitted, such a key is an
            error.
    """
    calls: list[Call[Any]] = []
    for keys in queues:
        calls += [stream_exists(keys), stream_info(keys)]
    replies = connection.try_many(calls) if calls else []
    if unsupported is not None:
        unsupported += [keys for keys, info in zip(queues, replies[1::2], strict=True) if is_wrong_type(info)]
    pairs = zip(replies[::2], replies[1::2], strict=True)
    return [parse_state(exists, info, skip_unsupported=unsupported is not None) for exists, info in pairs]


def parse_state(
    exists: bool | BulltaskError, info: StreamInfo | BulltaskError, *, skip_unsupported: bool = False
) -> StreamState | None:
    """Combine the replies to ``exists`` and ``stream_info``, which is an error reply if there is no stream."""
    if isinstance(exists, BulltaskError):
        raise exists
    if not exists or (skip_unsupported and is_wrong_type(info)):
        return None
    if isinstance(info, BulltaskError):
        raise info
    added = None if info.deleted else info.added
    first = StreamId.parse(info.first) if info.first else None
    return StreamState(first, StreamId.parse(info.last), info.length, added)


def find_end(
    connection: Connection, keys: QueueKeys, after: StreamId, until: StreamId, max_entries: int
) -> tuple[StreamId | None, int]:
    """Return the last of up to ``max_entries`` entries after ``after``, and their number; ``None`` and 0 for none.

    Redis scans a limited number of entries at a time, so that other clients do not wait long.
    """
    last, count = after, 0
    while count < max_entries:
        max_count = min(MAX_RANGE, max_entries - count)
        result = connection.run(last_id_of_range(keys, str(last), str(until), max_count))
        if result.count:
            last, count = StreamId.parse(result.last), count + result.count
        if result.count < max_count:
            break
    return (last, count) if count else (None, 0)


def read_pages(
    connection: Connection, keys: QueueKeys, after: StreamId, upto: StreamId, size: int
) -> Iterator[list[RawEntry]]:
    """Yield the entries after ``after``, up to and including ``upto``, in lists of at most ``size``."""
    position = str(after)
    while entries := connection.run(page(keys, position, str(upto), size)):
        yield entries
        if len(entries) < size:
            return
        position = entries[-1][0].decode()
