"""The streaming reader of events: it plans each batch from where the previous one ended.

Spark stores the end of each batch, requests the next batch, and after a crash requests the same batch again. The reader
therefore keeps no state except for logging; losses are derived from the offsets and the current streams.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from bulltask.jobs.errors import EventsLostError
from bulltask.spark.source.columns import event_record_batch, gap_entry
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import (
    BEGINNING,
    EventGap,
    LossReason,
    QueueOffset,
    StreamId,
    StreamState,
    batch_start,
    decode_offsets,
    encode_offsets,
    first_offset,
    with_stream_end,
)
from bulltask.spark.source.options import StreamOptions
from bulltask.spark.source.planning import BatchLimits, ScanRequest, ScanResult, plan_batch
from bulltask.spark.source.queues import QueueSelection, discover_queues, log_skipped, not_a_stream_reason
from bulltask.spark.source.ranges import EntryRange, split_range
from bulltask.spark.source.schemas import arrow_schema
from bulltask.spark.source.status import max_lengths
from bulltask.spark.source.streams import find_end, parse_state, read_pages, read_states
from bulltask.transport.call import QueueKeys
from bulltask.transport.streams import MAX_RANGE, last_id_of_range, stream_exists, stream_info

__all__ = ["EventsStreamReader", "StreamPartition"]

_log = logging.getLogger(__name__)  # without a handler, it writes to the driver's stderr

_OUTAGE_TIMEOUT_MS: Final = 60_000
"""How long a running query waits for a server that is restarting and loading its data, before the query fails."""


_StateReader = Callable[[Connection, Sequence[QueueKeys]], list[StreamState | None]]


@dataclass(frozen=True)
class StreamPartition(InputPartition):
    """The events that one task reads, or a record of lost events.

    Attributes:
        queue: The queue's name without the hash tag.
        piece: The range of entries, or the lost entries.
    """

    queue: str
    piece: EntryRange | EventGap


class EventsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the batches of one query. It holds no connection and is cheap to create.

    Args:
        options: The queues, the limits, and the handling of losses.
        schema: The columns to read, in order.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._target: Mapping[str, StreamState | None] | None = None
        self._logged = set[str]()  # skipped queues that have been logged
        self._limits: dict[str, int] = {}  # the length limit of each stream when the previous batch was planned

    def initialOffset(self) -> dict[str, Any]:
        """Return the start offsets of a new query."""
        offsets = dict[str, QueueOffset]()
        for queue, state in self._all_states(outage_timeout_ms=None).items():  # fail early if the address is wrong
            offsets[queue] = with_stream_end(first_offset(state, self._options.starts_at(queue)), state)
        return encode_offsets(offsets, offsets)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that ``maxEventsPerTrigger`` sets."""
        max_entries = self._options.max_events_per_trigger
        return ReadAllAvailable() if max_entries is None else ReadMaxRows(max_entries)

    def prepareForTriggerAvailableNow(self) -> None:
        """Store the current ends of the streams, which is where the query stops."""
        self._target = self._all_states()

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the end of the streams, for the query's progress."""
        return encode_offsets({queue: now.end for queue, now in self._all_states().items() if now is not None})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Plan the next batch.

        Raises:
            EventsLostError: Events were trimmed before they were read, and ``failOnDataLoss`` is on.
        """
        max_entries = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        # A queue that was just added to a list of names may be old; with *, it was just created.
        limits = BatchLimits(max_entries, self._options.align, count_missed=self._options.every, target=self._target)
        start_offsets = decode_offsets(start)
        with Connection(self._options.config, outage_timeout_ms=_OUTAGE_TIMEOUT_MS) as connection:
            selection = self._find(connection)
            self._compare_limits(connection, selection.queues)
            queues = {keys.name for keys in selection.queues}
            if self._options.every:
                # This includes deleted queues, so that their unread events are counted.
                queues.update(start_offsets.keys() - selection.skipped)
            planned = plan_batch(
                start_offsets,
                _RedisStreams(connection, self._options.config.prefix, self._states),
                sorted(queues),
                limits,
            )
        self._fail_for(planned.gaps)
        if planned.end == start_offsets:
            return start  # the same text, because Spark compares offsets as text
        return encode_offsets(planned.end, start_offsets if start_offsets == batch_start(None, start) else None)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Split a planned batch into tasks.

        Raises:
            EventsLostError: As for :meth:`latestOffset`, because the batch may have been planned before a crash.
        """
        start_offsets, result = batch_start(start, end) or {}, list[InputPartition]()
        with Connection(self._options.config, outage_timeout_ms=_OUTAGE_TIMEOUT_MS) as connection:
            for queue, state, end_offset in self._now(connection, end):
                gaps, span = split_range(queue.name, start_offsets.get(queue.name), end_offset, state)
                self._fail_for(gaps)
                pieces, late_gaps = _pieces(connection, queue, span, self._options.per_partition)
                self._fail_for(late_gaps)
                if self._options.gap_rows:
                    result += [StreamPartition(queue.queue, gap) for gap in (*gaps, *late_gaps)]
                result += [StreamPartition(queue.queue, piece) for piece in pieces]
        return result

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece as Arrow record batches. Runs in a different process from all other methods.

        Raises:
            EventsLostError: Entries were trimmed after the batch was split, and ``failOnDataLoss`` is on.
        """
        assert isinstance(partition, StreamPartition)
        piece, count, page, remaining_first = partition.piece, 0, BEGINNING, None
        if isinstance(piece, EventGap):
            yield event_record_batch(self._schema, partition.queue, [gap_entry(piece)])
            return
        keys = QueueKeys(self._options.config.prefix, piece.queue, partition.queue)
        with Connection(self._options.config, outage_timeout_ms=_OUTAGE_TIMEOUT_MS) as connection:
            for entries in read_pages(connection, keys, piece.after, piece.upto, self._options.fetch_size):
                count, page = count + len(entries), StreamId.parse(entries[0][0].decode())
                yield event_record_batch(self._schema, partition.queue, entries)
            if piece.missing(count):
                remaining_first = _first_entry(connection, keys)
        # Trimming removes entries from the beginning: missing entries were before the last page, or after it if nothing
        # is left.
        gap = piece.gap(count, None if remaining_first is None else max(remaining_first, page))
        if gap is not None:
            self._fail_for([gap])
            if self._options.gap_rows:
                yield event_record_batch(self._schema, partition.queue, [gap_entry(gap)])

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: BullMQ trims the streams."""

    def stop(self) -> None:
        """Do nothing: no connection is kept."""

    def _find(self, connection: Connection) -> QueueSelection:
        selection = discover_queues(connection, self._options)
        self._log_skipped(selection.skipped)
        return selection

    def _states(self, connection: Connection, queues: Sequence[QueueKeys]) -> list[StreamState | None]:
        unsupported: list[QueueKeys] | None = [] if self._options.skip_unsupported else None
        state = read_states(connection, queues, unsupported)
        self._log_skipped({keys.name: not_a_stream_reason(keys) for keys in unsupported or ()})
        return state

    def _compare_limits(self, connection: Connection, queues: Sequence[QueueKeys]) -> None:
        """Log streams whose length limit was lowered since the previous batch."""
        for keys, limit in zip(queues, max_lengths(connection, queues), strict=True):
            if limit < (before := self._limits.get(keys.name, limit)):
                _log.warning(
                    "[BULLTASK_STREAM_LIMIT_LOWERED] queue %s: opts.maxLenEvents was %s and is now %s, so its stream "
                    "keeps events for a shorter time. Node's new Queue() sets 10,000 unless streams.events.maxLen is "
                    "given: set it to %s there, and set opts.maxLenEvents again",
                    keys.queue,
                    *(f"{number:,}" for number in (before, limit, before)),
                )
            self._limits[keys.name] = limit

    def _log_skipped(self, skipped: Mapping[str, str]) -> None:
        log_skipped({queue: reason for queue, reason in skipped.items() if queue not in self._logged})
        self._logged.update(skipped)

    def _all_states(self, outage_timeout_ms: int | None = _OUTAGE_TIMEOUT_MS) -> dict[str, StreamState | None]:
        with Connection(self._options.config, outage_timeout_ms=outage_timeout_ms) as connection:
            queues = self._find(connection).queues
            return dict(zip([keys.name for keys in queues], self._states(connection, queues), strict=True))

    def _now(self, connection: Connection, end: dict[str, Any]) -> Iterator[tuple[QueueKeys, StreamState | None, Any]]:
        """Yield a batch's queues with the state of their streams; offsets also contain deleted queues."""
        ends, options = decode_offsets(end), self._options
        keys = [QueueKeys(options.config.prefix, name, options.app_name(name) or name) for name in ends]
        yield from zip(keys, self._states(connection, keys), ends.values(), strict=True)

    def _fail_for(self, gaps: Sequence[EventGap]) -> None:
        if gaps and self._options.fail_on_loss:
            raise EventsLostError("; ".join(gap.message for gap in gaps))


