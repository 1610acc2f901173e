"""Add jobs to the queue ``mail`` and read its keys in Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import redis

from bulltask.queue import Queue

__all__ = ["BASE", "EVERY_STATE", "add", "age_jobs", "ids_in_redis"]

BASE: Final = "bull:{mail}:"
EVERY_STATE: Final = "wait,active,paused,delayed,prioritized,waiting-children,completed,failed"
_SETS: Final = ("delayed", "prioritized", "waiting-children", "completed", "failed")


def add(queue: Queue, count: int, **options: Any) -> list[str]:
    """Add jobs; return their ids."""
    jobs: list[Any] = [{"name": "send", "data": {"n": number}, "options": options} for number in range(count)]
    return [job.id for job in queue.add_bulk(jobs)]


def ids_in_redis(client: redis.Redis, state: str) -> list[str]:
    """Return the ids of the jobs in a state."""
    key = BASE + state
    return [str(job_id) for job_id in (client.zrange(key, 0, -1) if state in _SETS else client.lrange(key, 0, -1))]


def age_jobs(client: redis.Redis, state: str, hours: Callable[[int], int]) -> None:
    """Change when jobs finished: the n-th newest job in a state ``hours(n)`` hours before the newest."""
    for number, job_id in enumerate(reversed(ids_in_redis(client, state))):
        finished_ms = int(client.zscore(BASE + state, job_id) or 0) - 3_600_000 * hours(number)
        client.zadd(BASE + state, {job_id: finished_ms})
        client.hset(BASE + job_id, "finishedOn", finished_ms)
