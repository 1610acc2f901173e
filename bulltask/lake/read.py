"""Read the lake's tables with Arrow, even while the pipeline writes them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from bulltask.jobs.errors import ConfigError, LakeError, did_you_mean
from bulltask.lake.arrow import arrow_schema, partition_schema
from bulltask.lake.layout import Layout, list_directories, partition_value
from bulltask.lake.listing import list_files
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, SNAPSHOTS, Table

__all__ = ["TableReader", "check_queues", "known_queues", "normalize_queue"]

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

    Args:
        layout: The lake.

    Raises:
        LakeError: There is no lake.
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
        """Read a table's rows batch by batch, and return the result of ``reduce``.

        If files disappear during the scan, because they were compacted or rewritten, ``reduce`` is called again with
        the current rows.

        Args:
            table: The table.
            days: The days to read.
            reduce: A function of an iterator over record batches, in any order.
            where: A filter, as an Arrow expression.
            columns: The columns of the batches; default: all, including partitions.
            queue: Only rows of this queue.

        Raises:
            LakeError: A file cannot be read.
        """
        day_list = list(days)
        for _ in range(_MAX_RETRIES):
            try:
                return reduce(self._batches(table, day_list, queue, where, columns))
            except FileNotFoundError:
                continue
            except (pa.ArrowException, OSError) as exc:
                raise LakeError(f"{self._layout.table(table)} cannot be read: {exc}") from exc
        raise LakeError(f"{self._layout.table(table)} cannot be read: its files are being replaced; try again")

    def count(self, table: Table, days: Iterable[date], queue: str | None = None) -> int:
        """Return the number of rows in some days, from the files' metadata; some may be superseded.

        Raises:
            LakeError: The files are being replaced.
        """
        day_list = list(days)
        for _ in range(_MAX_RETRIES):
            try:
                return int(self._dataset(table, day_list, queue).count_rows())
            except FileNotFoundError:
                continue
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

    Args:
        root: The lake's directory.
        names: Names as in the lake.
        known: The queues in the lake; an empty lake accepts all names.

    Raises:
        ConfigError: The lake has no data for a queue; the message lists the queues that it has, most similar first.
    """
    for queue in names if known else ():
        if queue not in known:
            similar = sorted(known, key=lambda name: (-difflib.SequenceMatcher(None, queue, name).ratio(), name))
            more = f" and {len(similar) - _MAX_NAMED:,} more" if len(similar) > _MAX_NAMED else ""
            hint = did_you_mean(queue, known) or "."
            raise ConfigError(
                f"the lake {root} has no data for queue {queue!r}{hint} It has {', '.join(similar[:_MAX_NAMED])}{more}"
            )
