"""The lake's tables in Spark: their types, and how rows are read and appended."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from bulltask.lake.storage import AtomicSwap, Layout, list_directories
from bulltask.lake.tables import Kind, Table

__all__ = ["append", "as_table", "command_ingest_id", "day_of", "latest", "read_table", "spark_schema"]


_TYPES: Final[Mapping[Kind, DataType]] = {
    Kind.TEXT: StringType(),
    Kind.INT: IntegerType(),
    Kind.LONG: LongType(),
    Kind.DOUBLE: DoubleType(),
    Kind.FLAG: BooleanType(),
    Kind.TIME: TimestampType(),
    Kind.TEXTS: ArrayType(StringType()),
    Kind.COUNTS: MapType(IntegerType(), LongType()),
    Kind.MONEY: DecimalType(18, 6),
}


def spark_schema(table: Table) -> StructType:
    """Return a table's columns followed by its partitions; ``dt`` is a string like ``2026-11-22``."""
    fields = [StructField(column.name, _TYPES[column.kind]) for column in table.columns]
    return StructType(fields + [StructField(name, StringType()) for name in table.partitions])


def as_table(frame: DataFrame, table: Table) -> DataFrame:
    """Return a DataFrame with exactly a table's columns and partitions, in order and with their types."""
    return frame.select(*(F.col(field.name).cast(field.dataType).alias(field.name) for field in spark_schema(table)))


def day_of(*times: Column) -> Column:
    """Return the partition ``dt`` of a row: the day (UTC) of the first of these times that is not null."""
    return F.date_format(F.coalesce(*times), "yyyy-MM-dd")


def read_table(spark: SparkSession, layout: Layout, table: Table) -> DataFrame:
    """Return all rows of a table. Filters on its partitions limit the files that are read."""
    schema = spark_schema(table)
    if not layout.days(table):
        return spark.createDataFrame([], schema)
    # With a schema, a queue named 007 stays a string.
    return spark.read.schema(schema).parquet(str(layout.table(table)))


def latest(rows: DataFrame, table: Table) -> DataFrame:
    """Return the latest rows: of the rows with the same key, the one with the latest ``as_of``."""
    newest = Window.partitionBy(*table.key).orderBy(F.col("as_of").desc())
    return rows.withColumn("rank", F.row_number().over(newest)).where("rank = 1").drop("rank")


def command_ingest_id(command: str, now: datetime | None = None) -> str:
    """Return the ``ingest_id`` for one run of a command: its name and the time."""
    return f"{command}-{now or datetime.now(UTC):%Y%m%dT%H%M%S%f}"


def append(rows: DataFrame, table: Table, layout: Layout, ingest_id: str) -> int:
    """Append rows to a table of bronze or silver, for a command rather than the pipeline; return their number.

    The rows have all columns except ``ingest_id``. They are written to a directory that readers skip, then published
    partition by partition.
    """
    columns = as_table(rows.selectExpr("*", "'' AS ingest_id"), table).drop("ingest_id")
    count = 0
    with AtomicSwap(layout) as swaps:
        new = swaps.new_directory()
        columns.write.partitionBy("dt", "queue").parquet(str(new))
        for day in list_directories(new):
            for queue in list_directories(day):
                count += sum(pq.read_metadata(file).num_rows for file in queue.glob("*.parquet"))
                target = layout.table(table) / day.name / queue.name / f"ingest_id={ingest_id}"
                swaps.swap(queue, target, [])
    return count
