"""The lifecycle of each job, derived from events: the fold of :mod:`~bulltask.spark.lifecycle.fold` in Spark.

An attempt is derived from one event and its neighbours in the job's lifecycle, and a job from running sums. So there is
no grouping: one shuffle by job, one sort, and windows that share both.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as fn

from bulltask.spark.lifecycle.error_fingerprints import ESCAPE, FURTHER_LINES, MAX_LENGTH, REPLACEMENTS, UNQUOTABLE
from bulltask.spark.lifecycle.fold import FINISHED, LIFECYCLE_COLUMNS, MAX_TIME_MS, STATE_AFTER

__all__ = [
    "as_time",
    "attempts",
    "attempts_of",
    "derive",
    "error_fingerprint",
    "in_order",
    "jobs",
    "jobs_of",
    "lifecycle_events",
    "plain_reason",
]

_SUMS = ("attempt_count", "stalls", "waits", "wait_ms", "runs", "run_ms")


def attempts(events: DataFrame) -> DataFrame:
    """Derive the attempts of all jobs from their events.

    Args:
        events: Rows of ``bronze.events`` or of the source's table ``events`` without duplicates, in any order, with the
            columns `LIFECYCLE_COLUMNS`.

    Returns:
        ``silver.attempts`` without its partitions except ``queue``: a row for each attempt, including attempts
        that have not ended. ``incarnation`` is the id of the added event, because job ids can be reused.
    """
    return attempts_of(derive(lifecycle_events(events)).where("begins"))


def jobs(events: DataFrame) -> DataFrame:
    """Derive the jobs from their events.

    Args:
        events: The events, as for `attempts`.

    Returns:
        ``silver.jobs`` without its partitions except ``queue``: a row for each incarnation of each job, including
        unfinished ones; ``incarnation`` as in `attempts`.
    """
    return jobs_of(derive(lifecycle_events(events)).where("is_last"))


def lifecycle_events(events: DataFrame, *, is_new: bool = True) -> DataFrame:
    """Return the events that belong to a job's lifecycle, with the columns that it is derived from.

    Args:
        events: The events, as for `attempts`.
        is_new: Value of the column ``is_new``, which distinguishes a batch's events from earlier ones.
    """
    event, prev = fn.col("event"), fn.coalesce("prev", fn.lit(""))
    is_relevant = event.isin(*STATE_AFTER) & ~((event == "removed") & prev.isin(*FINISHED))
    return events.where(fn.col("job_id").isNotNull() & is_relevant).select(
        *LIFECYCLE_COLUMNS, fn.lit(is_new).alias("is_new")
    )


def in_order() -> WindowSpec:
    """Return the window of each job's events in order; a number comes first because it sorts faster than strings."""
    return Window.partitionBy("job", "queue", "job_id").orderBy("event_ms", "event_seq")


def derive(events: DataFrame) -> DataFrame:
    """Add columns to each event: its neighbours, the attempt that begins with it, and the sums up to it.

    Args:
        events: The result of `lifecycle_events`, for any number of batches.

    Returns:
        All events. ``begins``: whether an attempt begins with the event; see `attempts_of`. ``decided``: whether the
        event that decided the outcome is new; NULL without such an event. ``is_last``: whether the event is the last of
        an incarnation of which more than the removal is known; see `jobs_of`.
    """
    window = in_order()
    so_far = window.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    event = fn.col("event")
    known = events.withColumn("job", fn.xxhash64("queue", "job_id")).withColumn(
        "from_active",
        fn.coalesce(fn.col("prev") == "active", fn.lit(False)),  # so that no condition below is NULL
    )
    near = known.withColumns(_neighbours(window)).withColumn("begins", (event == "active") | _ends_unknown_attempt())
    derived = near.withColumns(_attempt()).withColumns(_sums(so_far))
    added = fn.struct("event_ms", "event_seq", "name", "actives", *_SUMS)
    placed = derived.withColumn("added", fn.last(fn.when(event == "added", added), ignorenulls=True).over(so_far))
    is_first_start = (event == "active") & (_in_incarnation("actives") == 1)
    first = fn.last(fn.when(is_first_start, fn.col("event_ms")), ignorenulls=True).over(so_far)
    is_end = fn.col("next_event").isNull() | (fn.col("next_event") == "added")
    return placed.withColumns(
        {
            "first_started_ms": fn.when(_in_incarnation("actives") > 0, first),
            "is_last": is_end & fn.col("kept").isNotNull(),
        }
    )


