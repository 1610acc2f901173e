"""Build the gold tables for some days from bronze and silver.

A fact has a ``kind``, a minute, an ``amount`` (a count or milliseconds), and for wait and run times the histogram
``bucket``. All sums of the per-minute tables together need a single shuffle of facts, which moves little more data than
the result contains. Much of this is SQL text: each Python call on a column is a call into the JVM, and hundreds of
calls take longer than the work itself.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import reduce
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from bulltask.jobs.errors import ConfigError
from bulltask.lake.log_histogram import GROWTH, ZERO
from bulltask.lake.reader import days_in_gaps, half_built_days
from bulltask.lake.slo_config import EVERY, Metric, Objective, SLOConfig
from bulltask.lake.storage import DataFile, Lake, days_of
from bulltask.lake.tables import (
    ATTEMPTS,
    BUILT_FIRST,
    BUILT_LAST,
    CAPACITY_MINUTE,
    COST_DAY,
    ERRORS_DAY,
    EVENTS,
    GAPS,
    JOBS,
    SLO_DAY,
    TASK_MINUTE,
    Table,
)
from bulltask.spark.lake_tables import (
    as_table,
    check_shared,
    day_of,
    latest,
    read_files,
    read_table,
    replace_days,
    write_files,
)

MINUTE_MS: Final = 60_000
DAY_MS: Final = 86_400_000
_DAY: Final = timedelta(days=1)

COUNTERS: Final = (
    "added", "started", "completed", "failed", "requeued", "stalled", "waiting_children", "released", "finished",
    "removed", "busy_ms", "wasted_ms",
)  # fmt: skip
"""The kinds of facts that are columns of ``gold.task_minute``; ``waited`` and ``ran`` have histograms."""

_COUNTER: Final = "if(outcome = 'open', null, replace(outcome, '-', '_'))"
"""The counter of an attempt's outcome. An open attempt has not ended, so it has none."""


@dataclass(frozen=True, slots=True)
class DaySpan:
    """Consecutive days in UTC, including the last."""

    first: date
    last: date

    @property
    def start(self) -> datetime:
        """The beginning of the first day."""
        return datetime.combine(self.first, time(), UTC)

    @property
    def end(self) -> datetime:
        """The end of the last day (exclusive)."""
        return datetime.combine(self.last, time(), UTC) + timedelta(days=1)

    @property
    def start_ms(self) -> int:
        """The first millisecond."""
        return int(self.start.timestamp()) * 1000

    @property
    def end_ms(self) -> int:
        """The first millisecond after the last day."""
        return int(self.end.timestamp()) * 1000

    @property
    def days(self) -> list[date]:
        """All days."""
        return [self.first + number * _DAY for number in range((self.last - self.first).days + 1)]

    def contains(self, at: Column) -> Column:
        """Return a column that is true if a time is in these days."""
        return (at >= F.lit(self.start)) & (at < F.lit(self.end))


def minute_facts(inputs: GoldInputs, span: DaySpan) -> DataFrame:
    """Return the per-minute facts for some days.

    Their columns are ``queue``, ``name``, ``minute`` (epoch milliseconds), ``kind``, ``bucket``, ``amount``.
    """
    added_fact = _fact_sql("'added'", minute=_floor_sql("unix_millis(event_at)", MINUTE_MS))
    ended_at = "coalesce(finished_at, if(state = 'removed', as_of, null))"
    ended_minute = _floor_sql(f"unix_millis({ended_at})", MINUTE_MS)
    ended = _fact_sql("if(finished_at is null, 'removed', 'finished')", minute=ended_minute)
    gap = _fact_sql("'gap'", "0", minute="period")
    all_facts = [
        _attempt_facts(inputs.attempts, span),
        inputs.added.where(span.contains(F.col("event_at"))).selectExpr("queue", "name", f"{added_fact} as fact"),
        inputs.jobs.where(span.contains(F.expr(ended_at))).selectExpr("queue", "name", f"{ended} as fact"),
        # A minute with lost events has a row even if all its events are lost.
        gap_periods(inputs.gaps, span, MINUTE_MS)
        .where("creates_rows")
        .selectExpr("queue", "cast(null as string) as name", f"{gap} as fact"),
    ]
    return reduce(DataFrame.unionByName, all_facts).select("queue", "name", "fact.*")


