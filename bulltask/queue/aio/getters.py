"""``AsyncQueueGetters``: read a queue's jobs, their counts and states, and the connected clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from bulltask.jobs.errors import ConfigError
from bulltask.jobs.names import JobState, check_reference
from bulltask.queue import fields as read
from bulltask.queue.aio.job import AsyncJob
from bulltask.queue.context import QueueBase, checked
from bulltask.queue.fields import ClientInfo, DependencyPage, JobLogs, JobPages, Metrics, QueueSummary
from bulltask.transport.scripts import queue as scripts
from bulltask.transport.scripts.job import get_state, read_job

__all__ = ["AsyncQueueGetters"]


@checked
class AsyncQueueGetters(QueueBase):
    """The read methods of :class:`bulltask.queue.aio.queue.AsyncQueue`; BullMQ also has a class ``QueueGetters``."""

    async def get_job(self, job_id: str) -> AsyncJob | None:
        """Return a job, ``None`` if there is no job with this id."""
        stored = await self._context.arun(read_job(self._context.keys, check_reference(job_id)))
        return None if stored is None else AsyncJob(self._context, stored)

    async def get_jobs(
        self, states: Iterable[str] | str = (), start: int = 0, end: int = -1, *, asc: bool = False
    ) -> list[AsyncJob]:
        """Return jobs ``start`` to ``end`` (inclusive) in each state.

        Many jobs are read with several calls, so that none of them blocks Redis.

        Args:
            states: ``waiting`` (includes ``paused``), ``paused``, ``prioritized``, ``delayed``,
                ``waiting-children``, ``active``, ``completed``, ``failed`` (default: all).
            start: Index of the first job in each state, from 0.
            end: Index of the last job in each state, -1 for all. For large numbers of jobs use :meth:`iter_jobs`.
            asc: Oldest first.
        """
        jobs = await self._context.arun(read.get_jobs(self._context, states, start, end, asc=asc))
        return [AsyncJob(self._context, stored) for stored in jobs]

    async def get_job_ids(
        self, states: Iterable[str] | str = (), start: int = 0, end: int = -1, *, asc: bool = False
    ) -> list[str]:
        """Return the ids of the jobs that :meth:`get_jobs` returns; it takes the same arguments."""
        return await self._context.arun(read.get_job_ids(self._context, states, start, end, asc=asc))

    async def iter_jobs(
        self, states: Iterable[str] | str = (), *, asc: bool = True, page_size: int = 1000
    ) -> AsyncIterator[AsyncJob]:
        """Iterate over any number of jobs, a page at a time, while other clients use the queue.

        A job that stays in its state is returned exactly once, and a job that moves to a later state at least once. A
        job that is added, removed, or moved to an earlier state during the iteration may be missing. If a whole page of
        jobs leaves its state between two reads, some jobs may be returned twice.

        The iteration ends even if jobs are added faster than it reads.

        Args:
            states: As in :meth:`get_jobs`. They are read in the order in which jobs pass through them.
            asc: In each state, begin with the job that runs next (or finished first); otherwise, end with it.
            page_size: Maximum number of jobs in memory at a time.
        """
        pages = JobPages(self._context, states, page_size, asc=asc)
        while (page := await self._context.arun(pages.next())) is not None:
            for stored in page:
                yield AsyncJob(self._context, stored)

    async def get_job_counts(self, *states: str) -> dict[str, int]:
        """Count the jobs in each of ``states`` (default: all eight)."""
        return await self._context.arun(read.get_job_counts(self._context, states))

    async def get_summary(self) -> QueueSummary:
        """Count the jobs in five groups; ``waiting`` includes prioritized jobs and those of a paused queue.

        :meth:`get_job_counts` counts the jobs in each of BullMQ's states.
        """
        counts = await self.get_job_counts()
        return QueueSummary(
            waiting=counts["waiting"] + counts["paused"] + counts["prioritized"],
            active=counts["active"],
            completed=counts["completed"],
            failed=counts["failed"],
            delayed=counts["delayed"],
        )

    async def count(self) -> int:
        """Count the jobs that are waiting, paused, prioritized, delayed or waiting for child jobs."""
        counts = await self.get_job_counts("waiting", "paused", "delayed", "prioritized", "waiting-children")
        return sum(counts.values())

    async def get_counts_per_priority(self, priorities: Sequence[int]) -> dict[int, int]:
        """Count the waiting jobs with each priority; 0 means without a priority."""
        wanted = list(dict.fromkeys(priorities))
        if not wanted:
            return {}
        return await self._context.arun(scripts.get_counts_per_priority(self._context.keys, wanted))

    async def get_job_state(self, job_id: str) -> JobState:
        """Return a job's state, ``UNKNOWN`` if there is no job with this id."""
        return await self._context.arun(get_state(self._context.keys, check_reference(job_id)))

    async def get_job_logs(self, job_id: str, start: int = 0, end: int = -1, *, asc: bool = True) -> JobLogs:
        """Return lines of a job's log; see :meth:`bulltask.queue.aio.job.AsyncJob.get_logs`."""
        return await self._context.arun(read.get_job_logs(self._context, check_reference(job_id), start, end, asc=asc))

    async def get_metrics(self, kind: str, start: int = 0, end: int = -1) -> Metrics:
        """Return how many jobs completed or failed per minute.

        Args:
            kind: ``completed`` or ``failed``.
            start: First minute, from 0, the newest.
            end: Last minute, -1 for all.

        Raises:
            ConfigError: ``kind`` is unknown.
        """
        if kind not in {"completed", "failed"}:
            raise ConfigError(f"kind must be completed or failed, not {kind!r:.200}")
        return await self._context.arun(scripts.get_metrics(self._context.keys, kind, start, end))

    async def get_workers(self) -> list[ClientInfo]:
        """Return the connected workers, in Python and Node; one entry per connection."""
        return await self._context.arun(read.get_clients(self._context, events=False))

    async def get_workers_count(self) -> int:
        """Count the connected workers."""
        return len(await self.get_workers())

    async def get_queue_events(self) -> list[ClientInfo]:
        """Return the connections of ``QueueEvents`` objects."""
        return await self._context.arun(read.get_clients(self._context, events=True))

    async def get_dependencies(self, parent_id: str, kind: str, start: int = 0, end: int = -1) -> DependencyPage:
        """Return a job's children ``start`` to ``end``.

        Args:
            parent_id: The job.
            kind: ``"processed"``: completed, with return values; ``"pending"``: not finished; ``"ignored"``: failed,
                with reasons, and the parent ignores it; ``"failed"``: failed, and the parent fails with it.
            start: Index of the first child, from 0, in Redis' order.
            end: Index of the last child, -1 for all.
        """
        return await self._context.arun(
            read.get_dependency_page(self._context, check_reference(parent_id), kind, start, end)
        )

    async def export_prometheus_metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """Return the counts of all states in Prometheus' text format, as Node exports them, with ``labels`` in each
        line.
        """
        counts = await self.get_job_counts()
        more = "".join(f', {name}="{value}"' for name, value in (labels or {}).items())
        lines = [
            f'bullmq_job_count{{queue="{self._context.keys.name}", state="{state}"{more}}} {count}'
            for state, count in counts.items()
        ]
        head = ["# HELP bullmq_job_count Number of jobs in the queue by state", "# TYPE bullmq_job_count gauge"]
        return "\n".join([*head, *lines])

    async def get_waiting(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return waiting jobs without a priority, the next job first."""
        return await self.get_jobs("waiting", start, end, asc=True)

    async def get_active(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return active jobs, the oldest first."""
        return await self.get_jobs("active", start, end, asc=True)

    async def get_delayed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return delayed jobs, the next job first."""
        return await self.get_jobs("delayed", start, end, asc=True)

    async def get_prioritized(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return waiting jobs with a priority, the next job first."""
        return await self.get_jobs("prioritized", start, end, asc=True)

    async def get_completed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return completed jobs, the newest first."""
        return await self.get_jobs("completed", start, end, asc=False)

    async def get_failed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return failed jobs, the newest first."""
        return await self.get_jobs("failed", start, end, asc=False)

    async def get_waiting_children(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return jobs that are waiting for their child jobs, the oldest first."""
        return await self.get_jobs("waiting-children", start, end, asc=True)

    async def get_waiting_count(self) -> int:
        """Count the waiting jobs without a priority."""
        return await self.get_job_count_by_types("waiting")

    async def get_active_count(self) -> int:
        """Count the active jobs."""
        return await self.get_job_count_by_types("active")

    async def get_delayed_count(self) -> int:
        """Count the delayed jobs."""
        return await self.get_job_count_by_types("delayed")

    async def get_prioritized_count(self) -> int:
        """Count the waiting jobs with a priority."""
        return await self.get_job_count_by_types("prioritized")

    async def get_completed_count(self) -> int:
        """Count the completed jobs."""
        return await self.get_job_count_by_types("completed")

    async def get_failed_count(self) -> int:
        """Count the failed jobs."""
        return await self.get_job_count_by_types("failed")

    async def get_waiting_children_count(self) -> int:
        """Count the jobs that are waiting for their child jobs."""
        return await self.get_job_count_by_types("waiting-children")

    async def get_job_count_by_types(self, *states: str) -> int:
        """Count the jobs in all of ``states`` together (default: all eight)."""
        counts = await self.get_job_counts(*states)
        return sum(counts.values())
