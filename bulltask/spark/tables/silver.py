"""``silver.attempts`` and ``silver.jobs`` of one batch, and what is left to the next one.

The events of a batch are told together with those of the jobs that were open before it (the carry). An attempt is
written in the batch in which it is decided how it ended, a job in the batch in which it is done, so nothing is written
twice; what became of a job that is retried by hand later is a new row of the same key, which knows more.

An event of a job that is neither new nor in the carry has a past: that of a job that is done and was retried by hand,
that was given up, or of which events are lost. The past is looked up, and the job is told whole.

Nothing here reads or writes: frames in, frames out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from bulltask.lake.tables import ATTEMPTS, JOBS
from bulltask.spark.lifecycle.fold import FINISHED, LIFE
from bulltask.spark.lifecycle.sql import (
    OF_ATTEMPT,
    OF_JOB,
    attempts_of,
    in_order,
    is_finished,
    jobs_of,
    life_events,
    tell,
)
from bulltask.spark.tables.lake_tables import as_table, day_of

__all__ = ["LookUp", "Silver", "silver_of"]

_OF_ROWS = (*LIFE, *OF_ATTEMPT, *OF_JOB)

LookUp = Callable[[pa.Table], DataFrame | None]
"""Finds the events, of all batches before, of jobs (``queue``, ``job_id``); ``None`` when there is none."""


@dataclass(frozen=True, slots=True)
class Silver:
    """What a batch tells.

    Attributes:
        attempts: new rows of ``silver.attempts``, without ``ingest_id``.
        jobs: new rows of ``silver.jobs``, without ``ingest_id``.
        carry: the events of jobs that are still open, with the columns `LIFE`.
    """

    attempts: DataFrame
    jobs: DataFrame
    carry: DataFrame


@contextmanager
def silver_of(new: DataFrame, carry: DataFrame | None, look_up: LookUp, give_up_ms: int) -> Iterator[Silver]:
    """Tell what a batch adds; the frames are of use inside the ``with`` block.

    Args:
        new: the batch's events, as in ``bronze.events``.
        carry: what the batch before left; ``None`` for the first.
        look_up: finds what was before.
        give_up_ms: a job without an event since then is given up.
    """
    events = life_events(new)
    if carry is not None:
        events = events.unionByName(life_events(carry, is_new=False))
    judged = _judge(events, give_up_ms).persist()
    again: DataFrame | None = None
    try:
        late = judged.where("is_late")
        keys = late.where("is_first").select("queue", "job_id").toArrow()
        past = look_up(keys) if keys.num_rows else None
        if past is not None:
            whole = late.select(*LIFE, "is_new").unionByName(life_events(past, is_new=False))
            again = _judge(whole, give_up_ms).persist()
            yield _silver(judged.where("NOT is_late").unionByName(again))
        else:
            yield _silver(judged)
    finally:
        for frame in (judged, again):
            if frame is not None:
                frame.unpersist()


def _judge(events: DataFrame, give_up_ms: int) -> DataFrame:
    """Tell the events of a batch, of the carry and of what was looked up, and judge which jobs are open.

    Args:
        events: what `life_events` returned, new ones and others.
        give_up_ms: a job without an event since then is given up.

    Returns:
        Of what `tell` returned, the events with which something is to be done. One is the last of a life that ends now
        (``is_job``), an attempt begins with it of which the outcome is decided now (``is_attempt``), it is of a life
        that goes on (``is_open``), or of a job of which events are missing that came before (``is_late``, and
        ``is_first`` of its events).
    """
    whole = in_order().rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    life = fn.coalesce(fn.col("added.event_ms"), fn.lit(-1)), fn.coalesce(fn.col("added.event_seq"), fn.lit(-1))
    seen = tell(events).withColumn("number", fn.struct(*(part.alias(f"part_{n}") for n, part in enumerate(life))))
    last = {
        "last_number": fn.last("number").over(whole),
        "last_kept": fn.last("kept.event").over(whole),
        "last_event": fn.last("event").over(whole),
        "last_ms": fn.last("event_ms").over(whole),
        "all_new": fn.min("is_new").over(whole),
        "first_event": fn.first("event").over(whole),
    }
    ended = fn.coalesce(fn.col("last_kept").isin(*FINISHED), fn.lit(False)) | (fn.col("last_event") == "removed")
    goes_on = (fn.col("number") == fn.col("last_number")) & ~ended
    is_old = fn.col("last_ms") < give_up_ms
    told = seen.withColumns(last).withColumns({"goes_on": goes_on, "given_up": goes_on & is_old})
    return told.select(
        *_OF_ROWS,
        "is_new",
        (fn.col("begins") & fn.coalesce(fn.col("decided"), fn.col("given_up"))).alias("is_attempt"),
        (fn.col("is_last") & _is_told_now()).alias("is_job"),
        (fn.col("goes_on") & ~is_old).alias("is_open"),
        (fn.col("all_new") & (fn.col("first_event") != "added")).alias("is_late"),
        fn.col("back_event").isNull().alias("is_first"),
    ).where("is_attempt OR is_job OR is_open OR is_late")


def _silver(judged: DataFrame) -> Silver:
    """Tell what a batch adds, from what `_judge` returned."""
    attempts, jobs = attempts_of(judged.where("is_attempt")), jobs_of(judged.where("is_job"))
    dt = {"ingest_id": fn.lit(None).cast("string")}
    return Silver(
        as_table(attempts.withColumns({"dt": day_of(fn.col("ended_at"), fn.col("as_of")), **dt}), ATTEMPTS).drop(
            "ingest_id"
        ),
        as_table(jobs.withColumns({"dt": day_of(fn.col("finished_at"), fn.col("as_of")), **dt}), JOBS).drop(
            "ingest_id"
        ),
        judged.where("is_open").select(*LIFE),
    )


def _is_told_now() -> Column:
    """Of the last event of a life: whether the life ends in this batch, which has not been told before."""
    finished = fn.coalesce(is_finished(), fn.lit(False))
    return (
        fn.when(finished, fn.col("kept.is_new"))
        .when(fn.col("event") == "removed", fn.col("is_new"))
        .when(fn.col("next_event") == "added", fn.col("next_is_new"))
        .otherwise(fn.col("given_up"))
    )
