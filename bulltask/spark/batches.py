"""Write the pipeline's batches. Spark calls `BatchWriter` for each batch.

::

    read Redis once -> staging: bronze -> staging: silver, open jobs -> publish -> ledger -> Spark's checkpoint

Spark does the first step, directly from Redis to files; this module does the rest, with Arrow, from these files.

A batch is published after all of its files are written, and it is committed once it is in the ledger. A batch may
therefore be killed at any moment: when it runs again, it first removes its files from the tables.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bulltask.jobs.clock import mono_ms, wall_ms
from bulltask.jobs.errors import LakeError
from bulltask.lake.files import Staging, arrow_schema, write_file
from bulltask.lake.formatting import pluralize
from bulltask.lake.storage import (
    BatchRecord,
    Layout,
    Ledger,
    QueueRecord,
    batch_ingest_id,
    batch_of,
    hold_swaps,
    list_directories,
    list_files,
    partition_value,
)
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, MAX_TIME_MS, Table
from bulltask.spark.lake_tables import day_of
from bulltask.spark.lifecycle import LIFECYCLE_COLUMNS, derive_silver
from bulltask.spark.source.columns import GAP_EVENT
from bulltask.spark.source.offsets import BEGINNING, StreamId, batch_start, decode_offsets
from bulltask.spark.source.options import app_name
from bulltask.spark.source.planning import ExpectedRows, expected_rows

__all__ = ["BatchWriter", "check_complete", "earlier_events", "read_open_events", "stage"]


_ROWS_DIRECTORY: Final = "read"  # in staging: all rows of the batch
_GAP_ROWS, _EVENT_ROWS = "is_gap=true", "is_gap=false"
_MAX_INT64: Final = 2**63 - 1  # the maximum of event_ms and event_seq
_IN_FILES: Final = [name for name in LIFECYCLE_COLUMNS if name != "queue"]


@dataclass(frozen=True, slots=True)
class BronzeBatch:
    """The data that a batch has read.

    Attributes:
        queues: Each queue's counts and end, by name without the hash tag.
        lifecycle_events: The events, with the columns `LIFECYCLE_COLUMNS`.
        newest_ms, oldest_ms: The time of the newest event up to the year 9999, and of the oldest; 0 without events.
    """

    queues: Mapping[str, QueueRecord]
    lifecycle_events: pa.Table
    newest_ms: int
    oldest_ms: int

    @property
    def events(self) -> int:
        """The number of rows of ``bronze.events``."""
        return sum(queue.events for queue in self.queues.values())


def stage(batch: DataFrame, staging: Staging, detected_at: datetime) -> BronzeBatch:
    """Write the rows of a batch: events of the source, and rows that represent gaps, which were detected now."""
    names = [column.name for column in EVENTS.columns]
    is_gap = F.coalesce(F.col("event") == GAP_EVENT, F.lit(False))
    # For ids after the year 9999 the source returns no time, but every row needs a day.
    with_time = batch.withColumn("event_at", F.coalesce("event_at", F.timestamp_millis(F.lit(MAX_TIME_MS))))
    rows = with_time.select(*names, is_gap.alias("is_gap"), day_of(F.col("event_at")).alias("dt"), "queue")
    rows.write.partitionBy("is_gap", "dt", "queue").parquet(str(staging.directory(_ROWS_DIRECTORY)))
    gaps = _stage_gaps(staging, detected_at)
    events_directory = staging.directory(_ROWS_DIRECTORY) / _EVENT_ROWS
    lifecycle_events = _lifecycle_events(events_directory)
    queues = dict(_queue_records(lifecycle_events, events_directory))
    for queue, lost in gaps.items():
        record = queues.get(queue, QueueRecord())
        queues[queue] = QueueRecord(record.events, record.first, record.last, sum(lost), len(lost))
    if events_directory.is_dir():
        events_directory.rename(staging.table(EVENTS))
    ends_ms = [StreamId.parse(record.last).ms for record in queues.values() if record.last]
    oldest_ms = min((StreamId.parse(record.first).ms for record in queues.values() if record.first), default=0)
    # Ignore times after the year 9999: compared with them, all jobs would be too old.
    newest_ms = max((ms for ms in ends_ms if ms <= MAX_TIME_MS), default=0)
    return BronzeBatch(queues, pa.concat_tables(lifecycle_events.values()), newest_ms, oldest_ms)


def _lifecycle_events(root: Path) -> dict[str, pa.Table]:
    """Return each queue's events, from its files, and an empty table."""
    schema = arrow_schema(EVENTS)
    empty = pa.schema([schema.field(name) for name in LIFECYCLE_COLUMNS]).empty_table()
    parts: dict[str, list[pa.Table]] = {"": [empty]}
    for queue, file in _files(root):
        rows = pq.read_table(file, columns=_IN_FILES, partitioning=None).replace_schema_metadata(None)
        parts.setdefault(queue, []).append(rows.add_column(0, "queue", pa.repeat(pa.scalar(queue), rows.num_rows)))
    return {queue: pa.concat_tables(tables) for queue, tables in parts.items()}


