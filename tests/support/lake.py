"""Lakes like the pipeline's, for tests that read a lake without a JVM."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa

from bulltask.lake.ledger import BatchRecord
from bulltask.lake.storage import Lake, arrow_schema, batch_prefix
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, SNAPSHOTS, TABLES, Table

__all__ = ["LakeBuilder", "at"]

Row = Mapping[str, Any]


def at(text: str, milliseconds: int = 0) -> datetime:
    """Return a time in UTC, such as ``at("2026-11-22 10:00")``, plus some milliseconds."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC) + timedelta(milliseconds=milliseconds)


class LakeBuilder:
    """Writes rows to a lake.

    ::

        builder = LakeBuilder(tmp_path)
        builder.jobs([{"job_id": "1", "state": "failed", "finished_at": at("2026-11-22 10:00")}])
        builder.gold("task_minute", [{"queue": "mail", "name": "send", "minute": at("2026-11-22 10:00")}])
        builder.lake.open(JOBS)

    A row has the columns of its table (`bulltask.lake.tables`) and its partition. Missing columns are null, except:

    * ``queue``: ``mail``
    * ``dt``: the day of the table's time column; in gold, of ``minute`` or ``last_seen``. Required in other tables
    * ``as_of``: the end of the job or the attempt; ``source``: ``events``; ``attempt``: 1
    * in events, the columns derived from ``event_id``: ``event_ms``, ``event_seq``, ``event_at``

    The rows of a call are one commit, with a file for each day.

    Args:
        root: The directory or URL of the lake.
        storage_options: Settings of its object store.

    Attributes:
        root: The directory of the lake.
        lake: The lake.
    """

    def __init__(self, root: Path | str, storage_options: Mapping[str, str] | None = None) -> None:
        self.root = Path(root)
        self.lake = Lake(root, storage_options)
        self._calls = itertools.count()

    def jobs(self, rows: Iterable[Row], batch: int | None = None) -> Self:
        """Write rows of silver.jobs."""
        return self.write(JOBS, (_closed(row, "finished_at") for row in rows), batch)

    def attempts(self, rows: Iterable[Row], batch: int | None = None) -> Self:
        """Write rows of silver.attempts."""
        return self.write(ATTEMPTS, ({"attempt": 1, **_closed(row, "ended_at")} for row in rows), batch)

    def events(self, rows: Iterable[Row], batch: int | None = None) -> Self:
        """Write rows of bronze.events; each needs an ``event_id``."""
        return self.write(EVENTS, (_event(row) for row in rows), batch)

    def gaps(self, rows: Iterable[Row], batch: int | None = None) -> Self:
        """Write rows of bronze.gaps."""
        return self.write(GAPS, rows, batch)

    def snapshots(self, rows: Iterable[Row]) -> Self:
        """Write rows of bronze.jobs."""
        return self.write(SNAPSHOTS, rows)

    def open_events(self, rows: Iterable[Row], batch: int, record: BatchRecord) -> Self:
        """Complete a batch: write the events of open jobs, in the commit that has the batch's record."""
        stored = [{"queue": "mail", "batch": batch, "shard": "all", **row} for row in rows]
        table = self.lake.open_events
        files = self.lake.write(table, pa.Table.from_pylist(stored, arrow_schema(table)), batch_prefix(batch))
        assert self.lake.commit(table, files, batch=batch, metadata=record.to_json())
        return self

    def gold(self, table: str, rows: Iterable[Row]) -> Self:
        """Write rows of a gold table, named without its layer."""
        return self.write(TABLES[f"gold.{table}"], rows)

    def write(self, table: Table, rows: Iterable[Row], batch: int | None = None) -> Self:
        """Write rows of any table, if wanted as the commit of a batch.

        Raises:
            ValueError: A row has an unknown column, or no time that determines its day.
        """
        known = set(arrow_schema(table).names)
        completed: list[Row] = []
        for row in rows:
            if unknown := row.keys() - known:
                raise ValueError(f"{table.full_name} has no {', '.join(sorted(unknown))}")
            values = {"queue": "mail", **row}
            completed.append({**values, "dt": str(values.get("dt") or _day(table, values))})
        fields = arrow_schema(table)
        columns = [pa.array([row.get(field.name) for row in completed], field.type) for field in fields]
        prefix = f"test-{next(self._calls):05d}" if batch is None else batch_prefix(batch)
        files = self.lake.write(table, pa.Table.from_arrays(columns, schema=fields), prefix)
        assert self.lake.commit(table, files, batch=batch)
        return self


def _closed(row: Row, end: str) -> Row:
    return {"source": "events", "as_of": row.get(end), **row}


def _event(row: Row) -> Row:
    ms, seq = (int(part) for part in row["event_id"].split("-"))
    seconds = datetime.fromtimestamp(ms // 1000, UTC)
    return {"event_ms": ms, "event_seq": seq, "event_at": seconds + timedelta(milliseconds=ms % 1000), **row}


_DAYS: Final[Mapping[str, Callable[[Row], Any]]] = {
    "bronze.events": lambda row: row["event_at"],
    "bronze.gaps": lambda row: row["detected_at"],
    "bronze.jobs": lambda row: row.get("finished_at") or row["snapshot_at"],
    "bronze.backfills": lambda row: row["backfilled_at"],
    "silver.attempts": lambda row: row.get("ended_at") or row["as_of"],
    "silver.jobs": lambda row: row.get("finished_at") or row["as_of"],
    "gold.task_minute": lambda row: row["minute"],
    "gold.capacity_minute": lambda row: row["minute"],
    "gold.errors_day": lambda row: row["last_seen"],
}


def _day(table: Table, row: Row) -> date:
    time = _DAYS[table.full_name](row) if table.full_name in _DAYS else None
    if time is None:
        raise ValueError(f"this row of {table.full_name} has no day: add dt='2026-11-22'")
    day: date = time.astimezone(UTC).date()
    return day