def _attempt_facts(attempts: DataFrame, span: DaySpan) -> DataFrame:
    """Return the facts of attempts: start, end, and the run time in each minute."""
    start, end = _floor_sql("started", MINUTE_MS), _floor_sql("ended", MINUTE_MS)
    single = ", ".join([
        _fact_sql("'started'", minute=start),
        _fact_sql("if(wait_ms is not null, 'waited', null)", bucket=_bucket_sql("wait_ms"), minute=start),
        _fact_sql(_COUNTER, minute=end),
        _fact_sql("if(run_ms is not null, 'ran', null)", bucket=_bucket_sql("run_ms"), minute=end),
    ])  # fmt: skip
    is_wanted = f"fact.kind is not null and fact.minute between {span.start_ms} and {span.end_ms - 1}"
    busy, wasted = (
        _fact_sql(f"'{kind}'", "piece.to - piece.from", minute="piece.period") for kind in ("busy_ms", "wasted_ms")
    )
    facts = f"""concat(
        filter(array({single}), fact -> {is_wanted}),
        transform(pieces, piece -> {busy}),
        transform(if(outcome in ('failed', 'requeued', 'stalled'), pieces, slice(pieces, 1, 0)), piece -> {wasted})
    )"""
    timed = attempts.selectExpr(
        "queue", "name", "outcome", "wait_ms", "run_ms", "unix_millis(started_at) as started",
        "unix_millis(ended_at) as ended",
    )  # fmt: skip
    split = timed.selectExpr("*", f"{split_by_period('started', 'ended', span, MINUTE_MS)} as pieces")
    return split.selectExpr("queue", "name", f"explode({facts}) as fact")


def split_by_period(started: str, ended: str, span: DaySpan, period_ms: int) -> str:
    """Return SQL that splits the time between two moments (milliseconds) into the minutes or days of a span.

    It is an array of ``period`` (the first millisecond of a minute or day), ``from`` and ``to``; empty if a moment is
    unknown or the time does not overlap the span.
    """
    first = f"greatest({_floor_sql(started, period_ms)}, {span.start_ms}L)"
    last = f"least({_floor_sql(ended, period_ms)}, {span.end_ms - period_ms}L)"
    # sequence() would also count backward, and greatest() and least() ignore nulls.
    overlaps = f"{started} is not null and {ended} is not null and {first} <= {last}"
    periods = (
        f"if({overlaps}, sequence({first}, greatest({first}, {last}), {period_ms}L), cast(array() as array<bigint>))"
    )
    piece = f"'period', period, 'from', greatest({started}, period), 'to', least({ended}, period + {period_ms}L)"
    return f"transform({periods}, period -> named_struct({piece}))"


def gap_periods(gaps: DataFrame, span: DaySpan, period_ms: int) -> DataFrame:
    """Return the minutes or days of a span that overlap a gap, in one row for each gap and period.

    The columns are ``queue``, ``period`` (the first millisecond), ``lost``, ``creates_rows``. A gap without a known end
    lasts until it was detected. A gap without a known beginning includes all minutes before its end, but creates rows
    only for the period in which it ends.
    """
    ends = gaps.selectExpr(
        "queue", "lost", "unix_millis(last_at_before) as since",
        # Redis' clock may be ahead of the pipeline's.
        "unix_millis(greatest(coalesce(first_at_after, detected_at), last_at_before)) as until",
    )  # fmt: skip
    overlapping = split_by_period("coalesce(since, 0L)", "until", span, period_ms)
    rows = ends.selectExpr("queue", "lost", "since", "until", f"explode({overlapping}) as piece")
    creates_rows = f"since is not null or {_floor_sql('until', period_ms)} = piece.period"
    return rows.selectExpr("queue", "piece.period as period", "lost", f"{creates_rows} as creates_rows")


def _floor_sql(ms: str, period_ms: int) -> str:
    return f"({ms} - {ms} % {period_ms}L)"


def _bucket_sql(ms: str) -> str:
    """Return `bulltask.lake.log_histogram.bucket_of` as SQL."""
    return f"if({ms} <= 0, {ZERO}, cast(ceil(ln({ms}) / {math.log(GROWTH)!r}D) as int))"


def _fact_sql(kind: str, amount: str = "1", *, bucket: str = "null", minute: str | None = None) -> str:
    """Return the struct of a fact as SQL; a fact without a minute is one of a row that has a minute."""
    fields = "" if minute is None else f"'minute', {minute}, "
    bucket, amount = f"cast({bucket} as int)", f"cast({amount} as bigint)"
    return f"named_struct({fields}'kind', {kind}, 'bucket', {bucket}, 'amount', {amount})"


