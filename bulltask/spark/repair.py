"""Repair a lake: snapshots of the jobs in Redis, backfills of jobs whose events were lost, and rebuilds of silver."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from bulltask.jobs.errors import ConfigError, LakeError
from bulltask.lake.ledger import last_record
from bulltask.lake.reader import CLOCK_TOLERANCE, GapRow, find_gaps
from bulltask.lake.storage import DataFile, Lake, days_of
from bulltask.lake.tables import ATTEMPTS, BACKFILLS, EVENTS, FINISHED, JOBS, MAX_TIME_MS, SNAPSHOTS, Table
from bulltask.spark.connector import register
from bulltask.spark.lake_tables import (
    append,
    day_of,
    first_of_each,
    latest,
    read_files,
    read_table,
    replace_days,
    write_files,
)
from bulltask.spark.lifecycle import LIFECYCLE_COLUMNS, STATE_AFTER, derive_rows, plain_reasons
from bulltask.spark.sink import vectorized_udf
from bulltask.spark.source.columns import spark_schema


def snapshot(
    spark: SparkSession,
    lake: Lake,
    source: Mapping[str, str],
    *,
    states: Sequence[str] = FINISHED,
    since: datetime | None = None,
) -> int:
    """Write jobs that are in Redis to ``bronze.jobs``; return their number.

    ``source`` has the location of the queues, as options of ``format("bulltask")``. With ``since``, unfinished jobs are
    omitted.
    """
    register(spark)
    options = {**source, "table": "jobs", "state": ",".join(states), "skipUnsupportedQueues": "true"}
    if since is not None:
        options["since"] = since.isoformat()
    rows = spark.read.format("bulltask").options(**options).load()
    rows = rows.withColumn("snapshot_at", F.lit(datetime.now(UTC)))
    return append(rows.withColumn("dt", day_of(F.col("finished_at"), F.col("snapshot_at"))), SNAPSHOTS, lake)


# A backfill adds jobs whose events were lost, if their hashes are known.
#
# If the *completed* or *failed* event of a job is lost, the job is missing from ``silver``, or stays open forever. Its
# hash has the last attempt and the outcome. The rows that are derived from them have the ``source`` ``snapshot``, and
# supersede the pipeline's rows for the same incarnation, because their ``as_of`` is later. A job that was retried
# after an old snapshot is skipped.


_REASON: Final = StructType([StructField(name, StringType()) for name in ("failed_reason", "error_fingerprint")])


@dataclass(frozen=True, slots=True)
class BackfillResult:
    """The result of a backfill.

    Attributes:
        gaps: The number of gaps in the period.
        lost: The number of lost events.
        examined: The number of finished jobs in Redis in these queues.
        jobs: The number of rows written to ``silver.jobs``.
        backfilled_gaps: The number of gaps for which at least one job was added.
    """

    gaps: int
    lost: int
    examined: int
    jobs: int
    backfilled_gaps: int


def backfill(
    spark: SparkSession,
    lake: Lake,
    source: Mapping[str, str],
    *,
    since: datetime,
    until: datetime,
    queues: Collection[str] | None = None,
) -> BackfillResult:
    """Add jobs that finished in gaps to silver: gaps that end at ``since`` or later and begin before ``until``.

    The gaps are those of the lake's broker; ``queues`` has names without its prefix. First, the finished jobs of the
    queues with gaps are written to ``bronze.jobs``. Then all rows of ``bronze.jobs`` are compared with ``silver.jobs``.
    Running a backfill again writes no new rows.

    Raises:
        ConfigError: ``until`` is not later than ``since``.
    """
    if until <= since:
        raise ConfigError(f"until ({until}) must be later than since ({since})")
    wanted = None if queues is None else {lake.queue_prefix + queue for queue in queues}
    gaps = [gap for gap in find_gaps(lake, since=since, until=until, queues=wanted) if lake.has_queue(gap.queue)]
    if not gaps:
        return BackfillResult(0, 0, 0, 0, 0)
    # One queue at a time, as JSON: a name may contain a comma.
    names = sorted({gap.queue.removeprefix(lake.queue_prefix) for gap in gaps})
    # Events recorded while the hashes are read are later than this, so they supersede these rows.
    snapshot_at = datetime.now(UTC)
    examined = sum(snapshot(spark, lake, {**source, "queue": json.dumps([name])}) for name in names)
    reason = F.when(F.col("state") == "failed", F.col("failed_reason"))
    to_plain = partial(map, lambda column: pa.StructArray.from_arrays(plain_reasons(column), _REASON.names))
    plain_reason = vectorized_udf(to_plain, _REASON)(reason)
    missing = _missing(spark, lake, gaps).withColumn("reason", plain_reason).cache()
    try:
        rows = _silver_rows(missing, snapshot_at)
        append(rows, ATTEMPTS, lake)
        jobs = append(rows.withColumn("run_ms", F.expr("if(attempt = 1, run_ms, null)")), JOBS, lake)
        jobs_by_gap = {row["gap"]: row["count"] for row in missing.groupBy("gap").count().collect()}
    finally:
        missing.unpersist()
    day = str(snapshot_at.date())
    backfills = [
        (gap.queue, gap.last_id_before, gap.detected_at, jobs_by_gap.get(index, 0), snapshot_at, day)
        for index, gap in enumerate(gaps)
    ]
    append(spark.createDataFrame(list(dict.fromkeys(backfills)), spark_schema(BACKFILLS)), BACKFILLS, lake)
    return BackfillResult(len(gaps), sum(gap.lost for gap in gaps), examined, jobs, len(jobs_by_gap))


def _missing(spark: SparkSession, lake: Lake, gaps: Sequence[GapRow]) -> DataFrame:
    """Return jobs that finished in a gap and are not finished in ``silver``, with their ``incarnation`` and gap."""
    spans = [(gap.queue, index, *gap.finish_period) for index, gap in enumerate(gaps)]
    snapshots = first_of_each(read_table(spark, lake, SNAPSHOTS), ("queue", "id"), F.desc("snapshot_at"))
    finished = snapshots.where(F.col("state").isin(*FINISHED))
    gap_rows = spark.createDataFrame(spans, "queue string, gap int, begin timestamp, end timestamp")
    in_gap = finished.join(F.broadcast(gap_rows), ["queue"]).where("finished_at between begin and end")
    first = first_of_each(in_gap, ("queue", "id"), "end", "begin", "gap").drop("begin", "end")
    silver = latest(read_table(spark, lake, JOBS), JOBS).where(F.col("state").isin(*FINISHED))
    unknown = first.alias("job").join(silver.alias("silver"), _is_known(), "left_anti")
    return _drop_continued(spark, lake, _with_incarnation(spark, lake, unknown, silver))


_TOLERANCE: Final = f"interval {CLOCK_TOLERANCE.total_seconds():.0f} seconds"


def _is_known() -> Column:
    """Return whether the job has finished in ``silver``, at this time or later (after a manual retry).

    If a clock is further behind than `CLOCK_TOLERANCE`, the job is written again, in a row that supersedes the first.
    """
    added_at = f"timestamp_millis(least(cast(split(silver.incarnation, '-')[0] as bigint), {MAX_TIME_MS}L))"
    return F.expr(f"""
        job.queue = silver.queue and job.id = silver.job_id and (
            (job.state = silver.state and silver.finished_at >= job.finished_at - {_TOLERANCE})
            or ({added_at} <= coalesce(job.created_at, job.finished_at) + {_TOLERANCE}
                and silver.finished_at > job.finished_at + {_TOLERANCE})
        )
    """)


def _with_incarnation(spark: SparkSession, lake: Lake, unknown: DataFrame, silver: DataFrame) -> DataFrame:
    """Add the incarnation of the last ``added`` event before the job finished, unless it had finished earlier."""
    job = ["queue", "job_id", "incarnation"]
    events = read_table(spark, lake, EVENTS).where("event = 'added'").withColumnRenamed("event_id", "incarnation")
    ended = silver.groupBy(*job).agg(F.max("finished_at").alias("ended_at"))
    added = events.select(*job, "event_at", "event_ms", "event_seq").join(ended, job, "left")
    is_candidate = f"job.queue = added.queue and job.id = added.job_id and event_at <= finished_at + {_TOLERANCE}"
    candidates = unknown.alias("job").join(added.alias("added"), F.expr(is_candidate), "left")
    has_ended = f"coalesce(ended_at < created_at - {_TOLERANCE}, false)"
    newest = first_of_each(candidates, ("job.queue", "job.id"), F.desc("event_ms"), F.desc("event_seq"))
    return newest.select("job.*", F.expr(f"if({has_ended}, null, added.incarnation) as incarnation"))


def _drop_continued(spark: SparkSession, lake: Lake, finished: DataFrame) -> DataFrame:
    """Drop jobs that were retried after an old snapshot, because their events are more recent."""
    rows = read_table(spark, lake, JOBS).where("source = 'events'").groupBy("queue", "job_id", "incarnation")
    known = rows.agg(F.max("as_of").alias("known_at"))
    is_continued = f"""
        job.queue = known.queue and job.id = known.job_id and job.incarnation <=> known.incarnation
        and known_at > finished_at + {_TOLERANCE}
    """
    return finished.alias("job").join(known.alias("known"), F.expr(is_continued), "left_anti")


def _silver_rows(missing: DataFrame, snapshot_at: datetime) -> DataFrame:
    """Add the columns of both tables of silver, of which `append` takes those that its table has.

    A hash has only the job's last attempt. Columns that depend on earlier attempts are null if there were any.
    """
    attempt = "greatest(coalesce(attempts_started, attempts_made, 1), 1)"
    return missing.withColumns(
        {
            "job_id": F.col("id"),
            "attempt": F.expr(attempt),
            "attempt_count": F.expr(attempt),
            "queued_at": F.lit(None),
            "started_at": F.col("processed_at"),
            "first_started_at": F.expr(f"if({attempt} = 1, processed_at, null)"),
            "ended_at": F.col("finished_at"),
            "wait_ms": F.lit(None),
            "run_ms": F.expr("unix_millis(finished_at) - unix_millis(processed_at)"),
            "total_ms": F.expr("unix_millis(finished_at) - unix_millis(created_at)"),
            "stalls": F.coalesce("stalled_count", F.lit(0)),
            "outcome": F.col("state"),
            "failed_reason": F.col("reason.failed_reason"),
            "error_fingerprint": F.col("reason.error_fingerprint"),
            "data_bytes": F.octet_length("data"),
            "source": F.lit("snapshot"),
            "as_of": F.lit(snapshot_at),
            "dt": day_of(F.col("finished_at")),
        }
    )


_TABLES: Final = {ATTEMPTS: "outcome = 'open'", JOBS: "state not in ('completed', 'failed', 'removed')"}
"""The tables of silver, each with the condition for its rows of jobs that timed out."""

_SILVER: Final = StructType([StructField(table.name, spark_schema(table)) for table in _TABLES])
"""The type of the elements that `derive_rows` returns."""


def build_silver(spark: SparkSession, lake: Lake, days: Collection[date], *, open_job_timeout: timedelta) -> None:
    """Rebuild the silver rows for some days from all events in bronze, after damage or an upgrade of bulltask.

    Rows from snapshots and rows of open jobs that timed out are kept. The pipeline may be running.

    Raises:
        LakeError: Events that these days are derived from have expired.
        LakeInUseError: Another process is replacing rows of silver.
    """
    _check_not_expired(lake, days, open_job_timeout)
    # Rows that a batch adds after this are kept: rows that are then stored twice do no harm.
    since = {table: lake.create(table) for table in _TABLES}
    heads = list(filter(None, map(last_record, lake.of_all_brokers())))
    clock = datetime.fromtimestamp(min((head.newest_event_ms for head in heads), default=0) / 1000, UTC)
    time_out_before_ms = round((clock - open_job_timeout).timestamp() * 1000)
    events = read_table(spark, lake, EVENTS, columns=LIFECYCLE_COLUMNS)
    written: dict[Table, list[DataFile]] = {}
    with derived_silver(events, time_out_before_ms) as silver:
        for table, derived in silver.items():
            stored = read_files(spark, lake, table, since[table].files(set(map(str, days))))
            # These rows are not derived from events, or no longer are.
            kept = stored.where(f"source = 'snapshot' or {_TABLES[table]}")
            rows = derived.where(F.col("dt").isin(*map(str, days))).unionByName(kept)
            written[table] = write_files(rows, table, lake)
    for table, files in written.items():
        replace_days(lake, since[table], files, days)


def _check_not_expired(lake: Lake, days: Collection[date], open_job_timeout: timedelta) -> None:
    """Raise an error if early events of jobs have expired, because the rebuilt rows would lack data."""
    events, derived = days_of(lake.open(EVENTS)), [day for table in _TABLES for day in days_of(lake.open(table))]
    if not derived or (events and events[0] <= min(derived)):
        return
    first = events[0] + open_job_timeout if events else None
    for day in sorted(days):
        if first is None or day < first:
            raise LakeError(
                f"silver for {day} cannot be rebuilt: events that it is derived from have expired; bronze.events of "
                f"{lake.root} {f'begins with {events[0]}' if events else 'is empty'}"
            )


@contextmanager
def derived_silver(events: DataFrame, time_out_before_ms: int) -> Iterator[dict[Table, DataFrame]]:
    """Derive the rows of attempts whose outcome is known and of finished jobs, for use inside the ``with`` block.

    Open jobs are omitted, as in batches (:mod:`~bulltask.spark.batches`), unless they have had no events since
    ``time_out_before_ms``.
    """
    relevant = events.where(F.col("job_id").isNotNull() & F.col("event").isin(*STATE_AFTER)).select(*LIFECYCLE_COLUMNS)
    by_job = relevant.repartition("queue", "job_id")  # all events of a job are in one partition
    derive = vectorized_udf(partial(derive_rows, time_out_before_ms=time_out_before_ms), _SILVER)
    rows = by_job.select(derive(F.struct(*LIFECYCLE_COLUMNS)).alias("row")).persist()
    try:
        yield {
            table: rows.where(F.col(f"row.{table.name}").isNotNull()).select(f"row.{table.name}.*") for table in _TABLES
        }
    finally:
        rows.unpersist()
