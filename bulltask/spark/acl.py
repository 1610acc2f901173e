"""The minimal ACL grants of Redis users for Spark's reads and writes.

The documentation prints these lists, and a test runs with users that have exactly these grants. Reads need Redis 7.0
for ``%R~`` and for scripts that run read-only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["READER", "WRITER", "Grants"]

_CLUSTER: Final = ("cluster|slots", "asking")


@dataclass(frozen=True, slots=True)
class Grants:
    """The grants of a Redis user.

    Attributes:
        access: The prefix of key patterns: ``~`` for full access, ``%R~`` for reading.
        commands: The names of Redis commands, with a subcommand if only that is needed.
    """

    access: str
    commands: tuple[str, ...]

    def rules(self, prefix: str = "bull", *, cluster: bool = False) -> list[str]:
        """Return the rules for ``ACL SETUSER name on >password …``.

        Args:
            prefix: The setting ``prefix``.
            cluster: Whether the servers are a cluster. Each node needs the user.
        """
        bulltask_keys = "bulltask:*" if prefix == "bull" else f"bulltask:{prefix}:*"
        keys = [f"{self.access}{prefix}:*", f"{self.access}{bulltask_keys}"]
        allowed = (*self.commands, *(_CLUSTER if cluster else ()))
        return ["resetkeys", *keys, "resetchannels", "-@all", *(f"+{name}" for name in allowed)]


READER: Final = Grants(
    "%R~",
    (
        "eval_ro",
        "evalsha_ro",
        "exec",
        "exists",
        "hget",
        "hmget",
        "llen",
        "lrange",
        "multi",
        "scan",
        "sscan",
        "xinfo|stream",
        "xrange",
        "zcard",
        "zcount",
        "zmscore",
        "zrange",
        "zrangebyscore",
    ),
)
"""For ``spark.read``, ``spark.readStream``, ``gather`` and the pipeline's reads: this user cannot write."""

WRITER: Final = Grants(
    "~",
    (
        "del",
        "eval",
        "evalsha",
        "exists",
        "get",
        "hget",
        "hmget",
        "hmset",
        "hsetnx",
        "incr",
        "llen",
        "lpush",
        "pexpire",
        "rpush",
        "sadd",
        "set",
        "sismember",
        "time",
        "xadd",
        "zadd",
        "zrange",
        "zrem",
        "zrevrangebyscore",
    ),
)
"""For ``df.write``, ``df.writeStream`` and ``enqueue``: the commands of BullMQ's scripts that add jobs."""
