"""Statistics for dashboards: jobs by state, attempts over time, percentiles of wait and run times."""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from itertools import chain
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from bulltask.jobs.errors import ConfigError
from bulltask.lake.log_histogram import GROWTH, ZERO, percentile
from bulltask.lake.query import JobQuery
from bulltask.lake.read import TableReader
from bulltask.lake.search import CLOCK_DIFFERENCE, MAX_UNKNOWN_AGE, seen_expression
from bulltask.lake.tables import ATTEMPTS, JOBS

__all__ = ["AttemptCount", "Every", "JobCount", "LatencyPoint", "attempt_counts", "job_counts", "latency"]

Every = Literal["hour", "day"]

_ROWS_PER_PASS: Final = 500_000
"""How many rows are deduplicated in one pass; with more, each pass reads a part of the ids."""

_KEY: Final = ["queue", "job_id", "incarnation"]
_VALUES: Final = ["name", "state", "seen_at"]
_COLUMNS: Final = [*_KEY, "name", "state", "finished_at", "as_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCount:
    """The number of a task's jobs in a state.

    Attributes:
        queue: The queue, without BullMQ's braces.
        name: The task's name; ``None`` for jobs whose added event is missing.
        state: As in :class:`bulltask.lake.records.JobRecord`.
        jobs: The number of jobs.
    """

    queue: str
    name: str | None
    state: str
    jobs: int


@dataclass(frozen=True, slots=True)
class AttemptCount:
    """The number of attempts that ended in an hour or a day.

    Attributes:
        at: The start of the hour or day, UTC.
        attempts: The number of attempts.
    """

    at: datetime
    attempts: int


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """How long the attempts of an hour or a day took.

    Attributes:
        at: The start of the hour or day, UTC; for the whole period, ``since``, or ``None`` if it was not given.
        attempts: The number of attempts.
        percentiles: Seconds by percentile, like ``{50: 0.2, 95: 1.4}``, within 1%.
    """

    at: datetime | None
    attempts: int
    percentiles: dict[float, float]


def job_counts(reader: TableReader, query: JobQuery) -> list[JobCount]:
    """Count the jobs that a search with this query finds, by queue, task and state."""
    days = [day for day in reader.days(JOBS) if query.since is None or day >= query.since.date() - CLOCK_DIFFERENCE]
    older = [] if query.since is None else _older_rows(reader, query, query.since, days)
    parts = -(-reader.count(JOBS, days, query.queue) // _ROWS_PER_PASS)
    totals: Counter[tuple[str, str | None, str]] = Counter()
    for part in range(parts):
        totals += reader.scan(
            JOBS,
            days,
            partial(_count_part, older=older, query=query, part=part, parts=parts),
            columns=_COLUMNS,
            queue=query.queue,
        )
    ordered = sorted(totals.items(), key=lambda item: (item[0][0], item[0][1] or "", item[0][2]))
    return [JobCount(queue=queue, name=name, state=state, jobs=jobs) for (queue, name, state), jobs in ordered]


def attempt_counts(reader: TableReader, query: JobQuery, outcome: str, every: Every) -> list[AttemptCount]:
    """Count the attempts with an outcome per hour or day. Each has one row, so none is counted twice."""
    _check_every(every)

    def count_by_time(batches: Iterator[Any]) -> Counter[datetime]:
        totals: Counter[datetime] = Counter()
        for batch in batches:
            for row in pc.value_counts(pc.floor_temporal(batch["ended_at"], unit=every)).to_pylist():
                totals[row["values"].astimezone(UTC)] += row["counts"]
        return totals

    where = _ended_filter(query) & (ds.field("outcome") == outcome)
    days = _matching_days(reader, query)
    totals = reader.scan(ATTEMPTS, days, count_by_time, columns=["ended_at"], where=where, queue=query.queue)
    return [AttemptCount(at, attempts) for at, attempts in sorted(totals.items())]


def latency(
    reader: TableReader, query: JobQuery, metric: str, percentiles: Sequence[float], every: Every | None
) -> list[LatencyPoint]:
    """Return percentiles of how long attempts waited or ran.

    Raises:
        ConfigError: The metric, a percentile or ``every`` is invalid.
    """
    if metric not in {"wait", "run"}:
        raise ConfigError(f"metric must be 'wait' or 'run', not {metric!r}")
    if every is not None:
        _check_every(every)
    if invalid := [value for value in percentiles if not 0 <= value <= 100]:
        raise ConfigError(f"percentiles must be from 0 to 100, not {invalid[0]!r}")
    column = f"{metric}_ms"
    histograms = reader.scan(
        ATTEMPTS,
        _matching_days(reader, query),
        partial(_duration_histograms, column=column, every=every),
        columns=["ended_at", column],
        where=_ended_filter(query) & ds.field(column).is_valid(),
        queue=query.queue,
    )
    total = histograms.pop(None, None)
    points = (
        [(query.since, total)]
        if total
        else sorted((at, durations) for at, durations in histograms.items() if at is not None)
    )
    return [
        LatencyPoint(at, durations.total(), {value: _percentile(durations, value) for value in percentiles})
        for at, durations in points
    ]


def _check_every(every: str) -> None:
    if every not in {"hour", "day"}:
        raise ConfigError(f"every must be 'hour' or 'day', not {every!r}")


def _matching_days(reader: TableReader, query: JobQuery) -> list[Any]:
    return [day for day in reader.days(ATTEMPTS) if query.includes(day)]


def _ended_filter(query: JobQuery) -> Any:
    """Return an expression for the attempts that match a query."""
    where = ds.field("ended_at").is_valid()
    if query.since is not None:
        where &= ds.field("ended_at") >= _time(query.since)
    if query.until is not None:
        where &= ds.field("ended_at") < _time(query.until)
    if query.name is not None:
        where &= ds.field("name") == query.name
    return where


def _older_rows(reader: TableReader, query: JobQuery, since: datetime, days: Sequence[date]) -> list[Any]:
    """Read earlier rows of jobs that were added before ``days``: one of these may be the latest row of its job."""
    before = [day for day in reader.days(JOBS) if not days or day < days[0]]
    created, first = ds.field("created_at"), since.replace(hour=0, minute=0, second=0, microsecond=0)
    began_before = (created.is_null() | (created < _time(first))) & (seen_expression() >= _time(since))

    def first_day_by_job(batches: Iterator[Any]) -> dict[str, date]:
        first_days = dict[str, date]()
        for batch in batches:
            for job_id, moment in zip(batch["job_id"].to_pylist(), batch["created_at"].to_pylist(), strict=True):
                day = (first - MAX_UNKNOWN_AGE if moment is None else moment.astimezone(UTC)).date()
                first_days[job_id] = min(day, first_days.get(job_id, day))
        return first_days

    def read_first_days() -> dict[str, date]:
        columns = ["job_id", "created_at"]
        return reader.scan(JOBS, days, first_day_by_job, columns=columns, where=began_before, queue=query.queue)

    if not before or not (first_days := read_first_days()):
        return []
    nearby = [day for day in before if day >= min(first_days.values()) - CLOCK_DIFFERENCE]
    is_one = ds.field("job_id").isin(list(first_days))
    return reader.scan(JOBS, nearby, list, columns=_COLUMNS, where=is_one, queue=query.queue) if nearby else []


def _count_part(
    batches: Iterator[Any], *, older: Sequence[Any], query: JobQuery, part: int, parts: int
) -> Counter[tuple[str, str | None, str]]:
    """Count the jobs of one pass by their latest rows."""
    rows = [pa.Table.from_batches([_select_part(batch, part, parts)]) for batch in chain(batches, older)]
    if not rows:
        return Counter()
    table = pa.concat_tables(rows)
    table = table.append_column("seen_at", pc.coalesce(table["finished_at"], table["as_of"]))
    table = table.select([*_KEY, *_VALUES, "as_of"])
    ids = pc.value_counts(table["job_id"])
    # Few ids have several rows, of which only the latest counts.
    repeated = pc.is_in(table["job_id"], ids.field("values").filter(pc.greater(ids.field("counts"), 1)))
    totals = _count_rows(table.filter(pc.invert(repeated)), query)
    return totals + _count_rows(_latest(table.filter(repeated)), query)


def _latest(table: Any) -> Any:
    """Return the latest row for each key."""
    last = pc.ScalarAggregateOptions(skip_nulls=False)
    table = table.sort_by([(name, "ascending") for name in ("as_of", "seen_at", "state")])
    table = table.group_by(_KEY, use_threads=False).aggregate([(name, "last", last) for name in _VALUES])
    return table.rename_columns({f"{name}_last": name for name in _VALUES})


def _count_rows(table: Any, query: JobQuery) -> Counter[tuple[str, str | None, str]]:
    """Count the rows that match a query."""
    for condition in (
        None if query.since is None else pc.field("seen_at") >= _time(query.since),
        None if query.until is None else pc.field("seen_at") < _time(query.until),
        None if query.name is None else pc.field("name") == query.name,
    ):
        table = table if condition is None else table.filter(condition)
    totals = table.group_by(["queue", "name", "state"]).aggregate([([], "count_all")]).to_pylist()
    return Counter({(row["queue"], row["name"], row["state"]): row["count_all"] for row in totals})


def _select_part(batch: Any, part: int, parts: int) -> Any:
    """Return the rows of one part, which is chosen by the last characters of the id."""
    if parts == 1:
        return batch
    ends = pc.utf8_slice_codeunits(batch["job_id"], -3).dictionary_encode()
    in_part = [zlib.crc32(end.encode()) % parts == part for end in ends.dictionary.to_pylist()]
    return batch.filter(pa.array(in_part, pa.bool_()).take(ends.indices))


def _duration_histograms(
    batches: Iterator[Any], *, column: str, every: Every | None
) -> dict[datetime | None, Counter[int]]:
    """Return a histogram of durations (:mod:`bulltask.lake.log_histogram`) for each hour or day."""
    histograms: defaultdict[datetime | None, Counter[int]] = defaultdict(Counter)
    for batch in batches:
        buckets = pc.ceil(pc.divide(pc.ln(pc.max_element_wise(batch[column], 1)), math.log(GROWTH))).cast(pa.int32())
        buckets = pc.if_else(pc.less(batch[column], 1), ZERO, buckets)
        periods = pa.nulls(len(buckets), pa.timestamp("us", tz="UTC"))
        periods = periods if every is None else pc.floor_temporal(batch["ended_at"], unit=every)
        table = (
            pa.table({"period": periods, "bucket": buckets})
            .group_by(["period", "bucket"])
            .aggregate([([], "count_all")])
        )
        for row in table.to_pylist():
            moment = row["period"] and row["period"].astimezone(UTC)
            histograms[moment][row["bucket"]] += row["count_all"]
    return dict(histograms)


def _percentile(durations: Counter[int], percent: float) -> float:
    """Return a percentile in seconds."""
    return (percentile(durations, percent / 100) or 0) / 1000


def _time(moment: datetime) -> Any:
    return pa.scalar(moment, pa.timestamp("us", tz="UTC"))
