"""``History``: search the lake for jobs and their outcomes. Needs neither a JVM nor Redis.

An invalid argument of a function here raises ``ConfigError``.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypedDict, TypeVar, Unpack

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from bulltask.config.parsers import choice, integer
from bulltask.jobs import codec
from bulltask.jobs.errors import ConfigError, did_you_mean
from bulltask.lake.log_histogram import GROWTH, ZERO, percentile
from bulltask.lake.reader import TableReader, check_queues, known_queues, latest_rows, normalize_queue
from bulltask.lake.records import AttemptRecord, EventRecord, JobHistory, JobPage, JobRecord, SnapshotRecord
from bulltask.lake.storage import Lake
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, SNAPSHOTS, Table

Every = Literal["hour", "day"]

Row = dict[str, Any]

T = TypeVar("T")

MAX_LIMIT: Final = 1_000
"""The maximum number of jobs in a page."""

STATES: Final = (
    "completed", "failed", "removed", "waiting", "active", "delayed", "prioritized", "waiting-children", "unknown",
)  # fmt: skip
"""The states in ``silver.jobs``."""


class StatsFilter(TypedDict, total=False):
    """The filters of statistics; the keys are those of :class:`bulltask.lake.history.JobFilter`."""

    queue: str | None
    name: str | None
    since: datetime | date | None
    until: datetime | date | None


class JobFilter(StatsFilter, total=False):
    """The filters of a search. Omitted filters and ``None`` match all jobs.

    Keys:
        id: The job's id.
        name: The task's name.
        state: ``completed``, ``failed``, ``removed``; or ``waiting``, ``active``, ``delayed``, ``waiting-children``,
            the last state of an open job that timed out.
        queue: The queue, without BullMQ's braces.
        since: Jobs that finished at this time or later: a ``datetime`` (UTC if it is naive) or a ``date``. For
            jobs that have not finished, the time of their last event counts.
        until: Jobs that finished before this time.
        text: A substring of the failure reason, ignoring case.
        error_fingerprint: The fingerprint of the failure, as in ``silver.jobs.error_fingerprint``.
    """

    id: str | None
    state: str | None
    text: str | None
    error_fingerprint: str | None


class SearchPosition(NamedTuple):
    """A job's position in the search order, which is descending."""

    seen_us: int
    queue: str
    job_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """A validated filter; see :class:`JobFilter`."""

    id: str | None = None
    name: str | None = None
    state: str | None = None
    queue: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    text: str | None = None
    error_fingerprint: str | None = None

    @classmethod
    def of(cls, where: Mapping[str, Any]) -> Self:
        """Validate the filters of a search; raise ``TypeError`` for one that does not exist."""
        names = [field.name for field in fields(cls)]
        for name, value in where.items():
            if name not in names:
                raise TypeError(f"jobs cannot be searched by {name!r}{did_you_mean(name, names)}")
            if name not in {"since", "until"} and value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a non-empty string, not {value!r}")
        if (state := where.get("state")) is not None and state not in STATES:
            raise ConfigError(f"unknown state {state!r}{did_you_mean(state, STATES)}")
        times = {name: moment(where.get(name), name) for name in ("since", "until")}
        if times["since"] and times["until"] and times["since"] >= times["until"]:
            raise ConfigError(f"since ({times['since']}) must be before until ({times['until']})")
        return cls(**{**where, **times})

    def includes(self, day: date) -> bool:
        """Whether jobs of this day (``dt``) can match."""
        early = self.since is not None and day < self.since.date()
        late = self.until is not None and day > (self.until - timedelta(microseconds=1)).date()
        return not (early or late)

    def cursor(self, position: SearchPosition) -> str:
        """Return the cursor of the next page."""
        return codec.cursor_of([*position, self._checksum])

    def position(self, cursor: str) -> SearchPosition:
        """Parse a cursor."""

        def parse(parts: Any) -> tuple[SearchPosition, Any]:
            seen_us, queue, job_id, incarnation, checksum = parts
            return SearchPosition(int(seen_us), str(queue), str(job_id), str(incarnation)), checksum

        position, checksum = codec.read_cursor(cursor, parse)
        if checksum != self._checksum:
            raise ConfigError("the cursor is from another search: use the filters of the page that returned it")
        return position

    @property
    def _checksum(self) -> int:
        """A checksum of the filters. Times are omitted, because "an hour ago" is a different time on each page."""
        filters = (self.id, self.name, self.state, self.queue, self.text, self.error_fingerprint)
        return zlib.crc32(repr(filters).encode())


