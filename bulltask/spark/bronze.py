"""Read a batch's events from Redis and write them to files of ``bronze.events``, in tasks.

No event passes through Spark: each task writes the events that it reads to files below the table's directory and
returns only a description of them (`ReadPart`), the row of this data source. The files are not in the table before the
driver commits them. Files of a failed task stay unnamed; the task that replaces it writes files with other names.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from bulltask.lake.ledger import QueueRecord
from bulltask.lake.storage import DataFile, Lake
from bulltask.lake.tables import EVENTS, MAX_TIME_MS
from bulltask.spark.source import columns
from bulltask.spark.source.columns import GAP_EVENT
from bulltask.spark.source.offsets import BEGINNING, StreamId
from bulltask.spark.source.options import StreamOptions, read_options
from bulltask.spark.source.planning import pack
from bulltask.spark.source.readers import EventsStreamReader

_MAX_BYTES: Final = 64_000_000
"""A task writes its events to files when it has read about as many bytes (in Arrow's memory)."""

_FILES: Final = "events"  # how the names of files begin

_LAST_TIME: Final = pa.scalar(MAX_TIME_MS * 1000).cast(pa.timestamp("us", "UTC"))


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The events and gaps that a task has read.

    Attributes:
        files: The files of ``bronze.events`` that it has written.
        queues: The number of events of each queue, their first and last id, and its losses.
        gaps: The rows of ``bronze.gaps``, without the columns that :func:`gap_rows` adds.
    """

    files: Sequence[DataFile] = ()
    queues: Mapping[str, QueueRecord] = field(default_factory=dict)
    gaps: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Decode the result of :meth:`to_json`."""
        queues = {queue: QueueRecord(**record) for queue, record in stored["queues"].items()}
        return cls([DataFile(**file) for file in stored["files"]], queues, stored["gaps"])

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        return asdict(self)


def write_events(lake: Lake, batches: Iterable[pa.RecordBatch]) -> ReadPart:
    """Write the events that a task reads, page by page and in the order of each stream."""
    return merge_parts(_write(lake, pages) for pages in pack(batches, lambda page: page.nbytes, _MAX_BYTES))


def _write(lake: Lake, pages: Sequence[pa.RecordBatch]) -> ReadPart:
    rows = pa.Table.from_batches(pages)
    is_gap = pc.fill_null(pc.equal(rows["event"], GAP_EVENT), fill_value=False)
    gaps = [_gap(row) for row in rows.filter(is_gap).select(["queue", "event_id", "extra"]).to_pylist()]
    lost = [ReadPart(queues={gap["queue"]: QueueRecord(lost=gap["lost"], gaps=1)}, gaps=[gap]) for gap in gaps]
    events = rows.filter(pc.invert(is_gap)) if gaps else rows
    if not events.num_rows:
        return merge_parts(lost)
    encoded: Any = events["queue"].combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy()
    _, first, counts = np.unique(codes, return_index=True, return_counts=True)
    last = len(codes) - 1 - np.unique(codes[::-1], return_index=True)[1]
    ids = [events["event_id"].take(pa.array(at)).to_pylist() for at in (first, last)]
    records = map(QueueRecord, counts.tolist(), *ids)
    queues = dict(zip(encoded.dictionary.to_pylist(), records, strict=True))
    return merge_parts([ReadPart(lake.write(EVENTS, _with_day(events), _FILES), queues), *lost])


def merge_parts(parts: Iterable[ReadPart]) -> ReadPart:
    """Combine parts of a task, or of all tasks."""
    files: list[DataFile] = []
    queues: defaultdict[str, QueueRecord] = defaultdict(QueueRecord)
    gaps: list[Mapping[str, Any]] = []
    for part in parts:
        files += part.files
        gaps += part.gaps
        for queue, record in part.queues.items():
            queues[queue] = _both(queues[queue], record)
    return ReadPart(files, dict(queues), gaps)


def gap_rows(gaps: Iterable[Mapping[str, Any]], detected_at: datetime) -> list[dict[str, Any]]:
    """Return the rows of ``bronze.gaps`` for gaps that were detected at a time."""
    return [
        {
            **gap,
            "last_at_before": _time(gap["last_id_before"]),
            "first_at_after": _time(gap["first_id_after"]),
            "detected_at": detected_at + timedelta(microseconds=number),  # part of the key, so unique
            "dt": str(detected_at.date()),
        }
        for number, gap in enumerate(gaps)
    ]


def events_source(lake: Lake) -> type[DataSource]:
    """Return the data source of a pipeline.

    Its rows describe what its tasks have written. The lake is not an option of the source, because Spark shows options
    in plans, and the lake may have credentials.
    """

    class EventsSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "bulltask_pipeline"

        def schema(self) -> str:
            return "part string"

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002 - there is only one
            return _WritingReader(read_options(StreamOptions, self.options), lake)

    return EventsSource


class _WritingReader(EventsStreamReader):
    """A reader that writes the events and returns one row for each task."""

    min_per_task = 50_000  # each task writes a file: with many small ones, reads, commits and object stores cost more

    def __init__(self, options: StreamOptions, lake: Lake) -> None:
        super().__init__(options, columns.EVENTS)
        self._lake = lake

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, write its events, and describe them."""
        part = write_events(self._lake, super().read(partition))
        yield pa.RecordBatch.from_pydict({"part": [json.dumps(part.to_json())]})


def _with_day(rows: pa.Table) -> pa.Table:
    # For ids after the year 9999 there is no time, but every row needs a day.
    event_at: Any = pc.fill_null(rows["event_at"], _LAST_TIME)
    rows = rows.set_column(rows.column_names.index("event_at"), "event_at", event_at)
    return rows.append_column("dt", event_at.cast(pa.date32()).cast(pa.string()))


def _gap(row: Mapping[str, Any]) -> dict[str, Any]:
    extra = json.loads(row["extra"])
    return {
        "queue": row["queue"],
        "last_id_before": row["event_id"],
        "first_id_after": extra.get("first_id_after"),
        "lost": int(extra["lost"]),
        "exact": extra["exact"] == "true",
        "loss_reason": extra["loss_reason"],
    }


def _both(one: QueueRecord, other: QueueRecord) -> QueueRecord:
    firsts = [record.first for record in (one, other) if record.first is not None]
    lasts = [record.last for record in (one, other) if record.last is not None]
    return QueueRecord(
        one.events + other.events,
        min(firsts, key=StreamId.parse, default=None),
        max(lasts, key=StreamId.parse, default=None),
        one.lost + other.lost,
        one.gaps + other.gaps,
    )


def _time(entry_id: str | None) -> datetime | None:
    entry = BEGINNING if entry_id is None else StreamId.parse(entry_id)
    return None if entry == BEGINNING else datetime.fromtimestamp(min(entry.ms, MAX_TIME_MS) / 1000, UTC)
