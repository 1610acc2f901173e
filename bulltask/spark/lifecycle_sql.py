"""What became of each job, from its queue's events: the fold of :mod:`~bulltask.spark.lifecycle` as Spark runs it.

An attempt is told by one event and its neighbours in the job's life, so there is nothing to group: one shuffle by job,
one sort, and windows that share both.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as fn

from bulltask.spark.error_keys import ESCAPE, KEY_LENGTH, LINES_AFTER, NORMALISE, UNQUOTABLE
from bulltask.spark.lifecycle import EVENTS, FINISHED

__all__ = ["attempts", "error_key", "jobs", "plain_reason"]


def attempts(events: DataFrame) -> DataFrame:
    """Tell the attempts of all jobs that these events are about.

    Args:
        events: rows of the source's table ``events``, each once, in any order; it needs the columns ``queue``,
            ``job_id``, ``event_ms``, ``event_seq``, ``event``, ``name``, ``prev`` and ``failed_reason``.

    Returns:
        ``silver.attempts`` without ``ingest_id``: a row for each attempt, also for those that have not ended.
        ``life`` is the id of the event that added the job, as an id can be used again.
    """
    return (
        _told(events)
        .where("begins")
        .select(
            "queue",
            "job_id",
            "life",
            fn.col("attempt").cast("int").alias("attempt"),
            "name",
            fn.timestamp_millis("queued_ms").alias("queued_at"),
            fn.timestamp_millis("started_ms").alias("started_at"),
            fn.timestamp_millis("ended_ms").alias("ended_at"),
            (fn.col("started_ms") - fn.col("queued_ms")).alias("wait_ms"),
            (fn.col("ended_ms") - fn.col("started_ms")).alias("run_ms"),
            "outcome",
            "reason",
            error_key(fn.col("reason")).alias("error_key"),
            fn.lit(None).cast("string").alias("worker"),  # no event names it
            fn.lit("events").alias("source"),
        )
    )


def jobs(events: DataFrame) -> DataFrame:
    """Tell the jobs that these events are about.

    Args:
        events: as for `attempts`.

    Returns:
        ``silver.jobs``: a row for each life of each job, also for those that are not done; ``life`` as in `attempts`.
    """
    folded = _told(events).groupBy("queue", "job_id", "life").agg(*_summed())
    # A finished job keeps its state when it is removed.
    is_done = fn.coalesce(fn.col("kept.event").isin(*FINISHED), fn.lit(False))
    state = fn.when(is_done, fn.col("kept.event")).otherwise(_case("last", EVENTS))
    finished_ms = fn.when(is_done, fn.col("kept.event_ms"))
    final_reason = fn.when(state == "failed", plain_reason(fn.col("kept.failed_reason")))
    return folded.withColumns({"state": state, "finished_ms": finished_ms, "final_reason": final_reason}).select(
        "queue",
        "job_id",
        "life",
        "name",
        fn.timestamp_millis("created_ms").alias("created_at"),
        fn.timestamp_millis("first_started_ms").alias("first_started_at"),
        fn.timestamp_millis("finished_ms").alias("finished_at"),
        "state",
        "attempts",
        "stalls",
        "wait_ms",
        "run_ms",
        (fn.col("finished_ms") - fn.col("created_ms")).alias("total_ms"),
        "final_reason",
        error_key(fn.col("final_reason")).alias("error_key"),
        fn.lit(None).cast("string").alias("parent_key"),  # only the job's hash has it, as the next
        fn.lit(None).cast("int").alias("data_bytes"),
        fn.lit("events").alias("source"),
    )


def _summed() -> list[Column]:
    """Tell of a life what `jobs` needs: the sums over its attempts, the last event, and the last but ``removed``."""
    when, begins = fn.struct("event_ms", "event_seq"), fn.col("begins")
    kept = fn.when(fn.col("event") != "removed", when)
    return [
        fn.max("name").alias("name"),
        fn.max("created_ms").alias("created_ms"),
        fn.min(fn.when(begins, fn.col("started_ms"))).alias("first_started_ms"),
        fn.max_by("event", when).alias("last"),
        fn.max_by(fn.struct("event", "event_ms", "failed_reason"), kept).alias("kept"),
        fn.count_if(begins).cast("int").alias("attempts"),
        fn.count_if(begins & (fn.col("outcome") == "stalled")).cast("int").alias("stalls"),
        fn.sum(fn.when(begins, fn.col("started_ms") - fn.col("queued_ms"))).alias("wait_ms"),
        fn.sum(fn.when(begins, fn.col("ended_ms") - fn.col("started_ms"))).alias("run_ms"),
    ]


def plain_reason(reason: Column) -> Column:
    """`bulltask.spark.error_keys.plain_reason` as a column."""
    quoted = reason.startswith('"') & reason.endswith('"') & (fn.length(reason) >= 2)
    inner = fn.substring(reason, fn.lit(2), fn.length(reason) - 2)
    left = fn.regexp_replace(inner, fn.lit(ESCAPE), fn.lit(""))
    text = fn.get_json_object(fn.concat(fn.lit('{"text":'), reason, fn.lit("}")), "$.text")
    return fn.when(quoted & ~left.rlike(UNQUOTABLE), text).otherwise(reason)


def error_key(reason: Column) -> Column:
    """`bulltask.spark.error_keys.error_key` as a column."""
    key = fn.regexp_replace(reason, LINES_AFTER, "")
    for pattern, by in NORMALISE:
        key = fn.regexp_replace(key, pattern, by)
    return fn.substring(key, 1, KEY_LENGTH)


def _told(events: DataFrame) -> DataFrame:
    """Give each event of a job's life that life, and the attempt that begins with it."""
    in_order = Window.partitionBy("queue", "job_id").orderBy("event_ms", "event_seq")
    event = fn.col("event")
    known = (
        events.where(fn.col("job_id").isNotNull() & event.isin(*EVENTS))
        .select(
            "queue",
            "job_id",
            "event_ms",
            "event_seq",
            "event",
            fn.coalesce("prev", fn.lit("")).alias("prev"),  # so that all below is true or false, never NULL
            fn.col("name").alias("added_name"),
            "failed_reason",
        )
        .withColumn("given_back", (event == "waiting") & (fn.col("prev") == "active"))
    )
    near = known.withColumns(_neighbours(in_order)).withColumn("begins", (event == "active") | _ends_an_unseen_one())
    return _in_lives(near, in_order).withColumns(_attempt())


