"""Events of a queue, written into Redis as BullMQ's scripts write them, with ids that the test chooses."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from bulltask.spark.lifecycle.fold import Event

__all__ = ["write_events"]


def write_events(client: redis.Redis, events: Iterable[Event]) -> int:
    """Add events to the streams of their queues, in their order; return how many."""
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
