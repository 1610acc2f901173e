"""An app's connections to Redis (:class:`Broker`), and reads of a whole server: scans, its settings, its queues.

Each app has one broker. It makes the clients (of one server, of sentinels' primary, or of a cluster) that everything
else uses, and holds what they share: the server's clock, the names of the keys, the producer and the results.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeGuard, TypeVar

from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl
from bulltask.jobs.clock import ServerClock, value_class
from bulltask.jobs.errors import BrokerConfigError
from bulltask.jobs.names import Revocation, bullmq_name, check_queue_name
from bulltask.jobs.payloads import PayloadCodec
from bulltask.registry.protocols import EagerRunner, ResultReader
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import AnyAsyncClient, Call, QueueKeys, SyncClient, command, guard_key, info_by_name
from bulltask.transport.client import Client, ClientPool
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.operation import Operation
from bulltask.transport.produce import Producer
from bulltask.transport.results import FAILOVER_MS, RECHECK_MS, Results, StreamWatcher, revoke
from bulltask.transport.scripts.queue import DELAYED_SCORE
from bulltask.transport.streams import LONGEST_BLOCK_MS, SharedStream

if TYPE_CHECKING:
    from bulltask.transport.cluster import ClusterClient, HashSlotWaits, Topology
    from bulltask.transport.cluster_slots import Address

__all__ = [
    "MIN_REDIS_VERSION",
    "Broker",
    "ScanStep",
    "ServerSettings",
    "count_runnable_jobs",
    "count_unfinished_jobs",
    "read_queue_versions",
    "read_server_settings",
    "scan_all",
    "scan_up_to",
]


T = TypeVar("T")
MIN_REDIS_VERSION: Final = (6, 2)
"""The oldest version of Redis that is supported."""

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


class _KeysOfQueues(dict[str, QueueKeys]):
    """The keys of queues by their names in the app, made on first use: see :meth:`Broker.keys`."""

    def __init__(self, config: Config, *, in_cluster: bool) -> None:
        super().__init__()
        self._config = config
        self._in_cluster = in_cluster

    def __missing__(self, queue: str) -> QueueKeys:
        name = bullmq_name(check_queue_name(queue), hash_tag=self._config.queue_hash_tag)
        keys = QueueKeys(self._config.prefix, name, queue)
        if self._in_cluster and guard_key(keys.base) is None:
            raise BrokerConfigError(
                f"queue {queue}: in a Redis Cluster, all keys of a queue must be in one slot, but {keys.base}* "
                "have no hash tag. Set queue_hash_tag=True, the default (Node then uses the name with braces: "
                f"'{{{queue}}}'), or prefix='{{bull}}' in every app and Node client"
            )
        self[queue] = keys
        return keys


class Broker:
    """An app's connections to Redis: its clients, which connect on first use, and the objects that use them.

    Redis is one server, or a cluster, in which every call goes to the node that has its keys. The server's URL is
    ``config.broker_url`` unless that is ``embedded://``.

    Attributes:
        clock: The clock that gives the time of all calls; default: the server's.
        topology: The nodes of the cluster; ``None`` for a single server.
        eager: Runs jobs when they are sent, in eager mode.
        payloads: Writes and reads arguments and results.
        permitted: The hashes of the scripts that the user may complete: see :mod:`bulltask.transport.permissions`.
    """

    results: ResultReader
    producer: Producer
    eager: EagerRunner | None = None

    def __init__(self, config: Config, url: str | SecretUrl, *, clock: ServerClock | None = None) -> None:
        self.config = config
        self.payloads = PayloadCodec(config)
        self.permitted: set[str] = set()
        endpoint = Endpoint.from_config(config, url)
        is_cluster = endpoint.kind == "cluster"
        self.endpoint = endpoint.for_cluster() if is_cluster else endpoint
        self.topology: Topology | None = None
        if is_cluster:
            from bulltask.transport.cluster import Topology  # noqa: PLC0415 - only for a cluster

            self.topology = Topology(endpoint.seeds)
        self.clock = ServerClock() if clock is None else clock
        self.pool = ClientPool(self.client)
        self._waiters = ClientPool(lambda: self.blocking_client(RECHECK_MS))
        self._keys = _KeysOfQueues(config, in_cluster=is_cluster)
        self._async_clients = _PerLoop(self.async_client)
        async_client = self._async_clients.get
        watchers = _PerLoop[dict[str, StreamWatcher]](dict)
        self._event_streams = _PerLoop[dict[str, SharedStream]](dict)
        keys = self._keys.__getitem__
        self.producer = Producer(self.pool, async_client, keys, self.clock, config, is_cluster=is_cluster)
        results = Results(
            self.pool,
            self._waiters,
            async_client,
            lambda queue: self._watcher(watchers.get(), queue),
            keys,
            lambda ref, terminate: self.revocation(ref.queue, ref.id, terminate=terminate),
        )
        results.payloads = self.payloads
        results.url = self.endpoint.safe_url
        if self.endpoint.kind != "single":
            results.outage_timeout_ms = FAILOVER_MS
        self.results = results

    def keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue by its name in the app, if that is valid.

        Raises ``BrokerConfigError`` if, in a cluster, the keys would be on several nodes.
        """
        return self._keys[queue]

    def revocation(self, queue: str, job_id: str, *, terminate: bool) -> Operation[Revocation]:
        """Return the operation that revokes a job. Connect its client first, because it needs the server's time."""
        from bulltask.transport.permissions import permitted  # noqa: PLC0415 - not for a process that only sends

        operation = revoke(self.keys(queue), job_id, self.config, self.clock.now_ms, terminate=terminate)
        return permitted(operation, self.permitted, self.endpoint.safe_url)

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
        from bulltask.transport.cluster import ClusterClient  # noqa: PLC0415 - only for a cluster

        endpoint = self.endpoint.within(timeout_ms).within(NODE_TIMEOUT_MS)
        return ClusterClient(endpoint, self.clock, name, self.topology, waits=False)

    def blocking_client(self, block_ms: int, name: str | None = None) -> SyncClient:
        """Create a client whose calls may block for up to ``block_ms``."""
        return self._new_client(self.endpoint.blocking(block_ms), None, name)

    def hash_slot_waits(self, block_ms: int) -> HashSlotWaits | None:
        """Create an object for blocking calls of up to ``block_ms`` in several slots; ``None`` for a single server."""
        if self.topology is None:
            return None
        from bulltask.transport.cluster import ClusterClient, HashSlotWaits  # noqa: PLC0415 - only for a cluster

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

    def event_stream(self, queue: str, name: str) -> SharedStream:
        """Return the queue's stream for all readers in the running loop; ``CLIENT LIST`` shows ``name``."""
        streams = self._event_streams.get()
        if queue not in streams:
            client = self.blocking_async_client(LONGEST_BLOCK_MS, name)
            streams[queue] = SharedStream(self.keys(queue), client, self.shared_async_client)
        return streams[queue]

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
        from bulltask.transport.cluster import ClusterClient  # noqa: PLC0415 - only for a cluster

        return ClusterClient(endpoint, clock, name, self.topology)

    def _new_async_client(
        self, endpoint: Endpoint, clock: ServerClock | None, name: str | None = None
    ) -> AnyAsyncClient:
        if self.topology is None:
            return AsyncClient(endpoint, clock, name)
        from bulltask.transport.cluster import AsyncClusterClient  # noqa: PLC0415 - only for a cluster

        return AsyncClusterClient(endpoint, clock, name, self.topology)


