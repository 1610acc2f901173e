"""The tables of the lake in Spark: their types, and their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as fn
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

from bulltask.lake.layout import Layout
from bulltask.lake.tables import Kind, Table

__all__ = ["as_table", "day_of", "latest", "read_table", "spark_schema"]

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
    """Return a table's columns and, behind them, its partitions; ``dt`` is a text like ``2026-11-22``."""
    fields = [StructField(column.name, _TYPES[column.kind]) for column in table.columns]
    return StructType(fields + [StructField(name, StringType()) for name in table.partitions])


def as_table(frame: DataFrame, table: Table) -> DataFrame:
    """Return a frame with a table's columns and partitions, in their order and types; others are left out.

    Raises:
        AnalysisException: the frame has not all of them.
    """
    return frame.select(*(fn.col(field.name).cast(field.dataType).alias(field.name) for field in spark_schema(table)))


def day_of(*times: Column) -> Column:
    """Return the partition ``dt`` of a row: the day, UTC, of the first of these times that it has."""
    return fn.date_format(fn.coalesce(*times), "yyyy-MM-dd")


def read_table(spark: SparkSession, layout: Layout, table: Table) -> DataFrame:
    """Return all rows of a table, none where nothing was written yet; filters on its partitions read only those."""
    schema = spark_schema(table)
    if not layout.days(table):
        return spark.createDataFrame([], schema)
    # With a schema, a queue called 007 stays a text.
    return spark.read.schema(schema).parquet(str(layout.table(table)))


def latest(rows: DataFrame, table: Table) -> DataFrame:
    """Return the rows that count: of those with the same key, the one with the latest ``as_of``."""
    newest = Window.partitionBy(*table.key).orderBy(fn.col("as_of").desc())
    return rows.withColumn("place", fn.row_number().over(newest)).where("place = 1").drop("place")
