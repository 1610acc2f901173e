"""``silver.attempts`` and ``silver.jobs`` of whole tables of events, as batches have told them.

What of a job that is open is not told yet is left out, as batches do: :mod:`~bulltask.spark.tables.telling`. Nothing
here reads or writes: frames in, frames out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as fn

from bulltask.lake.tables import ATTEMPTS, JOBS, Table
from bulltask.spark.lifecycle.fold import FINISHED
from bulltask.spark.lifecycle.sql import attempts_of, in_order, is_finished, jobs_of, life_events, tell
from bulltask.spark.tables.lake_tables import as_table, day_of

__all__ = ["silver_of"]


@contextmanager
def silver_of(events: DataFrame, give_up_ms: int) -> Iterator[dict[Table, DataFrame]]:
    """Tell the attempts whose outcome is decided and the jobs that are done; of use inside the ``with`` block.

    Args:
        events: all rows of ``bronze.events``.
        give_up_ms: a job without an event since then is given up: told as it was seen last.

    Yields:
        Rows of ``silver.attempts`` and ``silver.jobs``, without ``ingest_id``.
    """
    judged = _judge(tell(life_events(events)), give_up_ms).persist()
    try:
        yield {
            ATTEMPTS: _of_table(attempts_of(judged.where("is_attempt")), ATTEMPTS, "ended_at"),
            JOBS: _of_table(jobs_of(judged.where("is_job")), JOBS, "finished_at"),
        }
    finally:
        judged.unpersist()


def _judge(told: DataFrame, give_up_ms: int) -> DataFrame:
    """Leave events with which a decided attempt begins (``is_attempt``), or a life ends that is over (``is_job``)."""
    whole = in_order().rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    life = fn.struct(
        *(fn.coalesce(fn.col(f"added.{name}"), fn.lit(-1)).alias(name) for name in ("event_ms", "event_seq"))
    )
    last = {
        "last_life": fn.last("life").over(whole),
        "last_kept": fn.last("kept.event").over(whole),
        "last_event": fn.last("event").over(whole),
        "last_ms": fn.last("event_ms").over(whole),
    }
    ended = fn.coalesce(fn.col("last_kept").isin(*FINISHED), fn.lit(False)) | (fn.col("last_event") == "removed")
    given_up = (fn.col("life") == fn.col("last_life")) & ~ended & (fn.col("last_ms") < give_up_ms)
    is_over = (
        fn.coalesce(is_finished(), fn.lit(False))
        | (fn.col("event") == "removed")
        | fn.col("next_event").isNotNull()
        | fn.col("given_up")
    )
    seen = told.withColumn("life", life).withColumns(last).withColumn("given_up", given_up)
    return seen.withColumns(
        {
            "is_attempt": fn.col("begins") & (fn.col("decided").isNotNull() | fn.col("given_up")),
            "is_job": fn.col("is_last") & is_over,
        }
    ).where("is_attempt OR is_job")


def _of_table(rows: DataFrame, table: Table, ended_at: str) -> DataFrame:
    added = {"dt": day_of(fn.col(ended_at), fn.col("as_of")), "ingest_id": fn.lit(None).cast("string")}
    return as_table(rows.withColumns(added), table).drop("ingest_id")
