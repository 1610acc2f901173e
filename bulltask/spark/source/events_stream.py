"""The stream reader of events: batch after batch, each planned from the last one's end.

Spark keeps the end of each batch, asks for the next one, and after a crash asks for the same one again. So the reader
remembers nothing but what it has logged: what is lost is worked out from positions and from the streams as they are.
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
from bulltask.spark.source.options import StreamOptions
from bulltask.spark.source.planning import Question, Reach, Rules, plan
from bulltask.spark.source.positions import (
    BEGINNING,
    Facts,
    Gap,
    LossReason,
    Position,
    StreamId,
    begin_of,
    decode,
    encode,
    seeing,
    starting,
)
from bulltask.spark.source.queues import Found, look_for_queues, no_stream, tell
from bulltask.spark.source.schemas import arrow_schema
from bulltask.spark.source.spans import Span, spans_of
from bulltask.spark.source.status import limits_of
from bulltask.spark.source.streams import end_of, facts_of, read_facts, read_pages
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.stream import SPAN, span_end, stream_exists, stream_info

__all__ = ["EventsStreamReader", "StreamPartition"]

_log = logging.getLogger(__name__)  # without a handler it writes to stderr, which is the driver's

_PATIENCE_MS: Final = 60_000
"""So long a server may be away, to be started again and to read its files, until a stream that runs ends for it."""


_FactsOf = Callable[[Connection, Sequence[QueueKeys]], list[Facts | None]]


@dataclass(frozen=True)
class StreamPartition(InputPartition):
    """Events that one task reads, or what is lost of them.

    Attributes:
        queue: as the user spells it.
        piece: which entries of which stream, or which of them nobody can read any more.
    """

    queue: str
    piece: Span | Gap


class EventsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Responsible for the batches of one query; it holds no connection and is cheap to make.

    Args:
        options: which queues, how much at once, and what to do about losses.
        schema: the columns to read, in their order.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options, self._schema = options, arrow_schema(schema)
        self._target: Mapping[str, Facts | None] | None = None
        self._told = set[str]()  # queues that are set aside
        self._limits: dict[str, int] = {}  # how many events each ring kept when the batch before was planned

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query begins with each queue."""
        begun = dict[str, Position]()
        for queue, now in self._all_facts(patience_ms=None).items():  # an address may be wrong
            begun[queue] = seeing(starting(now, self._options.starts_at(queue)), now)
        return encode(begun, begun)

    def getDefaultReadLimit(self) -> ReadLimit:
        """What ``maxEventsPerTrigger`` says."""
        most = self._options.max_events
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember what there is now: the query ends when it has read that."""
        self._target = self._all_facts()

    def reportLatestOffset(self) -> dict[str, Any]:
        """What there is to be read, for the query's progress."""
        return encode({queue: now.end for queue, now in self._all_facts().items() if now is not None})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Plan the next batch.

        Raises:
            EventsLostError: events were trimmed before they were read, and ``failOnDataLoss`` is on.
        """
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        # With a list of queues, one that is new to it may have been there for long; with all, it has just come up.
        rules = Rules(most, self._options.align, count_missed=self._options.every, target=self._target)
        before = decode(start)
        with Connection(self._options.config, patience_ms=_PATIENCE_MS) as connection:
            found = self._find(connection)
            self._compare_limits(connection, found.queues)
            queues = {keys.name for keys in found.queues}
            if self._options.every:
                queues.update(before.keys() - found.aside)  # those that have vanished, with what was not read of them
            planned = plan(
                before, _RedisStreams(connection, self._options.config.prefix, self._facts), sorted(queues), rules
            )
        self._fail_for(planned.gaps)
        if planned.end == before:
            return start  # to the letter
        return encode(planned.end, before if before == begin_of(None, start) else None)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Cut a planned batch into pieces for tasks.

        Raises:
            EventsLostError: as :meth:`latestOffset`; the batch may have been planned before a crash.
        """
        before, parts = begin_of(start, end) or {}, list[InputPartition]()
        with Connection(self._options.config, patience_ms=_PATIENCE_MS) as connection:
            for queue, facts, upto in self._now(connection, end):
                gaps, span = spans_of(queue.name, before.get(queue.name), upto, facts)
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
            EventsLostError: entries of it were trimmed after the batch was cut, and ``failOnDataLoss`` is on.
        """
        assert isinstance(partition, StreamPartition)
        piece, count, page, left = partition.piece, 0, BEGINNING, None
        if isinstance(piece, Gap):
            yield event_batch(self._schema, partition.queue, [gap_entry(piece)])
            return
        keys = QueueKeys(self._options.config.prefix, piece.queue, partition.queue)
        with Connection(self._options.config, patience_ms=_PATIENCE_MS) as connection:
            for entries in read_pages(connection, keys, piece.after, piece.upto, self._options.batch):
                count, page = count + len(entries), StreamId.parse(entries[0][0].decode())
                yield event_batch(self._schema, partition.queue, entries)
            if piece.missing(count):
                left = _first_left(connection, keys)
        # Trims go from the beginning: what is missing was before the last page, or behind it, where nothing is left.
        gap = piece.gap(count, None if left is None else max(left, page))
        if gap is not None:
            self._fail_for([gap])
            if self._options.gap_rows:
                yield event_batch(self._schema, partition.queue, [gap_entry(gap)])

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the streams belong to BullMQ, which trims them."""

    def stop(self) -> None:
        """Nothing to do: no connection is kept."""

    def _find(self, connection: Connection) -> Found:
        found = look_for_queues(connection, self._options)
        self._tell(found.aside)
        return found

    def _facts(self, connection: Connection, queues: Sequence[QueueKeys]) -> list[Facts | None]:
        foreign: list[QueueKeys] | None = [] if self._options.skip_foreign else None
        facts = facts_of(connection, queues, foreign)
        self._tell({keys.name: no_stream(keys) for keys in foreign or ()})
        return facts

    def _compare_limits(self, connection: Connection, queues: Sequence[QueueKeys]) -> None:
        """Log rings that were made shorter since the batch before."""
        for keys, limit in zip(queues, limits_of(connection, queues), strict=True):
            if limit < (before := self._limits.get(keys.name, limit)):
                _log.warning(
                    "[BULLTASK_RING_SHORTENED] queue %s: opts.maxLenEvents was %s and is %s now, so its stream holds "
                    "events for a shorter time. Node's new Queue() sets 10,000 unless it is given "
                    "streams.events.maxLen: give it %s there, and set it again",
                    keys.queue,
                    *(f"{number:,}" for number in (before, limit, before)),
                )
            self._limits[keys.name] = limit

    def _tell(self, aside: Mapping[str, str]) -> None:
        tell({queue: why for queue, why in aside.items() if queue not in self._told})
        self._told.update(aside)

    def _all_facts(self, patience_ms: int | None = _PATIENCE_MS) -> dict[str, Facts | None]:
        with Connection(self._options.config, patience_ms=patience_ms) as connection:
            found = self._find(connection).queues
            return dict(zip([keys.name for keys in found], self._facts(connection, found), strict=True))

    def _now(self, connection: Connection, end: dict[str, Any]) -> Iterator[tuple[QueueKeys, Facts | None, Any]]:
        """The queues of a batch with their streams as they are; offsets keep queues that are gone."""
        ends, options = decode(end), self._options
        keys = [QueueKeys(options.config.prefix, name, options.user_name(name) or name) for name in ends]
        yield from zip(keys, self._facts(connection, keys), ends.values(), strict=True)

    def _fail_for(self, gaps: Sequence[Gap]) -> None:
        if gaps and self._options.fail_on_loss:
            raise EventsLostError("; ".join(gap.message for gap in gaps))


