"""The minimum permissions (ACL) that Redis users need for Spark's reads and writes.

docs/how-to/spark.md has the command that prints these lists, and a test runs with users that have exactly these
permissions. Reads need Redis 7.0 for ``%R~`` and for scripts that run read-only.
"""

from __future__ import annotations

from typing import Final

from bulltask.transport.permissions import Grants

READER: Final = Grants(
    "%R~",
    (
        "eval_ro", "evalsha_ro", "exec", "exists", "hget", "hmget", "llen", "lrange", "multi", "scan",
        "sscan", "xinfo|stream", "xrange", "zcard", "zcount", "zmscore", "zrange", "zrangebyscore",
    ),
)  # fmt: skip
"""For ``spark.read``, ``spark.readStream``, ``gather`` and the pipeline's reads: this user cannot write."""

WRITER: Final = Grants(
    "~",
    (
        "del", "eval", "evalsha", "exists", "get", "hget", "hmget", "hmset", "hsetnx", "incr", "llen",
        "lpush", "pexpire", "pttl", "rpush", "sadd", "set", "sismember", "time", "xadd", "zadd", "zrange",
        "zrem", "zrevrangebyscore",
    ),
)  # fmt: skip
"""For ``df.write``, ``df.writeStream`` and ``enqueue``: the commands of BullMQ's scripts that add jobs."""
