"""Other clients' queues that the pipeline skips, because a lake cannot store them."""

from __future__ import annotations

import redis

__all__ = ["SKIPPED_QUEUES", "write_skipped_queues"]

SKIPPED_QUEUES = {
    "mail": b"mail",  # conflicts with the queue {mail}
    "a\\x00b": b"{a\0b}",
    "a\\xff": b"{a\xff}",
    "typed": b"{typed}",
}
"""Queue names in Redis, by a part of the name in messages."""


def write_skipped_queues(client: redis.Redis) -> None:
    """Create all queues with one event each; the events key of ``typed`` is not a stream."""
    for name in SKIPPED_QUEUES.values():
        client.hset(b"bull:" + name + b":meta", "version", "bullmq:5.62.0")
        if name == SKIPPED_QUEUES["typed"]:
            client.set(b"bull:" + name + b":events", "no stream")
        else:
            client.xadd(b"bull:" + name + b":events", {"event": "stalled", "jobId": "1"})
    client.set("bull:{odd}:meta", "no hash")  # not skipped: its events can be read