class _RedisStreams:
    """The streams in Redis; implements ``planning.EventStreams``."""

    def __init__(self, connection: Connection, prefix: str, read_states: _StateReader) -> None:
        self._connection = connection
        self._prefix = prefix
        self._read_states = read_states

    def states(self, queues: Sequence[str]) -> Mapping[str, StreamState | None]:
        state = self._read_states(self._connection, [self._keys(queue) for queue in queues])
        return dict(zip(queues, state, strict=True))

    def scan(self, requests: Sequence[ScanRequest]) -> Sequence[ScanResult]:
        return [self._scan(request) for request in requests]

    def _scan(self, request: ScanRequest) -> ScanResult:
        keys = self._keys(request.queue)
        max_count = MAX_RANGE if request.max_entries is None else min(MAX_RANGE, request.max_entries)
        calls = [
            stream_exists(keys),
            stream_info(keys),
            last_id_of_range(keys, str(request.after), str(request.until), max_count),
        ]
        exists, info, end = self._connection.try_atomically(calls)
        if isinstance(end, Exception):
            raise end
        state = parse_state(exists, info)
        truncated = end.count == max_count and max_count != request.max_entries
        return ScanResult(StreamId.parse(end.last) if end.count else None, end.count, state, truncated)

    def _keys(self, queue: str) -> QueueKeys:
        return QueueKeys(self._prefix, queue)


