"""Queries on event streams in Redis: their entries, how long they keep them, and how far a lake is behind them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bulltask.jobs.errors import BulltaskError
from bulltask.lake.ledger import last_record
from bulltask.lake.status import Lag, PipelineStatus, SkippedQueue, status_of
from bulltask.spark.source.connection import Connection, discover_queues, not_a_stream_reason, skipped_queues
from bulltask.spark.source.discovery import find_again
from bulltask.spark.source.offsets import BEGINNING, StreamId, StreamState
from bulltask.spark.source.options import EventsOptions, ReadOptions, read_options
from bulltask.spark.source.planning import EntryRange, pack
from bulltask.transport.call import Call, QueueKeys, command
from bulltask.transport.redis_errors import is_wrong_type
from bulltask.transport.streams import (
    DEFAULT_LENGTH,
    MAX_RANGE,
    RawEntry,
    StreamInfo,
    StreamRetention,
    busiest_rate,
    last_id_of_range,
    page,
    stream_exists,
    stream_info,
)

if TYPE_CHECKING:
    from bulltask.lake.storage import Lake


def read_states(
    connection: Connection, queues: Sequence[QueueKeys], skipped: dict[str, str] | None = None
) -> list[StreamState | None]:
    """Return the state of each stream; ``None`` for a stream that does not exist.

    ``skipped`` collects queues whose key is not a stream, with the reason; without it, such a key is an error.
    """
    calls: list[Call[Any]] = [call for keys in queues for call in (stream_exists(keys), stream_info(keys))]
    replies = connection.try_many(calls)
    states: list[StreamState | None] = []
    for keys, exists, info in zip(queues, replies[::2], replies[1::2], strict=True):
        if skipped is not None and is_wrong_type(info):
            skipped[keys.name] = not_a_stream_reason(keys)
            states.append(None)
        else:
            states.append(parse_state(exists, info))
    return states


def parse_state(exists: bool | BulltaskError, info: StreamInfo | BulltaskError) -> StreamState | None:
    """Combine the replies to ``exists`` and ``stream_info``, which is an error reply if there is no stream."""
    if isinstance(exists, BulltaskError):
        raise exists
    if not exists:
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


class RangePart(NamedTuple):
    """Entries of a range.

    Attributes:
        keys, span: The queue and the range.
        entries: The entries.
        read: The number of the range's entries up to here.
        page: The id of the first entry of the last page that had any; `BEGINNING` without entries.
        is_last: Whether the range ends here.
    """

    keys: QueueKeys
    span: EntryRange
    entries: Sequence[RawEntry]
    read: int
    page: StreamId
    is_last: bool


def read_ranges(
    connection: Connection, ranges: Iterable[tuple[QueueKeys, EntryRange]], size: int
) -> Iterator[list[RangePart]]:
    """Yield the entries of ranges, given with their queues: what a round trip returns, about ``size`` entries.

    A round trip reads several short ranges, or a page of a long one.
    """

    def first_page(item: tuple[QueueKeys, EntryRange]) -> int:
        return size if item[1].expect is None else min(size, item[1].expect)

    for group in pack(ranges, first_page, size):
        unread = [RangePart(keys, span, (), 0, BEGINNING, is_last=False) for keys, span in group]
        while unread:
            calls = [page(it.keys, _position(it), str(it.span.upto), size) for it in unread]
            replies = connection.run_many(calls)
            parts = [_next_part(it, entries, size) for it, entries in zip(unread, replies, strict=True)]
            yield parts
            unread = [it for it in parts if not it.is_last]


def _position(part: RangePart) -> str:
    return part.entries[-1][0].decode() if part.entries else str(part.span.after)


def _next_part(before: RangePart, entries: Sequence[RawEntry], size: int) -> RangePart:
    first = StreamId.parse(entries[0][0].decode()) if entries else before.page
    read = before.read + len(entries)
    return RangePart(before.keys, before.span, entries, read, first, is_last=len(entries) < size)


_RECENT_MS: Final = 10_000
_MAX_COUNTED: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ObservedStreams:
    """The streams of a pipeline's queues with their retention and state, and the skipped queues."""

    streams: Sequence[tuple[QueueKeys, StreamRetention, StreamState | None]]
    skipped: Sequence[SkippedQueue]


