"""The per-minute gold tables, and aggregates of minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from bulltask.lake.log_histogram import GROWTH, ZERO
from bulltask.lake.slo_config import EVERY
from bulltask.spark.gold.facts import COUNTERS, MINUTE_MS, DaySpan, gap_periods, split_by_period

__all__ = ["by_queue", "capacity_minutes", "merge_minutes", "percentile", "task_minutes"]

_HISTOGRAM_KINDS: Final = {"wait": "waited", "run": "ran"}
_QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def task_minutes(facts: DataFrame, gaps: DataFrame, span: DaySpan) -> DataFrame:
    """Aggregate ``gold.task_minute``, without its partition.

    Args:
        facts: The facts of `bulltask.spark.gold.facts.minute_facts`.
        gaps: Rows of ``bronze.gaps``.
        span: The days.
    """
    lost = gap_periods(gaps, span, MINUTE_MS).groupBy("queue", F.col("period").alias("minute"))
    summed = _sum_facts(facts, ("queue", "name", "minute"))
    return (
        summed.join(lost.agg(F.sum("lost").alias("events_lost")), ["queue", "minute"], "left")
        .withColumn("complete", F.col("events_lost").isNull())
        .withColumn("events_lost", F.coalesce("events_lost", F.lit(0)))
        .withColumn("minute", F.timestamp_millis("minute"))
    )


def merge_minutes(minutes: DataFrame, unit: str = "hour", by: Sequence[str] = ("queue", "name")) -> DataFrame:
    """Aggregate minutes to hours, days, weeks or months. Percentiles are accurate to within 1%, as for minutes.

    Args:
        minutes: Rows of ``gold.task_minute``.
        unit: A unit of Spark's ``date_trunc``: ``minute``, ``hour``, ``day``, ``week`` ...
        by: The columns to group by: ``("queue",)`` adds up the tasks of a queue, ``()`` adds up all rows.

    Returns:
        ``by``, ``since`` (the beginning, UTC) and the columns of ``gold.task_minute`` except ``events_lost``;
        ``complete`` is true if all minutes are complete.
    """
    counters = ", ".join(_fact_sql(name, name) for name in COUNTERS)
    histograms = (
        f"transform(map_entries({column}_histogram_ms), entry -> {_fact_sql(kind, 'entry.value', 'entry.key')})"
        for column, kind in _HISTOGRAM_KINDS.items()
    )
    nonzero = f"filter(concat(array({counters}), {', '.join(histograms)}), fact -> fact.amount != 0)"
    flags = f"array({_fact_sql('minute', '0')}, {_fact_sql('incomplete', 'if(complete, 0, 1)')})"
    facts = minutes.select(
        *by, F.date_trunc(unit, "minute").alias("since"), F.expr(f"inline(concat({nonzero}, {flags}))")
    )
    return _sum_facts(facts, (*by, "since"), "sum(if(kind = 'incomplete', amount, 0)) = 0 as complete")


def _fact_sql(kind: str, amount: str, bucket: str = "null") -> str:
    values = f"'bucket', cast({bucket} as int), 'amount', cast({amount} as bigint)"
    return f"named_struct('kind', '{kind}', {values})"


def _sum_facts(facts: DataFrame, keys: Sequence[str], *others: str) -> DataFrame:
    """Aggregate facts to one row for each key: counters, histograms and percentiles."""
    summed = facts.groupBy(*keys, "kind", "bucket").agg(F.sum("amount").alias("amount"))
    sums = [f"sum(if(kind = '{name}', amount, 0)) as {name}" for name in COUNTERS]
    counts = [
        f"map_from_entries(array_sort(collect_list(if(kind = '{kind}', struct(bucket, amount), null))))"
        f" as {column}_histogram_ms"
        for column, kind in _HISTOGRAM_KINDS.items()
    ]
    rows = summed.groupBy(*keys).agg(*map(F.expr, [*sums, *counts, *others]))
    percentiles = [
        f"{percentile(f'{column}_histogram_ms', quantile)} as {column}_{name}"
        for column in _HISTOGRAM_KINDS
        for name, quantile in _QUANTILES.items()
    ]
    return rows.selectExpr("*", *percentiles)


def percentile(counts: str, quantile: float) -> str:
    """Return `bulltask.lake.log_histogram.percentile` of a column such as ``wait_histogram_ms``, as SQL."""
    total = f"aggregate(map_values({counts}), 0L, (sum, count) -> sum + count)"
    start = f"named_struct('seen', 0L, 'wanted', ceil({quantile!r}D * {total}), 'last', cast(null as int))"
    last = "if(state.seen < state.wanted, entry.key, state.last)"
    step = f"named_struct('seen', state.seen + entry.value, 'wanted', state.wanted, 'last', {last})"
    value = f"cast(round(2 * pow({GROWTH!r}D, state.last) / {GROWTH + 1!r}D) as bigint)"
    result = f"if(state.last = {ZERO}, 0L, {value})"
    return f"aggregate(map_entries({counts}), {start}, (state, entry) -> {step}, state -> {result})"


def capacity_minutes(
    minutes: DataFrame, attempts: DataFrame, span: DaySpan, capacities: Mapping[str, int]
) -> DataFrame:
    """Aggregate ``gold.capacity_minute``, without its partition.

    Args:
        minutes: Rows of ``gold.task_minute`` for the span.
        attempts: The latest rows of ``silver.attempts``.
        span: The days.
        capacities: The maximum number of running jobs, by queue and ``*``; for other queues, the day's observed
            maximum.
    """
    queues = merge_minutes(minutes, "minute", ("queue",)).withColumnRenamed("since", "minute")
    configured = by_queue(capacities, "bigint")
    observed = F.expr("nullif(max(peak_slots) over (partition by queue, to_date(minute)), 0)")
    joined = queues.join(_peaks(attempts, span), ["queue", "minute"], "left").selectExpr(
        "*", "finished + removed as finished_or_removed",
        "added - finished - removed as backlog_delta", f"busy_ms / {MINUTE_MS} as busy_slots",
        "coalesce(peak, 0L) as peak_slots",
    )  # fmt: skip
    return joined.withColumn("capacity", F.coalesce(configured, observed)).selectExpr(
        "*", "busy_slots / capacity as utilization"
    )


def _peaks(attempts: DataFrame, span: DaySpan) -> DataFrame:
    """Return the maximum number of running attempts in each minute."""
    ran = split_by_period("unix_millis(started_at)", "unix_millis(ended_at)", span, MINUTE_MS)
    ends = "inline(array(named_struct('at', piece.from, 'more', 1), named_struct('at', piece.to, 'more', -1)))"
    # A worker may acquire its next job in the same millisecond in which it finishes one, so ends come first.
    running = "sum(more) over (partition by queue, period order by at, more) as running"
    return (
        attempts.selectExpr("queue", f"explode({ran}) as piece")
        .where("piece.from < piece.to")
        .selectExpr("queue", "piece.period as period", ends)
        .selectExpr("queue", "period", running)
        .groupBy("queue", F.expr("timestamp_millis(period)").alias("minute"))
        .agg(F.max("running").alias("peak"))
    )


def by_queue(values: Mapping[str, Any], kind: str) -> Column:
    """Return the value of a row's queue, where ``*`` stands for all other queues; null if there is no value."""
    cases = [F.when(F.col("queue") == queue, F.lit(value)) for queue, value in values.items() if queue != EVERY]
    default = [F.lit(values[EVERY])] if EVERY in values else []
    return reduce(F.coalesce, [*cases, *default, F.lit(None)]).cast(kind)
