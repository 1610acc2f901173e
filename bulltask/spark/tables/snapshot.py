"""Snapshots: write jobs that are in Redis, by default the finished ones, to ``bronze.jobs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bulltask.lake.layout import Layout
from bulltask.lake.tables import SNAPSHOTS
from bulltask.spark.connector.session import register
from bulltask.spark.tables.lake_tables import append, command_ingest_id, day_of

__all__ = ["FINISHED", "SnapshotResult", "snapshot"]

FINISHED = ("completed", "failed")


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """The result of a snapshot.

    Attributes:
        ingest_id: The ``ingest_id`` of the rows.
        rows: The number of jobs.
        snapshot_at: The ``snapshot_at`` of the rows.
    """

    ingest_id: str
    rows: int
    snapshot_at: datetime


def snapshot(
    spark: SparkSession,
    layout: Layout,
    source: Mapping[str, str],
    *,
    states: Sequence[str] = FINISHED,
    since: datetime | None = None,
) -> SnapshotResult:
    """Write jobs that are in Redis to ``bronze.jobs``.

    Args:
        spark: The session.
        layout: The lake.
        source: The location of the queues, as options of ``format("bulltask")``.
        states: The states of the jobs; default: ``completed`` and ``failed``.
        since: Only jobs that finished at this time or later; unfinished jobs are then omitted.
    """
    register(spark)
    snapshot_at = datetime.now(UTC)
    ingest_id = command_ingest_id("snapshot", snapshot_at)
    rows = _jobs(spark, source, states, since).withColumn("snapshot_at", F.lit(snapshot_at))
    rows = rows.withColumn("dt", day_of(F.col("finished_at"), F.col("snapshot_at")))
    return SnapshotResult(ingest_id, append(rows, SNAPSHOTS, layout, ingest_id), snapshot_at)


def _jobs(spark: SparkSession, source: Mapping[str, str], states: Sequence[str], since: datetime | None) -> DataFrame:
    options = {**source, "table": "jobs", "state": ",".join(states), "skipUnsupportedQueues": "true"}
    if since is None:
        return spark.read.format("bulltask").options(**options).load()
    # This DataFrame is read once, with a single filter, so Redis may apply the filter.
    rows = spark.read.format("bulltask").options(**options, pushdown="true").load()
    return rows.where(F.col("finished_at") >= F.lit(since))
