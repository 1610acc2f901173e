"""Compact past days: rewrite many small files into few large ones; does not require a JVM.

Each batch of the pipeline writes a file for each queue. Compaction rewrites the files of a past day into files of about
the target size, and drops superseded rows of silver tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from itertools import chain, count
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from bulltask.jobs.errors import ConfigError
from bulltask.lake.arrow import arrow_schema, latest_rows
from bulltask.lake.atomic_swap import AtomicSwap, OnStep, ignore_step
from bulltask.lake.layout import Layout, list_directories, partition_value
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import TABLES, Table

__all__ = ["COMPACTED", "CompactResult", "compact"]

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

    Args:
        layout: The lake.
        table: Its full name, one of :data:`COMPACTED`.
        before: Rewrite days before this one.
        target_mb: Target size of a file in megabytes.
        on_step: For tests, as in :class:`~bulltask.lake.atomic_swap.AtomicSwap`.

    Raises:
        ConfigError: The table does not exist, or the size is invalid.
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
    swaps.swap(new, directory / f"ingest_id={_new_ingest_id()}", old)
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


def _new_ingest_id() -> str:
    return f"compact-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