def _neighbours(in_order: WindowSpec) -> dict[str, Column]:
    """Tell what came before an event of the same job, and what came behind it."""
    this = fn.struct("event", "given_back", "event_ms", "failed_reason", "prev")
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    # `stalled` tells why a job waits, not since when.
    place = fn.when(fn.col("event") != "stalled", this)
    return {
        "this": this,
        "back": fn.lag(this).over(in_order),
        "next": fn.lead(this).over(in_order),
        "after_next": fn.lead("event", 2).over(in_order),
        "place": fn.last(place, ignorenulls=True).over(before),
    }


def _ends_an_unseen_one() -> Column:
    """Whether an attempt ended with this event that nobody saw begin."""
    event, back = fn.col("event"), fn.coalesce(fn.col("back.event"), fn.lit(""))
    back_was_given_back = fn.coalesce(fn.col("back.given_back"), fn.lit(False))
    ends = (
        event.isin(*FINISHED)
        | (fn.col("given_back") & (back != "stalled"))
        | ((event == "waiting-children") & (fn.col("prev") == "active"))
        | ((event == "stalled") & ~back_was_given_back)
    )
    return (back != "active") & ends


def _in_lives(near: DataFrame, in_order: WindowSpec) -> DataFrame:
    """Give each event the life it is part of, and the number of the last attempt that began in it."""
    begun = fn.sum(fn.col("begins").cast("int")).over(in_order)
    added = fn.struct(
        fn.concat_ws("-", "event_ms", "event_seq").alias("life"),
        fn.col("added_name").alias("name"),
        fn.col("event_ms").alias("created_ms"),
        "begun",
    )
    latest = fn.last(fn.when(fn.col("event") == "added", added), ignorenulls=True).over(in_order)
    return (
        near.withColumn("begun", begun)
        .withColumn("added", latest)
        .withColumn("attempt", fn.col("begun") - fn.coalesce("added.begun", fn.lit(0)))
        .withColumns({name: fn.col(f"added.{name}") for name in ("life", "name", "created_ms")})
    )


def _attempt() -> dict[str, Column]:
    """Tell of the attempt that begins with an event; of an unseen one, the event is the end."""
    is_seen = fn.col("event") == "active"
    end = fn.when(is_seen, fn.col("next")).otherwise(fn.col("this"))
    behind = fn.when(is_seen, fn.col("after_next")).otherwise(fn.col("next.event"))
    event = end["event"]
    outcome = (
        fn.when(event.isin(*FINISHED, "stalled", "waiting-children"), event)
        .when(end["given_back"] & (behind == "stalled"), fn.lit("stalled"))
        .when(end["given_back"] | (event == "delayed"), fn.lit("retry"))
        .otherwise(fn.lit("open"))
    )
    return {
        "queued_ms": fn.when(is_seen & (fn.col("place.event") == "waiting"), fn.col("place.event_ms")),
        "started_ms": fn.when(is_seen, fn.col("event_ms")),
        "outcome": outcome,
        "ended_ms": fn.when(outcome != "open", end["event_ms"]),
        "reason": fn.when(event == "failed", plain_reason(end["failed_reason"])),
    }


def _case(column: str, words: Mapping[str, str]) -> Column:
    """Translate a column's words."""
    table = fn.create_map(*[fn.lit(word) for pair in words.items() for word in pair])
    return table[fn.col(column)]