def _pieces(
    connection: Connection, keys: QueueKeys, span: EntryRange | None, size: int
) -> tuple[Sequence[EntryRange], Sequence[EventGap]]:
    """Split a range into pieces of up to ``size`` entries; also return the gaps from trimming in the meantime.

    Every piece is counted, including the last one. Otherwise, entries that are trimmed from the first piece would be
    recorded as a gap in the last one.
    """
    if span is None or span.expect is None or span.expect <= size:
        return [] if span is None else [span], []
    counted_pieces = list(_cut(connection, keys, span, size))
    if not (missing := span.missing(sum(count for _, count in counted_pieces))):
        return [piece for piece, _ in counted_pieces], []
    first = _first_entry(connection, keys)
    gap = EventGap(span.queue, span.after, first, missing, exact=True, loss_reason=LossReason.TRIMMED_DURING_READ)
    return [piece for piece, _ in counted_pieces], [gap]


def _cut(connection: Connection, keys: QueueKeys, span: EntryRange, size: int) -> Iterator[tuple[EntryRange, int]]:
    """Yield the remaining range in pieces of ``size`` entries, with the number of entries in each piece."""
    after, count = span.after, size
    while count == size:
        last, count = find_end(connection, keys, after, span.upto, size)
        if last is not None:
            yield EntryRange(span.queue, after, last, count), count
            after = last


def _first_entry(connection: Connection, keys: QueueKeys) -> StreamId | None:
    state = read_states(connection, [keys])[0]
    return None if state is None else state.first
