"""Files on their way into a lake's tables: written where no reader looks, and put into place all at once.

What a batch writes becomes visible when all of it is there, by renames; a process that is killed before leaves nothing
in the tables. One that is killed between the renames leaves what the ledger knows how to take away. Each try has a
directory of its own: the JVM of a driver that was killed may go on writing for a moment.
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

    def write(self, table: Table, rows: pa.Table) -> None:
        """Write rows for a table, a file for each of their partitions.

        Args:
            table: which.
            rows: with all columns of the table but ``ingest_id``, in any order.
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


def write_file(directory: Path, rows: pa.Table) -> None:
    """Write the file of a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, directory / "part-0.parquet")
