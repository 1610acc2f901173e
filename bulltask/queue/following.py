"""What follows a job that a rule made: whoever takes one adds the next one (PROTOCOL 4.10)."""

from __future__ import annotations

from datetime import tzinfo

from bulltask.job import ActiveJob
from bulltask.names import is_scheduler_id
from bulltask.queue.repeatables import add_next_repeat
from bulltask.repeat import Repeat, iteration_options
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, ask
from bulltask.transport.scripts_schedule import Iteration, update_job_scheduler

__all__ = ["add_following", "following"]


def add_following(keys: QueueKeys, job: ActiveJob, now_ms: int, zone: tzinfo) -> Operation[None]:
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
        yield from ask(update_job_scheduler(keys, job.scheduler_id, job.id, iteration, now_ms))


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