def observe_streams(connection: Connection, options: ReadOptions) -> ObservedStreams:
    """Query all queues that a pipeline with these options reads.

    The rate is the higher of two: over the whole stream, and over the last ten seconds with events.
    """
    names = find_again(connection, options.config) if options.every else None
    selection = discover_queues(connection, options, names)
    states = read_states(connection, selection.queues, selection.skipped)
    limits = max_lengths(connection, selection.queues)
    rates = _rates(connection, [(keys, state) for keys, state in zip(selection.queues, states, strict=True) if state])
    streams = [
        (keys, StreamRetention(keys.queue, state.length if state else 0, limit, rates.get(keys.queue)), state)
        for keys, limit, state in zip(selection.queues, limits, states, strict=True)
        if keys.name not in selection.skipped
    ]
    return ObservedStreams(streams, skipped_queues(selection.skipped))


def max_lengths(connection: Connection, queues: Sequence[QueueKeys]) -> list[int]:
    """Return the maximum length of each queue's event stream."""
    replies = connection.try_many([command("HGET", keys.meta, "opts.maxLenEvents") for keys in queues])
    return list(map(_limit, replies))


def _rates(connection: Connection, streams: Sequence[tuple[QueueKeys, StreamState]]) -> dict[str, float | None]:
    """Return the events per second of each queue: as a whole or in the last ten seconds, whichever is higher."""
    recent = [
        (keys, StreamId(max(state.last.ms - _RECENT_MS, 0), 0), state.last) for keys, state in streams if state.length
    ]
    counts = _count_entries(connection, recent)
    return {
        keys.queue: busiest_rate([
            (state.length, state.last.ms - (state.first or state.last).ms),
            (counts.get(keys.queue, 0), _RECENT_MS),
        ])
        for keys, state in streams
    }  # fmt: skip


def _count_entries(connection: Connection, ranges: Iterable[tuple[QueueKeys, StreamId, StreamId]]) -> dict[str, int]:
    """Return each queue's number of entries after the first id, up to the second one, and up to about `_MAX_COUNTED`.

    Most queues need one round trip, which hundreds of them share. Redis pauses only between round trips, so all of a
    round trip's commands together scan as much as `MAX_RANGE`.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    unread, size = list(ranges), MAX_RANGE // 100
    while unread:
        rest: list[tuple[QueueKeys, StreamId, StreamId]] = []
        for start in range(0, len(unread), MAX_RANGE // size):
            group = unread[start : start + MAX_RANGE // size]
            calls = [last_id_of_range(keys, str(after), str(until), size) for keys, after, until in group]
            for (keys, _, until), end in zip(group, connection.run_many(calls), strict=True):
                counts[keys.queue] += end.count
                if end.count == size and counts[keys.queue] < _MAX_COUNTED:
                    rest.append((keys, StreamId.parse(end.last), until))
        unread, size = rest, min(10 * size, MAX_RANGE)
    return counts


def _limit(stored: bytes | BulltaskError | None) -> int:
    if isinstance(stored, BulltaskError):
        if not is_wrong_type(stored):
            raise stored
        return DEFAULT_LENGTH
    # BullMQ's scripts use the default if the field is missing or not a number.
    return int(stored) if stored is not None and stored.isdigit() else DEFAULT_LENGTH


def pipeline_status(lake: Lake, source: Mapping[str, str]) -> PipelineStatus:
    """Return the status of a pipeline; ``source`` has the location of the queues, as options of the data source."""
    from bulltask.lake.storage import writer_pid  # noqa: PLC0415 - imports Arrow

    options = read_options(EventsOptions, {**source, "table": "events", "skipUnsupportedQueues": "true"})
    head = last_record(lake)
    lags: Mapping[str, Lag] = {}
    skipped: Sequence[SkippedQueue] = ()
    redis_error: str | None = None
    try:
        with Connection(options.config) as connection:
            observed = observe_streams(connection, options)
            lags, skipped = _lags(connection, observed, {} if head is None else head.last_ids), observed.skipped
    except BulltaskError as exc:
        redis_error = str(exc)
    status, pid = status_of(lake.root, head, lags), writer_pid(lake)
    return replace(status, writer_pid=pid, redis_error=redis_error, skipped=skipped, broker=lake.broker)


def _lags(connection: Connection, observed: ObservedStreams, ends: Mapping[str, str]) -> dict[str, Lag]:
    lags = {keys.queue: Lag(stream, 0, 0.0) for keys, stream, _ in observed.streams}
    unread: list[tuple[QueueKeys, StreamId, StreamId]] = []
    for keys, stream, state in observed.streams:
        last = StreamId.parse(ends[keys.queue]) if keys.queue in ends else BEGINNING
        if state is not None and last < state.last:
            since_ms = last.ms if last != BEGINNING else (state.first or state.last).ms
            lags[keys.queue] = Lag(stream, state.length, (state.last.ms - since_ms) / 1000)
            if last != BEGINNING:
                unread.append((keys, last, state.last))
    for queue, events in _count_entries(connection, unread).items():
        lags[queue] = lags[queue]._replace(events=events)
    return lags