def _queue_records(lifecycle_events: Mapping[str, pa.Table], root: Path) -> Iterator[tuple[str, QueueRecord]]:
    """Yield, for each queue, the number of events, and the first and last id."""
    for queue, events in lifecycle_events.items():
        if events.num_rows:
            first, last = _edge_id(events, "min"), _edge_id(events, "max")
            if _MAX_INT64 in {*first, *last}:
                first, last = _edge_ids(root, queue)
            yield queue, QueueRecord(events.num_rows, str(first), str(last))


def _edge_ids(root: Path, queue: str) -> tuple[StreamId, StreamId]:
    """Return the smallest and the greatest id, parsed from text: the integer columns cannot store all values."""
    files = [file for file_queue, file in _files(root) if file_queue == queue]
    tables = [pq.read_table(file, columns=["event_id"], partitioning=None) for file in files]
    ids = [StreamId.parse(event_id) for table in tables for event_id in table["event_id"].to_pylist()]
    return min(ids), max(ids)


def _edge_id(ids: pa.Table, edge: str) -> StreamId:
    """Return the smallest or greatest id."""
    aggregate = pc.min if edge == "min" else pc.max
    ms = aggregate(ids["event_ms"])
    seq = aggregate(ids["event_seq"].filter(pc.equal(ids["event_ms"], ms)))
    return StreamId(ms.as_py(), seq.as_py())


def _stage_gaps(staging: Staging, detected_at: datetime) -> dict[str, list[int]]:
    """Write the rows for gaps; return, for each queue, the number of lost events in each gap."""
    rows_by_queue: dict[str, list[dict[str, Any]]] = {}
    for queue, file in _files(staging.directory(_ROWS_DIRECTORY) / _GAP_ROWS):
        rows_by_queue.setdefault(queue, []).extend(pq.read_table(file, partitioning=None).to_pylist())
    gaps = {queue: list(_gaps(rows, detected_at)) for queue, rows in rows_by_queue.items()}
    rows = [
        {**gap, "queue": queue, "dt": str(detected_at.date())}
        for queue, queue_gaps in gaps.items()
        for gap in queue_gaps
    ]
    staging.write(GAPS, pa.Table.from_pylist(rows, arrow_schema(GAPS)))
    return {queue: [gap["lost"] for gap in queue_gaps] for queue, queue_gaps in gaps.items()}


def _gaps(rows: Iterable[Mapping[str, Any]], detected_at: datetime) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        extra = json.loads(row["extra"])
        first, after = extra.get("first_id_after"), StreamId.parse(row["event_id"])
        yield {
            "last_id_before": str(after),
            "first_id_after": first,
            "lost": int(extra["lost"]),
            "exact": extra["exact"] == "true",
            "loss_reason": extra["loss_reason"],
            "last_at_before": None if after == BEGINNING else _time(after),
            "first_at_after": None if first is None else _time(StreamId.parse(first)),
            "detected_at": detected_at + timedelta(microseconds=number),  # part of the key, so unique
        }


