"""Few large files instead of many small ones, and days that are not kept any longer; needs no JVM.

Each batch of a stream writes a file for each queue. Of a day that is over, these become a few files of about the size
that is wanted. In silver the rows that others have superseded are left out.
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

from bulltask.errors import ConfigError
from bulltask.lake.arrow import arrow_schema, latest_rows
from bulltask.lake.atomic_swap import AtomicSwap, OnStep, ignore_step
from bulltask.lake.layout import Layout, listed, partition_value
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import TABLES, Table

__all__ = ["COMPACTED", "CompactReport", "compact"]

COMPACTED: Final = tuple(table.full_name for table in TABLES.values() if "ingest_id" in table.partitions)
"""The tables that batches write to; those of gold are written a day at a time."""

_ROWS: Final = 131_072


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What became of a table.

    Attributes:
        table: its full name.
        partitions: days of queues that were written anew.
        files_before, files_after: of these, how many files.
        rows_before, rows_after: how many rows; fewer in silver, where superseded ones are left out.
        bytes_before, bytes_after: their size.
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
) -> CompactReport:
    """Write the days of a table that are over into few files; one that has no more files than it needs stays.

    Args:
        layout: the lake.
        table: by its full name, one of :data:`COMPACTED`.
        before: days before this one.
        target_mb: megabytes of a file, about.
        on_step: for tests, as in :class:`~bulltask.lake.atomic_swap.AtomicSwap`.

    Raises:
        ConfigError: there is no such table, or the size is none.
        LakeError: there is no lake.
    """
    if table not in COMPACTED:
        raise ConfigError(f"table {table!r} cannot be compacted; these can: {', '.join(COMPACTED)}")
    if not target_mb > 0:
        raise ConfigError(f"target_mb must be more than 0, not {target_mb!r}")
    layout.check()
    which, report = TABLES[table], CompactReport(table)
    with AtomicSwap(layout, on_step) as swaps:
        for day in layout.days(which):
            if day >= before:
                break
            for queue in listed(layout.day(which, day)):
                report = _compact_queue(layout, which, queue, target_mb, swaps, report)
    return report


def _compact_queue(
    layout: Layout, table: Table, directory: Path, target_mb: float, swaps: AtomicSwap, report: CompactReport
) -> CompactReport:
    old = _done(layout, directory)
    files = [file for one in old for file in sorted(one.glob("[!_.]*.parquet"))]
    size, wanted = sum(file.stat().st_size for file in files), int(target_mb * 1_000_000)
    if len(files) <= max(1, math.ceil(size / wanted)):
        return report
    columns = [field for field in arrow_schema(table) if field.name not in table.partitions]
    rows_before = sum(pq.read_metadata(file).num_rows for file in files)
    new = swaps.new_directory()
    batches = _batches(table, files, pa.schema(columns))
    rows_after = _write(new, batches, pa.schema(columns), wanted)
    made = sorted(new.iterdir())
    after = sum(file.stat().st_size for file in made)
    swaps.swap(new, directory / f"ingest_id={_name()}", old)
    return replace(
        report,
        partitions=report.partitions + 1,
        files_before=report.files_before + len(files),
        files_after=report.files_after + len(made),
        rows_before=report.rows_before + rows_before,
        rows_after=report.rows_after + rows_after,
        bytes_before=report.bytes_before + size,
        bytes_after=report.bytes_after + after,
    )


def _done(layout: Layout, directory: Path) -> list[Path]:
    """What was written by those who are done: of a batch that is not, the files may be taken away again."""
    found = listed(directory)
    # Asked behind the list: a batch of which files are there says so until it is done.
    open_one = Ledger(layout).publishing()
    return [one for one in found if partition_value(one.name) != open_one]


def _batches(table: Table, files: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    found = ds.dataset([str(file) for file in files], schema=schema, format="parquet")
    if table.layer != "silver":
        # Not more of it in memory than is needed: a day of events may be larger than that.
        yield from found.scanner(batch_size=_ROWS, batch_readahead=2, fragment_readahead=2).to_batches()
        return
    yield from latest_rows(found.to_table(), table).to_batches(max_chunksize=_ROWS)


def _write(place: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, wanted: int) -> int:
    """Write files of about the wanted size; how many rows there were."""
    place.mkdir()
    rows = 0
    filled = (batch for batch in batches if batch.num_rows)
    for number in count():
        if (first := next(filled, None)) is None:
            break
        path = str(place / f"part-{number:05d}.zstd.parquet")
        with pa.OSFile(path, "wb") as sink, pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for batch in chain([first], filled):
                writer.write_batch(batch)
                rows += batch.num_rows
                if sink.tell() >= wanted:
                    break
    return rows


def _name() -> str:
    return f"compact-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
