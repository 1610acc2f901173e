"""The directories of a lake.

::

    LAKE/bronze/events/dt=2026-11-22/queue=emails/ingest_id=3f0c2a91-00000017/part-*.parquet
    LAKE/silver/jobs/dt=…/queue=…/ingest_id=…/
    LAKE/gold/task_minute/dt=…/
    LAKE/_pipeline/                    the pipeline's state; readers skip names that begin with _ or .

``ingest_id`` identifies the write (a batch, or one run of a command) that created the files, so that a rerun write
can remove the files of an earlier run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from bulltask.jobs.errors import ConfigError, LakeError
from bulltask.lake.tables import TABLES, Table

__all__ = [
    "Layout",
    "batch_ingest_id",
    "batch_of",
    "check_local",
    "list_directories",
    "partition_name",
    "partition_value",
]

_INTERNAL: Final = "_pipeline"

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path of s3a://bucket is s3a:/bucket

_ESCAPED: Final = {code: f"%{code:02X}" for code in (*range(1, 32), *map(ord, "\"#%'*/:=?\\{[]^"), 127)}
"""The characters that Spark escapes in the names of directories."""


def batch_ingest_id(query_id: str, batch_id: int) -> str:
    """Return the ``ingest_id`` of a batch. A batch that is run again has the same id.

    Args:
        query_id: Spark's id of the query. A new checkpoint has a new id, and numbers its batches from 0 again.
        batch_id: The number of the batch.
    """
    return f"{query_id.replace('-', '')[:8]}-{batch_id:08d}"


def batch_of(ingest_id: str) -> tuple[str, int]:
    """Return the parts of an ``ingest_id``: the beginning of the query's id, and the number of the batch."""
    query, _, number = ingest_id.rpartition("-")
    return query, int(number)


def check_local(root: str | Path) -> None:
    """Check that a lake's directory is in a file system, not in an object store.

    Raises:
        ConfigError: It is a URL.
    """
    if _URL.match(str(root)):
        raise ConfigError(
            f"{root} is a URL, but a lake must be a directory in a file system: object stores are not supported yet. "
            "Use a directory that the driver and all executors share"
        )


class Layout:
    """The paths of a lake.

    Args:
        root: The directory of the lake, with the same path for all readers and writers.

    Raises:
        ConfigError: It is a URL.
    """

    def __init__(self, root: str | Path) -> None:
        check_local(root)
        self.root = Path(root)

    def check(self) -> None:
        """Check that there is a lake.

        Raises:
            LakeError: There is no lake.
        """
        if not any((self.root / name).is_dir() for name in ("bronze", "silver", "gold", _INTERNAL)):
            raise LakeError(
                f"there is no lake in {self.root} (no bronze/ or silver/): use the --lake of 'bulltask pipeline run', "
                "which creates the tables"
            )

    def table(self, table: Table) -> Path:
        """Return the directory of a table; it need not exist."""
        return self.root / table.layer / table.name

    def internal(self, *parts: str) -> Path:
        """Return a path in the pipeline's internal directory, which readers of the tables skip."""
        return self.root.joinpath(_INTERNAL, *parts)

    @property
    def checkpoint(self) -> Path:
        """The directory with Spark's checkpoint of the event stream."""
        return self.internal("checkpoint")

    @property
    def open_jobs(self) -> Path:
        """The directory with the events of open jobs, for the next batch."""
        return self.internal("open_jobs")

    def days(self, table: Table) -> list[date]:
        """Return the days that a table has directories for, in order."""
        names = (path.name for path in list_directories(self.table(table)) if path.name.startswith("dt="))
        return sorted(date.fromisoformat(name.removeprefix("dt=")) for name in names)

    def day(self, table: Table, day: date) -> Path:
        """Return the directory of a table's day."""
        return self.table(table) / f"dt={day.isoformat()}"

    def written_directories(self, table: Table, ingest_id: str) -> Iterator[Path]:
        """Yield a table's directories that the write with this ``ingest_id`` has created."""
        for day in list_directories(self.table(table)):
            for queue in list_directories(day):
                if (directory := queue / f"ingest_id={ingest_id}").is_dir():
                    yield directory

    def remove(self, ingest_id: str, tables: Iterable[Table] | None = None) -> None:
        """Remove the files of a write, before it is rerun.

        Args:
            ingest_id: The ``ingest_id`` of the write.
            tables: The tables; default: all tables that are partitioned by ``ingest_id``.
        """
        for table in TABLES.values() if tables is None else tables:
            if "ingest_id" in table.partitions:
                for path in self.written_directories(table, ingest_id):
                    shutil.rmtree(path)


def partition_name(column: str, value: str) -> str:
    """Return the name of a partition's directory as Spark writes it: ``queue=%7Bmail}`` for the queue ``{mail}``."""
    return f"{column}={value.translate(_ESCAPED)}"


def partition_value(directory: str) -> str:
    """Return the value in the name of a partition's directory: ``{mail}`` for ``queue=%7Bmail}``."""
    return unquote(directory.partition("=")[2])


def list_directories(path: Path) -> list[Path]:
    """Return the data directories in a directory, in order; an empty list if the directory does not exist."""
    if not path.is_dir():
        return []
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] not in "_.")
