"""Recover jobs that a gap hides, as far as their hashes still have them.

A job whose end was among lost events is unknown to ``silver``, or open forever. Its hash has the last attempt and how
the job ended; from that come rows with ``source`` ``snapshot``. They supersede what the pipeline may write about the
same incarnation, because they are of a later time; unless the events also record what came after this end, and only an
old snapshot has it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as fn
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from bulltask.errors import ConfigError
from bulltask.lake.atomic_swap import hold_swaps
from bulltask.lake.gaps import CLOCK_TOLERANCE, GapRow, find_gaps
from bulltask.lake.layout import Layout
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, REPAIRS, SNAPSHOTS
from bulltask.spark.lifecycle.sql import as_time, error_fingerprint, plain_reason
from bulltask.spark.tables.lake_tables import append, day_of, ingest_of, latest, read_table
from bulltask.spark.tables.snapshot import FINISHED, snapshot

__all__ = ["BackfillReport", "backfill"]

_GAPS: Final = StructType(
    [
        StructField("queue", StringType()),
        StructField("gap", IntegerType()),  # its index among the given gaps
        StructField("begin", TimestampType()),
        StructField("end", TimestampType()),
    ]
)


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """What a backfill has found.

    Attributes:
        gaps: How many gaps there are in that time.
        lost: The events that they lost.
        examined: Finished jobs of these queues that Redis still has.
        jobs: Rows written to ``silver.jobs``.
        repaired: Gaps of which at least one job was found.
    """

    gaps: int
    lost: int
    examined: int
    jobs: int
    repaired: int


def backfill(
    spark: SparkSession,
    layout: Layout,
    source: Mapping[str, str],
    *,
    since: datetime,
    until: datetime,
    queues: Collection[str] | None = None,
) -> BackfillReport:
    """Write what is still known of jobs that ended in gaps.

    First the finished jobs of the queues with gaps are written to ``bronze.jobs``; then everything known there is
    compared with ``silver.jobs``. Repeating a backfill writes nothing new.

    Args:
        spark: The session.
        layout: The lake.
        source: Where its queues are, as options of ``format("bulltask")``.
        since: Gaps that touch this time or later.
        until: And before this time.
        queues: Only gaps of these.

    Raises:
        ConfigError: ``until`` is not later than ``since``.
        LakeError: There is no lake.
    """
    if until <= since:
        raise ConfigError(f"until ({until}) must be later than since ({since})")
    gaps = find_gaps(layout, since=since, until=until, queues=queues)
    if not gaps:
        return BackfillReport(0, 0, 0, 0, 0)
    # One queue at a time, as JSON: a name may contain a comma.
    names = sorted({gap.queue for gap in gaps})
    # Events recorded while the hashes are read are later than this, and so supersede these rows.
    taken_at = datetime.now(UTC)
    examined = sum(snapshot(spark, layout, {**source, "queue": json.dumps([name])}).rows for name in names)
    missing = _missing(spark, layout, gaps).cache()
    try:
        with hold_swaps(layout):
            missing.count()
        ingest = ingest_of("backfill", taken_at)
        rows = missing.withColumns({"source": fn.lit("snapshot"), "as_of": fn.lit(taken_at)})
        append(_attempts(rows), ATTEMPTS, layout, ingest)
        jobs = append(_jobs(rows), JOBS, layout, ingest)
        found = {row["gap"]: row["count"] for row in _by_gap(missing)}
    finally:
        missing.unpersist()
    repairs = [
        (gap.queue, gap.after_id, gap.detected_at, found.get(place, 0), taken_at) for place, gap in enumerate(gaps)
    ]
    _record_repairs(spark, layout, ingest, list(dict.fromkeys(repairs)))
    return BackfillReport(len(gaps), sum(gap.lost for gap in gaps), examined, jobs, len(found))


def _missing(spark: SparkSession, layout: Layout, gaps: Sequence[GapRow]) -> DataFrame:
    """Return finished jobs whose end is in a gap and not in ``silver``, with their ``incarnation`` and gap."""
    spans = [(gap.queue, place, *gap.ends) for place, gap in enumerate(gaps)]
    newest = Window.partitionBy("queue", "id").orderBy(fn.col("snapshot_at").desc())
    hashes = read_table(spark, layout, SNAPSHOTS).withColumn("place", fn.row_number().over(newest))
    done = hashes.where((fn.col("place") == 1) & fn.col("state").isin(*FINISHED)).drop("place")
    in_gap = done.join(
        fn.broadcast(spark.createDataFrame(spans, _GAPS)),
        ["queue"],
    ).where(fn.col("finished_at").between(fn.col("begin"), fn.col("end")))
    first = Window.partitionBy("queue", "id").orderBy("end", "begin", "gap")
    ended = in_gap.withColumn("place", fn.row_number().over(first)).where("place = 1").drop("place", "begin", "end")
    unknown = ended.join(_known_ends(spark, layout), _is_known(), "left_anti")
    return _that_ended_last(spark, layout, _with_incarnation(spark, layout, unknown))


def _known_ends(spark: SparkSession, layout: Layout) -> DataFrame:
    """Return the ends that ``silver`` knows."""
    rows = latest(read_table(spark, layout, JOBS), JOBS).where(fn.col("state").isin(*FINISHED))
    return rows.selectExpr(
        "queue AS silver_queue", "job_id AS silver_id", "incarnation AS silver_incarnation", "state AS silver_state",
        "finished_at AS silver_at",
    )  # fmt: skip


def _is_known() -> Column:
    """Return whether ``silver`` knows an end, or a later end of the same incarnation (after a manual retry).

    If a clock is further behind than `CLOCK_TOLERANCE`, the end is written again, by a row that supersedes the first.
    """
    same_job = (fn.col("queue") == fn.col("silver_queue")) & (fn.col("id") == fn.col("silver_id"))
    same_end = (fn.col("state") == fn.col("silver_state")) & (
        fn.col("silver_at") >= fn.col("finished_at") - fn.lit(CLOCK_TOLERANCE)
    )
    began = as_time(fn.split("silver_incarnation", "-")[0].cast("bigint"))
    same_incarnation = began <= fn.coalesce("created_at", "finished_at") + fn.lit(CLOCK_TOLERANCE)
    later = fn.col("silver_at") > fn.col("finished_at") + fn.lit(CLOCK_TOLERANCE)
    return same_job & (same_end | (same_incarnation & later))


def _with_incarnation(spark: SparkSession, layout: Layout, unknown: DataFrame) -> DataFrame:
    """Add the incarnation: that of the last ``added`` before the end, unless that one ended before."""
    ends = (
        _known_ends(spark, layout)
        .groupBy("silver_queue", "silver_id", "silver_incarnation")
        .agg(fn.max("silver_at").alias("silver_at"))
    )
    added = (
        read_table(spark, layout, EVENTS)
        .where("event = 'added'")
        .selectExpr("queue AS silver_queue", "job_id AS silver_id", "event_id AS silver_incarnation",
                    "event_at AS added_at", "event_ms", "event_seq")
        .join(ends, ["silver_queue", "silver_id", "silver_incarnation"], "left")
    )  # fmt: skip
    same = (
        (fn.col("queue") == fn.col("silver_queue"))
        & (fn.col("id") == fn.col("silver_id"))
        & (fn.col("added_at") <= fn.col("finished_at") + fn.lit(CLOCK_TOLERANCE))
    )
    last = Window.partitionBy("queue", "id").orderBy(fn.col("event_ms").desc(), fn.col("event_seq").desc())
    lived = unknown.join(added, same, "left").withColumn("place", fn.row_number().over(last)).where("place = 1")
    is_another = fn.coalesce(fn.col("silver_at") < fn.col("created_at") - fn.lit(CLOCK_TOLERANCE), fn.lit(False))
    incarnation = fn.when(~is_another, fn.col("silver_incarnation"))
    return lived.withColumn("incarnation", incarnation).select(*unknown.columns, "incarnation")


def _that_ended_last(spark: SparkSession, layout: Layout, ended: DataFrame) -> DataFrame:
    """Drop jobs that only an old snapshot has as ended and that continued: of those the events know more."""
    derived = read_table(spark, layout, JOBS).where("source = 'events'").groupBy("queue", "job_id", "incarnation")
    known = derived.agg(fn.max("as_of").alias("known_at")).withColumnsRenamed(
        {"queue": "known_queue", "job_id": "known_id", "incarnation": "known_incarnation"}
    )
    same_job = (fn.col("queue") == fn.col("known_queue")) & (fn.col("id") == fn.col("known_id"))
    same_incarnation = fn.col("incarnation").eqNullSafe(fn.col("known_incarnation"))
    went_on = fn.col("known_at") > fn.col("finished_at") + fn.lit(CLOCK_TOLERANCE)
    return ended.join(known, same_job & same_incarnation & went_on, "left_anti")


def _by_gap(missing: DataFrame) -> Sequence[Mapping[str, object]]:
    return missing.groupBy("gap").count().collect()  # type: ignore[return-value]  # a Row is read by name


def _number() -> Column:
    """Return the number of the last attempt."""
    return fn.greatest(fn.coalesce("attempts_started", "attempts_made", fn.lit(1)), fn.lit(1)).cast("int")


def _reason() -> Column:
    return fn.when(fn.col("state") == "failed", plain_reason(fn.col("failed_reason")))


def _ms(first: str, last: str) -> Column:
    return fn.unix_millis(fn.col(last)) - fn.unix_millis(fn.col(first))


def _attempts(rows: DataFrame) -> DataFrame:
    """Return rows of ``silver.attempts``: the last attempt of each job, because the hash has no other."""
    return rows.select(
        "queue",
        fn.col("id").alias("job_id"),
        "incarnation",
        _number().alias("attempt"),
        "name",
        fn.lit(None).cast("timestamp").alias("queued_at"),
        fn.col("processed_at").alias("started_at"),
        fn.col("finished_at").alias("ended_at"),
        fn.lit(None).cast("bigint").alias("wait_ms"),
        _ms("processed_at", "finished_at").alias("run_ms"),
        fn.col("state").alias("outcome"),
        _reason().alias("reason"),
        error_fingerprint(_reason()).alias("error_fingerprint"),
        "worker",
        "source",
        "as_of",
        day_of(fn.col("finished_at"), fn.col("as_of")).alias("dt"),
    )


def _jobs(rows: DataFrame) -> DataFrame:
    """Return rows of ``silver.jobs``; what depends on earlier attempts is null, unless there were none."""
    is_only = _number() == 1
    return rows.select(
        "queue",
        fn.col("id").alias("job_id"),
        "incarnation",
        "name",
        "created_at",
        fn.when(is_only, fn.col("processed_at")).alias("first_started_at"),
        "finished_at",
        "state",
        _number().alias("attempts"),
        fn.coalesce("stalled_count", fn.lit(0)).alias("stalls"),
        fn.lit(None).cast("bigint").alias("wait_ms"),
        fn.when(is_only, _ms("processed_at", "finished_at")).alias("run_ms"),
        _ms("created_at", "finished_at").alias("total_ms"),
        _reason().alias("final_reason"),
        error_fingerprint(_reason()).alias("error_fingerprint"),
        "parent_key",
        fn.octet_length("data").cast("int").alias("data_bytes"),
        "source",
        "as_of",
        day_of(fn.col("finished_at"), fn.col("as_of")).alias("dt"),
    )


def _record_repairs(spark: SparkSession, layout: Layout, ingest: str, repairs: Sequence[tuple[object, ...]]) -> None:
    schema = "queue string, after_id string, detected_at timestamp, repaired_rows long, repaired_at timestamp"
    rows = spark.createDataFrame(repairs, schema)
    append(rows.withColumn("dt", day_of(fn.col("repaired_at"))), REPAIRS, layout, ingest)
