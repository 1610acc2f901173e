"""The lifecycle of each job, derived from events: the fold of :mod:`~bulltask.spark.fold` in Spark."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F

from bulltask.spark.fold import (
    ESCAPE,
    FINISHED,
    FURTHER_LINES,
    LIFECYCLE_COLUMNS,
    MAX_LENGTH,
    MAX_TIME_MS,
    REPLACEMENTS,
    STATE_AFTER,
    UNQUOTABLE,
)

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
    return attempts_of(derive(lifecycle_events(events)).where("has_attempt"))


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
        is_new: The value of the column ``is_new``, which distinguishes a batch's events from earlier ones.
    """
    event, prev = F.col("event"), F.coalesce("prev", F.lit(""))
    is_relevant = event.isin(*STATE_AFTER) & ~((event == "removed") & prev.isin(*FINISHED))
    return events.where(F.col("job_id").isNotNull() & is_relevant).select(
        *LIFECYCLE_COLUMNS, F.lit(is_new).alias("is_new")
    )


def in_order() -> WindowSpec:
    """Return the window over each job's events in order; a number comes first because it sorts faster than strings."""
    return Window.partitionBy("job", "queue", "job_id").orderBy("event_ms", "event_seq")


def derive(events: DataFrame) -> DataFrame:
    """Add columns to each event: its neighbors, the attempt that begins with it, and the sums up to it.

    Args:
        events: The result of `lifecycle_events`, for any number of batches.

    Returns:
        All events. ``has_attempt``: whether an attempt begins with the event; see `attempts_of`. ``decided``: whether
        the event that decided the outcome is new; NULL without such an event. ``is_last``: whether the event is the
        last one of an incarnation that has events other than its removal; see `jobs_of`.
    """
    window = in_order()
    so_far = window.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    event = F.col("event")
    known = events.withColumn("job", F.xxhash64("queue", "job_id")).withColumn(
        "from_active",
        F.coalesce(F.col("prev") == "active", F.lit(False)),  # so that no condition below is NULL
    )
    near = known.withColumns(_neighbors(window)).withColumn(
        "has_attempt", (event == "active") | _ends_unknown_attempt()
    )
    derived = near.withColumns(_attempt()).withColumns(_sums(so_far))
    added = F.struct("event_ms", "event_seq", "name", "actives", *_SUMS)
    placed = derived.withColumn("added", F.last(F.when(event == "added", added), ignorenulls=True).over(so_far))
    is_first_start = (event == "active") & (_in_incarnation("actives") == 1)
    first = F.last(F.when(is_first_start, F.col("event_ms")), ignorenulls=True).over(so_far)
    is_end = F.col("next_event").isNull() | (F.col("next_event") == "added")
    return placed.withColumns(
        {
            "first_started_ms": F.when(_in_incarnation("actives") > 0, first),
            "is_last": is_end & F.col("kept").isNotNull(),
        }
    )


def attempts_of(derived: DataFrame) -> DataFrame:
    """Return the rows of ``silver.attempts`` for attempts that begin with the given events."""
    queued_ms = F.when(F.col("queued_ms") >= 0, F.col("queued_ms"))
    return derived.select(
        "queue",
        "job_id",
        _incarnation(),
        _in_incarnation("attempt_count").cast("int").alias("attempt"),
        F.col("added.name").alias("name"),
        as_time(queued_ms).alias("queued_at"),
        as_time(F.col("started_ms")).alias("started_at"),
        as_time(F.col("ended_ms")).alias("ended_at"),
        (F.col("started_ms") - queued_ms).alias("wait_ms"),
        (F.col("ended_ms") - F.col("started_ms")).alias("run_ms"),
        "outcome",
        F.col("reason").alias("failed_reason"),
        error_fingerprint(F.col("reason")).alias("error_fingerprint"),
        F.lit(None).cast("string").alias("worker"),  # not in the events
        F.lit("events").alias("source"),
        _as_of(F.col("decided_ms"), F.col("decided_seq")),
    )


