"""``History``: search the lake for jobs and their outcomes. Needs neither a JVM nor Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pyarrow.dataset as ds

from bulltask.jobs.errors import ConfigError
from bulltask.lake import job_stats
from bulltask.lake.job_stats import AttemptCount, Every, JobCount, LatencyPoint
from bulltask.lake.layout import Layout
from bulltask.lake.query import JobFilter, JobQuery, check_limit
from bulltask.lake.read import TableReader, check_queues, known_queues, normalize_queue
from bulltask.lake.records import AttemptRecord, EventRecord, JobHistory, JobPage, JobRecord, SnapshotRecord
from bulltask.lake.search import search, sort_rank
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, SNAPSHOTS, Table

__all__ = ["History", "StatsFilter"]

Row = dict[str, Any]


class StatsFilter(TypedDict, total=False):
    """The filters of statistics; the keys are those of :class:`bulltask.lake.query.JobFilter`."""

    queue: str | None
    name: str | None
    since: datetime | date | None
    until: datetime | date | None


class History:
    """The jobs of a lake, including those that Redis no longer has: search, individual jobs, statistics for dashboards.

    ::

        history = History("/data/lake")
        page = history.search(state="failed", text="timed out", since=date(2026, 11, 1))
        for job in page.jobs:
            print(job.finished_at, job.queue, job.name, job.id, job.failed_reason)
        print(history.job(page.jobs[0].id).attempts)

    Only the latest state of a job counts: a job that failed and was completed by a later retry counts as completed. The
    pipeline may write at the same time; each call reads the files that exist at that moment. A call may take seconds:
    in asyncio, run it in a thread. Jobs that have not finished are not in the lake's table of jobs yet; :meth:`job`
    finds their events.

    Args:
        root: The directory of the lake.

    Raises:
        LakeError: There is no lake. Every method also raises it if a file cannot be read.
    """

    def __init__(self, root: str | Path) -> None:
        self._layout = Layout(root)
        self._reader = TableReader(self._layout)

    @property
    def root(self) -> Path:
        """The directory of the lake."""
        return self._layout.root

    def search(self, *, limit: int = 50, cursor: str | None = None, **where: Unpack[JobFilter]) -> JobPage:
        """Search for finished or removed jobs, and open jobs that timed out, latest first.

        Args:
            limit: The number of jobs per page, up to 1,000.
            cursor: :attr:`JobPage.cursor` of the previous page.
            where: The filters of :class:`bulltask.lake.query.JobFilter`; a job must match all of them.

        Raises:
            ConfigError: A filter, the limit or the cursor is invalid, or the lake has no data for the queue.
        """
        query = self._query(where)
        position = None if cursor is None else query.position(cursor)
        rows = search(self._reader, query, position, check_limit(limit) + 1)
        if not rows:
            self._check_queue(query.queue)
        page, has_more = rows[:limit], len(rows) > limit
        return JobPage(tuple(JobRecord.of(row) for _, row in page), query.cursor(page[-1][0]) if has_more else None)

    def job(self, job_id: str, queue: str | None = None) -> JobHistory | None:
        """Read a job's history; ``None`` if the lake does not have the job.

        Args:
            job_id: The job's id.
            queue: The job's queue; required if several queues have a job with this id.

        Raises:
            ConfigError: Several queues have a job with this id, or the lake has no data for the queue.
        """
        queue = self._lake_name(queue)
        id_columns = {JOBS: "job_id", ATTEMPTS: "job_id", EVENTS: "job_id", SNAPSHOTS: "id"}
        rows = {table: self._rows(table, ds.field(column) == job_id, queue) for table, column in id_columns.items()}
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
        return job_stats.job_counts(self._reader, self._query(where))

    def attempt_counts(
        self, outcome: str = "completed", *, every: Every = "hour", **where: Unpack[StatsFilter]
    ) -> list[AttemptCount]:
        """Count the attempts that ended in each hour or day, omitting hours and days in which none ended.

        Args:
            outcome: Only attempts with this outcome: ``completed``, ``failed`` (and so did the job), ``requeued`` (the
                job runs again: the attempt failed, was released, throttled or rescheduled, or its child crashed),
                ``stalled`` or ``waiting-children``.
            every: ``hour`` or ``day``.
            where: The filters of :class:`StatsFilter`.

        Raises:
            ConfigError: An argument is invalid.
        """
        return job_stats.attempt_counts(self._reader, self._query(where), outcome, every)

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
        return job_stats.latency(self._reader, self._query(where), metric, percentiles, every)

    def _query(self, where: Mapping[str, Any]) -> JobQuery:
        query = JobQuery.of(where)
        return replace(query, queue=self._lake_name(query.queue))

    def _lake_name(self, queue: str | None) -> str | None:
        """Return a queue's name in the lake: ``mail`` for BullMQ's ``{mail}``, unless the lake has both."""
        if queue is None or not queue.startswith("{"):
            return queue
        return normalize_queue(queue, known_queues(self._reader))

    def _rows(self, table: Table, where: Any, queue: str | None) -> list[Row]:
        def read(batches: Iterator[Any]) -> list[Row]:
            return [row for batch in batches for row in batch.to_pylist()]

        return self._reader.scan(table, self._reader.days(table), read, where=where, queue=queue)

    def _check_queue(self, queue: str | None) -> None:
        """Raise an error if there are no rows because the queue is unknown."""
        if queue is not None:
            check_queues(self.root, [queue], known_queues(self._reader))

    def __repr__(self) -> str:
        return f"<History {self.root}>"


def _incarnations(rows: list[Row]) -> tuple[JobRecord, ...]:
    best: dict[str | None, Row] = {}
    for row in sorted(rows, key=sort_rank):
        best[row["incarnation"]] = row
    ordered = sorted(best.values(), key=lambda row: (row["created_at"] or row["as_of"], row["as_of"]), reverse=True)
    return tuple(JobRecord.of(row) for row in ordered)


def _attempts(rows: list[Row]) -> tuple[AttemptRecord, ...]:
    best: dict[tuple[str | None, int], Row] = {}
    for row in sorted(rows, key=lambda row: (row["as_of"], row["ended_at"] or row["as_of"], row["outcome"])):
        best[row["incarnation"], row["attempt"]] = row
    ordered = sorted(best.values(), key=lambda row: (row["started_at"] or row["as_of"], row["attempt"]))
    return tuple(AttemptRecord.of(row) for row in ordered)


def _events(rows: list[Row]) -> tuple[EventRecord, ...]:
    once = {(row["event_ms"], row["event_seq"]): row for row in rows}
    return tuple(EventRecord.of(row) for _, row in sorted(once.items()))
