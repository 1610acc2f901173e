"""The streaming reader of events: batch after batch, each planned from the end of the one before.

Spark stores the end of each batch, asks for the next one, and after a crash asks for the same one again. So the reader
keeps no state except what it has logged; losses are derived from the offsets and from the streams as they are.
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

from bulltask.errors import EventsLostError
from bulltask.spark.source.columns import event_batch, gap_entry
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
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.stream import SPAN, span_end, stream_exists, stream_info

__all__ = ["EventsStreamReader", "StreamPartition"]

_log = logging.getLogger(__name__)  # without a handler it writes to stderr, which is the driver's

_PATIENCE_MS: Final = 60_000
"""How long a running stream waits for a server that is restarting and loading its data before the query fails."""


_ReadStates = Callable[[Connection, Sequence[QueueKeys]], list[StreamState | None]]


@dataclass(frozen=True)
class StreamPartition(InputPartition):
    """Events that one task reads, or a record of lost ones.

    Attributes:
        queue: The user's name of the queue.
        piece: Which entries of which stream, or which of them are lost.
    """

    queue: str
    piece: EntryRange | EventGap


class EventsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the batches of one query; holds no connection and is cheap to create.

    Args:
        options: Which queues, how much at a time, and what to do about losses.
        schema: The columns to read, in order.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options, self._schema = options, arrow_schema(schema)
        self._target: Mapping[str, StreamState | None] | None = None
        self._logged = set[str]()  # skipped queues that the log mentions
        self._limits: dict[str, int] = {}  # how many events each stream kept when the previous batch was planned

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins with each queue."""
        begun = dict[str, QueueOffset]()
        for queue, now in self._all_states(patience_ms=None).items():  # the address may be wrong: fail early
            begun[queue] = with_stream_end(first_offset(now, self._options.starts_at(queue)), now)
        return encode_offsets(begun, begun)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that ``maxEventsPerTrigger`` sets."""
        max_entries = self._options.max_events
        return ReadAllAvailable() if max_entries is None else ReadMaxRows(max_entries)

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember how far the streams go now: the query ends when it has read that."""
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
        # A queue that is new in a list may have existed for long; with "all queues" it has just appeared.
        rules = BatchLimits(max_entries, self._options.align, count_missed=self._options.every, target=self._target)
        before = decode_offsets(start)
        with Connection(self._options.config, patience_ms=_PATIENCE_MS) as connection:
            found = self._find(connection)
            self._compare_limits(connection, found.queues)
            queues = {keys.name for keys in found.queues}
            if self._options.every:
                queues.update(before.keys() - found.skipped)  # also deleted queues, so that unread events are counted
            planned = plan_batch(
                before, _RedisStreams(connection, self._options.config.prefix, self._states), sorted(queues), rules
            )
        self._fail_for(planned.gaps)
        if planned.end == before:
            return start  # the same text
        return encode_offsets(planned.end, before if before == batch_start(None, start) else None)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Split a planned batch into tasks.

        Raises:
            EventsLostError: As for :meth:`latestOffset`; the batch may have been planned before a crash.
        """
        before, parts = batch_start(start, end) or {}, list[InputPartition]()
        with Connection(self._options.config, patience_ms=_PATIENCE_MS) as connection:
            for queue, state, upto in self._now(connection, end):
                gaps, span = split_range(queue.name, before.get(queue.name), upto, state)
                self._fail_for(gaps)
                pieces, late = _pieces(connection, queue, span, self._options.per_partition)
                self._fail_for(late)
                if self._options.gap_rows:
                    parts += [StreamPartition(queue.queue, gap) for gap in (*gaps, *late)]
                parts += [StreamPartition(queue.queue, piece) for piece in pieces]
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece, in batches; runs in another process than the other methods.

        Raises:
            EventsLostError: Some of its entries were trimmed after the batch was split, and ``failOnDataLoss`` is on.
        """
        assert isinstance(partition, StreamPartition)
        piece, count, page, left = partition.piece, 0, BEGINNING, None
        if isinstance(piece, EventGap):
            yield event_batch(self._schema, partition.queue, [gap_entry(piece)])
            return
        keys = QueueKeys(self._options.config.prefix, piece.queue, partition.queue)
        with Connection(self._options.config, patience_ms=_PATIENCE_MS) as connection:
            for entries in read_pages(connection, keys, piece.after, piece.upto, self._options.batch):
                count, page = count + len(entries), StreamId.parse(entries[0][0].decode())
                yield event_batch(self._schema, partition.queue, entries)
            if piece.missing(count):
                left = _first_left(connection, keys)
        # Trims remove from the beginning: what is missing was before the last page, or after it if nothing is left.
        gap = piece.gap(count, None if left is None else max(left, page))
        if gap is not None:
            self._fail_for([gap])
            if self._options.gap_rows:
                yield event_batch(self._schema, partition.queue, [gap_entry(gap)])

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: BullMQ trims the streams."""

    def stop(self) -> None:
        """Do nothing: no connection is kept."""

    def _find(self, connection: Connection) -> QueueSelection:
        found = discover_queues(connection, self._options)
        self._log_skipped(found.skipped)
        return found

    def _states(self, connection: Connection, queues: Sequence[QueueKeys]) -> list[StreamState | None]:
        foreign: list[QueueKeys] | None = [] if self._options.skip_foreign else None
        state = read_states(connection, queues, foreign)
        self._log_skipped({keys.name: not_a_stream_reason(keys) for keys in foreign or ()})
        return state

    def _compare_limits(self, connection: Connection, queues: Sequence[QueueKeys]) -> None:
        """Log streams whose length limit was lowered since the previous batch."""
        for keys, limit in zip(queues, max_lengths(connection, queues), strict=True):
            if limit < (before := self._limits.get(keys.name, limit)):
                _log.warning(
                    "[BULLTASK_STREAM_LIMIT_LOWERED] queue %s: opts.maxLenEvents was %s and is %s now, so its stream "
                    "keeps events for a shorter time. Node's new Queue() sets 10,000 unless streams.events.maxLen is "
                    "given: set it to %s there, and set opts.maxLenEvents again",
                    keys.queue,
                    *(f"{number:,}" for number in (before, limit, before)),
                )
            self._limits[keys.name] = limit

    def _log_skipped(self, skipped: Mapping[str, str]) -> None:
        log_skipped({queue: why for queue, why in skipped.items() if queue not in self._logged})
        self._logged.update(skipped)

    def _all_states(self, patience_ms: int | None = _PATIENCE_MS) -> dict[str, StreamState | None]:
        with Connection(self._options.config, patience_ms=patience_ms) as connection:
            found = self._find(connection).queues
            return dict(zip([keys.name for keys in found], self._states(connection, found), strict=True))

    def _now(self, connection: Connection, end: dict[str, Any]) -> Iterator[tuple[QueueKeys, StreamState | None, Any]]:
        """Yield the queues of a batch with the state of their streams; offsets also contain deleted queues."""
        ends, options = decode_offsets(end), self._options
        keys = [QueueKeys(options.config.prefix, name, options.user_name(name) or name) for name in ends]
        yield from zip(keys, self._states(connection, keys), ends.values(), strict=True)

    def _fail_for(self, gaps: Sequence[EventGap]) -> None:
        if gaps and self._options.fail_on_loss:
            raise EventsLostError("; ".join(gap.message for gap in gaps))


class _RedisStreams:
    """Answers the requests of a plan (``planning.EventStreams``)."""

    def __init__(self, connection: Connection, prefix: str, read_states: _ReadStates) -> None:
        self._connection, self._prefix, self._read_states = connection, prefix, read_states

    def states(self, queues: Sequence[str]) -> Mapping[str, StreamState | None]:
        state = self._read_states(self._connection, [self._keys(queue) for queue in queues])
        return dict(zip(queues, state, strict=True))

    def scan(self, questions: Sequence[ScanRequest]) -> Sequence[ScanResult]:
        return [self._scan(question) for question in questions]

    def _scan(self, question: ScanRequest) -> ScanResult:
        keys = self._keys(question.queue)
        wanted = SPAN if question.max_entries is None else min(SPAN, question.max_entries)
        asked = [
            stream_exists(keys),
            stream_info(keys),
            span_end(keys, str(question.after), str(question.until), wanted),
        ]
        there, info, end = self._connection.try_atomically(asked)
        if isinstance(end, Exception):
            raise end
        state = parse_state(there, info)
        more = end.count == wanted and wanted != question.max_entries
        return ScanResult(StreamId.parse(end.last) if end.count else None, end.count, state, more)

    def _keys(self, queue: str) -> QueueKeys:
        return QueueKeys(self._prefix, queue)


def _pieces(
    connection: Connection, keys: QueueKeys, span: EntryRange | None, size: int
) -> tuple[Sequence[EntryRange], Sequence[EventGap]]:
    """Split a range into pieces of up to ``size`` entries; also return what was trimmed from it in the meantime.

    Every piece is counted, including the last: what a trim takes from the first would otherwise be missing in the last,
    as a gap in the wrong place.
    """
    if span is None or span.expect is None or span.expect <= size:
        return [] if span is None else [span], []
    pieces = list(_cut(connection, keys, span, size))
    if not (missing := span.missing(sum(count for _, count in pieces))):
        return [piece for piece, _ in pieces], []
    first = _first_left(connection, keys)
    gap = EventGap(span.queue, span.after, first, missing, exact=True, reason=LossReason.AT_READ)
    return [piece for piece, _ in pieces], [gap]


def _cut(connection: Connection, keys: QueueKeys, span: EntryRange, size: int) -> Iterator[tuple[EntryRange, int]]:
    """Yield what is left of the range, in pieces of ``size`` entries, and how many each piece has."""
    after, count = span.after, size
    while count == size:
        last, count = find_end(connection, keys, after, span.upto, size)
        if last is not None:
            yield EntryRange(span.queue, after, last, count), count
            after = last


def _first_left(connection: Connection, keys: QueueKeys) -> StreamId | None:
    state = read_states(connection, [keys])[0]
    return None if state is None else state.first