ScanStep = Callable[[str], Call[tuple[str, list[str]]]]
"""A function that returns the call for the next step of a scan, given the cursor (first ``"0"``)."""


def scan_all(client: SyncClient, step: ScanStep) -> set[str]:
    """Scan and return all results; each call continues from the cursor that the previous one returned.

    If slots of a cluster have moved in the meantime, the scan starts again. Keys that are being moved to another node
    may be missed.
    """
    return scan_up_to(client, step, sys.maxsize)[0]


def scan_up_to(client: SyncClient, step: ScanStep, max_steps: int) -> tuple[set[str], bool]:
    """Like :func:`scan_all`, but with at most ``max_steps`` calls to each node; also return whether all was read."""
    if not _is_cluster(client):
        return _scan(step, client.run, max_steps)
    names, is_complete, nodes = set[str](), True, None
    while nodes != (nodes := client.nodes()):
        is_complete = True
        for address in nodes:
            found, ended = _scan(step, lambda call, node=address: client.run_at(node, call), max_steps)  # type: ignore[misc]
            names |= found
            is_complete &= ended
    return names, is_complete


def _is_cluster(client: SyncClient) -> TypeGuard[ClusterClient]:
    return hasattr(client, "nodes")


def _scan(
    step: ScanStep, run: Callable[[Call[tuple[str, list[str]]]], tuple[str, list[str]]], max_steps: int
) -> tuple[set[str], bool]:
    names, cursor = set[str](), "0"
    for _ in range(max_steps):
        cursor, page = run(step(cursor))
        names.update(page)
        if cursor == "0":
            return names, True
    return names, False


