"""Keeping job schedulers going: the worker that picks an iteration up adds the next one (PROTOCOL 4.10)."""

from __future__ import annotations

from datetime import tzinfo
from typing import Final

from bulltask.clock import ServerClock
from bulltask.errors import REPAIRABLE, BulltaskError
from bulltask.job import ActiveJob
from bulltask.names import is_scheduler_id
from bulltask.repeat import Repeat, iteration_options
from bulltask.transport.scripts_schedule import Iteration, update_job_scheduler
from bulltask.worker.child.repeatables import add_next_repeat
from bulltask.worker.child.source import JobSource
from bulltask.worker.child.work import Picked, Postponed

__all__ = ["Iterations", "following"]

_FIRST_PAUSE_MS: Final = 1_000
_LONGEST_PAUSE_MS: Final = 300_000


class Iterations:
    """Responsible for the job that comes after one that a scheduler made.

    It is added before the job in hand runs, so whatever becomes of that one, the series goes on. Nothing here is
    asked about jobs that no scheduler made.

    Args:
        source: whose connection carries the call; jobs are picked up by the main thread, for the event loop too.
        clock: the server's time.
        zone: for patterns that name no time zone.
    """

    def __init__(self, source: JobSource, clock: ServerClock, zone: tzinfo) -> None:
        self._source, self._clock, self._zone = source, clock, zone

    def add_next(self, picked: Picked) -> Postponed | None:
        """Add the job that follows; return what becomes of the job in hand if that cannot be done.

        While Redis is away it is tried again, as when an outcome cannot be written: the job is ours and the
        supervisor renews its lock. What Redis refuses, or what cannot be read, waits in ``delayed`` and is tried
        again, after 2 s, 4 s … 5 min, as Node.js does: were the job run, its series would end.
        """
        job, interrupted = picked.job, False
        while True:
            try:
                self._add(picked)
                # Redis was away, perhaps for longer than the lock lasts: the job may be another worker's by now.
                lost = interrupted and not self._source.is_locked(picked)
            except REPAIRABLE as exc:
                interrupted = True
                self._source.pause(exc)
            except (BulltaskError, ValueError, OverflowError) as exc:  # the latter: what no clock or msgpack can hold
                pause_ms = _FIRST_PAUSE_MS * 2 ** min(job.attempts_started, 10)
                return Postponed(min(pause_ms, _LONGEST_PAUSE_MS), str(exc))
            else:
                self._source.outage.over()
                return Postponed(_FIRST_PAUSE_MS, "its lock was lost") if lost else None

    def _add(self, picked: Picked) -> None:
        job, now_ms = picked.job, self._clock.now_ms()
        if not job.scheduler_id or not is_scheduler_id(job.scheduler_id):
            add_next_repeat(self._source.client, picked.keys, job, now_ms, self._zone)
            return
        iteration = following(job, now_ms, self._zone)
        if iteration is not None:
            self._source.client.run(update_job_scheduler(picked.keys, job.scheduler_id, job.id, iteration, now_ms))


def following(job: ActiveJob, now_ms: int, zone: tzinfo) -> Iteration | None:
    """Return the job that follows ``job`` in its series, ``None`` if it was the last one.

    Args:
        job: made by a scheduler.
        now_ms: the server's time.
        zone: for a pattern that names no time zone.

    Raises:
        DecodeError, ConfigError: its rule cannot be read.
    """
    stored = job.opts.get("repeat")
    repeat = Repeat.from_wire(stored)
    if repeat.is_over(now_ms):
        return None
    next_ms = None
    if repeat.pattern is not None:
        previous = job.opts.get("prevMillis")
        # A clock that lags behind the one that made this job must not find the same moment again.
        next_ms = repeat.next_ms(max(now_ms, previous if isinstance(previous, int) else 0), zone)
        if next_ms is None:
            return None
    rule = {**job.opts["repeat"], "count": repeat.count + 1}
    return Iteration(next_ms, job.data, iteration_options(job.opts, rule, job.scheduler_id, next_ms, now_ms))
