"""Staging: write a batch's files to a directory that readers skip, then move all of them into the tables.

Once all files are written, renames make them visible. A process that is killed before the renames leaves nothing in the
tables. Files of a process that is killed between the renames are removed with the help of the ledger. Each run of a
batch has its own directory, because the JVM of a killed driver may keep writing for a short time.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulltask.lake.layout import Layout, list_directories, partition_name
from bulltask.lake.tables import Table

__all__ = ["Staging", "write_file"]


class Staging:
    """The staging directory of one batch.

    Args:
        layout: The lake.
        ingest_id: The ``ingest_id`` of the batch.
    """

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
        """Write rows of a table, one file per partition.

        Args:
            table: The table.
            rows: Rows with all columns of the table except ``ingest_id``, in any order.
        """
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
