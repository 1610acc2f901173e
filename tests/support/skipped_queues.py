"""Queues of others under the same prefix that a lake cannot hold."""

from __future__ import annotations

import redis

__all__ = ["SKIPPED_QUEUES", "write_skipped_queues"]

SKIPPED_QUEUES = {
    "mail": b"mail",  # beside the queue {mail}
    "a\\x00b": b"{a\0b}",
    "a\\xff": b"{a\xff}",
    "x" * 59: b"{" + b"x" * 256 + b"}",
    "\N{SNOWMAN}" * 59: b"{" + "\N{SNOWMAN}".encode() * 84 + b"}",  # fewer characters than there may be, but more bytes
    "typed": b"{typed}",
}
"""By a part of what a message calls them: their names."""


def write_skipped_queues(client: redis.Redis) -> None:
    """Let there be all of them, with an event each; the events of ``typed`` are no stream."""
    for name in SKIPPED_QUEUES.values():
        client.hset(b"bull:" + name + b":meta", "version", "bullmq:5.62.0")
        if name == SKIPPED_QUEUES["typed"]:
            client.set(b"bull:" + name + b":events", "no stream")
        else:
            client.xadd(b"bull:" + name + b":events", {"event": "stalled", "jobId": "1"})
    client.set("bull:{odd}:meta", "no hash")  # which does not matter: its events can be read
