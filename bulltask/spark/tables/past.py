"""What was before a batch: the events of jobs that were open, and those of others, where they come up again."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.types import LongType, StringType, StructField, StructType

from bulltask.lake.layout import Layout
from bulltask.lake.tables import EVENTS
from bulltask.spark.lifecycle.fold import LIFE
from bulltask.spark.tables.lake_tables import read_table

__all__ = ["earlier_events", "read_carry"]

_NUMBERS: Final = ("event_ms", "event_seq")
_CARRY: Final = StructType([StructField(name, LongType() if name in _NUMBERS else StringType()) for name in LIFE])

_FEW: Final = 500
"""So many ids are compared with what each file says of its own ids, before it is read."""


def read_carry(spark: SparkSession, layout: Layout, ingest: str) -> DataFrame:
    """Return the events that a batch has left to the next one."""
    return spark.read.schema(_CARRY).parquet(str(layout.carry / ingest))


def earlier_events(spark: SparkSession, layout: Layout, jobs: pa.Table) -> DataFrame | None:
    """Return all events of some jobs that are in the lake; ``None`` when nothing is.

    Args:
        spark: the session.
        layout: of the lake.
        jobs: their ``queue`` and ``job_id``, each once.
    """
    if not layout.days(EVENTS):
        return None
    queues, ids = pc.unique(jobs["queue"]).to_pylist(), pc.unique(jobs["job_id"]).to_pylist()
    events = read_table(spark, layout, EVENTS).where(fn.col("queue").isin(queues))
    if len(ids) <= _FEW:
        events = events.where(fn.col("job_id").isin(ids))
    return events.join(fn.broadcast(spark.createDataFrame(jobs)), ["queue", "job_id"], "left_semi")