def jobs_of(derived: DataFrame) -> DataFrame:
    """Return the rows of ``silver.jobs`` for incarnations whose last events are given."""
    finished = is_finished()
    state = F.when(finished, F.col("kept.event")).otherwise(_case("event", STATE_AFTER))
    finished_ms = F.when(finished, F.col("kept.event_ms"))
    reason = F.when(finished & (F.col("kept.event") == "failed"), plain_reason(F.col("kept.failed_reason")))
    derived = derived.withColumns({"state": state, "finished_ms": finished_ms, "reason": reason})
    return derived.select(
        "queue",
        "job_id",
        _incarnation(),
        F.col("added.name").alias("name"),
        as_time(F.col("added.event_ms")).alias("created_at"),
        as_time(F.col("first_started_ms")).alias("first_started_at"),
        as_time(F.col("finished_ms")).alias("finished_at"),
        "state",
        _in_incarnation("attempt_count").cast("int").alias("attempt_count"),
        _in_incarnation("stalls").cast("int").alias("stalls"),
        F.when(_in_incarnation("waits") > 0, _in_incarnation("wait_ms")).alias("wait_ms"),
        F.when(_in_incarnation("runs") > 0, _in_incarnation("run_ms")).alias("run_ms"),
        (F.col("finished_ms") - F.col("added.event_ms")).alias("total_ms"),
        F.col("reason").alias("failed_reason"),
        error_fingerprint(F.col("reason")).alias("error_fingerprint"),
        F.lit(None).cast("string").alias("parent_key"),  # only in the job's hash, like the next column
        F.lit(None).cast("int").alias("data_bytes"),
        F.lit("events").alias("source"),
        _as_of(*(F.when(finished, F.col(f"kept.{name}")).otherwise(F.col(name)) for name in ("event_ms", "event_seq"))),
    )


def is_finished() -> Column:
    """Return whether an incarnation has finished as of an event; it stays finished when the job is removed."""
    return F.col("kept.event").isin(*FINISHED)


def as_time(ms: Column) -> Column:
    """Return milliseconds as a timestamp; times after the year 9999 become its end."""
    return F.timestamp_millis(_shown(ms))


def plain_reason(reason: Column) -> Column:
    """Return `bulltask.spark.fold.plain_reason` as a column."""
    quoted = reason.startswith('"') & reason.endswith('"') & (F.length(reason) >= 2)
    inner = F.substring(reason, F.lit(2), F.length(reason) - 2)
    rest = F.regexp_replace(inner, F.lit(ESCAPE), F.lit(""))
    text = F.get_json_object(F.concat(F.lit('{"text":'), reason, F.lit("}")), "$.text")
    return F.when(quoted & ~rest.rlike(UNQUOTABLE), text).otherwise(reason)


def error_fingerprint(reason: Column) -> Column:
    """Return `bulltask.spark.fold.error_fingerprint` as a column."""
    key = F.regexp_replace(reason, FURTHER_LINES, "")
    for pattern, by in REPLACEMENTS:
        key = F.regexp_replace(key, pattern, by)
    return F.substring(key, 1, MAX_LENGTH)


def _neighbors(window: WindowSpec) -> dict[str, Column]:
    """Return columns of the events before and after each event of a job."""
    columns = {"back_event": F.lag("event").over(window), "back_from_active": F.lag("from_active").over(window)}
    for name in ("event", "from_active", "event_ms", "event_seq", "failed_reason", "is_new"):
        columns[f"next_{name}"] = F.lead(name).over(window)
    for name in ("event", "event_ms", "event_seq", "is_new"):
        columns[f"following_{name}"] = F.lead(name, 2).over(window)
    # `stalled` does not change when the job began to wait.
    event, before = F.col("event"), window.rowsBetween(Window.unboundedPreceding, -1)
    waits = F.when(event != "stalled", F.when(event == "waiting", F.col("event_ms")).otherwise(-1))
    columns["waits_since"] = F.last(waits, ignorenulls=True).over(before)
    return columns


def _ends_unknown_attempt() -> Column:
    """Return whether an attempt with an unknown start ended with this event."""
    event, back = F.col("event"), F.coalesce(F.col("back_event"), F.lit(""))
    from_active = F.col("from_active")
    ends = (
        event.isin(*FINISHED)
        | ((event == "waiting") & from_active & (back != "stalled"))
        | ((event == "waiting-children") & from_active)
        | ((event == "stalled") & ~((back == "waiting") & F.coalesce(F.col("back_from_active"), F.lit(False))))
    )
    return (back != "active") & ends