def _time(entry: StreamId) -> datetime:
    return datetime.fromtimestamp(min(entry.ms, MAX_TIME_MS) / 1000, UTC)


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files below a directory, each with its queue."""
    for day in list_directories(root):
        for queue in list_directories(day):
            for file in sorted(queue.glob("*.parquet")):
                yield partition_value(queue.name), file


# Executors write a batch's rows, and the driver derives all other data from their files. If an executor has another
# directory at the lake's path (a local disk instead of a shared one), it writes there, and Spark does not detect this:
# it only sees the driver's directory, with fewer files. Offsets count every entry that was ever added, so a batch's
# start and end offsets determine its number of rows.


def check_complete(layout: Layout, ingest_id: str, records: Mapping[str, QueueRecord], *, hash_tag: bool) -> None:
    """Compare the records of a batch, by queue name without the hash tag, with its offsets.

    Raises:
        LakeError: Rows are missing or duplicated.
    """
    _, number = batch_of(ingest_id)
    end = _offset(layout, number)
    begin = batch_start(None if number == 0 else _offset(layout, number - 1), end)
    if begin is None:  # an older version of bulltask planned the first batch
        return
    expectations: defaultdict[str, ExpectedRows] = defaultdict(partial(ExpectedRows, 0))
    for name, end_offset in decode_offsets(end).items():
        # Two queues may have the same name: offsets also contain queues that are now skipped.
        expectations[app_name(name, hash_tag=hash_tag) or name] += expected_rows(begin.get(name), end_offset)
    for queue, expected in expectations.items():
        record = records.get(queue, QueueRecord())
        if not expected.is_met(record.events, record.lost, record.gaps):
            raise LakeError(
                f"[BULLTASK_BATCH_INCOMPLETE] batch {ingest_id} should contain {_shown(expected)} from queue "
                f"{queue!r}, but its files contain {record.events:,} and record {record.lost:,} as lost. {layout.root} "
                "must be the same directory for the driver and for all executors. The batch was not published: mount "
                "the directory on every node and run the pipeline again before Redis trims these events"
            )


def _shown(expected: ExpectedRows) -> str:
    return "events" if expected.count is None else pluralize(expected.count, "event")


def _offset(layout: Layout, number: int) -> dict[str, Any]:
    """Return the offset at which a batch ends: the last line of Spark's file, after two header lines."""
    stored: dict[str, Any] = json.loads((layout.checkpoint / "offsets" / str(number)).read_text().splitlines()[-1])
    return stored


_MAX_CACHED_FILES: Final = 50_000
"""The maximum number of files whose id range is cached; reading a range takes a third of a millisecond."""


def read_open_events(layout: Layout, ingest_id: str) -> pa.Table:
    """Return the open jobs' events that a batch has stored for the next batch."""
    files = sorted((layout.open_jobs / ingest_id).glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file, columns=list(LIFECYCLE_COLUMNS), partitioning=None) for file in files])


def earlier_events(layout: Layout, jobs: pa.Table) -> pa.Table | None:
    """Return all events of some jobs that are in the lake; ``None`` if there are none.

    Only files that may contain them are read, judging by the smallest and greatest id in the files' statistics. The
    lake's directories must not move during the call (:func:`~bulltask.lake.storage.hold_swaps`).
    """
    wanted: dict[str, list[str]] = defaultdict(list)
    for queue, job_id in zip(jobs["queue"].to_pylist(), jobs["job_id"].to_pylist(), strict=True):
        wanted[queue].append(job_id)
    tables = [
        part for queue, ids in wanted.items() for part in _events_of_queue(layout, queue, sorted(ids)) if part.num_rows
    ]
    return pa.concat_tables(tables) if tables else None


def _events_of_queue(layout: Layout, queue: str, ids: Sequence[str]) -> Iterator[pa.Table]:
    chosen = pa.array(ids, pa.string())
    for day in layout.days(EVENTS):
        for file, _ in list_files(layout, EVENTS, day, queue):
            if _may_contain(file, ids):
                rows = pq.read_table(file, columns=_IN_FILES, partitioning=None)
                rows = rows.filter(pc.is_in(rows["job_id"], chosen)).replace_schema_metadata(None)
                yield rows.add_column(0, "queue", pa.repeat(pa.scalar(queue), rows.num_rows))


