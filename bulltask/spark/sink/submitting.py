"""``enqueue`` of a file of rows, its columns by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from bulltask.errors import ConfigError, did_you_mean
from bulltask.spark.sink.enqueueing import EnqueueOptions, EnqueueReport, enqueue

__all__ = ["RowNames", "submit"]


@dataclass(frozen=True, slots=True)
class RowNames:
    """What the columns of the rows are.

    Attributes:
        data: columns that become a job's data.
        name: name of all jobs; or
        name_column: the column with their names.
        id_column: the column with their ids; none: they come from the rows.
    """

    data: Sequence[str]
    name: str | None = None
    name_column: str | None = None
    id_column: str | None = None


def submit(
    spark: SparkSession, path: str, queue: str, names: RowNames, **more: Unpack[EnqueueOptions]
) -> EnqueueReport:
    """Add a job to a queue for each row of a Parquet file or a directory of them, as ``enqueue`` does.

    Args:
        spark: the session.
        path: of the file.
        queue: the queue.
        names: which columns are what.
        more: as for ``enqueue``.

    Raises:
        ConfigError: there is no such column, or as for ``enqueue``.
    """
    rows = spark.read.parquet(path)
    for column in (*names.data, names.name_column, names.id_column):
        if column is not None and column not in rows.columns:
            hint = did_you_mean(column, rows.columns)
            raise ConfigError(f"{path} has no column {column!r}{hint}; it has {', '.join(rows.columns)}")
    return enqueue(
        rows,
        queue,
        name=fn.col(names.name_column) if names.name_column is not None else str(names.name),
        data=list(names.data),
        job_id=None if names.id_column is None else fn.col(names.id_column).cast("string"),
        **more,
    )
