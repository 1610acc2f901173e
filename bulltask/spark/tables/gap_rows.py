"""``bronze.gaps`` with what backfills have found of each gap."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from bulltask.lake.layout import Layout
from bulltask.lake.tables import GAPS, REPAIRS
from bulltask.spark.tables.lake_tables import read_table

__all__ = ["gap_rows"]


def gap_rows(spark: SparkSession, layout: Layout) -> DataFrame:
    """Return ``bronze.gaps`` and ``repaired_rows``: how many jobs backfills have found; null for no backfill."""
    key = list(GAPS.key)
    repaired = read_table(spark, layout, REPAIRS).groupBy(key).agg(fn.sum("repaired_rows").alias("repaired_rows"))
    return read_table(spark, layout, GAPS).join(repaired, key, "left")