def moment(value: Any, name: str) -> datetime | None:
    """Return a ``datetime`` or a ``date`` in UTC."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    raise ConfigError(f"{name} must be a datetime or a date, not {value!r}")


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


class History:
    """The jobs of a lake, including those that Redis no longer has: search, individual jobs, statistics for dashboards.

    ::

        history = History("/data/lake")
        page = history.search(state="failed", text="timed out", since=date(2026, 11, 1))
        for job in page.jobs:
            print(job.finished_at, job.queue, job.name, job.id, job.failed_reason)
        print(history.job(page.jobs[0].id).attempts)

    Only the latest state of a job counts: a job that failed and was completed by a later retry counts as completed. The
    pipeline may write at the same time; each call reads the latest versions of the tables. A call may take seconds:
    in asyncio, run it in a thread. Jobs that have not finished are not in the lake's table of jobs yet; :meth:`job`
    finds their events.

    Args:
        root: The directory or URL of the lake, as in ``--lake``.
        storage_options: Settings of the object store, such as ``AWS_ENDPOINT_URL``; default: those of the environment.
        broker: Only the jobs of this broker, in a lake of several; its queues need no prefix in filters.

    Raises:
        ConfigError: The root is a URL of an unsupported kind.
        LakeError: There is no lake. Every method also raises it if a file cannot be read.
    """

    def __init__(
        self, root: str | Path | Lake, storage_options: Mapping[str, str] | None = None, broker: str = ""
    ) -> None:
        lake = root if isinstance(root, Lake) else Lake(root, storage_options)
        self._lake = lake.of_broker(broker) if broker else lake
        self._reader = TableReader(self._lake)

    @property
    def root(self) -> str:
        """The absolute path of the lake's directory, or its URL."""
        return self._lake.root

    def search(self, *, limit: int = 50, cursor: str | None = None, **where: Unpack[JobFilter]) -> JobPage:
        """Search for finished or removed jobs, and open jobs that timed out, latest first.

        Args:
            limit: The number of jobs per page, up to 1,000.
            cursor: :attr:`JobPage.cursor` of the previous page.
            where: The filters of :class:`bulltask.lake.history.JobFilter`; a job must match all of them.

        Raises:
            ConfigError: A filter, the limit or the cursor is invalid, or the lake has no data for the queue.
        """
        query = self._query(where)
        position = None if cursor is None else query.position(cursor)
        limit = integer(1, MAX_LIMIT)(limit, "limit")
        rows = _search(self._reader, query, position, limit + 1)
        if not rows:
            self._check_queue(query.queue)
        page, has_more = rows[:limit], len(rows) > limit
        return JobPage(tuple(JobRecord.of(row) for _, row in page), query.cursor(page[-1][0]) if has_more else None)

    def job(self, job_id: str, queue: str | None = None, since: datetime | date | None = None) -> JobHistory | None:
        """Read a job's history; ``None`` if the lake does not have the job.

        Args:
            job_id: The job's id.
            queue: The job's queue; required if several queues have a job with this id.
            since: A time at which the job had not been added yet; older days are not read. Default: all days.

        Raises:
            ConfigError: Several queues have a job with this id, or the lake has no data for the queue.
        """
        queue, first = self._lake_name(queue), _day_before(moment(since, "since"))

        def read(table: Table, first: date) -> list[Row]:
            days = [day for day in self._reader.days(table) if day >= first]
            return self._reader.rows(table, days, queue=queue, job_ids=[job_id])

        others = (ATTEMPTS, EVENTS, SNAPSHOTS)
        with ThreadPoolExecutor(len(others)) as threads:
            threads.map(self._lake.open, others)  # meanwhile, so that reading them begins at once
            rows = {JOBS: read(JOBS, first)}
            if rows[JOBS]:
                first = max(first, _day_before(min(map(_earliest_time, rows[JOBS]))))
            rows |= zip(others, threads.map(partial(read, first=first), others), strict=True)
        queues = sorted({row["queue"] for table_rows in rows.values() for row in table_rows})
        if len(queues) > 1:
            raise ConfigError(f"several queues have a job {job_id!r}: {', '.join(queues)}; choose one")
        if not queues:
            self._check_queue(queue)
            return None
        snapshots = sorted(rows[SNAPSHOTS], key=lambda row: row["snapshot_at"])
        return JobHistory(
            id=job_id,
            queue=queues[0],
            incarnations=_incarnations(rows[JOBS]),
            attempts=_attempts(rows[ATTEMPTS]),
            events=_events(rows[EVENTS]),
            snapshot=SnapshotRecord.of(snapshots[-1]) if snapshots else None,
        )

    def days(self) -> list[date]:
        """Return the days (UTC) on which jobs finished, in order."""
        return self._reader.days(JOBS)

    def queues(self) -> list[str]:
        """Return the queues that have jobs in the lake, in order, without the hash tag."""
        return self._reader.queues(JOBS)

    def job_counts(self, **where: Unpack[StatsFilter]) -> list[JobCount]:
        """Count jobs by queue, task and state; each job counts once, with its latest state.

        Args:
            where: The filters of :class:`StatsFilter`; days and times as in :meth:`search`.

        Raises:
            ConfigError: A filter is invalid.
        """
        query, reader = self._query(where), self._reader
        days = [day for day in reader.days(JOBS) if query.since is None or day >= query.since.date() - CLOCK_DIFFERENCE]
        older = [] if query.since is None else _older_rows(reader, query, query.since, days)
        parts = -(-reader.count(JOBS, days, query.queue) // _ROWS_PER_PASS)
        totals: Counter[tuple[Any, ...]] = Counter()
        for part in range(parts):
            count = partial(_count_part, older=older, query=query, part=part, parts=parts)
            totals += reader.scan(JOBS, days, count, columns=_COLUMNS, queue=query.queue)
        ordered = sorted(totals.items(), key=lambda item: (item[0][0], item[0][1] or "", item[0][2]))
        return [JobCount(queue=queue, name=name, state=state, jobs=jobs) for (queue, name, state), jobs in ordered]

    def attempt_counts(
        self, outcome: str = "completed", *, every: Every = "hour", **where: Unpack[StatsFilter]
    ) -> list[AttemptCount]:
        """Count the attempts that ended in each hour or day, omitting hours and days in which none ended.

        Args:
            outcome: Only attempts with this outcome: ``completed``, ``failed`` (and so did the job), ``requeued`` (the
                job runs again: the attempt failed, was released after its start or rescheduled, or its child crashed),
                ``stalled`` or ``waiting-children``; or ``released``: the releases of jobs before their start.
            every: ``hour`` or ``day``.
            where: The filters of :class:`StatsFilter`.

        Raises:
            ConfigError: An argument is invalid.
        """
        every = _check_every(every, "every")

        def hours_or_days(batch: Any) -> list[Any]:
            return [pc.floor_temporal(batch["ended_at"], unit=every)]

        condition = ds.field("outcome") == outcome
        totals = self._count_ended(self._query(where), condition, ["ended_at"], hours_or_days)
        return [AttemptCount(at.astimezone(UTC), attempts) for (at,), attempts in sorted(totals.items())]

    def latency(
        self,
        metric: str = "run",
        percentiles: Sequence[float] = (50, 95, 99),
        *,
        every: Every | None = "hour",
        **where: Unpack[StatsFilter],
    ) -> list[LatencyPoint]:
        """Return percentiles of how long the attempts that ended in each hour or day waited or ran.

        Args:
            metric: ``run`` (execution time) or ``wait`` (for a worker).
            percentiles: 0 to 100; the results are within 1%.
            every: ``hour``, ``day``, or ``None`` for one point for the whole period.
            where: The filters of :class:`StatsFilter`.

        Raises:
            ConfigError: An argument is invalid.
        """
        query, column = self._query(where), f"{choice('wait', 'run')(metric, 'metric')}_ms"
        every = None if every is None else _check_every(every, "every")
        if invalid := [value for value in percentiles if not 0 <= value <= 100]:
            raise ConfigError(f"percentiles must be from 0 to 100, not {invalid[0]!r}")

        def periods_and_buckets(batch: Any) -> list[Any]:
            whole_period = pa.nulls(batch.num_rows, pa.timestamp("us", tz="UTC"))
            at = whole_period if every is None else pc.floor_temporal(batch["ended_at"], unit=every)
            return [at, _buckets(batch[column])]

        totals = self._count_ended(query, ds.field(column).is_valid(), ["ended_at", column], periods_and_buckets)
        histograms: defaultdict[datetime | None, Counter[int]] = defaultdict(Counter)
        for (at, bucket), attempts in sorted(totals.items()):
            histograms[at.astimezone(UTC) if at else query.since][bucket] = attempts
        return [
            LatencyPoint(at, durations.total(), {value: _percentile(durations, value) for value in percentiles})
            for at, durations in histograms.items()
        ]

    def _count_ended(
        self, query: JobQuery, condition: Any, columns: Sequence[str], values: Callable[[Any], Sequence[Any]]
    ) -> Counter[tuple[Any, ...]]:
        """Count the attempts that match a query and a condition, and have ended, by values of each batch's rows."""
        ended = ds.field("ended_at")
        where = reduce(operator.and_, _conditions(query, ended), ended.is_valid() & condition)
        days = [day for day in self._reader.days(ATTEMPTS) if query.includes(day)]

        def count(batches: Iterator[Any]) -> Counter[tuple[Any, ...]]:
            totals: Counter[tuple[Any, ...]] = Counter()
            for batch in batches:
                totals.update(_count_rows(values(batch)))
            return totals

        return self._reader.scan(ATTEMPTS, days, count, columns=columns, where=where, queue=query.queue)

    def _query(self, where: Mapping[str, Any]) -> JobQuery:
        query = JobQuery.of(where)
        return replace(query, queue=self._lake_name(query.queue))

    def _lake_name(self, queue: str | None) -> str | None:
        """Return a queue's name in the lake: ``mail`` for BullMQ's ``{mail}``, unless the lake has both."""
        if queue is None:
            return None
        prefix = self._lake.queue_prefix
        if queue.startswith("{"):
            known = {name.removeprefix(prefix) for name in known_queues(self._reader)}
            queue = normalize_queue(queue, known)
        return queue if queue.startswith(prefix) else prefix + queue

    def _check_queue(self, queue: str | None) -> None:
        """Raise an error if there are no rows because the queue is unknown."""
        if queue is not None:
            check_queues(self.root, [queue], known_queues(self._reader))

    def __repr__(self) -> str:
        return f"<History {self.root}>"


def _incarnations(rows: list[Row]) -> tuple[JobRecord, ...]:
    best = {row["incarnation"]: row for row in sorted(rows, key=sort_rank)}
    ordered = sorted(best.values(), key=lambda row: (row["created_at"] or row["as_of"], row["as_of"]), reverse=True)
    return tuple(JobRecord.of(row) for row in ordered)


def _attempts(rows: list[Row]) -> tuple[AttemptRecord, ...]:
    by_rank = sorted(rows, key=lambda row: (row["as_of"], row["ended_at"] or row["as_of"], row["outcome"]))
    best = {(row["incarnation"], row["attempt"]): row for row in by_rank}
    ordered = sorted(best.values(), key=lambda row: (row["started_at"] or row["as_of"], row["attempt"]))
    return tuple(AttemptRecord.of(row) for row in ordered)


def _events(rows: list[Row]) -> tuple[EventRecord, ...]:
    once = {(row["event_ms"], row["event_seq"]): row for row in rows}
    return tuple(EventRecord.of(row) for _, row in sorted(once.items()))


# A search reads the jobs of the lake, newest first, by the latest row of each job.
#
# A job that failed and was completed by a later retry has two rows, and only the later row may match. The later row can
# be in the directory of another day, so a matching row is a candidate until all rows of its job have been read. Days
# are read from newest to oldest, with only as many candidates as the page still needs: memory does not grow with the
# lake.
#
# The latest row usually has the latest end time, too, as after a manual retry. A backfill is the exception: a row that
# it adds today can contain a completion that is earlier than a removal recorded last week. Therefore, a job's rows are
# read from the day on which it was added onward.


CLOCK_DIFFERENCE: Final = timedelta(days=1)
"""How much earlier a row's date can be than the time when the job was added, because clocks differ."""

MAX_UNKNOWN_AGE: Final = timedelta(days=31)
"""The assumed maximum lifetime of a job whose added event is missing."""

_EXTRA_CANDIDATES: Final = 16
"""Extra candidates, in case some are superseded."""

_MAX_DAYS_PER_READ: Final = 16

_ORDER: Final = [(name, "descending") for name in ("seen_at", "queue", "job_id", "incarnation_or_empty")]


def _search(
    reader: TableReader, query: JobQuery, after: SearchPosition | None, max_rows: int
) -> list[tuple[SearchPosition, Row]]:
    """Return up to ``max_rows`` rows of ``silver.jobs`` after a position that match, in order, with their positions."""
    rows: dict[SearchPosition, Row] = {}
    while len(rows) < max_rows:
        max_candidates = max_rows - len(rows) + _EXTRA_CANDIDATES
        candidates = _candidates(reader, query, after, max_candidates)
        rows.update(_latest(reader, candidates))
        if len(candidates) < max_candidates:
            break
        after = _position(candidates[-1])
    return list(rows.items())[:max_rows]


def seen_expression() -> Any:
    """Return an expression for the time of a job's end, or else of its last event; ``dt`` is the day of that time."""
    return pc.coalesce(ds.field("finished_at"), ds.field("as_of"))


def row_key(row: Row) -> tuple[str, str, str | None]:
    """Return the key of a row, which all rows of one incarnation of a job share."""
    return row["queue"], row["job_id"], row["incarnation"]


def sort_rank(row: Row) -> tuple[Any, ...]:
    """Return the sort key for rows with one key: ``as_of``, then values that make the order deterministic."""
    return row["as_of"], row["finished_at"] or row["as_of"], row["state"] or ""


def _latest(reader: TableReader, candidates: Sequence[Row]) -> Iterator[tuple[SearchPosition, Row]]:
    """Yield the candidates that no later row supersedes."""
    if not candidates:
        return
    first = _day_before(min(map(_earliest_time, candidates)))
    ids = sorted({row["job_id"] for row in candidates})
    columns = ["queue", "job_id", "incarnation", "as_of", "finished_at", "state"]
    days = [day for day in reader.days(JOBS) if day >= first]
    rows = sorted(reader.rows(JOBS, days, columns=columns, job_ids=ids), key=sort_rank)
    ranks = {row_key(row): sort_rank(row) for row in rows}  # of rows with the same key, the last
    for row in candidates:
        # A candidate that is no longer there has expired or is being rewritten: it still counts.
        if sort_rank(row) >= ranks.get(row_key(row), sort_rank(row)):
            yield _position(row), row


def _candidates(reader: TableReader, query: JobQuery, after: SearchPosition | None, max_rows: int) -> list[Row]:
    """Return the first matching rows in order; some may be superseded."""
    last_day = None if after is None else (_EPOCH + timedelta(microseconds=after.seen_us)).date()
    days = [day for day in reader.days(JOBS) if query.includes(day) and (last_day is None or day <= last_day)]
    where, rows = _expression(query, after), list[Row]()
    for portion in day_portions(days[::-1]) if query.id is None else [days]:
        read_first = partial(_first_rows, max_rows=max_rows - len(rows))
        job_ids = None if query.id is None else [query.id]
        rows += reader.scan(JOBS, portion, read_first, where=where, queue=query.queue, job_ids=job_ids)
        if len(rows) >= max_rows:
            break
    return rows


def day_portions(days: Sequence[date]) -> Iterator[Sequence[date]]:
    """Yield the days in portions: first a single day, because most searches end there, then more, which is faster."""
    start, size = 0, 1
    while start < len(days):
        yield days[start : start + size]
        start, size = start + size, min(2 * size, _MAX_DAYS_PER_READ)


def _first_rows(batches: Iterator[Any], max_rows: int) -> list[Row]:
    """Return the first ``max_rows`` rows in search order."""
    kept = None
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        rows = rows.append_column("seen_at", pc.coalesce(rows["finished_at"], rows["as_of"]))
        rows = rows.append_column("incarnation_or_empty", pc.fill_null(rows["incarnation"], ""))
        rows = rows if kept is None else pa.concat_tables([kept, rows])
        kept = rows.take(pc.select_k_unstable(rows, max_rows, _ORDER)) if rows.num_rows > max_rows else rows
    if kept is None:
        return []
    first_rows: list[Row] = kept.sort_by(_ORDER).to_pylist()
    return first_rows


def _expression(query: JobQuery, after: SearchPosition | None) -> Any:
    """Return the filters as an Arrow expression; ``None`` for all rows."""
    parts = [*_conditions(query, seen_expression())]
    for column, value in (("state", query.state), ("error_fingerprint", query.error_fingerprint)):
        if value is not None:
            parts.append(ds.field(column) == value)
    if query.text is not None:
        parts.append(pc.match_substring(ds.field("failed_reason"), query.text, ignore_case=True))
    if after is not None:
        parts.append(_after(after))
    return reduce(operator.and_, parts) if parts else None


def _conditions(query: JobQuery, at: Any) -> Iterator[Any]:
    """Yield expressions for the filters of jobs and attempts alike; ``at`` is the time that is in the period."""
    if query.name is not None:
        yield ds.field("name") == query.name
    if query.since is not None:
        yield at >= query.since
    if query.until is not None:
        yield at < query.until


def _after(after: SearchPosition) -> Any:
    """Return an expression for the rows after a position."""
    incarnation = pc.coalesce(ds.field("incarnation"), pc.scalar(""))
    columns = [
        (seen_expression(), _EPOCH + timedelta(microseconds=after.seen_us)),
        (ds.field("queue"), after.queue),
        (ds.field("job_id"), after.job_id),
        (incarnation, after.incarnation),
    ]
    expression = None
    for column, value in reversed(columns):
        expression = column < value if expression is None else (column < value) | ((column == value) & expression)
    return expression


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _seen_at(row: Row) -> datetime:
    moment: datetime = row["finished_at"] or row["as_of"]
    return moment


def _day_before(at: datetime | None) -> date:
    return date.min if at is None else at.date() - CLOCK_DIFFERENCE


def _earliest_time(row: Row) -> datetime:
    """Return the earliest time at which the job can have existed."""
    seen = _seen_at(row)
    return min(seen, row["created_at"] or seen - MAX_UNKNOWN_AGE)


def _position(row: Row) -> SearchPosition:
    seen_us = (_seen_at(row) - _EPOCH) // timedelta(microseconds=1)
    return SearchPosition(seen_us, row["queue"], row["job_id"], row["incarnation"] or "")


# Statistics count each job once, by its latest row, and each attempt, which has one row.


_ROWS_PER_PASS: Final = 500_000
"""How many rows are deduplicated in one pass; with more, each pass reads a part of the ids."""

_COLUMNS: Final = ["queue", "job_id", "incarnation", "name", "state", "finished_at", "as_of"]
_check_every: Final = choice("hour", "day")


def _older_rows(reader: TableReader, query: JobQuery, since: datetime, days: Sequence[date]) -> list[Any]:
    """Read earlier rows of jobs that were added before ``days``: one of these may be the latest row of its job."""
    before = [day for day in reader.days(JOBS) if not days or day < days[0]]
    created, first = ds.field("created_at"), since.replace(hour=0, minute=0, second=0, microsecond=0)
    began_before = (created.is_null() | (created < first)) & (seen_expression() >= since)

    def first_day_by_job(batches: Iterator[Any]) -> dict[str, date]:
        first_days = dict[str, date]()
        for batch in batches:
            for job_id, moment in zip(batch["job_id"].to_pylist(), batch["created_at"].to_pylist(), strict=True):
                day = (first - MAX_UNKNOWN_AGE if moment is None else moment.astimezone(UTC)).date()
                first_days[job_id] = min(day, first_days.get(job_id, day))
        return first_days

    if not before:
        return []
    columns = ["job_id", "created_at"]
    first_days = reader.scan(JOBS, days, first_day_by_job, columns=columns, where=began_before, queue=query.queue)
    if not first_days:
        return []
    nearby = [day for day in before if day >= min(first_days.values()) - CLOCK_DIFFERENCE]
    return reader.scan(JOBS, nearby, list, columns=_COLUMNS, queue=query.queue, job_ids=first_days) if nearby else []


def _count_part(
    batches: Iterator[Any], *, older: Sequence[Any], query: JobQuery, part: int, parts: int
) -> Counter[tuple[Any, ...]]:
    """Count the jobs of one pass by their latest rows."""
    rows = [pa.Table.from_batches([_select_part(batch, part, parts)]) for batch in chain(batches, older)]
    if not rows:
        return Counter()
    table = pa.concat_tables(rows)
    table = table.append_column("seen_at", pc.coalesce(table["finished_at"], table["as_of"]))
    ids = pc.value_counts(table["job_id"])
    # Few ids have several rows, of which only the latest counts.
    repeated = pc.is_in(table["job_id"], ids.field("values").filter(pc.greater(ids.field("counts"), 1)))
    latest = latest_rows(table.filter(repeated), JOBS, "seen_at", "state")
    counted = pa.concat_tables([table.filter(pc.invert(repeated)), latest])
    for condition in _conditions(query, ds.field("seen_at")):
        counted = counted.filter(condition)
    return _count_rows([counted["queue"], counted["name"], counted["state"]])


def _count_rows(columns: Sequence[Any]) -> Counter[tuple[Any, ...]]:
    """Count the rows of some columns with the same values."""
    names = [f"{at}" for at in range(len(columns))]
    counts = pa.table(list(columns), names).group_by(names).aggregate([([], "count_all")]).to_pylist()
    return Counter({tuple(row[name] for name in names): row["count_all"] for row in counts})


def _select_part(batch: Any, part: int, parts: int) -> Any:
    """Return the rows of one part, which is chosen by the last characters of the id."""
    if parts == 1:
        return batch
    ends = pc.utf8_slice_codeunits(batch["job_id"], -3).dictionary_encode()
    in_part = [zlib.crc32(end.encode()) % parts == part for end in ends.dictionary.to_pylist()]
    return batch.filter(pa.array(in_part, pa.bool_()).take(ends.indices))


def _buckets(durations: Any) -> Any:
    """Return the buckets of durations, as :func:`bulltask.lake.log_histogram.bucket_of` does."""
    buckets = pc.ceil(pc.divide(pc.ln(pc.max_element_wise(durations, 1)), math.log(GROWTH))).cast(pa.int32())
    return pc.if_else(pc.less(durations, 1), ZERO, buckets)


def _percentile(durations: Counter[int], percent: float) -> float:
    """Return a percentile in seconds."""
    return (percentile(durations, percent / 100) or 0) / 1000
