"""Rebuild ``silver`` of some days from ``bronze.events``: if it was damaged, or a newer bulltask derives more."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as fn

from bulltask.errors import LakeError
from bulltask.lake.atomic_swap import AtomicSwap, hold_swaps
from bulltask.lake.layout import Layout, list_directories
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, Table
from bulltask.spark.lifecycle.fold import FINISHED
from bulltask.spark.lifecycle.sql import attempts_of, derive, in_order, is_finished, jobs_of, lifecycle_events
from bulltask.spark.tables.lake_tables import as_table, day_of, ingest_of, read_table

__all__ = ["build_silver", "derived_silver"]

_TABLES: Final = (ATTEMPTS, JOBS)

Partitions = dict[tuple[str, str], list[Path]]
"""What was written, by day and queue as their directories are named."""


def build_silver(spark: SparkSession, layout: Layout, days: Collection[date], *, max_open: timedelta) -> None:
    """Rebuild the silver rows of some days from all events that are there.

    Rows from snapshots stay, and so do those of jobs that were given up as open. The stream may run at the same time.

    Args:
        spark: The session.
        layout: The lake.
        days: Which, UTC.
        max_open: How long a job may have no event until it is given up, as for the stream.

    Raises:
        LakeError: Events that these days are derived from have expired.
    """
    _check_not_expired(layout, days, max_open)
    # List before reading events: what a batch adds afterwards is kept, and a duplicate row does no harm.
    old = {table: _partitions(layout, table, days) for table in _TABLES}
    head = Ledger(layout).head()
    clock = datetime.fromtimestamp((head.clock_ms if head else 0) / 1000, UTC)
    give_up_ms = round((clock - max_open).timestamp() * 1000)
    ingest = ingest_of("build")
    with AtomicSwap(layout) as swaps:
        made: dict[Table, Path] = {}
        with hold_swaps(layout), derived_silver(read_table(spark, layout, EVENTS), give_up_ms) as silver:
            for table, rows in silver.items():
                made[table] = swaps.new_directory()
                whole = rows.unionByName(_kept(spark, layout, table)).where(fn.col("dt").isin(*map(str, days)))
                whole.write.partitionBy("dt", "queue").parquet(str(made[table]))
        for table, new in made.items():
            for (day, queue), gone in sorted((_new_partitions(new) | old[table]).items()):
                is_there = (new / day / queue).is_dir()
                place = layout.table(table) / day / queue / f"ingest_id={ingest}"
                swaps.swap(new / day / queue if is_there else None, place if is_there else None, gone)


def _check_not_expired(layout: Layout, days: Collection[date], max_open: timedelta) -> None:
    """Raise an error if the events of a job's beginning are gone: the rebuilt rows would say less than those there."""
    events, derived = layout.days(EVENTS), [day for table in _TABLES for day in layout.days(table)]
    if not derived or (events and events[0] <= min(derived)):
        return
    first = events[0] + max_open if events else None
    for day in sorted(days):
        if first is None or day < first:
            raise LakeError(
                f"silver of {day} cannot be rebuilt: events that it is derived from have expired; bronze.events in "
                f"{layout.root} begins with {events[0] if events else 'nothing'}"
            )


def _partitions(layout: Layout, table: Table, days: Collection[date]) -> Partitions:
    found = {
        (day.name, queue.name): list_directories(queue)
        for day in (layout.day(table, one) for one in sorted(days))
        for queue in list_directories(day)
    }
    # A batch that is being published removes its own files if it must.
    name = f"ingest_id={Ledger(layout).publishing()}"
    return {key: [one for one in paths if one.name != name] for key, paths in found.items()}


def _new_partitions(new: Path) -> Partitions:
    return {(day.name, queue.name): [] for day in list_directories(new) for queue in list_directories(day)}


def _kept(spark: SparkSession, layout: Layout, table: Table) -> DataFrame:
    """Return the rows that are not derived from events, or can no longer be."""
    rows = read_table(spark, layout, table).drop("ingest_id")
    return rows.where((fn.col("source") == "snapshot") | _is_given_up(table))


def _is_given_up(table: Table) -> Column:
    if table is ATTEMPTS:
        return fn.col("outcome") == "open"
    return ~fn.col("state").isin("completed", "failed", "removed")


@contextmanager
def derived_silver(events: DataFrame, give_up_ms: int) -> Iterator[dict[Table, DataFrame]]:
    """Derive the attempts whose outcome is decided and the jobs that are finished; valid inside the ``with`` block.

    Open jobs are left out, as batches do (:mod:`~bulltask.spark.tables.silver`).

    Args:
        events: All rows of ``bronze.events``.
        give_up_ms: A job without an event since then is given up: written in its last known state.

    Yields:
        Rows of ``silver.attempts`` and ``silver.jobs``, without ``ingest_id``.
    """
    chosen = _choose_rows(derive(lifecycle_events(events)), give_up_ms).persist()
    try:
        yield {
            ATTEMPTS: _of_table(attempts_of(chosen.where("is_attempt")), ATTEMPTS, "ended_at"),
            JOBS: _of_table(jobs_of(chosen.where("is_job")), JOBS, "finished_at"),
        }
    finally:
        chosen.unpersist()


def _choose_rows(derived: DataFrame, give_up_ms: int) -> DataFrame:
    """Keep events that begin a decided attempt (``is_attempt``) or end an incarnation that is over (``is_job``)."""
    whole = in_order().rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    incarnation = fn.struct(
        *(fn.coalesce(fn.col(f"added.{name}"), fn.lit(-1)).alias(name) for name in ("event_ms", "event_seq"))
    )
    last = {
        "last_incarnation": fn.last("incarnation").over(whole),
        "last_kept": fn.last("kept.event").over(whole),
        "last_event": fn.last("event").over(whole),
        "last_ms": fn.last("event_ms").over(whole),
    }
    ended = fn.coalesce(fn.col("last_kept").isin(*FINISHED), fn.lit(False)) | (fn.col("last_event") == "removed")
    given_up = (fn.col("incarnation") == fn.col("last_incarnation")) & ~ended & (fn.col("last_ms") < give_up_ms)
    is_over = (
        fn.coalesce(is_finished(), fn.lit(False))
        | (fn.col("event") == "removed")
        | fn.col("next_event").isNotNull()
        | fn.col("given_up")
    )
    seen = derived.withColumn("incarnation", incarnation).withColumns(last).withColumn("given_up", given_up)
    return seen.withColumns(
        {
            "is_attempt": fn.col("begins") & (fn.col("decided").isNotNull() | fn.col("given_up")),
            "is_job": fn.col("is_last") & is_over,
        }
    ).where("is_attempt OR is_job")


def _of_table(rows: DataFrame, table: Table, ended_at: str) -> DataFrame:
    added = {"dt": day_of(fn.col(ended_at), fn.col("as_of")), "ingest_id": fn.lit(None).cast("string")}
    return as_table(rows.withColumns(added), table).drop("ingest_id")
