"""What follows a job that a rule made: whoever takes one adds the next one (PROTOCOL 4.10)."""

from __future__ import annotations

from datetime import tzinfo
from typing import Final

from bulltask.errors import BulltaskError
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import is_scheduler_id
from bulltask.queue.repeatables import add_next_repeat
from bulltask.schedule.repeat import Repeat, iteration_options
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.schedule import Iteration, update_job_scheduler

__all__ = ["NOT_ADDED", "add_following", "following", "pause_ms"]

NOT_ADDED: Final = (BulltaskError, ValueError, OverflowError)
"""What :func:`add_following` may raise; the last two: a moment that no clock or msgpack can hold."""

_FIRST_PAUSE_MS: Final = 1_000
_LONGEST_PAUSE_MS: Final = 300_000


def pause_ms(attempts_started: int) -> int:
    """How long a job is put off whose following one could not be added: 2 s, 4 s … 5 min, as Node.js does.

    Were the job run, its series would end.
    """
    return min(_FIRST_PAUSE_MS << min(max(0, attempts_started), 10), _LONGEST_PAUSE_MS)


def add_following(keys: QueueKeys, job: RunningJob, now_ms: int, zone: tzinfo) -> Operation[None]:
    """Add the job that follows ``job``; nothing if it was the last one, or if its series was removed.

    Args:
        keys: the queue.
        job: made by a job scheduler, or a repeatable one of BullMQ before 5.10.
        now_ms: the server's time.
        zone: for a pattern that names no time zone.

    Raises:
        BrokerError: Redis is away, or refuses; asking again is safe.
        DecodeError, ConfigError: its rule cannot be read.
    """
    if not job.scheduler_id or not is_scheduler_id(job.scheduler_id):
        yield from add_next_repeat(keys, job, now_ms, zone)
        return
    iteration = following(job, now_ms, zone)
    if iteration is not None:
        yield from execute(update_job_scheduler(keys, job.scheduler_id, job.id, iteration, now_ms))


def following(job: RunningJob, now_ms: int, zone: tzinfo) -> Iteration | None:
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
