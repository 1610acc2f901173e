"""The facts that are aggregated into the per-minute gold tables.

A fact has a ``kind``, a minute, an ``amount`` (a count or milliseconds), and for wait and run times the histogram
``bucket``. All sums together need a single shuffle, which moves little more data than the result contains.

Much of this is SQL text: each Python call on a column is a call into the JVM, and hundreds of calls take longer than
the work itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from bulltask.lake.log_histogram import GROWTH, ZERO

__all__ = ["COUNTERS", "DAY_MS", "MINUTE_MS", "DaySpan", "gap_periods", "minute_facts", "split_by_period"]

MINUTE_MS: Final = 60_000
DAY_MS: Final = 86_400_000

COUNTERS: Final = (
    "added", "started", "completed", "failed", "requeued", "stalled", "waiting_children", "finished", "removed",
    "busy_ms", "wasted_ms",
)  # fmt: skip
"""The kinds of facts that are columns of ``gold.task_minute``; ``waited`` and ``ran`` have histograms."""

_COUNTER_OF_OUTCOME: Final = {
    "completed": "completed",
    "failed": "failed",
    "requeued": "requeued",
    "stalled": "stalled",
    "waiting-children": "waiting_children",
}
"""The counter for each outcome of an attempt. An open attempt has not ended, so it has none."""

_WASTED: Final = "outcome in ('failed', 'requeued', 'stalled')"


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

    def contains(self, at: Column) -> Column:
        """Return a column that is true if a time is in these days."""
        return (at >= F.lit(self.start)) & (at < F.lit(self.end))


def minute_facts(added: DataFrame, attempts: DataFrame, jobs: DataFrame, gaps: DataFrame, span: DaySpan) -> DataFrame:
    """Return the per-minute facts for some days.

    Args:
        added: The ``added`` events of ``bronze.events``.
        attempts: The latest rows of ``silver.attempts``.
        jobs: The latest rows of ``silver.jobs``.
        gaps: Rows of ``bronze.gaps``.
        span: The days. Rows of other days are omitted.

    Returns:
        ``queue``, ``name``, ``minute`` (epoch milliseconds), ``kind``, ``bucket``, ``amount``.
    """
    added_fact = _fact_sql(_minute_sql("unix_millis(event_at)"), "'added'")
    ended_at = "coalesce(finished_at, if(state = 'removed', as_of, null))"
    ended = _fact_sql(_minute_sql(f"unix_millis({ended_at})"), "if(finished_at is null, 'removed', 'finished')")
    all_facts = [
        _flatten(_attempt_facts(attempts, span)),
        _flatten(added.where(span.contains(F.col("event_at"))).selectExpr("queue", "name", f"{added_fact} as fact")),
        _flatten(jobs.where(span.contains(F.expr(ended_at))).selectExpr("queue", "name", f"{ended} as fact")),
        # A minute with lost events has a row even if all its events are lost.
        _flatten(
            gap_periods(gaps, span, MINUTE_MS)
            .where("creates_rows")
            .selectExpr("queue", "cast(null as string) as name", f"{_fact_sql('period', _quote('gap'), '0')} as fact")
        ),
    ]
    return reduce(DataFrame.unionByName, all_facts)


def _flatten(facts: DataFrame) -> DataFrame:
    return facts.select("queue", "name", "fact.*")


def _attempt_facts(attempts: DataFrame, span: DaySpan) -> DataFrame:
    """Return the facts of attempts: start, end, and the run time in each minute."""
    at_start, at_end = _minute_sql("started"), _minute_sql("ended")
    counter = "".join(f" when {_quote(outcome)} then {_quote(name)}" for outcome, name in _COUNTER_OF_OUTCOME.items())
    single = ", ".join([
        _fact_sql(at_start, _quote("started")),
        _fact_sql(at_start, "if(wait_ms is not null, 'waited', null)", "1", _bucket_sql("wait_ms")),
        _fact_sql(at_end, f"case outcome {counter} end"),
        _fact_sql(at_end, "if(run_ms is not null, 'ran', null)", "1", _bucket_sql("run_ms")),
    ])  # fmt: skip
    is_wanted = f"fact.kind is not null and fact.minute between {span.start_ms} and {span.end_ms - 1}"
    busy, wasted = (
        _fact_sql("piece.period", _quote(kind), "piece.to - piece.from") for kind in ("busy_ms", "wasted_ms")
    )
    facts = f"""concat(
        filter(array({single}), fact -> {is_wanted}),
        transform(pieces, piece -> {busy}),
        transform(if({_WASTED}, pieces, slice(pieces, 1, 0)), piece -> {wasted})
    )"""
    timed = attempts.selectExpr(
        "queue", "name", "outcome", "wait_ms", "run_ms", "unix_millis(started_at) as started",
        "unix_millis(ended_at) as ended",
    )  # fmt: skip
    split = timed.selectExpr("*", f"{split_by_period('started', 'ended', span, MINUTE_MS)} as pieces")
    return split.selectExpr("queue", "name", f"explode({facts}) as fact")


def split_by_period(started: str, ended: str, span: DaySpan, period_ms: int) -> str:
    """Return SQL that splits the time between two moments (milliseconds) into the minutes or days of a span.

    Returns:
        An array of ``period`` (the first millisecond of a minute or day), ``from`` and ``to``; empty if a
        moment is unknown or the time does not overlap the span.
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
    """Return the minutes or days of a span that overlap a gap.

    A gap without a known end lasts until it was detected. A gap without a known beginning includes all minutes before
    its end, but creates rows (``creates_rows``) only for the period in which it ends.

    Returns:
        ``queue``, ``period`` (the first millisecond), ``lost``, ``creates_rows``: one row for each gap and period.
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


def _minute_sql(ms: str) -> str:
    return _floor_sql(ms, MINUTE_MS)


def _bucket_sql(ms: str) -> str:
    """Return `bulltask.lake.log_histogram.bucket_of` as SQL."""
    return f"if({ms} <= 0, {ZERO}, cast(ceil(ln({ms}) / {math.log(GROWTH)!r}D) as int))"


def _fact_sql(minute: str, kind: str, amount: str = "1", bucket: str = "cast(null as int)") -> str:
    amount = f"cast({amount} as bigint)"
    return f"named_struct('minute', {minute}, 'kind', {kind}, 'bucket', {bucket}, 'amount', {amount})"


def _quote(text: str) -> str:
    return f"'{text}'"