class _RedisStreams:
    """Answers the questions of a plan (``planning.Streams``)."""

    def __init__(self, connection: Connection, prefix: str, facts_of: _FactsOf) -> None:
        self._connection, self._prefix, self._facts_of = connection, prefix, facts_of

    def facts(self, queues: Sequence[str]) -> Mapping[str, Facts | None]:
        facts = self._facts_of(self._connection, [self._keys(queue) for queue in queues])
        return dict(zip(queues, facts, strict=True))

    def reach(self, questions: Sequence[Question]) -> Sequence[Reach]:
        return [self._reach(question) for question in questions]

    def _reach(self, question: Question) -> Reach:
        keys = self._keys(question.queue)
        wanted = SPAN if question.most is None else min(SPAN, question.most)
        asked = [
            stream_exists(keys),
            stream_info(keys),
            span_end(keys, str(question.after), str(question.until), wanted),
        ]
        there, info, end = self._connection.try_at_once(asked)
        if isinstance(end, Exception):
            raise end
        facts = read_facts(there, info)
        more = end.count == wanted and wanted != question.most
        return Reach(StreamId.parse(end.last) if end.count else None, end.count, facts, more)

    def _keys(self, queue: str) -> QueueKeys:
        return QueueKeys(self._prefix, queue)


def _pieces(
    connection: Connection, keys: QueueKeys, span: Span | None, size: int
) -> tuple[Sequence[Span], Sequence[Gap]]:
    """Pieces of up to ``size`` entries that together are the span, and what was trimmed of it meanwhile.

    Each piece is counted, also the last one: what a trim takes from the first would else be missed in the last, as a
    gap in another place.
    """
    if span is None or span.expect is None or span.expect <= size:
        return [] if span is None else [span], []
    pieces = list(_cut(connection, keys, span, size))
    if not (missing := span.missing(sum(count for _, count in pieces))):
        return [piece for piece, _ in pieces], []
    first = _first_left(connection, keys)
    gap = Gap(span.queue, span.after, first, missing, exact=True, reason=LossReason.AT_READ)
    return [piece for piece, _ in pieces], [gap]


def _cut(connection: Connection, keys: QueueKeys, span: Span, size: int) -> Iterator[tuple[Span, int]]:
    """What is there of the span, in pieces of ``size`` entries, and how many each has."""
    after, count = span.after, size
    while count == size:
        last, count = end_of(connection, keys, after, span.upto, size)
        if last is not None:
            yield Span(span.queue, after, last, count), count
            after = last


def _first_left(connection: Connection, keys: QueueKeys) -> StreamId | None:
    facts = facts_of(connection, [keys])[0]
    return None if facts is None else facts.first