def attempts_of(derived: DataFrame) -> DataFrame:
    """Return the rows of ``silver.attempts`` for attempts that begin with the given events."""
    queued_ms = fn.when(fn.col("queued_ms") >= 0, fn.col("queued_ms"))
    return derived.select(
        "queue",
        "job_id",
        _incarnation(),
        _in_incarnation("attempt_count").cast("int").alias("attempt"),
        fn.col("added.name").alias("name"),
        as_time(queued_ms).alias("queued_at"),
        as_time(fn.col("started_ms")).alias("started_at"),
        as_time(fn.col("ended_ms")).alias("ended_at"),
        (fn.col("started_ms") - queued_ms).alias("wait_ms"),
        (fn.col("ended_ms") - fn.col("started_ms")).alias("run_ms"),
        "outcome",
        "reason",
        error_fingerprint(fn.col("reason")).alias("error_fingerprint"),
        fn.lit(None).cast("string").alias("worker"),  # events do not have it
        fn.lit("events").alias("source"),
        _as_of(fn.col("decided_ms"), fn.col("decided_seq")),
    )


def jobs_of(derived: DataFrame) -> DataFrame:
    """Return the rows of ``silver.jobs`` for incarnations whose last events are given."""
    finished = is_finished()
    state = fn.when(finished, fn.col("kept.event")).otherwise(_case("event", STATE_AFTER))
    finished_ms = fn.when(finished, fn.col("kept.event_ms"))
    reason = fn.when(finished & (fn.col("kept.event") == "failed"), plain_reason(fn.col("kept.failed_reason")))
    derived = derived.withColumns({"state": state, "finished_ms": finished_ms, "final_reason": reason})
    return derived.select(
        "queue",
        "job_id",
        _incarnation(),
        fn.col("added.name").alias("name"),
        as_time(fn.col("added.event_ms")).alias("created_at"),
        as_time(fn.col("first_started_ms")).alias("first_started_at"),
        as_time(fn.col("finished_ms")).alias("finished_at"),
        "state",
        _in_incarnation("attempt_count").cast("int").alias("attempts"),
        _in_incarnation("stalls").cast("int").alias("stalls"),
        fn.when(_in_incarnation("waits") > 0, _in_incarnation("wait_ms")).alias("wait_ms"),
        fn.when(_in_incarnation("runs") > 0, _in_incarnation("run_ms")).alias("run_ms"),
        (fn.col("finished_ms") - fn.col("added.event_ms")).alias("total_ms"),
        "final_reason",
        error_fingerprint(fn.col("final_reason")).alias("error_fingerprint"),
        fn.lit(None).cast("string").alias("parent_key"),  # only the job's hash has it, like the next column
        fn.lit(None).cast("int").alias("data_bytes"),
        fn.lit("events").alias("source"),
        _as_of(
            *(fn.when(finished, fn.col(f"kept.{name}")).otherwise(fn.col(name)) for name in ("event_ms", "event_seq"))
        ),
    )


def is_finished() -> Column:
    """Return whether an incarnation is finished as of an event; it stays finished when the job is removed."""
    return fn.col("kept.event").isin(*FINISHED)


def as_time(ms: Column) -> Column:
    """Return milliseconds as a timestamp; times after the year 9999 become its end."""
    return fn.timestamp_millis(_shown(ms))


def plain_reason(reason: Column) -> Column:
    """Return `bulltask.spark.lifecycle.error_fingerprints.plain_reason` as a column."""
    quoted = reason.startswith('"') & reason.endswith('"') & (fn.length(reason) >= 2)
    inner = fn.substring(reason, fn.lit(2), fn.length(reason) - 2)
    rest = fn.regexp_replace(inner, fn.lit(ESCAPE), fn.lit(""))
    text = fn.get_json_object(fn.concat(fn.lit('{"text":'), reason, fn.lit("}")), "$.text")
    return fn.when(quoted & ~rest.rlike(UNQUOTABLE), text).otherwise(reason)


def error_fingerprint(reason: Column) -> Column:
    """Return `bulltask.spark.lifecycle.error_fingerprints.error_fingerprint` as a column."""
    key = fn.regexp_replace(reason, FURTHER_LINES, "")
    for pattern, by in REPLACEMENTS:
        key = fn.regexp_replace(key, pattern, by)
    return fn.substring(key, 1, MAX_LENGTH)


def _neighbours(window: WindowSpec) -> dict[str, Column]:
    """Return columns of the events before and after each event of a job."""
    columns = {"back_event": fn.lag("event").over(window), "back_from_active": fn.lag("from_active").over(window)}
    for name in ("event", "from_active", "event_ms", "event_seq", "failed_reason", "is_new"):
        columns[f"next_{name}"] = fn.lead(name).over(window)
    for name in ("event", "event_ms", "event_seq", "is_new"):
        columns[f"following_{name}"] = fn.lead(name, 2).over(window)
    # `stalled` does not change when the job began to wait.
    event, before = fn.col("event"), window.rowsBetween(Window.unboundedPreceding, -1)
    waits = fn.when(event != "stalled", fn.when(event == "waiting", fn.col("event_ms")).otherwise(-1))
    columns["waits_since"] = fn.last(waits, ignorenulls=True).over(before)
    return columns


