"""Files on their way into a lake's tables: written where no reader looks, and put into place all at once.

What a batch writes becomes visible when all of it is there, by renames; a process that is killed before leaves nothing
in the tables. One that is killed between the renames leaves what the ledger knows how to take away. Each try has a
directory of its own: the JVM of a driver that was killed may go on writing for a moment.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bulltask.lake.layout import Layout, listed
from bulltask.lake.tables import Table

__all__ = ["Staging"]


class Staging:
    """Responsible for the files of one batch until they are in the tables. Made empty.

    Args:
        layout: of the lake.
        ingest: the ``ingest_id`` of the batch.
    """

    def __init__(self, layout: Layout, ingest: str) -> None:
        self._layout, self._ingest = layout, ingest
        self.clear()
        self._root = layout.own("staging", f"{ingest}-{secrets.token_hex(4)}")

    def place(self, name: str) -> Path:
        """A directory for files of any kind; it need not exist."""
        return self._root / name

    def table(self, table: Table) -> Path:
        """Where a table's rows are written, under ``dt=…/queue=…``."""
        return self.place(table.full_name)

    def rows(self, name: str) -> int:
        """How many rows are in a place; for a table, by its full name."""
        return sum(pq.read_metadata(file).num_rows for file in _files(self.place(name)))

    def least(self, name: str, column: str) -> int:
        """The least number of a column in a place, as the files say; 0 where there is none."""
        found = []
        for file in _files(self.place(name)):
            data = pq.read_metadata(file)
            at = data.schema.names.index(column)
            parts = [data.row_group(number).column(at).statistics for number in range(data.num_row_groups)]
            found += [part.min for part in parts if part is not None and part.has_min_max]
        return min(found, default=0)

    def add(self, table: Table, partition: str, rows: pa.Table) -> None:
        """Write rows for a table.

        Args:
            table: which.
            partition: as a directory: ``dt=2026-11-22/queue=emails``.
            rows: without the columns that the partition says.
        """
        directory = self.table(table) / partition
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, directory / "part-0.parquet")

    def publish(self, tables: tuple[Table, ...]) -> None:
        """Put what is there for these tables into them."""
        for table in tables:
            root = self.table(table)
            for day in listed(root):
                for queue in listed(day):
                    place = self._layout.table(table) / day.name / queue.name / f"ingest_id={self._ingest}"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    queue.rename(place)

    def clear(self) -> None:
        """Take away what is left, also by other tries."""
        shutil.rmtree(self._layout.own("staging"), ignore_errors=True)


def _files(root: Path) -> Iterator[Path]:
    return root.rglob("*.parquet") if root.is_dir() else iter(())
