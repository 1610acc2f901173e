"""Batches of events that the pipeline's batch writer stores in a lake, without Spark and Redis."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pyarrow as pa

from bulltask.lake.reader import latest_rows
from bulltask.lake.storage import Lake, arrow_schema
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, MAX_TIME_MS, OPEN_EVENTS, Table
from bulltask.spark.batches import BatchWriter
from bulltask.spark.bronze import write_events
from bulltask.spark.open_jobs import open_events
from bulltask.spark.source import columns
from bulltask.spark.source.offsets import encode_offsets
from tests.support.lifecycle_oracle import LifecycleEvent

__all__ = ["StoredBatches", "assert_has_sent", "event_batches", "ids_of", "rows_as_text", "rows_of"]


def event_batches(events: Iterable[LifecycleEvent]) -> list[pa.RecordBatch]:
    """Return the events of a task as it reads them: those of each queue in their order."""
    schema = columns.arrow_schema(columns.EVENTS)
    by_queue: dict[str, list[dict[str, Any]]] = {}
    for entry in sorted(events, key=lambda event: (event.event_ms, event.event_seq)):
        at = datetime.fromtimestamp(entry.event_ms / 1000, UTC) if entry.event_ms <= MAX_TIME_MS else None
        row = {**asdict(entry), "event_id": entry.event_id, "event_at": at}
        by_queue.setdefault(entry.queue, []).append(row)
    return [pa.RecordBatch.from_pylist(rows, schema) for rows in by_queue.values()]


class StoredBatches:
    """The driver of a pipeline: Spark's query without Spark. Each object is a process with its own view of the lake.

    Args:
        lake: The lake.
        checkpoint: The directory of Spark's progress; it is created with a new query if it does not exist.
        open_job_timeout_ms: When an open job times out.

    Attributes:
        reads: How many batches have been read.
    """

    def __init__(self, lake: Lake, checkpoint: Path, open_job_timeout_ms: int = 10**9) -> None:
        self.lake = lake
        self.reads = 0
        self._checkpoint = checkpoint
        if not checkpoint.exists():
            (checkpoint / "offsets").mkdir(parents=True)
            (checkpoint / "metadata").write_text(json.dumps({"id": str(uuid4())}))
        self._writer = BatchWriter(lake, checkpoint, open_job_timeout_ms, hash_tag=True)

    def write(self, batch: int, events: Sequence[LifecycleEvent], gaps: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write a batch of the query, as Spark asks for it."""
        (self._checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(encode_offsets({}))}")

        def collect() -> list[Any]:
            self.reads += 1
            half = len(events) // 2
            parts = [write_events(self.lake, event_batches(part)) for part in (events[:half], events[half:])]
            stored = [part.to_json() for part in parts] + [{"files": [], "queues": {}, "gaps": list(gaps)}]
            return [SimpleNamespace(part=json.dumps(part)) for part in stored]

        self._writer(SimpleNamespace(collect=collect, sparkSession=None), batch)  # type: ignore[arg-type]


def rows_of(lake: Lake, table: Table) -> pa.Table:
    """Return the rows of a table, with deltalake alone; of silver, the current ones."""
    snapshot = lake.open(table)
    if snapshot is None:
        return arrow_schema(table).empty_table()
    if table is OPEN_EVENTS:
        return open_events(lake, snapshot.files())
    from deltalake import DeltaTable  # noqa: PLC0415

    rows = DeltaTable(lake.location(table), storage_options=lake._options or None).to_pyarrow_table()
    return latest_rows(rows, table) if table in {ATTEMPTS, JOBS} else rows


def rows_as_text(lake: Lake, table: Table) -> Counter[str]:
    """Return the rows of a table as texts, to be compared with those of another lake."""
    rows = rows_of(lake, table)
    return Counter(repr(row) for row in rows.select(sorted(rows.column_names)).to_pylist())


def assert_has_sent(lake: Lake, events: Sequence[LifecycleEvent]) -> None:
    """Assert that ``bronze.events`` has these events, once each, in all their fields."""
    names = [*asdict(events[0]), "event_id"]
    sent = Counter(repr(asdict(event) | {"event_id": event.event_id}) for event in events)
    assert Counter(map(repr, rows_of(lake, EVENTS).select(names).to_pylist())) == sent


def ids_of(lake: Lake) -> list[tuple[str, str]]:
    """Return the queue and the id of each row of ``bronze.events``, in order."""
    rows = rows_of(lake, EVENTS)
    return sorted(zip(rows["queue"].to_pylist(), rows["event_id"].to_pylist(), strict=True))
