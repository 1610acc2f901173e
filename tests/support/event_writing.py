"""Events of a queue, written into Redis as BullMQ's scripts write them."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from bulltask.spark.lifecycle.fold import LifecycleEvent

__all__ = ["fill", "write_events"]


def fill(client: redis.Redis, count: int, queue: str = "mail") -> list[str]:
    """Add so many events to the queue's stream; return their ids, which are the server's."""
    pipeline = client.pipeline(transaction=False)
    pipeline.hset(f"bull:{{{queue}}}:meta", "opts.maxLenEvents", "10000")
    for number in range(count):
        pipeline.xadd(f"bull:{{{queue}}}:events", {"event": "stalled", "jobId": str(number)})
    return [str(entry_id) for entry_id in pipeline.execute()[1:]]


def write_events(client: redis.Redis, events: Iterable[LifecycleEvent]) -> int:
    """Add events to the streams of their queues, in their order and with their ids; return how many."""
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