def _ends_unknown_attempt() -> Column:
    """Return whether an attempt with unknown start ended with this event."""
    event, back = fn.col("event"), fn.coalesce(fn.col("back_event"), fn.lit(""))
    from_active = fn.col("from_active")
    ends = (
        event.isin(*FINISHED)
        | ((event == "waiting") & from_active & (back != "stalled"))
        | ((event == "waiting-children") & from_active)
        | ((event == "stalled") & ~((back == "waiting") & fn.coalesce(fn.col("back_from_active"), fn.lit(False))))
    )
    return (back != "active") & ends


def _attempt() -> dict[str, Column]:
    """Return columns of the attempt that begins with an event, or ends with it if the start is unknown."""
    is_seen = fn.col("event") == "active"

    def end(name: str) -> Column:
        return fn.when(is_seen, fn.col(f"next_{name}")).otherwise(fn.col(name))

    def following(name: str) -> Column:
        return fn.when(is_seen, fn.col(f"following_{name}")).otherwise(fn.col(f"next_{name}"))

    ended_by, followed_by = end("event"), following("event")
    released = (ended_by == "waiting") & end("from_active")
    outcome = (
        fn.when(ended_by.isin(*FINISHED, "stalled", "waiting-children"), ended_by)
        .when(released & (followed_by == "stalled"), fn.lit("stalled"))
        .when(released | (ended_by == "delayed"), fn.lit("retry"))
        .otherwise(fn.lit("open"))
    )

    def decided(name: str) -> Column:
        """Return a column of the event that decided the outcome, or of the last event of this incarnation."""
        of_end = fn.when(ended_by.isNull() | (ended_by == "added"), fn.col(name)).otherwise(end(name))
        return fn.when(released & (followed_by != "added"), following(name)).otherwise(of_end)

    return {
        "queued_ms": fn.when(is_seen, fn.col("waits_since")),
        "started_ms": fn.when(is_seen, fn.col("event_ms")),
        "outcome": outcome,
        "ended_ms": fn.when(outcome != "open", end("event_ms")),
        "reason": fn.when(ended_by == "failed", plain_reason(end("failed_reason"))),
        "decided_ms": decided("event_ms"),
        "decided_seq": decided("event_seq"),
        "decided": fn.when(released, following("is_new")).otherwise(end("is_new")),
    }


def _sums(so_far: WindowSpec) -> dict[str, Column]:
    """Return running sums over all incarnations of a job, and the last event except ``removed``."""
    begins, event = fn.col("begins"), fn.col("event")
    wait_ms = fn.when(begins & (fn.col("queued_ms") >= 0), fn.col("started_ms") - fn.col("queued_ms"))
    run_ms = fn.when(begins, fn.col("ended_ms") - fn.col("started_ms"))
    last_kept = fn.when(event != "removed", fn.struct("event", "event_ms", "event_seq", "failed_reason", "is_new"))
    return {
        "actives": fn.count_if(event == "active").over(so_far),
        "attempt_count": fn.count_if(begins).over(so_far),
        "stalls": fn.count_if(begins & (fn.col("outcome") == "stalled")).over(so_far),
        "waits": fn.count(wait_ms).over(so_far),
        "wait_ms": fn.coalesce(fn.sum(wait_ms).over(so_far), fn.lit(0)),
        "runs": fn.count(run_ms).over(so_far),
        "run_ms": fn.coalesce(fn.sum(run_ms).over(so_far), fn.lit(0)),
        "kept": fn.last(last_kept, ignorenulls=True).over(so_far),
    }


def _in_incarnation(name: str) -> Column:
    """Return a sum over this incarnation only."""
    return fn.col(name) - fn.coalesce(fn.col(f"added.{name}"), fn.lit(0))


def _incarnation() -> Column:
    is_known = fn.col("added").isNotNull()
    return fn.when(is_known, fn.concat_ws("-", fn.col("added.event_ms"), fn.col("added.event_seq"))).alias(
        "incarnation"
    )


def _as_of(ms: Column, seq: Column) -> Column:
    """Return `bulltask.spark.lifecycle.fold.LifecycleEvent.as_of_us` as a timestamp."""
    return fn.timestamp_micros(_shown(ms) * 1000 + fn.least(seq, fn.lit(999))).alias("as_of")


def _shown(ms: Column) -> Column:
    return fn.when(ms > MAX_TIME_MS, MAX_TIME_MS).otherwise(ms)  # NULL stays NULL


def _case(column: str, words: Mapping[str, str]) -> Column:
    """Map the values of a column."""
    table = fn.create_map(*[fn.lit(word) for pair in words.items() for word in pair])
    return table[fn.col(column)]