def _may_contain(file: Path, ids: Sequence[str]) -> bool:
    """Return whether a file may contain one of some sorted ids."""
    ends = _id_range(str(file))
    if ends is None:
        return True
    first = bisect_left(ids, ends[0])
    return first < len(ids) and ids[first] <= ends[1]


@lru_cache(_MAX_CACHED_FILES)
def _id_range(file: str) -> tuple[str, str] | None:
    """Return the smallest and the greatest job id in a file; ``None`` without statistics. Files never change."""
    metadata = pq.read_metadata(file)
    at = metadata.schema.names.index("job_id")
    parts = [metadata.row_group(number).column(at).statistics for number in range(metadata.num_row_groups)]
    if any(part is None or not (part.has_min_max or not part.num_values) for part in parts):
        return None
    known = [part for part in parts if part.has_min_max]
    return min((part.min for part in known), default=""), max((part.max for part in known), default="")


_OPEN_JOBS: Final = "open_jobs"  # under staging

_TABLES: Final = (EVENTS, GAPS, ATTEMPTS, JOBS)

_CONF: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A batch is small and its size is known, so adaptive execution would only cost time.
    "spark.sql.adaptive.enabled": "false",
    # A task has rows from few queues: it can write their files at the same time, without sorting the rows first.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
}
"""Settings of the query's session, which is a copy of the user's."""