class RollingScan:
    """A scan that begins again after its end, a few calls at a time: it finds all that exists for two of its rounds."""

    def __init__(self, step: ScanStep) -> None:
        self._step = step
        self._cursors: list[tuple[Address | None, str]] = []

    def advance(self, client: SyncClient, max_steps: int) -> tuple[set[str], int]:
        """Make up to ``max_steps`` calls, but none beyond the end of this round; return the results, and their number.

        If a call fails, the next one begins a new round: a node may have been replaced.
        """
        cluster = client if _is_cluster(client) else None
        cursors = self._cursors or [(node, "0") for node in ([None] if cluster is None else cluster.nodes())]
        self._cursors = []
        found, steps = set[str](), 0
        while cursors and steps < max_steps:
            node, cursor = cursors.pop()
            call = self._step(cursor)
            cursor, page = client.run(call) if cluster is None or node is None else cluster.run_at(node, call)
            found.update(page)
            steps += 1
            if cursor != "0":
                cursors.append((node, cursor))
        self._cursors = cursors
        return found, steps


@value_class
class ServerSettings:
    """Properties of the server that a worker checks; in a cluster, those of the worst node.

    Attributes:
        version: The Redis version that the server is compatible with; the lowest of a cluster's nodes.
        eviction: Its ``maxmemory_policy``; any other than ``noeviction`` may delete jobs silently.
        max_clients: How many clients may connect (``maxclients``); ``None`` if the server does not say.
        connected: How many clients are connected.
    """

    version: tuple[int, ...]
    eviction: str
    max_clients: int | None
    connected: int


def read_server_settings(client: SyncClient) -> ServerSettings:
    """Read the server's settings from ``INFO``; in a cluster, those of every node that has slots."""
    nodes = client.run_on_all_nodes(command("INFO", parse_reply=_settings))
    eviction = next((node.eviction for node in nodes if node.eviction != "noeviction"), "noeviction")
    known = [node for node in nodes if node.max_clients is not None]
    fullest = min(known or nodes, key=lambda node: (node.max_clients or 0) - node.connected)
    version = min(node.version for node in nodes)
    return ServerSettings(version, eviction, fullest.max_clients, fullest.connected)


def count_runnable_jobs(client: SyncClient, queues: Sequence[QueueKeys], now_ms: int) -> int:
    """Count the jobs that a worker of these queues could run at ``now_ms`` (server time), in one round trip.

    These are the waiting and prioritized jobs, and the delayed jobs that are due (at most 100 of each queue), except
    those of paused queues.
    """
    calls: list[Call[Any]] = []
    for keys in queues:
        due: Call[Any] = command(
            "ZRANGEBYSCORE", keys.delayed, 0, DELAYED_SCORE * (now_ms + 1) - 1, "LIMIT", 0, 100, parse_reply=len
        )
        paused: Call[Any] = command("HEXISTS", keys.meta, "paused")
        calls += [paused, command("LLEN", keys.wait), command("ZCARD", keys.prioritized), due]
    counts = client.run_many(calls)
    by_queue = [counts[start : start + 4] for start in range(0, len(counts), 4)]
    return sum(sum(lengths) for paused, *lengths in by_queue if not paused)


def count_unfinished_jobs(client: SyncClient, queues: Sequence[QueueKeys]) -> list[int]:
    """Count each queue's waiting, paused, prioritized and delayed jobs in one round trip; reads only these keys."""
    calls: list[Call[Any]] = []
    for keys in queues:
        calls += [command("LLEN", keys.wait), command("LLEN", keys.paused)]
        calls += [command("ZCARD", keys.prioritized), command("ZCARD", keys.delayed)]
    counts = client.run_many(calls)
    return [sum(counts[start : start + 4]) for start in range(0, len(counts), 4)]


def read_queue_versions(client: SyncClient, queues: Sequence[QueueKeys]) -> list[str]:
    """Read the version of the client that wrote each queue's metadata: ``bullmq:5.62.0``; ``""`` if missing."""
    calls: list[Call[str]] = [command("HGET", keys.meta, "version", parse_reply=_text) for keys in queues]
    return client.run_many(calls)


def _text(reply: Any) -> str:
    return "" if reply is None else reply.decode("utf-8", "replace")


def _settings(reply: Any) -> ServerSettings:
    info = info_by_name(reply)
    numbers = tuple(int(part) for part in info.get("redis_version", "0").split(".") if part.isdecimal())
    return ServerSettings(
        numbers,
        info.get("maxmemory_policy", "noeviction"),
        int(info["maxclients"]) if info.get("maxclients", "").isdecimal() else None,
        int(connected) if (connected := info.get("connected_clients", "")).isdecimal() else 0,
    )
