"""The lake's tables with Arrow: reading them while the pipeline writes, their gaps, a batch's files, and compaction."""

from __future__ import annotations

import difflib
import math
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from bulltask.jobs.errors import ConfigError, LakeError, did_you_mean
from bulltask.lake.storage import (
    AtomicSwap,
    Layout,
    Ledger,
    OnStep,
    ignore_step,
    list_directories,
    list_files,
    partition_name,
    partition_value,
)
from bulltask.lake.tables import ATTEMPTS, BACKFILLS, EVENTS, GAPS, JOBS, SNAPSHOTS, TABLES, Kind, Table

__all__ = [
    "CLOCK_TOLERANCE",
    "COMPACTED",
    "CompactResult",
    "GapRow",
    "Staging",
    "TableReader",
    "arrow_schema",
    "check_queues",
    "compact",
    "days_in_gaps",
    "find_gaps",
    "known_queues",
    "latest_rows",
    "normalize_queue",
    "partition_schema",
    "write_file",
]


_TYPES: Final[Mapping[Kind, Any]] = {
    Kind.TEXT: pa.string(),
    Kind.INT: pa.int32(),
    Kind.LONG: pa.int64(),
    Kind.DOUBLE: pa.float64(),
    Kind.FLAG: pa.bool_(),
    Kind.TIME: pa.timestamp("us", tz="UTC"),
    Kind.TEXTS: pa.list_(pa.string()),
    Kind.COUNTS: pa.map_(pa.int32(), pa.int64()),
    Kind.MONEY: pa.decimal128(18, 6),
}


def arrow_schema(table: Table) -> Any:
    """Return the Arrow schema (``pyarrow.Schema``) of a table: the columns of its files, then its partitions."""
    columns = [pa.field(column.name, _TYPES[column.kind]) for column in table.columns]
    return pa.schema(columns + list(partition_schema(table)))


def partition_schema(table: Table) -> Any:
    """Return the Arrow schema of a table's partitions; ``dt`` is text like ``2026-11-22``."""
    return pa.schema([pa.field(name, pa.string()) for name in table.partitions])


def latest_rows(rows: pa.Table, table: Table, *more: str) -> pa.Table:
    """Return one row of a silver table for each key, in which nulls are equal: the row with the latest ``as_of``.

    Of rows with the same ``as_of``, it is the one with the greatest values in ``more`` columns.
    """
    if rows.num_rows < 2:
        return rows
    key = [name for name in table.key if name in rows.column_names]
    order = [*((name, "ascending") for name in key), *((name, "descending") for name in ("as_of", *more))]
    ordered = rows.sort_by(order).combine_chunks()
    is_same = pa.scalar(True)
    for name in key:
        column = ordered[name]
        current, previous = column.slice(1), column.slice(0, len(column) - 1)
        both_null = pc.and_(pc.is_null(current), pc.is_null(previous))
        is_same = pc.and_(is_same, pc.or_(pc.fill_null(pc.equal(current, previous), False), both_null))
    head = pa.chunked_array([pa.array([True])])
    keep = pa.chunked_array(head.chunks + pc.invert(is_same).chunks)
    return ordered.filter(keep)


T = TypeVar("T")

_MAX_RETRIES: Final = 50
"""How many times a read is retried because files vanished after they were listed: they were compacted or replaced."""

_SCAN: Final = {"batch_size": 32_768, "batch_readahead": 4, "fragment_readahead": 4}
"""Rows per batch, and how many batches and files are read ahead. This bounds the memory of a read."""

_MAX_NAMED: Final = 8
"""How many queues an error message lists."""

_PARQUET: Final = ds.ParquetFileFormat()


