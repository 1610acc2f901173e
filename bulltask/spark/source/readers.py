"""The readers of ``format("bulltask")``: batch reads of jobs, events and counts, and the streaming read of events."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic
from zlib import crc32

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from bulltask.jobs.errors import EventsLostError
from bulltask.lake.tables import FINISHED
from bulltask.spark.source.columns import (
    arrow_schema,
    count_record_batch,
    event_record_batch,
    gap_entry,
    hash_fields,
    job_record_batch,
)
from bulltask.spark.source.connection import (
    Connection,
    QueueSelection,
    SentToTasks,
    discover_queues,
    log_skipped,
    select_queues,
)
from bulltask.spark.source.discovery import QueueDiscovery
from bulltask.spark.source.offsets import (
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
from bulltask.spark.source.options import CountsOptions, EventsOptions, JobsOptions, OptionsT, StreamOptions
from bulltask.spark.source.planning import (
    BatchLimits,
    EntryRange,
    ScanRequest,
    ScanResult,
    is_unchanged,
    pack,
    plan_batch,
    split_range,
)
from bulltask.spark.source.streams import find_end, max_lengths, parse_state, read_ranges, read_states
from bulltask.transport.call import Call, QueueKeys
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.queue import (
    LISTS,
    STATES,
    count_by_score,
    ids_by_score,
    ids_with_scores,
    list_ids,
    score_at,
    state_size,
)
from bulltask.transport.streams import MAX_RANGE, last_id_of_range, stream_exists, stream_info

_log = logging.getLogger(__name__)  # without a handler, it writes to the driver's stderr


class _TableReader(SentToTasks, DataSourceReader, Generic[OptionsT]):
    """A batch reader of one table. It holds no connection: Spark copies it to other processes."""

    def __init__(self, options: OptionsT, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)


# Spark keeps the plan of a read with its DataFrame or view and uses it for later queries, too: see ADR 54. So a plan
# contains no ids of jobs. It only says how tasks share the jobs, and each task looks up its own share when it runs.
#
# A read of jobs returns each job in the selected states once, while workers move jobs. Tasks share the jobs of a queue
# by a hash of the id, so a job that moves stays with its task, which lists all states in one transaction, so that no
# job is between two states. Jobs that had finished long before the plan keep their state: they are shared by the time
# at which they finished, because a task need not list those of others. That time comes from the worker's clock: if a
# clock is more than :data:`RECENT_MS` behind, a job may appear a second time among the jobs that finished long before.


RECENT_MS: Final = 10_000
"""Jobs that finished later than this before the newest one of the plan are shared by id; workers' clocks may differ."""


@dataclass(frozen=True)
class QueueShare:
    """The jobs of a queue that one task reads: those whose ids have the remainder ``number`` when divided by ``count``.

    Of the jobs in a finished state, only those from ``edges[state]`` on, and those within ``ranges[state]``, which are
    older: bounds of times, in Redis' syntax. ``queue`` is the name without the hash tag.
    """

    queue: str
    bullmq_name: str
    number: int = 0
    count: int = 1
    edges: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def has(self, job_id: str) -> bool:
        """Return whether a job belongs to this share, unless it had finished long before the plan."""
        return self.count == 1 or crc32(job_id.encode("utf-8", "surrogatepass")) % self.count == self.number


@dataclass(frozen=True)
class JobsPartition(InputPartition):
    """The shares of queues that one task reads.

    With ``*``, one task has the names of all planned queues, and also reads the queues that have been created since.
    """

    shares: tuple[QueueShare, ...] = ()
    planned: frozenset[str] | None = None