@dataclass(frozen=True)
class BatchWriter:
    """Writes each batch. Spark serializes it for the process that runs the batches, so it has no references to Spark.

    Attributes:
        root: The directory of the lake.
        open_job_timeout_ms: The time without events after which an open job times out.
        hash_tag: Whether BullMQ's name for queue ``emails`` is ``{emails}``.
    """

    root: str
    open_job_timeout_ms: int
    hash_tag: bool

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write a batch, unless it is already in the lake."""
        layout = Layout(self.root)
        ledger, ingest_id = Ledger(layout), batch_ingest_id(_query_id(layout), batch_id)
        head = ledger.head()
        if head is not None and head.ingest_id == ingest_id:
            return  # the batch was committed, but Spark was killed before it committed its checkpoint
        if ledger.has(ingest_id):
            raise LakeError(
                f"batch {ingest_id} and later batches are already in {layout.root}: the checkpoint is older than the "
                f"lake. Delete {layout.checkpoint}: the next run continues after the lake's last event"
            )
        _clean_up(layout, ledger)
        _BatchRun(self, layout, ledger, head, ingest_id).write(batch)


class _BatchRun:
    """One batch, from its rows to its record in the ledger."""

    def __init__(
        self, writer: BatchWriter, layout: Layout, ledger: Ledger, head: BatchRecord | None, ingest_id: str
    ) -> None:
        self._writer = writer
        self._layout = layout
        self._ledger = ledger
        self._ingest_id = ingest_id
        self._head = head or BatchRecord("", number=0)
        self._staging = Staging(layout, ingest_id)
        self._open_jobs_ingest_id = self._head.open_jobs_ingest_id
        self._open_job_events = self._head.open_job_events
        self._oldest_ms = self._head.oldest_open_event_ms
        self._steps_ms: dict[str, int] = {}

    def write(self, batch: DataFrame) -> None:
        for name, value in _CONF.items():
            batch.sparkSession.conf.set(name, value)
        with self._step("bronze"):
            read = stage(batch, self._staging, datetime.now(UTC))
            check_complete(self._layout, self._ingest_id, read.queues, hash_tag=self._writer.hash_tag)
        counts = self._derive(read) if read.events else {}
        with self._step("publish"):
            self._ledger.begin_publishing(self._ingest_id)
            self._staging.publish(_TABLES)
            self._publish_open_jobs()
        self._ledger.commit(self._record(read, counts))
        self._staging.clear()
        for old in list_directories(self._layout.open_jobs):
            if old.name != self._open_jobs_ingest_id:
                shutil.rmtree(old)

    def _derive(self, read: BronzeBatch) -> dict[Table, int]:
        """Write the rows of attempts and jobs, and the open events; return the number of rows."""
        with self._step("derive"):
            before = self._open_jobs_ingest_id
            open_events = None if before is None else read_open_events(self._layout, before)
            find_earlier = partial(earlier_events, self._layout)
            time_out_before_ms = self._time_out_before_ms(read)
            # Files must not be moved during the lookup, because it is not retried.
            with hold_swaps(self._layout):
                derived = derive_silver(read.lifecycle_events, open_events, find_earlier, time_out_before_ms)
        tables = {ATTEMPTS: derived.attempts, JOBS: derived.jobs}
        for table, rows in tables.items():
            with self._step(table.name):
                self._staging.write(table, rows)
        self._open_job_events = derived.open_events.num_rows
        self._open_jobs_ingest_id = None
        self._oldest_ms = pc.min(derived.open_events["event_ms"]).as_py() or 0
        if self._open_job_events:
            with self._step("open_jobs"):
                self._open_jobs_ingest_id = self._ingest_id
                write_file(self._staging.directory(_OPEN_JOBS), derived.open_events)
        return {table: rows.num_rows for table, rows in tables.items()}

    def _time_out_before_ms(self, read: BronzeBatch) -> int:
        """Return the cutoff: open jobs whose last event is older time out; 0 if no event is older."""
        time_out_before_ms = max(read.newest_ms, self._head.newest_event_ms) - self._writer.open_job_timeout_ms
        oldest_ms = min(read.oldest_ms, self._head.oldest_open_event_ms or read.oldest_ms)
        return time_out_before_ms if oldest_ms < time_out_before_ms else 0

    def _publish_open_jobs(self) -> None:
        if self._open_jobs_ingest_id == self._ingest_id:
            self._layout.open_jobs.mkdir(exist_ok=True)
            self._staging.directory(_OPEN_JOBS).rename(self._layout.open_jobs / self._ingest_id)

    def _record(self, read: BronzeBatch, counts: Mapping[Table, int]) -> BatchRecord:
        head = self._head
        query, number = batch_of(self._ingest_id)
        lost = {queue: head.lost.get(queue, 0) + record.lost for queue, record in read.queues.items() if record.lost}
        gaps = {queue: head.gaps.get(queue, 0) + record.gaps for queue, record in read.queues.items() if record.gaps}
        return BatchRecord(
            self._ingest_id,
            previous=head.ingest_id or None,
            number=head.number + 1,
            written_ms=wall_ms(),
            newest_event_ms=max(head.newest_event_ms, read.newest_ms),
            queues=read.queues,
            last_ids={**head.last_ids, **{queue: record.last for queue, record in read.queues.items() if record.last}},
            lost={**head.lost, **lost},
            gaps={**head.gaps, **gaps},
            attempts=counts.get(ATTEMPTS, 0),
            jobs=counts.get(JOBS, 0),
            open_jobs_ingest_id=self._open_jobs_ingest_id,
            open_job_events=self._open_job_events,
            oldest_open_event_ms=self._oldest_ms,
            steps_ms=self._steps_ms,
            queries={**head.queries, query: number},
        )

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        start_ms = mono_ms()
        yield
        self._steps_ms[name] = mono_ms() - start_ms


def _clean_up(layout: Layout, ledger: Ledger) -> None:
    """Remove the files of a batch that was killed while it was published."""
    interrupted, head = ledger.publishing(), ledger.head()
    if interrupted is not None and (head is None or head.ingest_id != interrupted):
        layout.remove(interrupted, _TABLES)
        shutil.rmtree(layout.open_jobs / interrupted, ignore_errors=True)


def _query_id(layout: Layout) -> str:
    """Return Spark's id for the query, from the checkpoint, because Spark Connect does not provide it."""
    return str(json.loads((layout.checkpoint / "metadata").read_text())["id"])
