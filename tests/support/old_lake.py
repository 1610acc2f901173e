"""Lakes of the layout that bulltask had before its tables were Delta tables, as its pipeline wrote them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulltask.lake.storage import arrow_schema
from bulltask.lake.tables import OPEN_EVENTS, Table

__all__ = ["OldLakeBuilder"]

_ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f")  # in queue names, Spark writes these as %XX
_numbers = itertools.count()


class OldLakeBuilder:
    """Writes rows as files of the old layout; a row needs all its columns that are not null, and ``dt``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, table: Table, rows: Iterable[Mapping[str, Any]], ingest_id: str = "3f0c2a91-00000000") -> None:
        """Write one file for each row."""
        for row in rows:
            day = self.root / table.layer / table.name / f"dt={row['dt']}"
            if table.layer == "gold":
                self._write_file(table, day, row, {"dt"})
            else:
                name = "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in row["queue"])
                self._write_file(table, day / f"queue={name}" / f"ingest_id={ingest_id}", row, {"dt", "queue"})

    def head(self, ingest_id: str, open_events: Iterable[Mapping[str, Any]] = (), **record: Any) -> None:
        """Write the record of the last batch, and the events of open jobs."""
        internal, events = self.root / "_pipeline", list(open_events)
        for event in events:
            self._write_file(OPEN_EVENTS, internal / "open_jobs" / ingest_id, event, {"batch", "shard"})
        content = {
            "version": 1, "ingest_id": ingest_id, "previous": None, "number": 1, "written_ms": 1, "newest_event_ms": 1,
            "queues": {}, "last_ids": {}, "lost": {}, "attempts": 0, "jobs": 0,
            "open_jobs_ingest_id": ingest_id if events else None, "open_job_events": len(events),
            "oldest_open_event_ms": 0, "steps_ms": {}, **record,
        }  # fmt: skip
        for name in ("batches", "checkpoint/offsets", "staging"):
            (internal / name).mkdir(parents=True, exist_ok=True)
        (internal / "head.json").write_text(json.dumps(content))

    def publishing(self, ingest_id: str) -> None:
        """Record that a batch is being moved into the tables."""
        (self.root / "_pipeline" / "publishing.json").write_text(json.dumps({"ingest_id": ingest_id}))

    def _write_file(self, table: Table, directory: Path, row: Mapping[str, Any], skipped: set[str]) -> None:
        fields = [field for field in arrow_schema(table) if field.name not in skipped]
        columns = [pa.array([row.get(field.name)], field.type) for field in fields]
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"part-{next(_numbers):05d}.zstd.parquet"
        pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), path)
