"""The raw data of a batch: ``bronze.events``, and ``bronze.gaps`` for lost events.

Spark writes the rows once, directly from Redis. All other data is derived from these files: the number of rows for each
queue, the gaps, and the jobs' lifecycles.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bulltask.lake.arrow import arrow_schema
from bulltask.lake.layout import list_directories, partition_value
from bulltask.lake.ledger import QueueRecord
from bulltask.lake.staging import Staging
from bulltask.lake.tables import EVENTS, GAPS
from bulltask.spark.lifecycle.fold import LIFECYCLE_COLUMNS, MAX_TIME_MS
from bulltask.spark.source.offsets import BEGINNING, StreamId
from bulltask.spark.source.schemas import GAP_EVENT
from bulltask.spark.tables.lake_tables import day_of

__all__ = ["BronzeBatch", "stage"]

_ROWS_DIRECTORY: Final = "read"  # in staging: all rows of the batch
_GAP_ROWS, _EVENT_ROWS = "is_gap=true", "is_gap=false"
_MAX_INT64: Final = 2**63 - 1  # the maximum of event_ms and event_seq
_IN_FILES: Final = [name for name in LIFECYCLE_COLUMNS if name != "queue"]


@dataclass(frozen=True, slots=True)
class BronzeBatch:
    """The data that a batch has read.

    Attributes:
        queues: Each queue's counts and end, by name without the hash tag.
        lifecycle_events: The events, with the columns from which lifecycles are derived.
        newest_ms: The time of the newest event up to the year 9999; 0 without events.
        oldest_ms: The time of the oldest event; 0 without events.
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
    """Write the rows of a batch.

    Args:
        batch: Rows of the source's table ``events``, including rows that represent gaps.
        staging: The staging directory.
        detected_at: When the gaps were detected.
    """
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
    parts: dict[str, list[pa.Table]] = {"": [_empty_table()]}
    for queue, file in _files(root):
        rows = pq.read_table(file, columns=_IN_FILES, partitioning=None).replace_schema_metadata(None)
        parts.setdefault(queue, []).append(rows.add_column(0, "queue", pa.repeat(pa.scalar(queue), rows.num_rows)))
    return {queue: pa.concat_tables(tables) for queue, tables in parts.items()}


def _empty_table() -> pa.Table:
    columns = arrow_schema(EVENTS)
    return pa.schema([columns.field(name) for name in LIFECYCLE_COLUMNS]).empty_table()


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


def _directories(root: Path) -> Iterator[tuple[Path, str]]:
    for day in list_directories(root):
        for queue in list_directories(day):
            yield queue, partition_value(queue.name)


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for directory, queue in _directories(root):
        for file in sorted(directory.glob("*.parquet")):
            yield queue, file
