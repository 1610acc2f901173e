"""Keeping job schedulers going: the worker that picks an iteration up adds the next one (PROTOCOL 4.10)."""

from __future__ import annotations

from datetime import tzinfo
from typing import Final

from bulltask.clock import ServerClock
from bulltask.errors import RECOVERABLE
from bulltask.queue.following import add_following, pause_ms
from bulltask.transport.operation import run_sync
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.outcomes import AcquiredJob, Postponed

__all__ = ["Iterations"]

_PAUSE_MS: Final = 1_000
"""Whoever has the job meanwhile may have it for a second, before it is looked at again."""


class Iterations:
    """Responsible for the job that comes after one that a scheduler made.

    It is added before the job in hand runs, so whatever becomes of that one, the series goes on. Nothing here is
    asked about jobs that no scheduler made.

    Args:
        fetcher: whose connection carries the call; jobs are picked up by the main thread, for the event loop too.
        clock: the server's time.
        zone: for patterns that name no time zone.
    """

    def __init__(self, fetcher: JobFetcher, clock: ServerClock, zone: tzinfo) -> None:
        self._fetcher, self._clock, self._zone = fetcher, clock, zone

    def add_next(self, acquired: AcquiredJob) -> Postponed | None:
        """Add the job that follows; return what becomes of the job in hand if that cannot be done.

        While Redis is away it is tried again, as when an outcome cannot be written: the job is ours and the
        supervisor renews its lock. What Redis refuses, or what cannot be read, waits in ``delayed`` and is tried
        again (:func:`~bulltask.queue.following.pause_ms`).
        """
        interrupted = False
        while True:
            try:
                self._add(acquired)
                # Redis was away, perhaps for longer than the lock lasts: the job may be another worker's by now.
                lost = interrupted and not self._fetcher.keeps_lock(acquired)
            except RECOVERABLE as exc:
                interrupted = True
                self._fetcher.back_off(exc)
            except Exception as exc:  # noqa: BLE001 - whatever rule it has: the child has other jobs
                return Postponed(pause_ms(acquired.job.attempts_started), str(exc) or type(exc).__name__)
            else:
                self._fetcher.backoff.reset()
                return Postponed(_PAUSE_MS, "its lock was lost") if lost else None

    def _add(self, acquired: AcquiredJob) -> None:
        run_sync(self._fetcher.client, add_following(acquired.keys, acquired.job, self._clock.now_ms(), self._zone))
