"""``AsyncQueueGetters``: :class:`bulltask.queue.getters.QueueGetters` for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from bulltask.jobs.states import JobState
from bulltask.queue import reading
from bulltask.queue.ajob import AsyncJob
from bulltask.queue.answers import ClientInfo, DependencyPage, JobCounts, JobLogs, Metrics
from bulltask.queue.base import QueueBase
from bulltask.queue.walk import Walk

__all__ = ["AsyncQueueGetters"]


class AsyncQueueGetters(QueueBase):
    """What a :class:`bulltask.queue.aqueue.AsyncQueue` can be asked."""

    async def get_job(self, job_id: str) -> AsyncJob | None:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_job`."""
        record = await self._link.arun(reading.get_job(self._link, job_id))
        return None if record is None else AsyncJob(self._link, record)

    async def get_jobs(
        self, states: Iterable[str] | str = (), start: int = 0, end: int = -1, *, asc: bool = False
    ) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_jobs`."""
        found = await self._link.arun(reading.get_jobs(self._link, states, start, end, asc=asc))
        return [AsyncJob(self._link, record) for record in found]

    async def get_job_ids(
        self, states: Iterable[str] | str = (), start: int = 0, end: int = -1, *, asc: bool = False
    ) -> list[str]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_job_ids`."""
        return await self._link.arun(reading.get_job_ids(self._link, states, start, end, asc=asc))

    async def iter_jobs(
        self, states: Iterable[str] | str = (), *, asc: bool = True, page_size: int = 1000
    ) -> AsyncIterator[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.iter_jobs`."""
        walk = Walk(self._link, states, page_size, asc=asc)
        while (page := await self._link.arun(walk.page())) is not None:
            for record in page:
                yield AsyncJob(self._link, record)

    async def get_job_counts(self, *states: str) -> dict[str, int]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_job_counts`."""
        return await self._link.arun(reading.get_counts_of(self._link, states))

    async def job_counts(self) -> JobCounts:
        """As :meth:`bulltask.queue.getters.QueueGetters.job_counts`."""
        return await self._link.arun(reading.job_counts(self._link))

    async def count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.count`."""
        return await self._link.arun(reading.count(self._link))

    async def get_counts_per_priority(self, priorities: Sequence[int]) -> dict[int, int]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_counts_per_priority`."""
        return await self._link.arun(reading.get_counts_per_priority(self._link, priorities))

    async def get_job_state(self, job_id: str) -> JobState:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_job_state`."""
        return await self._link.arun(reading.get_job_state(self._link, job_id))

    async def get_job_logs(self, job_id: str, start: int = 0, end: int = -1, *, asc: bool = True) -> JobLogs:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_job_logs`."""
        return await self._link.arun(reading.get_job_logs(self._link, job_id, start, end, asc=asc))

    async def get_metrics(self, kind: str, start: int = 0, end: int = -1) -> Metrics:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_metrics`."""
        return await self._link.arun(reading.get_metrics(self._link, kind, start, end))

    async def get_workers(self) -> list[ClientInfo]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_workers`."""
        return await self._link.arun(reading.get_clients(self._link, events=False))

    async def get_workers_count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_workers_count`."""
        return len(await self.get_workers())

    async def get_queue_events(self) -> list[ClientInfo]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_queue_events`."""
        return await self._link.arun(reading.get_clients(self._link, events=True))

    async def get_dependencies(self, parent_id: str, kind: str, start: int = 0, end: int = -1) -> DependencyPage:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_dependencies`."""
        return await self._link.arun(reading.get_dependencies(self._link, parent_id, kind, start, end))

    async def export_prometheus_metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """As :meth:`bulltask.queue.getters.QueueGetters.export_prometheus_metrics`."""
        return await self._link.arun(reading.prometheus_text(self._link, labels or {}))

    async def get_waiting(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_waiting`."""
        return await self.get_jobs("waiting", start, end, asc=True)

    async def get_active(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_active`."""
        return await self.get_jobs("active", start, end, asc=True)

    async def get_delayed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_delayed`."""
        return await self.get_jobs("delayed", start, end, asc=True)

    async def get_prioritized(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_prioritized`."""
        return await self.get_jobs("prioritized", start, end, asc=True)

    async def get_completed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_completed`."""
        return await self.get_jobs("completed", start, end, asc=False)

    async def get_failed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_failed`."""
        return await self.get_jobs("failed", start, end, asc=False)

    async def get_waiting_children(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_waiting_children`."""
        return await self.get_jobs("waiting-children", start, end, asc=True)

    async def get_waiting_count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_waiting_count`."""
        return await self.get_job_count_by_types("waiting")

    async def get_active_count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_active_count`."""
        return await self.get_job_count_by_types("active")

    async def get_delayed_count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_delayed_count`."""
        return await self.get_job_count_by_types("delayed")

    async def get_prioritized_count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_prioritized_count`."""
        return await self.get_job_count_by_types("prioritized")

    async def get_completed_count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_completed_count`."""
        return await self.get_job_count_by_types("completed")

    async def get_failed_count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_failed_count`."""
        return await self.get_job_count_by_types("failed")

    async def get_waiting_children_count(self) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_waiting_children_count`."""
        return await self.get_job_count_by_types("waiting-children")

    async def get_job_count_by_types(self, *states: str) -> int:
        """As :meth:`bulltask.queue.getters.QueueGetters.get_job_count_by_types`."""
        return sum((await self.get_job_counts(*states)).values())
