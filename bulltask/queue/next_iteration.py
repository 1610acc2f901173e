"""The next iteration of a job scheduler. The worker that acquires one of the scheduler's jobs adds it."""

from __future__ import annotations

from datetime import tzinfo
from typing import Final

from bulltask.errors import BulltaskError
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import may_be_old_repeat_key
from bulltask.queue.repeatables import add_next_repeat
from bulltask.schedules.repeat import Repeat, iteration_options
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.schedule import Iteration, has_job_scheduler, update_job_scheduler

__all__ = ["SCHEDULING_ERRORS", "add_next_iteration", "next_iteration", "scheduling_retry_delay_ms"]

SCHEDULING_ERRORS: Final = (BulltaskError, ValueError, OverflowError)
"""Errors of :func:`add_next_iteration`; the last two are for a time that a clock or msgpack cannot represent."""

_PAUSE_UNIT_MS: Final = 1_000
_MAX_PAUSE_MS: Final = 300_000


def scheduling_retry_delay_ms(attempts_started: int) -> int:
    """Return how long a job is delayed if its next iteration could not be added: 2 s, 4 s … 5 min, as in Node.

    If the job ran instead, its scheduler would add no further jobs.
    """
    return min(_PAUSE_UNIT_MS << min(max(0, attempts_started), 10), _MAX_PAUSE_MS)


def add_next_iteration(keys: QueueKeys, job: RunningJob, now_ms: int, zone: tzinfo) -> Operation[None]:
    """Add the iteration after ``job``, unless that was the last one or its scheduler was removed.

    Args:
        keys: The queue.
        job: Added by a job scheduler, or a repeatable job of BullMQ before 5.10.
        now_ms: The server's time.
        zone: For a pattern without a time zone.

    Raises:
        BrokerError: Redis cannot be reached or returns an error; it is safe to retry.
        DecodeError, ConfigError: Its rule is malformed.
    """
    key = job.scheduler_id
    if not key or (may_be_old_repeat_key(key) and not (yield from execute(has_job_scheduler(keys, key)))):
        yield from add_next_repeat(keys, job, now_ms, zone)
        return
    iteration = next_iteration(job, now_ms, zone)
    if iteration is not None:
        yield from execute(update_job_scheduler(keys, key, job.id, iteration, now_ms))


def next_iteration(job: RunningJob, now_ms: int, zone: tzinfo) -> Iteration | None:
    """Return the iteration after ``job``, ``None`` if that was the last one.

    Args:
        job: Added by a job scheduler.
        now_ms: The server's time.
        zone: For a pattern without a time zone.

    Raises:
        DecodeError, ConfigError: Its rule is malformed.
    """
    stored = job.opts.get("repeat")
    repeat = Repeat.from_wire(stored)
    if repeat.is_over(now_ms):
        return None
    next_ms = None
    if repeat.pattern is not None:
        previous = job.opts.get("prevMillis")
        # Without max(), a clock that is behind the one that scheduled this job would give the same time again.
        next_ms = repeat.next_ms(max(now_ms, previous if isinstance(previous, int) else 0), zone)
        if next_ms is None:
            return None
    rule = {**job.opts["repeat"], "count": repeat.count + 1}
    return Iteration(next_ms, job.data, iteration_options(job.opts, rule, job.scheduler_id, next_ms, now_ms))
