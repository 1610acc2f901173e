"""``bronze.jobs``: the jobs that Redis has now, as their hashes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from bulltask.lake.layout import Layout
from bulltask.lake.tables import SNAPSHOTS
from bulltask.spark.connector.session import register
from bulltask.spark.tables.lake_tables import append, day_of, ingest_of

__all__ = ["FINISHED", "SnapshotReport", "snapshot"]

FINISHED = ("completed", "failed")


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """What a snapshot has written.

    Attributes:
        ingest: Its ``ingest_id``.
        rows: How many jobs.
        taken_at: Its ``snapshot_at``.
    """

    ingest: str
    rows: int
    taken_at: datetime


def snapshot(
    spark: SparkSession,
    layout: Layout,
    source: Mapping[str, str],
    *,
    states: Sequence[str] = FINISHED,
    since: datetime | None = None,
) -> SnapshotReport:
    """Write the jobs that Redis has now to ``bronze.jobs``.

    Args:
        spark: The session.
        layout: The lake.
        source: Where the queues are, as options of ``format("bulltask")``.
        states: Of the jobs.
        since: Only jobs that finished at this time or later; unfinished jobs are then left out.
    """
    register(spark)
    taken_at = datetime.now(UTC)
    ingest = ingest_of("snapshot", taken_at)
    rows = _jobs(spark, source, states, since).withColumn("snapshot_at", fn.lit(taken_at))
    rows = rows.withColumn("dt", day_of(fn.col("finished_at"), fn.col("snapshot_at")))
    return SnapshotReport(ingest, append(rows, SNAPSHOTS, layout, ingest), taken_at)


def _jobs(spark: SparkSession, source: Mapping[str, str], states: Sequence[str], since: datetime | None) -> DataFrame:
    options = {**source, "table": "jobs", "state": ",".join(states), "skipForeignQueues": "true"}
    if since is None:
        return spark.read.format("bulltask").options(**options).load()
    # This frame is read once, with this one filter, so Redis may apply it.
    rows = spark.read.format("bulltask").options(**options, pushdown="true").load()
    return rows.where(fn.col("finished_at") >= fn.lit(since))
