"""Which queues a read is of: those that were named, or all under the prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bulltask.errors import ConfigError
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import ReadOptions
from bulltask.transport.keys import QueueKeys

if TYPE_CHECKING:
    from bulltask.spark.source.pushdown import Narrowing  # imports pyspark, which a look at queues does not need
from bulltask.transport.scripts_history import some_queues

__all__ = ["find_queues"]


def find_queues(connection: Connection, options: ReadOptions, narrowing: Narrowing | None = None) -> list[QueueKeys]:
    """Return the keys of the queues to read, sorted by name.

    Args:
        connection: to the server; it is asked only when all queues are read.
        options: which queues, and how they are spelled.
        narrowing: filters that may leave fewer of them, none if left out.

    Raises:
        ConfigError: ``*`` found two queues that the user would spell alike.
    """
    if not options.every:
        return [options.keys(queue) for queue in sorted(options.queues) if _wanted(queue, narrowing)]
    prefix = options.config.prefix
    found: dict[str, str] = {}
    for wire in sorted(connection.walk(lambda cursor: some_queues(prefix, cursor))):
        queue = options.user_name(wire) or wire
        if queue in found:
            raise ConfigError(
                f"under the prefix {prefix!r} there are the queues {found[queue]!r} and {wire!r}, and both would be "
                f"called {queue!r}; set queueHashTag=false, so that queues are called as BullMQ calls them"
            )
        found[queue] = wire
    return [QueueKeys(prefix, found[queue], queue) for queue in sorted(found) if _wanted(queue, narrowing)]


def _wanted(queue: str, narrowing: Narrowing | None) -> bool:
    return narrowing is None or narrowing.queue(queue)
