"""A batch as it was read: ``bronze.events``, and ``bronze.gaps`` for what could not be read.

Spark writes the rows once, straight from Redis. Everything else is derived from these files: how many rows there are
and of which queues, which of them represent lost events, and later the lifecycle of the jobs.
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
from pyspark.sql import functions as fn

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

_ALL_ROWS: Final = "read"  # in staging: all rows of the batch
_GAP_ROWS, _EVENT_ROWS = "is_gap=true", "is_gap=false"
_MAX_INT64: Final = 2**63 - 1  # the maximum of event_ms and event_seq
_IN_FILES: Final = [name for name in LIFECYCLE_COLUMNS if name != "queue"]


@dataclass(frozen=True, slots=True)
class BronzeBatch:
    """What a batch has read.

    Attributes:
        queues: Counts and ends of each queue, by the user's name.
        lifecycle_events: Its events, with the columns that lifecycles are derived from.
        newest_ms: Time of its newest event, as far as it can be represented; 0 if there is none.
        oldest_ms: Time of its oldest event; 0 if there is none.
    """

    queues: Mapping[str, QueueRecord]
    lifecycle_events: pa.Table
    newest_ms: int
    oldest_ms: int

    @property
    def events(self) -> int:
        """How many rows of ``bronze.events`` there are."""
        return sum(queue.events for queue in self.queues.values())


def stage(batch: DataFrame, staging: Staging, detected_at: datetime) -> BronzeBatch:
    """Write the rows of a batch.

    Args:
        batch: Rows of the source's table ``events``, including those that represent gaps.
        staging: Where.
        detected_at: When the gaps were found.
    """
    names = [column.name for column in EVENTS.columns]
    is_gap = fn.coalesce(fn.col("event") == GAP_EVENT, fn.lit(False))
    # For an id after the year 9999 the source has no time, but every row needs a day.
    shown = batch.withColumn("event_at", fn.coalesce("event_at", fn.timestamp_millis(fn.lit(MAX_TIME_MS))))
    rows = shown.select(*names, is_gap.alias("is_gap"), day_of(fn.col("event_at")).alias("dt"), "queue")
    rows.write.partitionBy("is_gap", "dt", "queue").parquet(str(staging.directory(_ALL_ROWS)))
    gaps = _stage_gaps(staging, detected_at)
    place = staging.directory(_ALL_ROWS) / _EVENT_ROWS
    lifecycle_events = _lifecycle_events(place)
    queues = dict(_seen(lifecycle_events, place))
    for queue, lost in gaps.items():
        seen = queues.get(queue, QueueRecord())
        queues[queue] = QueueRecord(seen.events, seen.first, seen.last, sum(lost), len(lost))
    if place.is_dir():
        place.rename(staging.table(EVENTS))
    ends_ms = [StreamId.parse(seen.last).ms for seen in queues.values() if seen.last]
    oldest_ms = min((StreamId.parse(seen.first).ms for seen in queues.values() if seen.first), default=0)
    # Ignore times after the year 9999: compared with them, all jobs would be too old.
    newest_ms = max((ms for ms in ends_ms if ms <= MAX_TIME_MS), default=0)
    return BronzeBatch(queues, pa.concat_tables(lifecycle_events.values()), newest_ms, oldest_ms)


def _lifecycle_events(root: Path) -> dict[str, pa.Table]:
    """Of each queue, the events in its files; one without any is there all the same."""
    parts: dict[str, list[pa.Table]] = {"": [_none()]}
    for queue, file in _files(root):
        rows = pq.read_table(file, columns=_IN_FILES, partitioning=None).replace_schema_metadata(None)
        parts.setdefault(queue, []).append(rows.add_column(0, "queue", pa.repeat(pa.scalar(queue), rows.num_rows)))
    return {queue: pa.concat_tables(tables) for queue, tables in parts.items()}


def _none() -> pa.Table:
    columns = arrow_schema(EVENTS)
    return pa.schema([columns.field(name) for name in LIFECYCLE_COLUMNS]).empty_table()


def _seen(lifecycle_events: Mapping[str, pa.Table], root: Path) -> Iterator[tuple[str, QueueRecord]]:
    """Yield for each queue how many events there are, and the first and the last."""
    for queue, events in lifecycle_events.items():
        if events.num_rows:
            first, last = _end(events, "min"), _end(events, "max")
            if _MAX_INT64 in {*first, *last}:
                first, last = _ends_of_ids(root, queue)
            yield queue, QueueRecord(events.num_rows, str(first), str(last))


def _ends_of_ids(root: Path, queue: str) -> tuple[StreamId, StreamId]:
    """Return the least and the greatest id, from the ids themselves: the integer columns cannot hold all values."""
    files = [file for its, file in _files(root) if its == queue]
    tables = [pq.read_table(file, columns=["event_id"], partitioning=None) for file in files]
    ids = [StreamId.parse(one) for table in tables for one in table["event_id"].to_pylist()]
    return min(ids), max(ids)


def _end(ids: pa.Table, which: str) -> StreamId:
    """Return the least or greatest id."""
    choose = pc.min if which == "min" else pc.max
    ms = choose(ids["event_ms"])
    seq = choose(ids["event_seq"].filter(pc.equal(ids["event_ms"], ms)))
    return StreamId(ms.as_py(), seq.as_py())


def _stage_gaps(staging: Staging, detected_at: datetime) -> dict[str, list[int]]:
    """Write the rows of gaps; return for each queue how many events each gap lost."""
    found: dict[str, list[dict[str, Any]]] = {}
    for queue, file in _files(staging.directory(_ALL_ROWS) / _GAP_ROWS):
        found.setdefault(queue, []).extend(pq.read_table(file, partitioning=None).to_pylist())
    gaps = {queue: list(_gaps(rows, detected_at)) for queue, rows in found.items()}
    rows = [{**gap, "queue": queue, "dt": str(detected_at.date())} for queue, its in gaps.items() for gap in its]
    staging.write(GAPS, pa.Table.from_pylist(rows, arrow_schema(GAPS)))
    return {queue: [gap["lost"] for gap in its] for queue, its in gaps.items()}


def _gaps(rows: Iterable[Mapping[str, Any]], detected_at: datetime) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        said = json.loads(row["extra"])
        first, after = said.get("first"), StreamId.parse(row["event_id"])
        yield {
            "after_id": str(after),
            "first_id": first,
            "lost": int(said["lost"]),
            "exact": said["exact"] == "true",
            "reason": said["reason"],
            "after_at": None if after == BEGINNING else _time(after),
            "first_at": None if first is None else _time(StreamId.parse(first)),
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
