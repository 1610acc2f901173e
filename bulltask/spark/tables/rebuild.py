"""Rebuild ``silver`` for some days from ``bronze.events``, after damage or an upgrade of bulltask."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from bulltask.jobs.errors import LakeError
from bulltask.lake.atomic_swap import AtomicSwap, hold_swaps
from bulltask.lake.layout import Layout, list_directories
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, Table
from bulltask.spark.lifecycle.fold import FINISHED
from bulltask.spark.lifecycle.sql import attempts_of, derive, in_order, is_finished, jobs_of, lifecycle_events
from bulltask.spark.tables.lake_tables import as_table, command_ingest_id, day_of, read_table

__all__ = ["build_silver", "derived_silver"]

_TABLES: Final = (ATTEMPTS, JOBS)

Partitions = dict[tuple[str, str], list[Path]]
"""Paths by the names of their day and queue directories."""


def build_silver(spark: SparkSession, layout: Layout, days: Collection[date], *, open_job_timeout: timedelta) -> None:
    """Rebuild the silver rows for some days from all events in bronze.

    Rows from snapshots and rows of open jobs that timed out are kept. The pipeline may be running.

    Args:
        spark: The session.
        layout: The lake.
        days: The days (UTC).
        open_job_timeout: The time without events after which an open job times out, as for the pipeline.

    Raises:
        LakeError: Events that these days are derived from have expired.
    """
    _check_not_expired(layout, days, open_job_timeout)
    # List the directories before reading events: rows that a batch adds after that are kept, and duplicate rows do no
    # harm.
    old = {table: _partitions(layout, table, days) for table in _TABLES}
    head = Ledger(layout).head()
    clock = datetime.fromtimestamp((head.newest_event_ms if head else 0) / 1000, UTC)
    time_out_before_ms = round((clock - open_job_timeout).timestamp() * 1000)
    ingest_id = command_ingest_id("build")
    with AtomicSwap(layout) as swaps:
        directories: dict[Table, Path] = {}
        with hold_swaps(layout), derived_silver(read_table(spark, layout, EVENTS), time_out_before_ms) as silver:
            for table, rows in silver.items():
                directories[table] = swaps.new_directory()
                all_rows = rows.unionByName(_rows_to_keep(spark, layout, table)).where(
                    F.col("dt").isin(*map(str, days))
                )
                all_rows.write.partitionBy("dt", "queue").parquet(str(directories[table]))
        for table, new in directories.items():
            for (day, queue), replaced in sorted((_new_partitions(new) | old[table]).items()):
                has_rows = (new / day / queue).is_dir()
                target = layout.table(table) / day / queue / f"ingest_id={ingest_id}"
                swaps.swap(new / day / queue if has_rows else None, target if has_rows else None, replaced)


def _check_not_expired(layout: Layout, days: Collection[date], open_job_timeout: timedelta) -> None:
    """Raise an error if early events of jobs have expired, because the rebuilt rows would lack data."""
    events, derived = layout.days(EVENTS), [day for table in _TABLES for day in layout.days(table)]
    if not derived or (events and events[0] <= min(derived)):
        return
    first = events[0] + open_job_timeout if events else None
    for day in sorted(days):
        if first is None or day < first:
            raise LakeError(
                f"silver for {day} cannot be rebuilt: events that it is derived from have expired; bronze.events of "
                f"{layout.root} {f'begins with {events[0]}' if events else 'is empty'}"
            )


def _partitions(layout: Layout, table: Table, days: Collection[date]) -> Partitions:
    partitions = {
        (day.name, queue.name): list_directories(queue)
        for day in (layout.day(table, path) for path in sorted(days))
        for queue in list_directories(day)
    }
    # A batch that is being published may remove its files.
    publishing = f"ingest_id={Ledger(layout).publishing()}"
    return {key: [path for path in paths if path.name != publishing] for key, paths in partitions.items()}


def _new_partitions(new: Path) -> Partitions:
    return {(day.name, queue.name): [] for day in list_directories(new) for queue in list_directories(day)}


def _rows_to_keep(spark: SparkSession, layout: Layout, table: Table) -> DataFrame:
    """Return the rows that are not, or can no longer be, derived from events."""
    rows = read_table(spark, layout, table).drop("ingest_id")
    return rows.where((F.col("source") == "snapshot") | _is_timed_out(table))


def _is_timed_out(table: Table) -> Column:
    if table is ATTEMPTS:
        return F.col("outcome") == "open"
    return ~F.col("state").isin("completed", "failed", "removed")


@contextmanager
def derived_silver(events: DataFrame, time_out_before_ms: int) -> Iterator[dict[Table, DataFrame]]:
    """Derive the attempts whose outcome is known and the finished jobs, which can be used inside the ``with`` block.

    Open jobs are omitted, as in batches (:mod:`~bulltask.spark.tables.silver`).

    Args:
        events: All rows of ``bronze.events``.
        time_out_before_ms: An open job without events since this time times out: it is written with its last state.

    Yields:
        Rows of ``silver.attempts`` and ``silver.jobs``, without ``ingest_id``.
    """
    chosen = _choose_rows(derive(lifecycle_events(events)), time_out_before_ms).persist()
    try:
        yield {
            ATTEMPTS: _as_rows_of(attempts_of(chosen.where("is_attempt")), ATTEMPTS, "ended_at"),
            JOBS: _as_rows_of(jobs_of(chosen.where("is_job")), JOBS, "finished_at"),
        }
    finally:
        chosen.unpersist()


def _choose_rows(derived: DataFrame, time_out_before_ms: int) -> DataFrame:
    """Keep events that begin an attempt with a known outcome (``is_attempt``), or end an incarnation (``is_job``)."""
    window = in_order().rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    incarnation = F.struct(
        *(F.coalesce(F.col(f"added.{name}"), F.lit(-1)).alias(name) for name in ("event_ms", "event_seq"))
    )
    last = {
        "last_incarnation": F.last("incarnation").over(window),
        "last_kept": F.last("kept.event").over(window),
        "last_event": F.last("event").over(window),
        "last_ms": F.last("event_ms").over(window),
    }
    ended = F.coalesce(F.col("last_kept").isin(*FINISHED), F.lit(False)) | (F.col("last_event") == "removed")
    timed_out = (F.col("incarnation") == F.col("last_incarnation")) & ~ended & (F.col("last_ms") < time_out_before_ms)
    is_over = (
        F.coalesce(is_finished(), F.lit(False))
        | (F.col("event") == "removed")
        | F.col("next_event").isNotNull()
        | F.col("timed_out")
    )
    with_last = derived.withColumn("incarnation", incarnation).withColumns(last).withColumn("timed_out", timed_out)
    return with_last.withColumns(
        {
            "is_attempt": F.col("has_attempt") & (F.col("decided").isNotNull() | F.col("timed_out")),
            "is_job": F.col("is_last") & is_over,
        }
    ).where("is_attempt OR is_job")


def _as_rows_of(rows: DataFrame, table: Table, ended_at: str) -> DataFrame:
    added = {"dt": day_of(F.col(ended_at), F.col("as_of")), "ingest_id": F.lit(None).cast("string")}
    return as_table(rows.withColumns(added), table).drop("ingest_id")
