"""The per-day gold tables: failures, objectives, costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from bulltask.lake.slo_config import EVERY, Metric, Objective
from bulltask.spark.gold.facts import DAY_MS, DaySpan, gap_periods
from bulltask.spark.gold.minutes import by_queue
from bulltask.spark.tables.lake_tables import day_of

__all__ = ["cost_days", "errors_days", "slo_days"]

_SAMPLES: Final = 5
_HOUR_MS: Final = 3_600_000


def errors_days(attempts: DataFrame, span: DaySpan) -> DataFrame:
    """Aggregate ``gold.errors_day``.

    Args:
        attempts: The latest rows of ``silver.attempts``.
        span: The days.
    """
    keys = ("dt", "queue", "name", "error_fingerprint")
    failures = attempts.where((F.col("outcome") == "failed") & span.contains(F.col("ended_at"))).withColumn(
        "dt", day_of(F.col("ended_at"))
    )
    newest = Window.partitionBy(*keys).orderBy(F.desc("ended_at"), "job_id", "incarnation")
    sample = F.when(F.col("rank") <= _SAMPLES, F.struct("rank", "job_id"))
    by_task = Window.partitionBy("dt", "queue", "name")
    return (
        failures.withColumn("rank", F.row_number().over(newest))
        .groupBy(*keys)
        .agg(
            F.count("*").alias("count"),
            F.min("ended_at").alias("first_seen"),
            F.max("ended_at").alias("last_seen"),
            F.min_by("failed_reason", "rank").alias("sample_failed_reason"),
            F.array_sort(F.collect_list(sample))["job_id"].alias("sample_job_ids"),
        )
        .withColumn("fraction", F.col("count") / F.sum("count").over(by_task))
    )


def slo_days(
    attempts: DataFrame, jobs: DataFrame, gaps: DataFrame, span: DaySpan, objectives: Iterable[Objective]
) -> DataFrame:
    """Aggregate ``gold.slo_day``.

    Args:
        attempts: The latest rows of ``silver.attempts``.
        jobs: The latest rows of ``silver.jobs``.
        gaps: Rows of ``bronze.gaps``.
        span: The days.
        objectives: The objectives; without objectives there are no rows.
    """
    objectives = list(objectives)
    durations = _durations(attempts, jobs, span).where(F.lit(bool(objectives)))
    targets = F.filter(F.array(*_targets(objectives)), lambda target: target["target"].isNotNull())
    is_good = (F.col("ms") <= F.col("threshold_ms")) & F.col("may_be_good")
    measured, good = F.count("*"), F.count_if(is_good)
    missed = 1 - F.col("attainment")
    return (
        durations.select("*", F.inline(targets))
        .groupBy("dt", "queue", "name", "metric", "threshold_ms", "target")
        .agg(measured.alias("measured"), good.alias("good"))
        .withColumn("attainment", F.col("good") / F.col("measured"))
        .withColumn("error_budget_remaining", 1 - missed / (1 - F.col("target")))
        .join(_days_with_gaps(gaps, span), ["queue", "dt"], "left")
        .withColumn("complete", F.col("has_gap").isNull())
    )


def _durations(attempts: DataFrame, jobs: DataFrame, span: DaySpan) -> DataFrame:
    """Return all measured durations: ``queue``, ``name``, ``dt``, ``metric``, ``ms``, ``may_be_good``."""

    def select_durations(rows: DataFrame, metric: Metric, at: str, good: Column) -> DataFrame:
        ms = F.col(f"{metric}_ms")
        return rows.where(span.contains(F.col(at)) & ms.isNotNull()).select(
            "queue", "name", day_of(F.col(at)).alias("dt"), F.lit(metric.value).alias("metric"),
            ms.alias("ms"), good.alias("may_be_good"),
        )  # fmt: skip

    waits = select_durations(attempts.where("attempt = 1"), Metric.WAIT, "started_at", F.lit(True))
    runs = select_durations(attempts, Metric.RUN, "ended_at", F.lit(True))
    totals = select_durations(jobs, Metric.TOTAL, "finished_at", F.col("state") == "completed")
    return waits.unionByName(runs).unionByName(totals)


def _targets(objectives: Iterable[Objective]) -> list[Column]:
    """Return the objectives as structs of a duration and a target; a target is null if its objective does not apply."""
    targets: dict[tuple[str, int], list[Column]] = {}
    for objective in objectives:
        applies = (
            (F.col("metric") == str(objective.metric))
            & _matches("queue", objective.queue)
            & _matches("name", objective.name)
        )
        targets.setdefault((objective.metric, objective.threshold_ms), []).append(
            F.when(applies, F.lit(float(objective.target)))
        )
    structs = [
        F.struct(F.lit(ms).cast("long").alias("threshold_ms"), F.coalesce(*target_columns).alias("target"))
        for (_, ms), target_columns in targets.items()
    ]
    null_struct = F.struct(F.lit(None).cast("long").alias("threshold_ms"), F.lit(None).cast("double").alias("target"))
    return [*structs, null_struct]


def _matches(column: str, pattern: str) -> Column:
    if pattern == EVERY:  # matches even rows without a name
        return F.lit(True)
    regex = ".*".join(map(re.escape, pattern.split(EVERY)))
    return F.coalesce(F.col(column).rlike(rf"(?s)\A{regex}\z"), F.lit(False))


def cost_days(minutes: DataFrame, gaps: DataFrame, span: DaySpan, prices: Mapping[str, Decimal]) -> DataFrame:
    """Aggregate ``gold.cost_day``.

    Args:
        minutes: Rows of ``gold.task_minute`` for the span.
        gaps: Rows of ``bronze.gaps``.
        span: The days.
        prices: The price of a slot per hour, by queue and ``*``; other queues have no cost.
    """
    ended = reduce(Column.__add__, map(F.col, ("completed", "failed", "requeued", "stalled", "waiting_children")))
    cost = F.col("busy_ms").cast("decimal(18,0)") * by_queue(prices, "decimal(14,6)") / F.lit(_HOUR_MS)
    jobs = F.nullif(F.col("jobs"), F.lit(0))
    return (
        minutes.groupBy("queue", "name", day_of(F.col("minute")).alias("dt"))
        .agg(
            F.sum("finished").alias("jobs"),
            F.sum(ended).alias("attempts"),
            F.sum("busy_ms").alias("busy_ms"),
            F.sum("wasted_ms").alias("wasted_ms"),
        )
        .where("jobs > 0 or attempts > 0 or busy_ms > 0")
        .withColumns(
            {
                "busy_s": F.col("busy_ms") / 1000,
                "wasted_s": F.col("wasted_ms") / 1000,
                "cost": cost.cast("decimal(18,6)"),
                "cost_per_job": (cost / jobs).cast("decimal(18,6)"),
            }
        )
        .join(_days_with_gaps(gaps, span), ["queue", "dt"], "left")
        .withColumn("complete", F.col("has_gap").isNull())
    )


def _days_with_gaps(gaps: DataFrame, span: DaySpan) -> DataFrame:
    """Return the days of each queue that overlap a gap."""
    day = day_of(F.timestamp_millis("period"))
    return gap_periods(gaps, span, DAY_MS).select("queue", day.alias("dt"), F.lit(True).alias("has_gap")).distinct()
