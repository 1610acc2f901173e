"""Which queues a read is of: those that were named, or all under the prefix."""

from __future__ import annotations

from bulltask.errors import ConfigError
from bulltask.spark.connection import Connection
from bulltask.spark.options import ReadOptions
from bulltask.spark.pushdown import Narrowing
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts_history import some_queues

__all__ = ["find_queues"]


def find_queues(connection: Connection, options: ReadOptions, narrowing: Narrowing) -> list[QueueKeys]:
    """Return the keys of the queues to read, sorted by name.

    Args:
        connection: to the server; it is asked only when all queues are read.
        options: which queues, and how they are spelled.
        narrowing: filters that may leave fewer of them.

    Raises:
        ConfigError: ``*`` found two queues that the user would spell alike.
    """
    if not options.every:
        return [options.keys(queue) for queue in sorted(options.queues) if narrowing.queue(queue)]
    prefix = options.config.prefix
    found: dict[str, str] = {}
    for wire in _all_names(connection, prefix):
        queue = options.user_name(wire) or wire
        if queue in found:
            raise ConfigError(
                f"under the prefix {prefix!r} there are the queues {found[queue]!r} and {wire!r}, and both would be "
                f"called {queue!r}; set queueHashTag=false, so that queues are called as BullMQ calls them"
            )
        found[queue] = wire
    return [QueueKeys(prefix, found[queue], queue) for queue in sorted(found) if narrowing.queue(queue)]


def _all_names(connection: Connection, prefix: str) -> list[str]:
    names: set[str] = set()
    cursor = "0"
    while True:
        cursor, some = connection.run(some_queues(prefix, cursor))
        names.update(some)
        if cursor == "0":
            return sorted(names)
