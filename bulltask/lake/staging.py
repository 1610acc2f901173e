"""Staging: write a batch's files where no reader looks, then move all of them into the tables.

The files become visible by renames when all of them are written. A process that is killed before leaves nothing in the
tables; files of one that is killed between the renames are removed with the ledger's help. Each try has its own
directory, as the JVM of a killed driver may write for a little longer.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulltask.lake.layout import Layout, listed, partition_name
from bulltask.lake.tables import Table

__all__ = ["Staging", "write_file"]


class Staging:
    """The files of one batch until they are in the tables; empty at first.

    Args:
        layout: the lake.
        ingest: the ``ingest_id`` of the batch.
    """

    def __init__(self, layout: Layout, ingest: str) -> None:
        self._layout, self._ingest = layout, ingest
        self.clear()
        self._root = layout.own("staging", f"{ingest}-{secrets.token_hex(4)}")

    def place(self, name: str) -> Path:
        """Return a directory for files of any kind; it need not exist."""
        return self._root / name

    def table(self, table: Table) -> Path:
        """Return the directory for a table's rows, which are written to ``dt=…/queue=…`` in it."""
        return self.place(table.full_name)

    def write(self, table: Table, rows: pa.Table) -> None:
        """Write rows of a table, one file per partition.

        Args:
            table: the table.
            rows: rows with all columns of the table except ``ingest_id``, in any order.
        """
        partitions = [name for name in table.partitions if name != "ingest_id"]
        columns = [column.name for column in table.columns]
        ordered = rows.take(pc.sort_indices(rows, [(name, "ascending") for name in partitions]))
        groups = ordered.group_by(partitions, use_threads=False).aggregate([([], "count_all")]).to_pylist()
        place = 0
        for group in groups:
            directory = self.table(table).joinpath(*(partition_name(name, group[name]) for name in partitions))
            write_file(directory, ordered.slice(place, group["count_all"]).select(columns))
            place += group["count_all"]

    def publish(self, tables: tuple[Table, ...]) -> None:
        """Move the files of these tables into them."""
        for table in tables:
            root = self.table(table)
            for day in listed(root):
                for queue in listed(day):
                    place = self._layout.table(table) / day.name / queue.name / f"ingest_id={self._ingest}"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    queue.rename(place)

    def clear(self) -> None:
        """Remove all staged files, including those of other tries."""
        shutil.rmtree(self._layout.own("staging"), ignore_errors=True)


def write_file(directory: Path, rows: pa.Table) -> None:
    """Write the only file of a directory, which is created."""
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, directory / "part-0.parquet")
