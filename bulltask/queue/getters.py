"""``QueueGetters``: everything that can be asked about a queue and its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from bulltask.jobs.states import JobState
from bulltask.queue import reading
from bulltask.queue.answers import ClientInfo, DependencyPage, JobCounts, JobLogs, Metrics
from bulltask.queue.base import QueueBase
from bulltask.queue.job import Job
from bulltask.queue.walk import Walk

__all__ = ["QueueGetters"]


class QueueGetters(QueueBase):
    """What a :class:`bulltask.queue.queue.Queue` can be asked; BullMQ has a class of that name too."""

    def get_job(self, job_id: str) -> Job | None:
        """Read a job; ``None`` when there is none of that id."""
        record = self._link.run(reading.get_job(self._link, job_id))
        return None if record is None else Job(self._link, record)

    def get_jobs(
        self, states: Iterable[str] | str = (), start: int = 0, end: int = -1, *, asc: bool = False
    ) -> list[Job]:
        """Read jobs ``start`` to ``end`` (both included) of each of ``states``, all at once.

        Args:
            states: ``waiting`` (means ``paused`` too), ``paused``, ``prioritized``, ``delayed``,
                ``waiting-children``, ``active``, ``completed``, ``failed``; none means all.
            start: first one of each state, from 0.
            end: last one of each state, -1 for all; for very many :meth:`iter_jobs` is the better way.
            asc: the oldest first.
        """
        found = self._link.run(reading.get_jobs(self._link, states, start, end, asc=asc))
        return [Job(self._link, record) for record in found]

    def get_job_ids(
        self, states: Iterable[str] | str = (), start: int = 0, end: int = -1, *, asc: bool = False
    ) -> list[str]:
        """The ids of those jobs alone; arguments as for :meth:`get_jobs`."""
        return self._link.run(reading.get_job_ids(self._link, states, start, end, asc=asc))

    def iter_jobs(self, states: Iterable[str] | str = (), *, asc: bool = True, page_size: int = 1000) -> Iterator[Job]:
        """Walk through any number of jobs, a page at a time, while others go on using the queue.

        A job that stays where it is from beginning to end is met, and met once. One that comes, leaves or moves
        meanwhile may be met or not; one that moves on to a later state is met at least once. A queue that grows
        faster than the walk does not keep it from ending. Only where jobs left so fast that a whole page was gone
        may some be met twice.

        Args:
            states: as in :meth:`get_jobs`; walked through in the order in which jobs go through them.
            asc: within a state the one that is next in turn (or ended first) comes first; else last.
            page_size: jobs in memory at a time.
        """
        walk = Walk(self._link, states, page_size, asc=asc)
        while (page := self._link.run(walk.page())) is not None:
            for record in page:
                yield Job(self._link, record)

    def get_job_counts(self, *states: str) -> dict[str, int]:
        """How many jobs are in each of ``states``; all eight if none is named."""
        return self._link.run(reading.get_counts_of(self._link, states))

    def job_counts(self) -> JobCounts:
        """How many jobs wait, run, have ended well or badly, and are delayed."""
        return self._link.run(reading.job_counts(self._link))

    def count(self) -> int:
        """How many jobs have not been taken yet: waiting, paused, prioritized, delayed and waiting for children."""
        return self._link.run(reading.count(self._link))

    def get_counts_per_priority(self, priorities: Sequence[int]) -> dict[int, int]:
        """How many jobs wait with each of ``priorities``; 0 are those without one."""
        return self._link.run(reading.get_counts_per_priority(self._link, priorities))

    def get_job_state(self, job_id: str) -> JobState:
        """Where a job is; ``UNKNOWN`` when there is none of that id."""
        return self._link.run(reading.get_job_state(self._link, job_id))

    def get_job_logs(self, job_id: str, start: int = 0, end: int = -1, *, asc: bool = True) -> JobLogs:
        """Lines of a job's log; see :meth:`bulltask.queue.job.Job.get_logs`."""
        return self._link.run(reading.get_job_logs(self._link, job_id, start, end, asc=asc))

    def get_metrics(self, kind: str, start: int = 0, end: int = -1) -> Metrics:
        """How many jobs ended as ``kind`` (``completed`` or ``failed``), minutes ``start`` to ``end``, newest first."""
        return self._link.run(reading.get_metrics(self._link, kind, start, end))

    def get_workers(self) -> list[ClientInfo]:
        """The workers that are connected now, whatever they are written in; one entry for each connection."""
        return self._link.run(reading.get_clients(self._link, events=False))

    def get_workers_count(self) -> int:
        """How many workers are connected now."""
        return len(self.get_workers())

    def get_queue_events(self) -> list[ClientInfo]:
        """The ``QueueEvents`` listeners that are connected now."""
        return self._link.run(reading.get_clients(self._link, events=True))

    def get_dependencies(self, parent_id: str, kind: str, start: int = 0, end: int = -1) -> DependencyPage:
        """Read children ``start`` to ``end`` of a job.

        Args:
            parent_id: the job.
            kind: ``"processed"``: with return values; ``"pending"``: those that have not ended; ``"ignored"``: failed
                ones that it does not mind, with reasons; ``"failed"``: those that fail it.
            start: first one, from 0, in an order of Redis' own.
            end: last one, -1 for all.
        """
        return self._link.run(reading.get_dependencies(self._link, parent_id, kind, start, end))

    def export_prometheus_metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """The counts of all states as Prometheus' text, as Node exports them.

        Args:
            labels: added to each line.
        """
        return self._link.run(reading.prometheus_text(self._link, labels or {}))

    def get_waiting(self, start: int = 0, end: int = -1) -> list[Job]:
        """Read jobs ``start`` to ``end`` of those that wait without a priority, the next one first."""
        return self.get_jobs("waiting", start, end, asc=True)

    def get_active(self, start: int = 0, end: int = -1) -> list[Job]:
        """Read jobs ``start`` to ``end`` of those that workers have, the oldest first."""
        return self.get_jobs("active", start, end, asc=True)

    def get_delayed(self, start: int = 0, end: int = -1) -> list[Job]:
        """Read jobs ``start`` to ``end`` of those that are due later, the next one first."""
        return self.get_jobs("delayed", start, end, asc=True)

    def get_prioritized(self, start: int = 0, end: int = -1) -> list[Job]:
        """Read jobs ``start`` to ``end`` of those that wait with a priority, the next one first."""
        return self.get_jobs("prioritized", start, end, asc=True)

    def get_completed(self, start: int = 0, end: int = -1) -> list[Job]:
        """Read jobs ``start`` to ``end`` of those that have ended well, the last one first."""
        return self.get_jobs("completed", start, end, asc=False)

    def get_failed(self, start: int = 0, end: int = -1) -> list[Job]:
        """Read jobs ``start`` to ``end`` of those that have ended badly, the last one first."""
        return self.get_jobs("failed", start, end, asc=False)

    def get_waiting_children(self, start: int = 0, end: int = -1) -> list[Job]:
        """Read jobs ``start`` to ``end`` of those that wait for their children, the oldest first."""
        return self.get_jobs("waiting-children", start, end, asc=True)

    def get_waiting_count(self) -> int:
        """How many jobs there are that wait without a priority."""
        return self.get_job_count_by_types("waiting")

    def get_active_count(self) -> int:
        """How many jobs there are that workers have."""
        return self.get_job_count_by_types("active")

    def get_delayed_count(self) -> int:
        """How many jobs there are that are due later."""
        return self.get_job_count_by_types("delayed")

    def get_prioritized_count(self) -> int:
        """How many jobs there are that wait with a priority."""
        return self.get_job_count_by_types("prioritized")

    def get_completed_count(self) -> int:
        """How many jobs there are that have ended well."""
        return self.get_job_count_by_types("completed")

    def get_failed_count(self) -> int:
        """How many jobs there are that have ended badly."""
        return self.get_job_count_by_types("failed")

    def get_waiting_children_count(self) -> int:
        """How many jobs there are that wait for their children."""
        return self.get_job_count_by_types("waiting-children")

    def get_job_count_by_types(self, *states: str) -> int:
        """How many jobs are in ``states`` together; in all eight if none is named."""
        return sum(self.get_job_counts(*states).values())
