"""Stops a worker that has nothing more to do: ``--burst`` and ``--max-jobs``."""

from __future__ import annotations

from collections.abc import Callable

from bulltask.errors import BrokerError
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.control_page import ControlPage
from bulltask.worker.supervisor.child_pool import ChildPool

__all__ = ["BurstCheck", "MaxJobsCheck"]


class BurstCheck:
    """Stops a worker when its queues have no job that it could run, and its children have none.

    The children are checked before and after the queues, because a child may take the last job in between, and that
    job may send others.

    Args:
        pool: The children.
        count_jobs: Reads from Redis how many jobs could run now.
        backoff: The supervisor's backoff.
        finish: Stops the worker.
    """

    interval_ms = 100

    def __init__(
        self, pool: ChildPool, count_jobs: Callable[[], int], backoff: ReconnectBackoff, finish: Callable[[str], None]
    ) -> None:
        self._pool, self._count_jobs, self._backoff, self._finish = pool, count_jobs, backoff, finish

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check the children and the queues."""
        before = self._pool.idle_slots()
        if not before or self._backoff.is_active or self._pool.is_paused:
            return
        try:
            if self._count_jobs() == 0 and self._pool.idle_slots() == before:
                self._finish("burst")
        except BrokerError as exc:
            self._backoff.record_failure(exc)


class MaxJobsCheck:
    """Stops a worker whose children have started the maximum number of jobs.

    Args:
        control: Counts the started jobs.
        max_jobs: The maximum.
        finish: Stops the worker.
    """

    interval_ms = 50

    def __init__(self, control: ControlPage, max_jobs: int, finish: Callable[[str], None]) -> None:
        self._control, self._max_jobs, self._finish = control, max_jobs, finish

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check the number of started jobs."""
        if self._control.jobs_started >= self._max_jobs:
            self._finish("max_jobs")
