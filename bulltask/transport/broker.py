"""An app's connections to Redis: its clients, clock and keys, its producer and its results."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from bulltask.clock import ServerClock
from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl
from bulltask.errors import BrokerConfigError
from bulltask.jobs.names import bullmq_name, check_queue_name
from bulltask.jobs.states import Revocation
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.ports import EagerRunner, ResultReader
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.async_cluster import AsyncClusterClient
from bulltask.transport.client import Client
from bulltask.transport.client_pool import ClientPool
from bulltask.transport.client_types import AnyAsyncClient, SyncClient
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.hash_slot_waits import HashSlotWaits
from bulltask.transport.keys import QueueKeys, guard_key
from bulltask.transport.operation import Operation
from bulltask.transport.produce import Producer
from bulltask.transport.results import FAILOVER_MS, RECHECK_MS, Results, StreamWatcher
from bulltask.transport.revoke import revoke
from bulltask.transport.topology import Topology

__all__ = ["NODE_TIMEOUT_MS", "Broker"]

T = TypeVar("T")
NODE_TIMEOUT_MS: Final = 3_000
"""How long a worker waits for a reply from one node of a cluster."""

_UNBLOCK_MS: Final = 1_000
"""Timeout for the call that ends a wait. It is short, because the child acquires no jobs during this call."""


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
    """An app's connections to Redis: its clients, which connect on first use, and the objects that use them.

    Redis is one server, or a cluster, in which every call goes to the node that has its keys.

    Args:
        config: The app's settings.
        url: The server; ``config.broker_url`` unless that is ``embedded://``.
        clock: The clock that gives the time of all calls; default: the server's.

    Attributes:
        topology: The nodes of the cluster; ``None`` for a single server.
        eager: Runs jobs when they are sent, in eager mode.
        payloads: Writes and reads arguments and results.
    """

    results: ResultReader
    producer: Producer
    eager: EagerRunner | None = None

    def __init__(self, config: Config, url: str | SecretUrl, *, clock: ServerClock | None = None) -> None:
        self.config, self.payloads = config, PayloadCodec(config)
        endpoint = Endpoint.from_config(config, url)
        is_cluster = endpoint.kind == "cluster"
        self.endpoint = endpoint.for_cluster() if is_cluster else endpoint
        self.topology = Topology(endpoint.seeds) if is_cluster else None
        self.clock = ServerClock() if clock is None else clock
        self.pool = ClientPool(self.client)
        self._waiters = ClientPool(lambda: self.blocking_client(RECHECK_MS))
        self._keys: dict[str, QueueKeys] = {}
        self._async_clients = _PerLoop(self.async_client)
        async_client = self._async_clients.get
        watchers = _PerLoop[dict[str, StreamWatcher]](dict)
        self.producer = Producer(self.pool, async_client, self.keys, self.clock, config, is_cluster=is_cluster)
        results = Results(
            self.pool,
            self._waiters,
            async_client,
            lambda queue: self._watcher(watchers.get(), queue),
            self.keys,
            lambda ref, terminate: self.revocation(ref.queue, ref.id, terminate=terminate),
        )
        results.payloads, results.url = self.payloads, self.endpoint.safe_url
        if self.endpoint.kind != "single":
            results.outage_timeout_ms = FAILOVER_MS
        self.results = results

    def keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue by its name in the app.

        Raises:
            InvalidNameError: The name is not a valid queue name.
            BrokerConfigError: In a cluster, the queue's keys would be on several nodes.
        """
        keys = self._keys.get(queue)
        if keys is None:
            name = bullmq_name(check_queue_name(queue), hash_tag=self.config.queue_hash_tag)
            keys = QueueKeys(self.config.prefix, name, queue)
            if self.topology is not None and guard_key(keys.base) is None:
                raise BrokerConfigError(
                    f"queue {queue}: in a Redis Cluster, all keys of a queue must be in one slot, but {keys.base}* "
                    "have no hash tag. Set queue_hash_tag=True, the default (Node then uses the name with braces: "
                    f"'{{{queue}}}'), or prefix='{{bull}}' in every app and Node client"
                )
            self._keys[queue] = keys
        return keys

    def revocation(self, queue: str, job_id: str, *, terminate: bool) -> Operation[Revocation]:
        """Return the operation that revokes a job. Connect its client first, because it needs the server's time."""
        return revoke(self.keys(queue), job_id, self.config, self.clock.now_ms, terminate=terminate)

    def client(self, name: str | None = None, *, timeout_ms: int | None = None) -> SyncClient:
        """Create a client; ``timeout_ms`` limits all its timeouts."""
        return self._new_client(self.endpoint.within(timeout_ms), self.clock, name)

    def worker_client(self, name: str | None = None, *, timeout_ms: int | None = None) -> SyncClient:
        """Create a client for a child or a supervisor, which has calls for several queues to make.

        In a cluster, trouble in one slot or node must not delay the calls to the others: a call for a slot that is
        being moved fails immediately, and a node that hangs is waited for once, for :data:`NODE_TIMEOUT_MS`.
        """
        if self.topology is None:
            return self.client(name, timeout_ms=timeout_ms)
        endpoint = self.endpoint.within(timeout_ms).within(NODE_TIMEOUT_MS)
        return ClusterClient(endpoint, self.clock, name, self.topology, waits=False)

    def blocking_client(self, block_ms: int, name: str | None = None) -> SyncClient:
        """Create a client whose calls may block for up to ``block_ms``."""
        return self._new_client(self.endpoint.blocking(block_ms), None, name)

    def hash_slot_waits(self, block_ms: int) -> HashSlotWaits | None:
        """Create an object for blocking calls of up to ``block_ms`` in several slots; ``None`` for a single server."""
        if self.topology is None:
            return None
        client = ClusterClient(self.endpoint.within(_UNBLOCK_MS), None, None, self.topology)
        return HashSlotWaits(self.endpoint.blocking(block_ms), self.topology, client)

    def shared_async_client(self) -> AnyAsyncClient:
        """Return the asyncio client that all tasks of the running loop share."""
        return self._async_clients.get()

    def async_client(self) -> AnyAsyncClient:
        """Create an asyncio client for the running loop that is not shared."""
        return self._new_async_client(self.endpoint, self.clock)

    def blocking_async_client(self, block_ms: int, name: str | None = None) -> AnyAsyncClient:
        """Create an asyncio client whose calls may block for up to ``block_ms``."""
        return self._new_async_client(self.endpoint.blocking(block_ms), None, name)

    def close(self) -> None:
        """Close idle connections. The broker can be used again."""
        self.pool.close()
        self._waiters.close()
        self._close_events()

    async def aclose(self) -> None:
        """Close the running loop's shared connection. The broker can be used again."""
        client = self._async_clients.remove()
        if client is not None:
            await client.close()
        self._close_events()

    def _close_events(self) -> None:
        if self.endpoint.primary is not None:
            self.endpoint.primary.close()

    def _watcher(self, watchers: dict[str, StreamWatcher], queue: str) -> StreamWatcher:
        if queue not in watchers:
            watchers[queue] = StreamWatcher(self.keys(queue), self.blocking_async_client(RECHECK_MS))
        return watchers[queue]

    def _new_client(self, endpoint: Endpoint, clock: ServerClock | None, name: str | None) -> SyncClient:
        if self.topology is None:
            return Client(endpoint, clock, name)
        return ClusterClient(endpoint, clock, name, self.topology)

    def _new_async_client(
        self, endpoint: Endpoint, clock: ServerClock | None, name: str | None = None
    ) -> AnyAsyncClient:
        if self.topology is None:
            return AsyncClient(endpoint, clock, name)
        return AsyncClusterClient(endpoint, clock, name, self.topology)
