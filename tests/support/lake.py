"""Lakes like the pipeline's, written with pyarrow for tests that read a lake without a JVM."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from bulltask.lake.files import arrow_schema, partition_schema
from bulltask.lake.storage import Layout
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, SNAPSHOTS, TABLES, Table

__all__ = ["LakeBuilder", "at", "encode_partition"]

Row = Mapping[str, Any]

#: The characters in queue names that Spark writes as %XX in directory names.
_ESCAPED: Final = frozenset("\"#%'*/:=?\\{[]^\x7f")
_ABSENT: Final = "__HIVE_DEFAULT_PARTITION__"


def at(text: str, milliseconds: int = 0) -> datetime:
    """Return a time in UTC, such as ``at("2026-11-22 10:00")``, plus some milliseconds."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC) + timedelta(milliseconds=milliseconds)


def encode_partition(value: str | None) -> str:
    """Encode a partition's value as Spark does in a directory name."""
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in value) if value else _ABSENT


class LakeBuilder:
    """Writes the files of a lake.

    ::

        lake = LakeBuilder(tmp_path)
        lake.jobs([{"job_id": "1", "state": "failed", "finished_at": at("2026-11-22 10:00")}])
        lake.gold("task_minute", [{"queue": "mail", "name": "send", "minute": at("2026-11-22 10:00")}])

    A row has the columns of its table (`bulltask.lake.tables`) and its partitions. Missing columns are null, except:

    * ``queue``: ``mail``
    * ``ingest_id``: unique for each call, ``test-00000000``, ``test-00000001``, ..., or the value of the argument
    * ``dt``: the day of the table's time column; in gold, of ``minute`` or ``last_seen``. Required in other tables
    * ``as_of``: the end of the job or the attempt; ``source``: ``events``; ``attempt``: 1
    * in events, the columns derived from ``event_id``: ``event_ms``, ``event_seq``, ``event_at``

    Rows with the same call, day and queue are written to one file.

    Args:
        root: The directory of the lake.
    """

    def __init__(self, root: Path) -> None:
        self.layout = Layout(root)
        self._calls, self._files = itertools.count(), itertools.count()

    def jobs(self, rows: Iterable[Row], ingest_id: str | None = None) -> Self:
        """Write rows of silver.jobs."""
        return self.write(JOBS, (_closed(row, "finished_at") for row in rows), ingest_id)

    def attempts(self, rows: Iterable[Row], ingest_id: str | None = None) -> Self:
        """Write rows of silver.attempts."""
        return self.write(ATTEMPTS, ({"attempt": 1, **_closed(row, "ended_at")} for row in rows), ingest_id)

    def events(self, rows: Iterable[Row], ingest_id: str | None = None) -> Self:
        """Write rows of bronze.events; each needs an ``event_id``."""
        return self.write(EVENTS, (_event(row) for row in rows), ingest_id)

    def gaps(self, rows: Iterable[Row], ingest_id: str | None = None) -> Self:
        """Write rows of bronze.gaps."""
        return self.write(GAPS, rows, ingest_id)

    def snapshots(self, rows: Iterable[Row], ingest_id: str | None = None) -> Self:
        """Write rows of bronze.jobs."""
        return self.write(SNAPSHOTS, rows, ingest_id)

    def gold(self, table: str, rows: Iterable[Row]) -> Self:
        """Write rows of a gold table, named without its layer."""
        return self.write(TABLES[f"gold.{table}"], rows)

    def write(self, table: Table, rows: Iterable[Row], ingest_id: str | None = None) -> Self:
        """Write rows of any table.

        Raises:
            ValueError: A row has an unknown column, or no time that determines its day.
        """
        default = {"queue": "mail", "ingest_id": ingest_id or f"test-{next(self._calls):08d}"}
        files: defaultdict[Path, list[Row]] = defaultdict(list)
        known = set(arrow_schema(table).names)
        for row in rows:
            if unknown := row.keys() - known:
                raise ValueError(f"{table.full_name} has no {', '.join(sorted(unknown))}")
            values = {**default, **row}
            values["dt"] = str(values.get("dt") or _day(table, values))
            files[self._directory(table, values)].append(values)
        for directory, directory_rows in files.items():
            self._write_file(table, directory, directory_rows)
        return self

    def _directory(self, table: Table, values: Row) -> Path:
        directory = self.layout.table(table)
        return directory.joinpath(*(f"{name}={encode_partition(values[name])}" for name in table.partitions))

    def _write_file(self, table: Table, directory: Path, rows: list[Row]) -> None:
        fields = list(arrow_schema(table))[: -len(partition_schema(table))]
        columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in fields]
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"part-{next(self._files):05d}-test.snappy.parquet"
        pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), path)


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