def _attempt() -> dict[str, Column]:
    """Return columns of the attempt that begins with an event, or ends with it if the start is unknown."""
    is_seen = F.col("event") == "active"

    def end(name: str) -> Column:
        return F.when(is_seen, F.col(f"next_{name}")).otherwise(F.col(name))

    def following(name: str) -> Column:
        return F.when(is_seen, F.col(f"following_{name}")).otherwise(F.col(f"next_{name}"))

    ended_by, followed_by = end("event"), following("event")
    released = (ended_by == "waiting") & end("from_active")
    outcome = (
        F.when(ended_by.isin(*FINISHED, "stalled", "waiting-children"), ended_by)
        .when(released & (followed_by == "stalled"), F.lit("stalled"))
        .when(released | (ended_by == "delayed"), F.lit("requeued"))
        .otherwise(F.lit("open"))
    )

    def decided(name: str) -> Column:
        """Return a column of the event that decided the outcome, or of the last event of this incarnation."""
        of_end = F.when(ended_by.isNull() | (ended_by == "added"), F.col(name)).otherwise(end(name))
        return F.when(released & (followed_by != "added"), following(name)).otherwise(of_end)

    return {
        "queued_ms": F.when(is_seen, F.col("waits_since")),
        "started_ms": F.when(is_seen, F.col("event_ms")),
        "outcome": outcome,
        "ended_ms": F.when(outcome != "open", end("event_ms")),
        "reason": F.when(ended_by == "failed", plain_reason(end("failed_reason"))),
        "decided_ms": decided("event_ms"),
        "decided_seq": decided("event_seq"),
        "decided": F.when(released, following("is_new")).otherwise(end("is_new")),
    }


def _sums(so_far: WindowSpec) -> dict[str, Column]:
    """Return running sums across all incarnations of a job, and the last event except ``removed``."""
    has_attempt, event = F.col("has_attempt"), F.col("event")
    wait_ms = F.when(has_attempt & (F.col("queued_ms") >= 0), F.col("started_ms") - F.col("queued_ms"))
    run_ms = F.when(has_attempt, F.col("ended_ms") - F.col("started_ms"))
    last_kept = F.when(event != "removed", F.struct("event", "event_ms", "event_seq", "failed_reason", "is_new"))
    return {
        "actives": F.count_if(event == "active").over(so_far),
        "attempt_count": F.count_if(has_attempt).over(so_far),
        "stalls": F.count_if(has_attempt & (F.col("outcome") == "stalled")).over(so_far),
        "waits": F.count(wait_ms).over(so_far),
        "wait_ms": F.coalesce(F.sum(wait_ms).over(so_far), F.lit(0)),
        "runs": F.count(run_ms).over(so_far),
        "run_ms": F.coalesce(F.sum(run_ms).over(so_far), F.lit(0)),
        "kept": F.last(last_kept, ignorenulls=True).over(so_far),
    }


def _in_incarnation(name: str) -> Column:
    """Return a sum over this incarnation only."""
    return F.col(name) - F.coalesce(F.col(f"added.{name}"), F.lit(0))


def _incarnation() -> Column:
    is_known = F.col("added").isNotNull()
    return F.when(is_known, F.concat_ws("-", F.col("added.event_ms"), F.col("added.event_seq"))).alias("incarnation")


def _as_of(ms: Column, seq: Column) -> Column:
    """Return `bulltask.spark.fold.LifecycleEvent.as_of_us` as a timestamp."""
    return F.timestamp_micros(_shown(ms) * 1000 + F.least(seq, F.lit(999))).alias("as_of")


def _shown(ms: Column) -> Column:
    return F.when(ms > MAX_TIME_MS, MAX_TIME_MS).otherwise(ms)  # NULL stays NULL


def _case(column: str, values: Mapping[str, str]) -> Column:
    """Map the values of a column."""
    table = F.create_map(*[F.lit(value) for pair in values.items() for value in pair])
    return table[F.col(column)]
