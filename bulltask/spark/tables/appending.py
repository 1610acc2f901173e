"""Rows that are added to tables by a command, not by the stream: all of a partition at once, or none of it."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from bulltask.lake.layout import Layout, listed
from bulltask.lake.replacing import Replacing
from bulltask.lake.tables import Table
from bulltask.spark.tables.lake_tables import as_table

__all__ = ["append", "ingest_of"]


def ingest_of(command: str, now: datetime | None = None) -> str:
    """Return the ``ingest_id`` of one run of a command: its name and the time."""
    return f"{command}-{now or datetime.now(UTC):%Y%m%dT%H%M%S%f}"


def append(rows: DataFrame, table: Table, layout: Layout, ingest: str) -> int:
    """Add rows to a table of bronze or silver.

    They are written where no reader looks, and then put into place, partition by partition.

    Args:
        rows: with all columns of the table but ``ingest_id``.
        table: which.
        layout: the lake.
        ingest: their ``ingest_id``; a new one for each call and table.

    Returns:
        How many rows there were.
    """
    columns = as_table(rows.selectExpr("*", "'' AS ingest_id"), table).drop("ingest_id")
    count = 0
    with Replacing(layout) as replacing:
        new = replacing.fresh()
        columns.write.partitionBy("dt", "queue").parquet(str(new))
        for day in listed(new):
            for queue in listed(day):
                count += sum(pq.read_metadata(file).num_rows for file in queue.glob("*.parquet"))
                place = layout.table(table) / day.name / queue.name / f"ingest_id={ingest}"
                replacing.swap(queue, place, [])
    return count