class TableReader:
    """A reader of tables as they are on disk at one moment.

    Raises:
        LakeError: There is no lake; or, in every method, a file cannot be read.
    """

    def __init__(self, layout: Layout) -> None:
        layout.check()
        self._layout = layout
        self._files = LocalFileSystem()

    def days(self, table: Table) -> list[date]:
        """Return the days that a table has directories for, in order."""
        return self._layout.days(table)

    def queues(self, table: Table) -> list[str]:
        """Return the queues that a table has directories for, in order."""
        days = (self._layout.day(table, day) for day in self.days(table))
        return sorted({partition_value(queue.name) for day in days for queue in list_directories(day)})

    def scan(
        self,
        table: Table,
        days: Iterable[date],
        reduce: Callable[[Iterator[Any]], T],
        *,
        where: Any = None,
        columns: Sequence[str] | None = None,
        queue: str | None = None,
    ) -> T:
        """Read a table's rows batch by batch, in any order, and return the result of ``reduce``.

        If files disappear during the scan, because they were compacted or rewritten, ``reduce`` is called again with
        the current rows. ``where`` is an Arrow expression; the default columns are all, including partitions.
        """
        day_list = list(days)
        return self._retry(table, lambda: reduce(self._batches(table, day_list, queue, where, columns)))

    def rows(
        self,
        table: Table,
        days: Iterable[date] | None = None,
        *,
        where: Any = None,
        columns: Sequence[str] | None = None,
        queue: str | None = None,
    ) -> list[dict[str, Any]]:
        """Return rows as :meth:`scan` reads them; by default those of all days."""

        def collect(batches: Iterator[Any]) -> list[dict[str, Any]]:
            return [row for batch in batches for row in batch.to_pylist()]

        all_days = self.days(table) if days is None else days
        return self.scan(table, all_days, collect, where=where, columns=columns, queue=queue)

    def count(self, table: Table, days: Iterable[date], queue: str | None = None) -> int:
        """Return the number of rows in some days, from the files' metadata; some may be superseded."""
        day_list = list(days)
        return self._retry(table, lambda: int(self._dataset(table, day_list, queue).count_rows()))

    def _retry(self, table: Table, read: Callable[[], T]) -> T:
        for _ in range(_MAX_RETRIES):
            try:
                return read()
            except FileNotFoundError:
                continue
            except (pa.ArrowException, OSError) as exc:
                raise LakeError(f"{self._layout.table(table)} cannot be read: {exc}") from exc
        raise LakeError(f"{self._layout.table(table)} cannot be read: its files are being replaced; try again")

    def _batches(
        self, table: Table, days: list[date], queue: str | None, where: Any, columns: Sequence[str] | None
    ) -> Iterator[Any]:
        names = list(columns) if columns is not None else arrow_schema(table).names
        scanner = self._dataset(table, days, queue).scanner(columns=names, filter=where, **_SCAN)
        return (batch for batch in scanner.to_batches() if batch.num_rows)

    def _dataset(self, table: Table, days: list[date], queue: str | None) -> Any:
        hive = ds.partitioning(partition_schema(table), flavor="hive")
        root = self._layout.table(table)
        fragments = [
            _PARQUET.make_fragment(str(path), self._files, hive.parse(f"/{directory.relative_to(root)}/"))
            for day in days
            for path, directory in list_files(self._layout, table, day, queue)
        ]
        return ds.FileSystemDataset(fragments, arrow_schema(table), _PARQUET, self._files)


def known_queues(reader: TableReader) -> set[str]:
    """Return the queues in bronze and silver tables; gold tables may be kept for longer."""
    return {name for table in (EVENTS, ATTEMPTS, JOBS, SNAPSHOTS, GAPS) for name in reader.queues(table)}


def normalize_queue(queue: str, known: Collection[str]) -> str:
    """Return a queue's name in the lake: ``mail`` for BullMQ's ``{mail}``, unless the lake has the name with braces."""
    in_braces = queue.startswith("{") and queue.endswith("}")
    return queue[1:-1] if in_braces and queue not in known else queue


def check_queues(root: Path, names: Iterable[str], known: Collection[str]) -> None:
    """Check that a lake has data for each queue, because a misspelled name looks like a queue without jobs.

    An empty lake accepts all names. Others raise ``ConfigError``, which lists the lake's queues, most similar first.
    """
    for queue in names if known else ():
        if queue not in known:
            similar = sorted(known, key=lambda name: (-difflib.SequenceMatcher(None, queue, name).ratio(), name))
            more = f" and {len(similar) - _MAX_NAMED:,} more" if len(similar) > _MAX_NAMED else ""
            hint = did_you_mean(queue, known) or "."
            raise ConfigError(
                f"the lake {root} has no data for queue {queue!r}{hint} It has {', '.join(similar[:_MAX_NAMED])}{more}"
            )


CLOCK_TOLERANCE: Final = timedelta(seconds=10)
"""How much the clock of the worker that writes ``finishedOn`` to the job's hash may differ from Redis' clock."""

_BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class GapRow:
    """Lost events of one queue, with the columns of ``bronze.gaps``.

    Attributes:
        backfilled_jobs: The number of jobs that backfills have added; ``None`` if there was no backfill.
    """

    queue: str
    last_id_before: str
    first_id_after: str | None
    lost: int
    exact: bool
    loss_reason: str
    last_at_before: datetime | None
    first_at_after: datetime | None
    detected_at: datetime
    backfilled_jobs: int | None

    def overlaps(self, since: datetime | None, until: datetime | None) -> bool:
        """Whether lost events can be from this period."""
        until_at = self.first_at_after or self.detected_at
        late = until is not None and self.last_at_before is not None and self.last_at_before >= until
        return not late and (since is None or until_at >= since)

    @property
    def finish_period(self) -> tuple[datetime, datetime]:
        """The period, by workers' clocks, in which jobs without their *completed* or *failed* event finished."""
        begin = _BEGINNING if self.last_at_before is None else self.last_at_before - CLOCK_TOLERANCE
        return begin, (self.first_at_after or self.detected_at) + CLOCK_TOLERANCE


def find_gaps(
    layout: Layout,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    queues: Collection[str] | None = None,
) -> list[GapRow]:
    """Return the gaps that end at ``since`` or later and begin before ``until``, in order of their detection."""
    reader, backfilled = TableReader(layout), dict[tuple[str, str, datetime], int]()
    for row in reader.rows(BACKFILLS):
        backfilled[_gap_key(row)] = backfilled.get(_gap_key(row), 0) + row["backfilled_jobs"]
    gaps = (_gap_row(row, backfilled.get(_gap_key(row))) for row in reader.rows(GAPS))
    matching = (gap for gap in gaps if gap.overlaps(since, until) and (queues is None or gap.queue in queues))
    return sorted(matching, key=lambda gap: (gap.detected_at, gap.queue))


def days_in_gaps(layout: Layout, days: Iterable[date]) -> list[date]:
    """Return the days on which jobs without their *completed* or *failed* event may have finished.

    A backfill writes rows to these days only.
    """
    periods = [gap.finish_period for gap in find_gaps(layout)]
    return [day for day in days if any(begin.date() <= day <= end.date() for begin, end in periods)]


def _gap_key(row: dict[str, Any]) -> tuple[str, str, datetime]:
    """Return the key of a gap. It includes the time, because every new stream of a queue begins at ``0-0``."""
    return row["queue"], row["last_id_before"], row["detected_at"]


def _gap_row(row: dict[str, Any], backfilled_jobs: int | None) -> GapRow:
    known = {name: row[name] for name in GapRow.__dataclass_fields__ if name in row}
    return GapRow(**known, backfilled_jobs=backfilled_jobs)


# A batch's files are written to a staging directory, which readers skip, and then moved into the tables.
#
# Once all files are written, renames make them visible. A process that is killed before the renames leaves nothing in
# the tables. Files of a process that is killed between the renames are removed with the help of the ledger. Each run of
# a batch has its own directory, because the JVM of a killed driver may keep writing for a short time.


class Staging:
    """The staging directory of one batch."""

    def __init__(self, layout: Layout, ingest_id: str) -> None:
        self._layout = layout
        self._ingest_id = ingest_id
        self.clear()
        self._root = layout.internal("staging", f"{ingest_id}-{secrets.token_hex(4)}")

    def directory(self, name: str) -> Path:
        """Return a directory for files of any kind; it need not exist."""
        return self._root / name

    def table(self, table: Table) -> Path:
        """Return the directory for a table's rows; files go to its subdirectories ``dt=…/queue=…``."""
        return self.directory(table.full_name)

    def write(self, table: Table, rows: pa.Table) -> None:
        """Write rows with all columns of a table except ``ingest_id``, one file per partition."""
        partitions = [name for name in table.partitions if name != "ingest_id"]
        columns = [column.name for column in table.columns]
        ordered = rows.take(pc.sort_indices(rows, [(name, "ascending") for name in partitions]))
        groups = ordered.group_by(partitions, use_threads=False).aggregate([([], "count_all")]).to_pylist()
        offset = 0
        for group in groups:
            directory = self.table(table).joinpath(*(partition_name(name, group[name]) for name in partitions))
            write_file(directory, ordered.slice(offset, group["count_all"]).select(columns))
            offset += group["count_all"]

    def publish(self, tables: tuple[Table, ...]) -> None:
        """Move the staged files of these tables into the tables."""
        for table in tables:
            root = self.table(table)
            for day in list_directories(root):
                for queue in list_directories(day):
                    target = self._layout.table(table) / day.name / queue.name / f"ingest_id={self._ingest_id}"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    queue.rename(target)

    def clear(self) -> None:
        """Remove all staged files, including files of other runs."""
        shutil.rmtree(self._layout.internal("staging"), ignore_errors=True)


def write_file(directory: Path, rows: pa.Table) -> None:
    """Create a directory with a single file."""
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, directory / "part-0.parquet")


