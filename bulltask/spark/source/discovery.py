"""The queues under a prefix, for readers that ask again and again: every trigger of a query, every request for metrics.

A scan of the keyspace costs Redis half a second per million keys, whoever they belong to. Workers and senders of
bulltask register their queues, so a scan only has to find those that Node.js alone uses. All keys are scanned at the
start, and then slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from threading import Lock
from typing import Final

from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl
from bulltask.jobs.clock import mono_ms
from bulltask.spark.source.connection import Connection
from bulltask.transport.broker import RollingScan
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.queue import queue_exists, scan_queues
from bulltask.transport.workers import registered_names

_STEPS_PER_S: Final = 2
"""How many times a thousand keys are scanned per second, on average; that takes Redis 0.5 milliseconds each time."""

_SAVED_STEPS: Final = 100
"""How many steps may be made at once, at least: with fewer keys, every call finds all queues."""


class QueueDiscovery:
    """Finds the queues under a prefix (see the module)."""

    def __init__(self, prefix: str, now_ms: Callable[[], int] = mono_ms) -> None:
        self._prefix = prefix
        self._now_ms = now_ms
        self._scan = RollingScan(partial(scan_queues, prefix))
        self._scanned: set[str] | None = None
        self._steps = float(_SAVED_STEPS)
        self._at_ms = now_ms()

    def names(self, connection: Connection) -> set[str]:
        """Return BullMQ's names of the queues that exist; the first call scans all keys."""
        names = self._scan_more(connection).union(connection.run(registered_names(self._prefix)))
        keys = [QueueKeys(self._prefix, name) for name in names]
        existing = connection.run_many([queue_exists(queue) for queue in keys])
        found = {queue.name for queue, exists in zip(keys, existing, strict=True) if exists}
        self._scanned = found
        return found

    def _scan_more(self, connection: Connection) -> set[str]:
        """Return the queues that were known, and those that the next part of the scan finds."""
        now_ms = self._now_ms()
        if self._scanned is None:
            self._at_ms = now_ms
            return connection.scan_all(partial(scan_queues, self._prefix))
        gained = (now_ms - self._at_ms) * _STEPS_PER_S / 1000
        self._at_ms = now_ms
        self._steps = min(self._steps + gained, max(_SAVED_STEPS, gained))
        found, steps = connection.advance(self._scan, int(self._steps))
        self._steps -= steps
        return self._scanned | found


_LOCK: Final = Lock()


def find_again(connection: Connection, config: Config) -> set[str]:
    """Return BullMQ's names of the queues of ``config``; only this process's first call scans all keys."""
    with _LOCK:  # several requests for metrics may be served at the same time
        return _discovery(config.broker_url, config.prefix).names(connection)


@lru_cache(maxsize=8)
def _discovery(url: SecretUrl, prefix: str) -> QueueDiscovery:  # noqa: ARG001 - a server's queues are its own
    return QueueDiscovery(prefix)
