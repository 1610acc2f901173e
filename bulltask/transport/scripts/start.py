"""The call that starts or throttles a job of a task with a rate limit."""

from __future__ import annotations

from typing import Any

from bulltask.config.rate_limits import TaskRate
from bulltask.jobs.job import RunningJob
from bulltask.lua import wrappers
from bulltask.transport.call import Call, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for
from bulltask.transport.scripts.move import wake_next

__all__ = ["start_or_throttle"]


def start_or_throttle(keys: QueueKeys, job: RunningJob, token: str, rate: TaskRate, now_ms: int) -> Call[int]:
    """bulltask's ``startOrThrottle`` with ``moveToDelayed``: start a job, or delay it because of its task's rate limit.

    Returns:
        A call. Its result is 0 if the job may start, else the milliseconds until the job is due again.

    Args:
        keys: The queue.
        job: The job. A job that has started before, or has the option ``lifo``, goes before the throttled jobs.
        token: The token of its lock.
        rate: The task's rate limit.
        now_ms: The server's time.
    """
    skips_line = job.lifo or job.attempts_started > 1
    script_keys = (
        keys.next_start(job.name),
        keys.throttled(job.name),
        keys.wait,
        keys.marker,
        keys.active,
        keys.prioritized,
        keys.delayed,
        keys.job(job.id),
        keys.events,
        keys.meta,
        keys.stalled,
    )
    interval, tolerance = f"{rate.interval_ms:.6f}", f"{rate.tolerance_ms:.6f}"
    args = (interval, tolerance, "1" if skips_line else "", job.name, keys.base, now_ms, job.id, token)

    def parse_reply(reply: Any) -> int:
        raise_for(reply, job.id, keys.name)
        return int(reply)

    return wake_next(keys, script_call(wrappers.with_delay("startOrThrottle"), script_keys, args, parse_reply))
