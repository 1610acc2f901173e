"""Build the gold tables for some days from bronze and silver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from bulltask.jobs.errors import ConfigError
from bulltask.lake.atomic_swap import AtomicSwap, hold_swaps
from bulltask.lake.gaps import days_in_gaps
from bulltask.lake.layout import Layout
from bulltask.lake.slo_config import SLOConfig
from bulltask.lake.tables import (
    ATTEMPTS,
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
from bulltask.spark.gold.days import cost_days, errors_days, slo_days
from bulltask.spark.gold.facts import DaySpan, minute_facts
from bulltask.spark.gold.minutes import capacity_minutes, task_minutes
from bulltask.spark.tables.lake_tables import as_table, day_of, latest, read_table, spark_schema

__all__ = ["GoldInputs", "build_gold", "derived_tables", "minute_table", "read_inputs"]

_DAY: Final = timedelta(days=1)
_ATTEMPT_COLUMNS: Final = (
    "queue", "job_id", "incarnation", "attempt", "name", "started_at", "ended_at", "wait_ms", "run_ms", "outcome",
    "failed_reason", "error_fingerprint",
)  # fmt: skip
_JOB_COLUMNS: Final = ("queue", "name", "finished_at", "state", "total_ms", "as_of")
_SETTINGS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}


@dataclass(frozen=True, slots=True)
class GoldInputs:
    """The rows that gold is built from: the latest rows of some days and of the days around them."""

    added: DataFrame
    attempts: DataFrame
    jobs: DataFrame
    gaps: DataFrame


def build_gold(spark: SparkSession, layout: Layout, days: Iterable[date], slo_config: SLOConfig | None = None) -> None:
    """Build all gold tables for some days (UTC) and replace existing rows.

    A day without data gets empty tables. Other days are not changed: an attempt that runs past midnight counts in each
    of its days when that day is built. A day may be built any number of times; its rows change until all attempts that
    began on that day have ended, because an attempt is recorded when it ends.

    Args:
        spark: A session, ideally from `bulltask.spark.session`.
        layout: The lake.
        days: The days, in any order.
        slo_config: Objectives, prices and capacities; default: none.

    Raises:
        ConfigError: The days include 9999-12-31.
    """
    with AtomicSwap(layout) as swaps, _in_utc(spark):
        for span in _spans(days):
            with hold_swaps(layout), _cached(read_inputs(spark, layout, span)) as inputs:
                written = {TASK_MINUTE: _write_table(minute_table(inputs, span), TASK_MINUTE, swaps.new_directory())}
                # The other tables are built from the per-minute rows. Reading these from files keeps the query plan
                # short.
                minutes = spark.read.schema(spark_schema(TASK_MINUTE)).parquet(str(written[TASK_MINUTE]))
                for table, frame in derived_tables(inputs, minutes, span, slo_config or SLOConfig()).items():
                    written[table] = _write_table(frame, table, swaps.new_directory())
            # All tables are complete before the first table becomes visible.
            for table, directory in written.items():
                _swap_days(layout, swaps, table, directory, span)


def read_inputs(spark: SparkSession, layout: Layout, span: DaySpan) -> GoldInputs:
    """Read the rows that the gold tables for some days are built from.

    A row may be superseded by a row of any other day. A row of an earlier day can only supersede it if a backfill wrote
    that row, and backfills only write days with gaps. Rows of later days are filtered by their start time while the
    files are read, except where rows with the same key can have different start times: incarnations and attempts whose
    start is unknown. An extra day on either side allows for differences between clocks.
    """
    before, after = str(span.first - _DAY), F.lit(span.end + _DAY)

    def rows(table: Table, started: str, ended_at: Column) -> DataFrame:
        is_snapshot, is_near = F.col("source") == "snapshot", F.col("dt") >= before
        if backfilled_days := days_in_gaps(layout, (day for day in layout.days(table) if str(day) < before)):
            is_near |= F.col("dt").isin(*map(str, backfilled_days)) & is_snapshot
        starts_early = F.col(started).isNull() | (F.col(started) < after)
        known = starts_early | is_snapshot | F.col("incarnation").isNull()
        return latest(read_table(spark, layout, table).where(is_near & known), table).where(
            (ended_at >= F.lit(span.start)) & _starts_before(F.col(started), span)
        )

    days = F.col("dt").between(str(span.first), str(span.last))
    added = read_table(spark, layout, EVENTS).where(days & (F.col("event") == "added"))
    return GoldInputs(
        added.select("queue", "name", "event_at"),
        rows(ATTEMPTS, "started_at", F.coalesce("ended_at", "started_at")).select(*_ATTEMPT_COLUMNS),
        rows(JOBS, "created_at", F.coalesce("finished_at", "as_of")).select(*_JOB_COLUMNS),
        _gaps(read_table(spark, layout, GAPS), span),
    )


def _gaps(gaps: DataFrame, span: DaySpan) -> DataFrame:
    """Return the gaps that overlap some days. Usually there are none: an empty DataFrame makes the plan shorter."""
    ends_late = F.greatest(F.coalesce("first_at_after", "detected_at"), "last_at_before") >= F.lit(span.start)
    starts_early = F.col("last_at_before").isNull() | (F.col("last_at_before") < F.lit(span.end))
    overlapping = gaps.where(ends_late & starts_early)
    return gaps.where(F.lit(False)) if overlapping.isEmpty() else overlapping


def _starts_before(started: Column, span: DaySpan) -> Column:
    return started.isNull() | (started < F.lit(span.end))


def minute_table(inputs: GoldInputs, span: DaySpan) -> DataFrame:
    """Build ``gold.task_minute`` for some days."""
    facts = minute_facts(inputs.added, inputs.attempts, inputs.jobs, inputs.gaps, span)
    minutes = task_minutes(facts, inputs.gaps, span)
    return as_table(minutes.withColumn("dt", day_of(F.col("minute"))), TASK_MINUTE)


def derived_tables(
    inputs: GoldInputs, minutes: DataFrame, span: DaySpan, slo_config: SLOConfig
) -> dict[Table, DataFrame]:
    """Build the other gold tables for some days.

    Args:
        inputs: The rows that the tables are built from.
        minutes: Rows of ``gold.task_minute`` for these days.
        span: The days.
        slo_config: Objectives, prices and capacities.
    """
    attempts, jobs, gaps = inputs.attempts, inputs.jobs, inputs.gaps
    capacity = capacity_minutes(minutes, attempts, span, slo_config.capacities).withColumn(
        "dt", day_of(F.col("minute"))
    )
    return {
        CAPACITY_MINUTE: as_table(capacity, CAPACITY_MINUTE),
        ERRORS_DAY: as_table(errors_days(attempts, span), ERRORS_DAY),
        SLO_DAY: as_table(slo_days(attempts, jobs, gaps, span, slo_config.objectives), SLO_DAY),
        COST_DAY: as_table(cost_days(minutes, gaps, span, slo_config.prices), COST_DAY),
    }


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


def _write_table(frame: DataFrame, table: Table, directory: Path) -> Path:
    """Write a table's rows, one file for each day, sorted by key."""
    ordered = frame.repartition("dt").sortWithinPartitions("dt", *table.key)
    ordered.write.partitionBy("dt").parquet(str(directory))
    return directory


def _swap_days(layout: Layout, swaps: AtomicSwap, table: Table, directory: Path, span: DaySpan) -> None:
    """Replace old days with new days; a new day without rows also replaces the old day."""
    for number in range((span.last - span.first).days + 1):
        day = layout.day(table, span.first + number * _DAY)
        new = directory / day.name
        new.mkdir(parents=True, exist_ok=True)
        swaps.swap(new, day, [day] if day.exists() else [])


@contextmanager
def _cached(inputs: GoldInputs) -> Iterator[GoldInputs]:
    """Cache the inputs that every table uses, so that they are read and sorted once."""
    with _persisted(inputs.attempts) as attempts, _persisted(inputs.jobs) as jobs:
        yield GoldInputs(inputs.added, attempts, jobs, inputs.gaps)


@contextmanager
def _persisted(frame: DataFrame) -> Iterator[DataFrame]:
    yield frame.persist()
    frame.unpersist()


@contextmanager
def _in_utc(spark: SparkSession) -> Iterator[None]:
    """Override the session's settings, so that days are in UTC and files are portable."""
    before = {name: str(spark.conf.get(name)) for name in _SETTINGS}
    try:
        for name, value in _SETTINGS.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