class JobsReader(_TableReader[JobsOptions]):
    """Plans and performs one read of jobs."""

    def partitions(self) -> list[InputPartition]:
        """Query the queues and split the read into tasks."""
        with Connection(self._options.config) as connection:
            queues = select_queues(connection, self._options)
            shares = [share for keys in queues for share in self._plan(connection, keys)]
        # Spark would replace an empty list with a default partition, which read() does not support.
        count = max(1, min(len(shares), self._max_parts))
        planned = frozenset(keys.name for keys in queues) if self._options.every else None
        return [JobsPartition(tuple(shares[number::count]), None if number else planned) for number in range(count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition as Arrow record batches. Runs in a different process from :meth:`partitions`."""
        assert isinstance(partition, JobsPartition)
        with Connection(self._options.config) as connection:
            for share in partition.shares:
                yield from self._read_share(connection, share)
            if partition.planned is not None:
                for keys in discover_queues(connection, self._options).queues:
                    if keys.name not in partition.planned:
                        yield from self._read_share(connection, QueueShare(keys.queue, keys.name))

    def _read_share(self, connection: Connection, share: QueueShare) -> Iterator[pa.RecordBatch]:
        keys = QueueKeys(self._options.config.prefix, share.bullmq_name, share.queue)
        states = self._options.matching_states
        for wanted in self._options.id_pages:
            calls = [self._listing(keys, state, share.edges.get(state, "-inf"), wanted) for state in states]
            for state, ids in zip(states, connection.run_atomically(calls) if calls else (), strict=True):
                chosen = ids if wanted is None else set(wanted).intersection(ids)
                yield from self._read_jobs(connection, keys, state, list(filter(share.has, chosen)))
        for state, (low, high) in share.ranges.items():
            yield from self._read_jobs(connection, keys, state, connection.run(ids_by_score(keys, state, low, high)))

    def _read_jobs(
        self, connection: Connection, keys: QueueKeys, state: str, ids: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        constants, names = {"queue": keys.queue, "state": state}, hash_fields(self._schema.names)
        for start in range(0, len(ids), self._options.fetch_size):
            page = ids[start : start + self._options.fetch_size]
            replies = connection.run_many([job_fields(keys, job_id, names) for job_id in page])
            yield job_record_batch(self._schema, constants, page, replies)

    def _listing(self, keys: QueueKeys, state: str, edge: str, wanted: Sequence[str] | None) -> Call[list[str]]:
        """Return the call for the ids in a state, or for those of some ids; for finished jobs, from the edge on."""
        if state in LISTS:
            return list_ids(keys, state)
        low, high = self._options.finished_between if state in FINISHED else ("-inf", "+inf")
        if wanted is not None:
            return ids_with_scores(keys, state, wanted, low, high)
        return ids_by_score(keys, state, max(low, edge, key=float) if state in FINISHED else low, high)

    def _plan(self, connection: Connection, keys: QueueKeys) -> list[QueueShare]:
        if self._options.ids is not None:
            return [QueueShare(keys.queue, keys.name)]
        states = self._options.matching_states
        finished = [state for state in states if state in FINISHED]
        low, high = self._options.finished_between
        calls: list[Call[Any]] = [
            count_by_score(keys, state, low, high) if state in FINISHED else state_size(keys, state) for state in states
        ]
        calls += [score_at(keys, state, -1) for state in finished]
        replies = connection.run_atomically(calls) if calls else []  # fails early if the keys are in several slots
        count = self._parts(sum(replies[: len(states)]))
        if count == 1:
            return [QueueShare(keys.queue, keys.name)]
        edges = dict(zip(finished, map(_recent_edge, replies[len(states) :]), strict=True))
        ranges = {state: self._cut_times(connection, keys, state, edge) for state, edge in edges.items()}
        return [
            QueueShare(
                keys.queue,
                keys.name,
                number,
                count,
                edges,
                {state: spans[number] for state, spans in ranges.items() if number < len(spans)},
            )
            for number in range(count)
        ]

    def _cut_times(self, connection: Connection, keys: QueueKeys, state: str, edge: str) -> list[tuple[str, str]]:
        """Split the times before the edge into ranges with about the same number of jobs."""
        low, high = self._options.finished_between
        high = f"({edge}" if float(edge) < float(high.removeprefix("(")) else high
        calls = [count_by_score(keys, state, "-inf", f"({low}"), count_by_score(keys, state, low, high)]
        skipped, count = connection.run_many(calls)
        if not count:
            return []
        range_count = self._parts(count)
        ranks = [skipped + count * number // range_count for number in range(1, range_count)]
        scores = connection.run_many([score_at(keys, state, rank) for rank in ranks]) if ranks else []
        cut_scores = {score for score in scores if score and float(low) < float(score) < float(high.removeprefix("("))}
        cuts = sorted(cut_scores, key=float)
        return list(zip([low, *cuts], [*(f"({cut}" for cut in cuts), high], strict=True))

    def _parts(self, count: int) -> int:
        return max(1, min(self._max_parts, count // self._options.min_rows))

    @property
    def _max_parts(self) -> int:
        return self._options.partitions or 2 * (os.cpu_count() or 1)


def _recent_edge(newest: str | None) -> str:
    return "-inf" if newest is None else str(int(float(newest)) - RECENT_MS)


# When a read of events is planned, the stream is split into ranges of ids, each with the number of entries that it must
# return. The stream may be trimmed while it is read; with the expected numbers, missing rows are detected.


_MIN_PER_TASK: Final = 5_000
"""A task that reads as many events takes longer to read them than to start."""


@dataclass(frozen=True)
class EventsPartition(InputPartition):
    """What one task reads: ranges of events, or records of lost events, each with its queue without the hash tag."""

    pieces: Sequence[tuple[str, EntryRange | EventGap]] = field(default=(), repr=False)


_Piece = tuple[str, EntryRange | EventGap, int]
"""A range of events or lost events, with the queue without the hash tag and the number of rows, at most."""


def _distribute(
    pieces: Sequence[_Piece], options: EventsOptions, min_per_task: int = _MIN_PER_TASK
) -> list[InputPartition]:
    """Distribute pieces over tasks: small pieces share one, queue after queue."""
    total, most = sum(size for _, _, size in pieces), options.partitions or 2 * (os.cpu_count() or 1)
    tasks = max(1, min(most, total // min_per_task))
    groups = pack(pieces, lambda item: item[2], min(options.per_partition, -(-total // tasks)))
    return [EventsPartition([(queue, piece) for queue, piece, _ in group]) for group in groups]


def _read_pieces(
    connection: Connection, partition: EventsPartition, options: EventsOptions, schema: pa.Schema
) -> Iterator[pa.RecordBatch | EventGap]:
    """Yield a task's events, and a gap for each range from which entries were trimmed after it was planned."""
    ranges = [
        (QueueKeys(options.config.prefix, piece.queue, queue), piece)
        for queue, piece in partition.pieces
        if isinstance(piece, EntryRange)
    ]
    for parts in read_ranges(connection, ranges, options.fetch_size):
        if entries := [entry for part in parts for entry in part.entries]:
            yield event_record_batch(schema, [part.keys.queue for part in parts for _ in part.entries], entries)
        for part in parts:
            if part.is_last and part.span.missing(part.read):
                first = _first_entry(connection, part.keys)
                # Trimming removes entries from the beginning: missing entries were before the last page, or after it if
                # nothing is left.
                if gap := part.span.gap(part.read, None if first is None else max(first, part.page)):
                    yield gap


class EventsReader(_TableReader[EventsOptions]):
    """Reads all events that are in the streams when the read is planned."""

    def partitions(self) -> list[InputPartition]:
        """Query the streams and split them into ranges; raise ``EventsLostError`` if events are trimmed meanwhile."""
        options, pieces = self._options, list[_Piece]()
        with Connection(options.config) as connection:
            queues, skipped = discover_queues(connection, options)
            states = read_states(connection, queues, skipped if options.skip_unsupported else None)
            for keys, state in zip(queues, states, strict=True):
                if state is not None and state.first is not None:
                    stream = EntryRange(keys.name, state.first.before, state.last, state.length)
                    spans, gaps = _cut(connection, keys, stream, options.per_partition)
                    if gaps:
                        raise EventsLostError(gaps[0].message)
                    pieces += [(keys.queue, span, span.expect or 0) for span in spans]
        log_skipped(skipped)
        # Spark would replace an empty list with a default partition, which read() does not support.
        return _distribute(pieces, options) or [EventsPartition()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition as Arrow record batches. Runs in a different process from :meth:`partitions`.

        Raise ``EventsLostError`` if entries were trimmed after the read was planned.
        """
        assert isinstance(partition, EventsPartition)
        if not partition.pieces:
            return
        with Connection(self._options.config) as connection:
            for part in _read_pieces(connection, partition, self._options, self._schema):
                if isinstance(part, EventGap):
                    raise EventsLostError(part.message)
                yield part


class CountsReader(_TableReader[CountsOptions]):
    """Reads the number of jobs in each state of each queue, with one row for each state."""

    def partitions(self) -> list[InputPartition]:
        """Return one partition: counting takes one round trip."""
        return [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - there is only one
        """Count the jobs. Runs in a different process from :meth:`partitions`."""
        with Connection(self._options.config) as connection:
            queues = select_queues(connection, self._options)
            numbers = iter(connection.run_many([state_size(keys, state) for keys in queues for state in STATES]))
        for keys in queues:
            yield count_record_batch(self._schema, keys.queue, {state: next(numbers) for state in STATES})


# Spark stores the end of each batch, requests the next batch, and after a crash requests the same batch again. The
# reader therefore keeps no state except for logging; losses are derived from the offsets and the current streams.


_OUTAGE_TIMEOUT_MS: Final = 60_000
"""How long a running query waits for a server that is restarting and loading its data, before the query fails."""


class EventsStreamReader(SentToTasks, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the batches of one query. It holds no connection and is cheap to create.

    Attributes:
        min_per_task: How many events make one more task worthwhile.
    """

    min_per_task: ClassVar[int] = _MIN_PER_TASK

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._discovery = QueueDiscovery(options.config.prefix)
        self._queues: Sequence[QueueKeys] | None = None  # those of the previous batch
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
        """Return the end of the previous batch's streams, for the query's progress."""
        states = self._all_states(self._queues)
        return encode_offsets({queue: now.end for queue, now in states.items() if now is not None})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Plan the next batch; lost events raise ``EventsLostError`` if ``failOnDataLoss`` is on."""
        max_entries = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        # A queue that was just added to a list of names may be old; with *, it was just created.
        limits = BatchLimits(max_entries, self._options.align, are_created=self._options.every, target=self._target)
        start_offsets = decode_offsets(start)
        with Connection(self._options.config, outage_timeout_ms=_OUTAGE_TIMEOUT_MS) as connection:
            selection = self._find(connection)
            self._queues = selection.queues
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

        It may have been planned before a crash, so events may have been lost since.
        """
        begin, pieces = batch_start(start, end) or {}, list[_Piece]()
        ends = {name: to for name, to in decode_offsets(end).items() if not is_unchanged(begin.get(name), to)}
        queues = list(map(self._options.stored_keys, ends))
        with Connection(self._options.config, outage_timeout_ms=_OUTAGE_TIMEOUT_MS) as connection:
            for keys, state in zip(queues, self._states(connection, queues), strict=True):
                gaps, span = split_range(keys.name, begin.get(keys.name), ends[keys.name], state)
                self._fail_for(gaps)
                spans, late_gaps = _cut(connection, keys, span, self._options.per_partition)
                self._fail_for(late_gaps)
                if self._options.gap_rows:
                    pieces += [(keys.queue, gap, 1) for gap in (*gaps, *late_gaps)]
                # Without a count, the stream's length is the maximum.
                pieces += [(keys.queue, it, it.expect or (state.length if state else 0)) for it in spans]
        return _distribute(pieces, self._options, self.min_per_task)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition as Arrow record batches. Runs in a different process from all other methods."""
        assert isinstance(partition, EventsPartition)
        lost = [(queue, piece) for queue, piece in partition.pieces if isinstance(piece, EventGap)]
        if lost:
            yield event_record_batch(self._schema, [queue for queue, _ in lost], [gap_entry(gap) for _, gap in lost])
        if len(lost) == len(partition.pieces):
            return
        queues = {piece.queue: queue for queue, piece in partition.pieces}
        with Connection(self._options.config, outage_timeout_ms=_OUTAGE_TIMEOUT_MS) as connection:
            for part in _read_pieces(connection, partition, self._options, self._schema):
                if not isinstance(part, EventGap):
                    yield part
                    continue
                self._fail_for([part])
                if self._options.gap_rows:
                    yield event_record_batch(self._schema, queues[part.queue], [gap_entry(part)])

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: BullMQ trims the streams."""

    def stop(self) -> None:
        """Do nothing: no connection is kept."""

    def _find(self, connection: Connection) -> QueueSelection:
        names = self._discovery.names(connection) if self._options.every else None
        selection = discover_queues(connection, self._options, names)
        self._log_skipped(selection.skipped)
        return selection

    def _states(self, connection: Connection, queues: Sequence[QueueKeys]) -> list[StreamState | None]:
        skipped = dict[str, str]()
        states = read_states(connection, queues, skipped if self._options.skip_unsupported else None)
        self._log_skipped(skipped)
        return states

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

    def _all_states(
        self, queues: Sequence[QueueKeys] | None = None, *, outage_timeout_ms: int | None = _OUTAGE_TIMEOUT_MS
    ) -> dict[str, StreamState | None]:
        """Return the states of the streams of some queues; default: of all that are read."""
        with Connection(self._options.config, outage_timeout_ms=outage_timeout_ms) as connection:
            queues = self._find(connection).queues if queues is None else queues
            return dict(zip([keys.name for keys in queues], self._states(connection, queues), strict=True))

    def _fail_for(self, gaps: Sequence[EventGap]) -> None:
        messages = [gap.message for gap in gaps if gap.loss_reason is not LossReason.TRIMMED_BEFORE_START]
        if messages and self._options.fail_on_loss:
            raise EventsLostError("; ".join(messages))


@dataclass(frozen=True)
class _RedisStreams:
    """The streams in Redis; implements ``planning.EventStreams``."""

    connection: Connection
    prefix: str
    read_states: Callable[[Connection, Sequence[QueueKeys]], list[StreamState | None]]

    def states(self, queues: Sequence[str]) -> Mapping[str, StreamState | None]:
        states = self.read_states(self.connection, [QueueKeys(self.prefix, queue) for queue in queues])
        return dict(zip(queues, states, strict=True))

    def scan(self, requests: Sequence[ScanRequest]) -> Sequence[ScanResult]:
        # The requests of a round trip count as many entries as one of them may, so that other clients do not wait long.
        results = list[ScanResult]()
        for group in pack(requests, _max_count, MAX_RANGE):
            replies = self.connection.try_atomically([self._calls(request) for request in group])
            results += [_scan_result(request, *reply) for request, reply in zip(group, replies, strict=True)]
        return results

    def _calls(self, request: ScanRequest) -> list[Call[Any]]:
        keys, after, until = QueueKeys(self.prefix, request.queue), str(request.after), str(request.until)
        return [stream_exists(keys), stream_info(keys), last_id_of_range(keys, after, until, _max_count(request))]


def _max_count(request: ScanRequest) -> int:
    return MAX_RANGE if request.max_entries is None else min(MAX_RANGE, request.max_entries)


def _scan_result(request: ScanRequest, exists: Any, info: Any, end: Any) -> ScanResult:
    if isinstance(end, Exception):
        raise end
    max_count = _max_count(request)
    truncated = end.count == max_count and max_count != request.max_entries
    return ScanResult(StreamId.parse(end.last) if end.count else None, end.count, parse_state(exists, info), truncated)


def _cut(
    connection: Connection, keys: QueueKeys, span: EntryRange | None, size: int
) -> tuple[list[EntryRange], list[EventGap]]:
    """Split a range into pieces of up to ``size`` entries; also return the gaps from trimming in the meantime.

    Every piece is counted, including the last one. Otherwise, entries that are trimmed from the first piece would be
    recorded as a gap in the last one.
    """
    if span is None or span.expect is None or span.expect <= size:
        return [] if span is None else [span], []
    pieces: list[EntryRange] = []
    after, read, count = span.after, 0, size
    while count == size:
        last, count = find_end(connection, keys, after, span.upto, size)
        if last is not None:
            pieces.append(EntryRange(span.queue, after, last, count))
            after, read = last, read + count
    gap = span.gap(read, _first_entry(connection, keys)) if span.missing(read) else None
    return pieces, [] if gap is None else [gap]


def _first_entry(connection: Connection, keys: QueueKeys) -> StreamId | None:
    state = read_states(connection, [keys])[0]
    return None if state is None else state.first
