"""An app's connections to Redis: its clients, clock and keys, its producer and its results."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from bulltask.clock import ServerClock
from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl
from bulltask.jobs.names import bullmq_name, check_queue_name
from bulltask.jobs.states import Revocation
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.ports import EagerRunner, ResultReader
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.client import Client
from bulltask.transport.client_pool import ClientPool
from bulltask.transport.client_types import AnyAsyncClient, SyncClient
from bulltask.transport.cluster import ClusterPool
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation
from bulltask.transport.produce import Producer
from bulltask.transport.results import RECHECK_MS, Results, StreamWatcher
from bulltask.transport.revoke import revoke

__all__ = ["Broker"]

T = TypeVar("T")


class _PerLoop(Generic[T]):
    """One object per running event loop, dropped with the loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._objects: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T] = weakref.WeakKeyDictionary()

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        if (existing := self._objects.get(loop)) is None:
            existing = self._objects[loop] = self._make()
        return existing

    def remove(self) -> T | None:
        """Remove and return the running loop's object; the next :meth:`get` creates another one."""
        return self._objects.pop(asyncio.get_running_loop(), None)


class Broker:
    """An app's connections to the Redis server: its clients, which connect on first use, and the objects that use them.

    Args:
        config: The app's settings.
        url: The server; ``config.broker_url`` unless that is ``embedded://``.
        clustered: Whether the server is a node of a cluster. Currently, only sends are routed to the right node.
        clock: The clock that gives the time of all calls; default: the server's.

    Attributes:
        eager: Runs jobs when they are sent, in eager mode.
        payloads: Writes and reads arguments and results.
    """

    results: ResultReader
    producer: Producer
    eager: EagerRunner | None = None

    def __init__(
        self, config: Config, url: str | SecretUrl, *, clustered: bool = False, clock: ServerClock | None = None
    ) -> None:
        self.config, self.payloads = config, PayloadCodec(config)
        endpoint = Endpoint.from_config(config, url)
        self.endpoint = endpoint.for_cluster() if clustered else endpoint
        self.clock = ServerClock() if clock is None else clock
        self.pool = ClientPool(self.client)
        self._waiters = ClientPool(lambda: self.blocking_client(RECHECK_MS))
        self._keys: dict[str, QueueKeys] = {}
        self._async_clients = _PerLoop(lambda: AsyncClient(self.endpoint, self.clock))
        async_client = self._async_clients.get
        watchers = _PerLoop[dict[str, StreamWatcher]](dict)
        self._senders = ClusterPool(self.endpoint, self.clock) if clustered else self.pool
        self.producer = Producer(self._senders, async_client, self.keys, self.clock, config)
        results = Results(
            self.pool,
            self._waiters,
            async_client,
            lambda queue: self._watcher(watchers.get(), queue),
            self.keys,
            lambda ref, terminate: self.revocation(ref.queue, ref.id, terminate=terminate),
        )
        results.payloads = self.payloads
        self.results = results

    def keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue by its name in the app.

        Raises:
            InvalidNameError: The name is not a valid queue name.
        """
        keys = self._keys.get(queue)
        if keys is None:
            name = bullmq_name(check_queue_name(queue), hash_tag=self.config.queue_hash_tag)
            keys = self._keys[queue] = QueueKeys(self.config.prefix, name, queue)
        return keys

    def revocation(self, queue: str, job_id: str, *, terminate: bool) -> Operation[Revocation]:
        """Return the operation that revokes a job. Connect its client first, because it needs the server's time."""
        return revoke(self.keys(queue), job_id, self.config, self.clock.now_ms, terminate=terminate)

    def client(self, name: str | None = None, *, timeout_ms: int | None = None) -> SyncClient:
        """Create a client for a child or a supervisor; ``timeout_ms`` limits all its timeouts."""
        return Client(self.endpoint.within(timeout_ms), self.clock, name)

    def blocking_client(self, block_ms: int, name: str | None = None) -> SyncClient:
        """Create a client whose calls may block for up to ``block_ms``."""
        return Client(self.endpoint.blocking(block_ms), None, name)

    def shared_async_client(self) -> AnyAsyncClient:
        """Return the asyncio client that all tasks of the running loop share."""
        return self._async_clients.get()

    def async_client(self) -> AnyAsyncClient:
        """Create an asyncio client for the running loop that is not shared."""
        return AsyncClient(self.endpoint, self.clock)

    def close(self) -> None:
        """Close idle connections. The broker can be used again."""
        self.pool.close()
        self._senders.close()
        self._waiters.close()

    async def aclose(self) -> None:
        """Close the running loop's shared connection. The broker can be used again."""
        client = self._async_clients.remove()
        if client is not None:
            await client.close()

    def _watcher(self, watchers: dict[str, StreamWatcher], queue: str) -> StreamWatcher:
        if queue not in watchers:
            watchers[queue] = StreamWatcher(self.keys(queue), AsyncClient(self.endpoint.blocking(RECHECK_MS)))
        return watchers[queue]
