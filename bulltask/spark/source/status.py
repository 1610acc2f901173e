"""The state of event streams: how long they keep events, and how far a lake is behind them. Does not need Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bulltask.jobs.errors import BulltaskError
from bulltask.lake.layout import Layout
from bulltask.lake.ledger import Ledger
from bulltask.lake.lock import writer_pid
from bulltask.lake.status import Lag, PipelineStatus, SkippedQueue, status_of
from bulltask.lake.stream_retention import DEFAULT_LENGTH, StreamRetention, busiest_rate
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import BEGINNING, StreamId, StreamState
from bulltask.spark.source.options import EventsOptions, ReadOptions, read_options
from bulltask.spark.source.queues import discover_queues, not_a_stream_reason, skipped_queues
from bulltask.spark.source.streams import find_end, read_states
from bulltask.transport.call import QueueKeys, command
from bulltask.transport.redis_errors import is_wrong_type

__all__ = ["ObservedStreams", "max_lengths", "observe_streams", "pipeline_status", "redis_version"]

_RECENT_MS: Final = 10_000
_MAX_COUNTED: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ObservedStreams:
    """The streams of a pipeline's queues.

    Attributes:
        streams: Each queue with the retention and the state of its stream.
        skipped: The skipped queues.
    """

    streams: Sequence[tuple[QueueKeys, StreamRetention, StreamState | None]]
    skipped: Sequence[SkippedQueue]


def observe_streams(connection: Connection, options: ReadOptions) -> ObservedStreams:
    """Query all queues that a pipeline with these options reads.

    The rate is the higher of two: over the whole stream, and over the last ten seconds with events.
    """
    selection, unsupported = discover_queues(connection, options), list[QueueKeys]()
    states = read_states(connection, selection.queues, unsupported)
    streams = []
    for keys, limit, state in zip(selection.queues, max_lengths(connection, selection.queues), states, strict=True):
        if keys not in unsupported:
            rate = None if state is None else _rate(connection, keys, state)
            streams.append((keys, StreamRetention(keys.queue, state.length if state else 0, limit, rate), state))
    return ObservedStreams(
        streams, skipped_queues({**selection.skipped, **{keys.name: not_a_stream_reason(keys) for keys in unsupported}})
    )


def max_lengths(connection: Connection, queues: Sequence[QueueKeys]) -> list[int]:
    """Return the maximum length of each queue's event stream."""
    replies = connection.try_many([command("HGET", keys.meta, "opts.maxLenEvents") for keys in queues])
    return list(map(_limit, replies))


def redis_version(connection: Connection) -> str | None:
    """Return the version of the server, which may be Redis or Valkey; ``None`` if it does not report one."""
    return ".".join(map(str, connection.server_info().version)) or None


def _rate(connection: Connection, keys: QueueKeys, state: StreamState) -> float | None:
    if state.first is None:
        return None
    spans = [(state.length, state.last.ms - state.first.ms)]
    since = StreamId(max(state.last.ms - _RECENT_MS, 0), 0)
    if since > state.first:
        spans.append((find_end(connection, keys, since, state.last, _MAX_COUNTED)[1], _RECENT_MS))
    return busiest_rate(spans)


def _limit(stored: bytes | BulltaskError | None) -> int:
    if isinstance(stored, BulltaskError):
        if not is_wrong_type(stored):
            raise stored
        return DEFAULT_LENGTH
    # BullMQ's scripts use the default if the field is missing or not a number.
    return int(stored) if stored is not None and stored.isdigit() else DEFAULT_LENGTH


def pipeline_status(layout: Layout, source: Mapping[str, str]) -> PipelineStatus:
    """Return the status of a pipeline.

    Args:
        layout: The lake.
        source: The location of the queues, as options of ``format("bulltask")``.

    Raises:
        ConfigError: An option of the source is invalid.
    """
    options = read_options(EventsOptions, {**source, "table": "events", "skipUnsupportedQueues": "true"})
    head = Ledger(layout).head()
    lags: Mapping[str, Lag] = {}
    skipped: Sequence[SkippedQueue] = ()
    redis_error: str | None = None
    try:
        with Connection(options.config) as connection:
            observed = observe_streams(connection, options)
            lags, skipped = _lags(connection, observed, {} if head is None else head.last_ids), observed.skipped
    except BulltaskError as exc:
        redis_error = str(exc)
    return status_of(
        str(layout.root), head, lags, writer_pid=writer_pid(layout), redis_error=redis_error, skipped=skipped
    )


def _lags(connection: Connection, observed: ObservedStreams, ends: Mapping[str, str]) -> dict[str, Lag]:
    lags: dict[str, Lag] = {}
    for keys, stream, state in observed.streams:
        last = StreamId.parse(ends[keys.queue]) if keys.queue in ends else BEGINNING
        if state is None or last >= state.last:
            lags[keys.queue] = Lag(stream, 0, 0.0)
            continue
        unread = state.length if last == BEGINNING else find_end(connection, keys, last, state.last, _MAX_COUNTED)[1]
        since_ms = last.ms if last != BEGINNING else (state.first or state.last).ms
        lags[keys.queue] = Lag(stream, unread, (state.last.ms - since_ms) / 1000)
    return lags