# Each batch of the pipeline writes a file for each queue. Compaction rewrites the files of a past day into files of
# about the target size, and drops superseded rows of silver tables.


COMPACTED: Final = tuple(table.full_name for table in TABLES.values() if "ingest_id" in table.partitions)
"""The tables that batches write to. Gold tables are written a day at a time and need no compaction."""

_ROWS: Final = 131_072


@dataclass(frozen=True, slots=True)
class CompactResult:
    """The result of a compaction of one table.

    Attributes:
        table: Its full name.
        partitions: The number of rewritten partitions (each is one queue's day).
        files_before, files_after: The number of their files.
        rows_before, rows_after: The number of their rows; fewer in silver, where superseded rows are dropped.
        bytes_before, bytes_after: Their size.
    """

    table: str
    partitions: int = 0
    files_before: int = 0
    files_after: int = 0
    rows_before: int = 0
    rows_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def compact(
    layout: Layout, table: str, *, before: date, target_mb: float = 128, on_step: OnStep = ignore_step
) -> CompactResult:
    """Rewrite past days of a table into few files; partitions with few files are not changed.

    Raises:
        ConfigError: ``table`` is not one of the :data:`COMPACTED`, or the size is invalid.
        LakeError: There is no lake.
    """
    if table not in COMPACTED:
        raise ConfigError(f"table {table!r} cannot be compacted: use one of {', '.join(COMPACTED)}")
    if not target_mb > 0:
        raise ConfigError(f"target_mb must be more than 0, not {target_mb!r}")
    layout.check()
    source, result = TABLES[table], CompactResult(table)
    with AtomicSwap(layout, on_step) as swaps:
        for day in layout.days(source):
            if day >= before:
                break
            for queue in list_directories(layout.day(source, day)):
                result = _compact_queue(layout, source, queue, target_mb, swaps, result)
    return result


def _compact_queue(
    layout: Layout, table: Table, directory: Path, target_mb: float, swaps: AtomicSwap, result: CompactResult
) -> CompactResult:
    old = _published_directories(layout, directory)
    files = [file for path in old for file in sorted(path.glob("[!_.]*.parquet"))]
    size, target_bytes = sum(file.stat().st_size for file in files), int(target_mb * 1_000_000)
    if len(files) <= max(1, math.ceil(size / target_bytes)):
        return result
    columns = [field for field in arrow_schema(table) if field.name not in table.partitions]
    rows_before = sum(pq.read_metadata(file).num_rows for file in files)
    new = swaps.new_directory()
    batches = _batches(table, files, pa.schema(columns))
    rows_after = _write(new, batches, pa.schema(columns), target_bytes)
    new_files = sorted(new.iterdir())
    bytes_after = sum(file.stat().st_size for file in new_files)
    swaps.swap(new, directory / f"ingest_id=compact-{datetime.now(UTC):%Y%m%dT%H%M%S%f}", old)
    return replace(
        result,
        partitions=result.partitions + 1,
        files_before=result.files_before + len(files),
        files_after=result.files_after + len(new_files),
        rows_before=result.rows_before + rows_before,
        rows_after=result.rows_after + rows_after,
        bytes_before=result.bytes_before + size,
        bytes_after=result.bytes_after + bytes_after,
    )


def _published_directories(layout: Layout, directory: Path) -> list[Path]:
    """Return the directories of committed batches; files of an uncommitted batch may be removed again."""
    directories = list_directories(directory)
    # Read after the listing: a batch that has published files is in the ledger as publishing until it is committed.
    publishing = Ledger(layout).publishing()
    return [path for path in directories if partition_value(path.name) != publishing]


def _batches(table: Table, files: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    dataset = ds.dataset([str(file) for file in files], schema=schema, format="parquet")
    if table.layer != "silver":
        # Little read-ahead, because a day of events can be larger than the memory.
        yield from dataset.scanner(batch_size=_ROWS, batch_readahead=2, fragment_readahead=2).to_batches()
        return
    yield from latest_rows(dataset.to_table(), table).to_batches(max_chunksize=_ROWS)


def _write(directory: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, target_bytes: int) -> int:
    """Write files of about the target size; return the number of rows."""
    directory.mkdir()
    rows = 0
    filled = (batch for batch in batches if batch.num_rows)
    for number in count():
        if (first := next(filled, None)) is None:
            break
        path = str(directory / f"part-{number:05d}.zstd.parquet")
        with pa.OSFile(path, "wb") as sink, pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for batch in chain([first], filled):
                writer.write_batch(batch)
                rows += batch.num_rows
                if sink.tell() >= target_bytes:
                    break
    return rows
