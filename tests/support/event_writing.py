"""Write a queue's events to Redis, as BullMQ's scripts do."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from tests.support.lifecycle_oracle import LifecycleEvent

__all__ = ["fill", "write_events"]


def fill(client: redis.Redis, count: int, queue: str = "mail") -> list[str]:
    """Add ``count`` events to the queue's stream; return the ids that the server gave them."""
    pipeline = client.pipeline(transaction=False)
    pipeline.hset(f"bull:{{{queue}}}:meta", "opts.maxLenEvents", "10000")
    for number in range(count):
        pipeline.xadd(f"bull:{{{queue}}}:events", {"event": "stalled", "jobId": str(number)})
    return [str(entry_id) for entry_id in pipeline.execute()[1:]]


def write_events(client: redis.Redis, events: Iterable[LifecycleEvent]) -> int:
    """Add events with their ids to the streams of their queues; return the number of events."""
    count = 0
    with client.pipeline(transaction=False) as pipe:
        for event in events:
            fields = {
                "event": event.event,
                "jobId": event.job_id,
                "name": event.name,
                "prev": event.prev,
                "failedReason": event.failed_reason,
            }
            pipe.hsetnx(f"bull:{event.queue}:meta", "version", "bullmq:5.62.0")
            pipe.xadd(
                f"bull:{event.queue}:events",
                {name: value for name, value in fields.items() if value is not None},
                id=event.event_id,
            )
            count += 1
        pipe.execute()
    return count
