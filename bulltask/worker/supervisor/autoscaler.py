"""Scales the number of children with the number of jobs."""

from __future__ import annotations

from collections.abc import Callable

from bulltask.config.parsers import Autoscale
from bulltask.errors import BrokerError
from bulltask.events import Bus, ConcurrencyChanged
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.supervisor.child_pool import ChildPool

__all__ = ["Autoscaler"]


class Autoscaler:
    """Scales the number of children between the minimum and the maximum of ``worker_autoscale``.

    The number grows when jobs are waiting but no child is waiting for a job. Each tick at most doubles it, so that a
    short backlog does not start all children. If jobs wait because of a rate limit or global concurrency, children are
    waiting, so no more are started. The number shrinks by the number of children that were not needed during the
    keepalive (30 s by default, as in Celery). Children with the fewest jobs are stopped first; they finish their jobs.

    Args:
        pool: The children.
        limits: The minimum and maximum number of children.
        keepalive_ms: How long the worker must have had more children than it needed before the surplus is stopped.
        per_child: How many jobs a child can run at a time.
        count_jobs: Reads from Redis how many jobs could run now.
        bus: Receives an event for each change.
        backoff: The supervisor's backoff.
    """

    interval_ms = 1_000

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        pool: ChildPool,
        limits: Autoscale,
        keepalive_ms: int,
        per_child: int,
        count_jobs: Callable[[], int],
        bus: Bus,
        backoff: ReconnectBackoff,
    ) -> None:
        self._pool, self._limits, self._keepalive_ms, self._per_child = pool, limits, keepalive_ms, per_child
        self._count_jobs, self._bus, self._backoff = count_jobs, bus, backoff
        self._min_free: int | None = None
        self._shrink_at_ms = 0

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Compare the children with the jobs, and start or stop children."""
        free = self._pool.free_slots(self._per_child)
        if self._pool.is_paused or self._backoff.is_active or free is None:
            self._min_free = None
        elif free == 0:
            self._min_free = None
            self._grow()
        elif self._min_free is None:
            self._min_free, self._shrink_at_ms = free, now_ms + self._keepalive_ms
        else:
            self._min_free = min(self._min_free, free)
            if now_ms >= self._shrink_at_ms:
                self._resize(self._pool.target - self._min_free // self._per_child)
                self._min_free = None

    def _grow(self) -> None:
        target = self._pool.target
        if target >= self._limits.maximum:
            return
        try:
            self._resize(target + min(target, self._count_jobs()))
        except BrokerError as exc:
            self._backoff.record_failure(exc)

    def _resize(self, target: int) -> None:
        target = max(self._limits.minimum, min(self._limits.maximum, target))
        if target != self._pool.target:
            self._pool.resize(target)
            self._bus.emit(ConcurrencyChanged(self._pool.target, "autoscale"))