_HISTOGRAM_KINDS: Final = {"wait": "waited", "run": "ran"}
_QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def task_minutes(facts: DataFrame, gaps: DataFrame, span: DaySpan) -> DataFrame:
    """Aggregate ``gold.task_minute`` from the facts of `minute_facts`."""
    lost = gap_periods(gaps, span, MINUTE_MS).groupBy("queue", F.col("period").alias("minute"))
    summed = _sum_facts(facts, ("queue", "name", "minute"))
    return (
        summed.join(lost.agg(F.sum("lost").alias("events_lost")), ["queue", "minute"], "left")
        .withColumn("complete", F.col("events_lost").isNull())
        .withColumn("events_lost", F.coalesce("events_lost", F.lit(0)))
        .withColumn("minute", F.timestamp_millis("minute"))
        .withColumn("dt", day_of(F.col("minute")))
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
    counters = ", ".join(_fact_sql(f"'{name}'", name) for name in COUNTERS)
    entry = {kind: _fact_sql(f"'{kind}'", "entry.value", bucket="entry.key") for kind in _HISTOGRAM_KINDS.values()}
    histograms = (
        f"transform(map_entries({column}_histogram_ms), entry -> {entry[kind]})"
        for column, kind in _HISTOGRAM_KINDS.items()
    )
    nonzero = f"filter(concat(array({counters}), {', '.join(histograms)}), fact -> fact.amount != 0)"
    flags = ", ".join([_fact_sql("'minute'", "0"), _fact_sql("'incomplete'", "if(complete, 0, 1)")])
    facts = minutes.select(
        *by, F.date_trunc(unit, "minute").alias("since"), F.expr(f"inline(concat({nonzero}, array({flags})))")
    )
    return _sum_facts(facts, (*by, "since"), "sum(if(kind = 'incomplete', amount, 0)) = 0 as complete")


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
    """Aggregate ``gold.capacity_minute`` from ``gold.task_minute`` and the latest attempts.

    ``capacities`` are the maximum number of running jobs, by queue and ``*``; for other queues, the day's observed
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
    return joined.withColumn("capacity", F.coalesce(configured, observed)).select(
        "*", F.expr("busy_slots / capacity as utilization"), day_of(F.col("minute")).alias("dt")
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


def errors_days(attempts: DataFrame, span: DaySpan) -> DataFrame:
    """Aggregate ``gold.errors_day`` from the latest attempts."""
    keys = ("dt", "queue", "name", "error_fingerprint")
    failures = attempts.where((F.col("outcome") == "failed") & span.contains(F.col("ended_at"))).withColumn(
        "dt", day_of(F.col("ended_at"))
    )
    newest = Window.partitionBy(*keys).orderBy(F.desc("ended_at"), "job_id", "incarnation")
    sample = F.when(F.col("rank") <= 5, F.struct("rank", "job_id"))
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


def slo_days(inputs: GoldInputs, span: DaySpan, objectives: Sequence[Objective]) -> DataFrame:
    """Aggregate ``gold.slo_day`` from the latest attempts and jobs; without objectives there are no rows."""
    durations = _durations(inputs, span).where(F.lit(bool(objectives)))
    targets = F.filter(F.array(*_targets(objectives)), lambda target: target["target"].isNotNull())
    is_good = (F.col("ms") <= F.col("threshold_ms")) & F.col("may_be_good")
    days = (
        durations.select("*", F.inline(targets))
        .groupBy("dt", "queue", "name", "metric", "threshold_ms", "target")
        .agg(F.count("*").alias("measured"), F.count_if(is_good).alias("good"))
        .withColumn("attainment", F.expr("good / measured"))
        .withColumn("error_budget_remaining", F.expr("1 - (1 - attainment) / (1 - target)"))
    )
    return _with_complete(days, inputs.gaps, span)


def _durations(inputs: GoldInputs, span: DaySpan) -> DataFrame:
    """Return all measured durations: ``queue``, ``name``, ``dt``, ``metric``, ``ms``, ``may_be_good``."""

    def select_durations(rows: DataFrame, metric: Metric, at: str, good: Column) -> DataFrame:
        ms = F.col(f"{metric}_ms")
        return rows.where(span.contains(F.col(at)) & ms.isNotNull()).select(
            "queue", "name", day_of(F.col(at)).alias("dt"), F.lit(metric.value).alias("metric"),
            ms.alias("ms"), good.alias("may_be_good"),
        )  # fmt: skip

    waits = select_durations(inputs.attempts.where("attempt = 1"), Metric.WAIT, "started_at", F.lit(True))
    runs = select_durations(inputs.attempts, Metric.RUN, "ended_at", F.lit(True))
    totals = select_durations(inputs.jobs, Metric.TOTAL, "finished_at", F.col("state") == "completed")
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
    """Aggregate ``gold.cost_day`` from the rows of ``gold.task_minute``.

    ``prices`` are the price of a slot per hour, by queue and ``*``; other queues have no cost.
    """
    totals = {
        "jobs": "finished", "attempts": "completed + failed + requeued + stalled + waiting_children",
        "busy_ms": "busy_ms", "wasted_ms": "wasted_ms",
    }  # fmt: skip
    cost = "cast(busy_ms as decimal(18,0)) * price / 3600000"
    days = (
        minutes.groupBy("queue", "name", day_of(F.col("minute")).alias("dt"))
        .agg(*(F.expr(f"sum({amount}) as {name}") for name, amount in totals.items()))
        .where("jobs > 0 or attempts > 0 or busy_ms > 0")
        .withColumn("price", by_queue(prices, "decimal(14,6)"))
        .selectExpr("*", "busy_ms / 1000 as busy_s", "wasted_ms / 1000 as wasted_s", f"{cost} as cost")
        .withColumn("cost_per_job", F.expr("cost / nullif(jobs, 0)"))
    )
    return _with_complete(days, gaps, span)


def _with_complete(days: DataFrame, gaps: DataFrame, span: DaySpan) -> DataFrame:
    """Add ``complete`` to the days of queues: whether no gap overlaps the day."""
    day = day_of(F.timestamp_millis("period"))
    gap_days = gap_periods(gaps, span, DAY_MS).select("queue", day.alias("dt"), F.lit(True).alias("has_gap")).distinct()
    return days.join(gap_days, ["queue", "dt"], "left").withColumn("complete", F.col("has_gap").isNull())


_ATTEMPT_COLUMNS: Final = (
    "queue", "job_id", "incarnation", "attempt", "name", "started_at", "ended_at", "wait_ms", "run_ms", "outcome",
    "failed_reason", "error_fingerprint",
)  # fmt: skip
_JOB_COLUMNS: Final = ("queue", "name", "finished_at", "state", "total_ms", "as_of")
_TIME_ZONE: Final = "spark.sql.session.timeZone"
_TABLES: Final = (BUILT_FIRST, CAPACITY_MINUTE, ERRORS_DAY, SLO_DAY, BUILT_LAST)


@dataclass(frozen=True, slots=True)
class GoldInputs:
    """The rows that gold is built from: the latest rows of some days and of the days around them."""

    added: DataFrame
    attempts: DataFrame
    jobs: DataFrame
    gaps: DataFrame


def build_gold(spark: SparkSession, lake: Lake, days: Iterable[date], slo_config: SLOConfig | None = None) -> None:
    """Build all gold tables for some days (UTC) and replace existing rows.

    A day without data gets empty tables. Other days are not changed, except those that a killed build has left with
    tables that contradict each other: an attempt that runs past midnight counts in each of its days when that day is
    built. A day may be built any number of times; its rows change until all attempts that began on that day have ended,
    because an attempt is recorded when it ends.

    ``spark`` is ideally a session from `bulltask.spark.session`; ``slo_config`` has objectives, prices and capacities.

    Raises:
        ConfigError: The days include 9999-12-31.
        LakeError: An executor cannot read the lake.
        LakeInUseError: Another process is replacing rows of gold.
    """
    config = slo_config or SLOConfig()
    with check_shared(lake), ExitStack() as settings:
        settings.callback(spark.conf.set, _TIME_ZONE, str(spark.conf.get(_TIME_ZONE)))
        spark.conf.set(_TIME_ZONE, "UTC")  # so that days are in UTC
        for span in _spans([*days, *half_built_days(lake)]):
            since = {table: lake.create(table) for table in _TABLES}
            inputs = read_inputs(spark, lake, span)
            with ExitStack() as cached:
                for rows in (inputs.attempts, inputs.jobs):  # every table uses these: read and sort them once
                    cached.callback(rows.persist().unpersist)
                facts = minute_facts(inputs, span)
                written = {TASK_MINUTE: _write(task_minutes(facts, inputs.gaps, span), TASK_MINUTE, lake)}
                # The other tables are built from the per-minute rows. Reading these from files keeps the query plan
                # short.
                minutes = read_files(spark, lake, TASK_MINUTE, written[TASK_MINUTE])
                derived = {
                    CAPACITY_MINUTE: capacity_minutes(minutes, inputs.attempts, span, config.capacities),
                    ERRORS_DAY: errors_days(inputs.attempts, span),
                    SLO_DAY: slo_days(inputs, span, list(config.objectives)),
                    COST_DAY: cost_days(minutes, inputs.gaps, span, config.prices),
                }
                written |= {table: _write(rows, table, lake) for table, rows in derived.items()}
            # All tables are complete before the first table becomes visible.
            build = {"build": secrets.token_hex(8), "days": [str(day) for day in span.days]}
            for table in _TABLES:
                replace_days(lake, since[table], written[table], span.days, build)


def read_inputs(spark: SparkSession, lake: Lake, span: DaySpan) -> GoldInputs:
    """Read the rows that the gold tables for some days are built from.

    A row may be superseded by a row of any other day. A row of an earlier day can only supersede it if a backfill wrote
    that row, and backfills only write days with gaps. Rows of later days are filtered by their start time while the
    files are read, except where rows with the same key can have different start times: incarnations and attempts whose
    start is unknown. An extra day on either side allows for differences between clocks.
    """
    before, after = span.first - _DAY, F.lit(span.end + _DAY)

    def rows(table: Table, columns: Sequence[str], started: str, ended_at: Column) -> DataFrame:
        days = days_of(lake.open(table))
        near = [day for day in days if day >= before]
        backfilled = days_in_gaps(lake, (day for day in days if day < before))
        names = dict.fromkeys((*columns, *table.key, started, "as_of", "source", "dt"))
        is_snapshot, is_near = F.col("source") == "snapshot", F.col("dt") >= str(before)
        starts_early = F.col(started).isNull() | (F.col(started) < after)
        known = starts_early | is_snapshot | F.col("incarnation").isNull()
        stored = read_table(spark, lake, table, [*backfilled, *near], list(names))
        found = latest(stored.where((is_near | is_snapshot) & known), table).where(
            (ended_at >= F.lit(span.start)) & (F.col(started).isNull() | (F.col(started) < F.lit(span.end)))
        )
        return found.select(*columns)

    events = read_table(spark, lake, EVENTS, span.days, ("queue", "name", "event_at", "event"))
    return GoldInputs(
        events.where("event = 'added'").drop("event"),
        rows(ATTEMPTS, _ATTEMPT_COLUMNS, "started_at", F.coalesce("ended_at", "started_at")),
        rows(JOBS, _JOB_COLUMNS, "created_at", F.coalesce("finished_at", "as_of")),
        _gaps(read_table(spark, lake, GAPS), span),
    )


def _gaps(gaps: DataFrame, span: DaySpan) -> DataFrame:
    """Return the gaps that overlap some days. Usually there are none: an empty DataFrame makes the plan shorter."""
    ends_late = F.greatest(F.coalesce("first_at_after", "detected_at"), "last_at_before") >= F.lit(span.start)
    starts_early = F.col("last_at_before").isNull() | (F.col("last_at_before") < F.lit(span.end))
    overlapping = gaps.where(ends_late & starts_early)
    return gaps.where(F.lit(False)) if overlapping.isEmpty() else overlapping


def _spans(days: Iterable[date]) -> Iterator[DaySpan]:
    """Yield spans of consecutive days; each span is built as a whole."""
    ordered = sorted(set(days))
    if date.max in ordered:
        raise ConfigError(
            f"gold cannot be built for {date.max}: events with times after the year 9999 are stored on that day"
        )
    start = 0
    for index, day in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] - day > _DAY:
            yield DaySpan(ordered[start], day)
            start = index + 1


def _write(rows: DataFrame, table: Table, lake: Lake) -> list[DataFile]:
    """Write a table's rows, one file for each day, sorted by key."""
    return write_files(as_table(rows, table).repartition("dt").sortWithinPartitions("dt", *table.key), table, lake)
