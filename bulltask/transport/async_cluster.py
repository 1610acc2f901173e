"""The asyncio client of a Redis Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from bulltask import loop_timers
from bulltask.clock import ServerClock, mono_ms
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError, BulltaskError
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import Call
from bulltask.transport.cluster_rounds import Batch, Rounds, name_node
from bulltask.transport.cluster_slots import Address, SlotMap, slots
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.redis_errors import is_no_cluster, no_cluster_error
from bulltask.transport.server_info import TIME
from bulltask.transport.topology import Topology

__all__ = ["AsyncClusterClient"]

R = TypeVar("R")


class AsyncClusterClient:
    """One connection to each node, which the tasks of one event loop share.

    It does for asyncio what :class:`~bulltask.transport.cluster.ClusterClient` does, with the same arguments. The calls
    of one task for one queue are executed in their order, but a call that a node redirects may be executed after later
    calls. ``WATCH`` is not supported, because the tasks share the connections.

    Args:
        endpoint: Nodes from which the others are discovered.
        clock: Set when connecting and every few seconds, unless there is a name; ``None`` for no clock.
        name: The name of the connections in ``CLIENT LIST``.
        topology: The nodes, if other clients share them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: ServerClock | None = None,
        name: str | None = None,
        topology: Topology | None = None,
    ) -> None:
        self._endpoint, self._clock, self._name = endpoint.for_cluster(), clock if name is None else None, name
        self._topology = Topology(endpoint.seeds) if topology is None else topology
        self._topology_version = 0
        self._clients: dict[Address, AsyncClient] = {}
        self._connecting = asyncio.Lock()

    async def run(self, call: Call[R]) -> R:
        """Make one call; raises the same errors as ``AsyncClient.run``."""
        result: R = (await self.run_many([call]))[0]
        return result

    async def run_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """Make several calls in one round trip to each node; raises the same errors as ``AsyncClient.run_many``.

        Args:
            calls: The calls.
            deadline_ms: Deadline (``mono_ms``), in addition to the endpoint's timeouts.
        """
        results = await self.try_many(calls, deadline_ms)
        for result in results:
            if isinstance(result, BulltaskError):
                raise result
        return results

    async def try_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """Make independent calls; the result of a failed call is its error.

        Raises:
            BrokerUnavailableError: No node replies.
            BrokerError: Calls that belong together have keys in several slots; no call was sent.
        """
        until_ms = mono_ms() + self._endpoint.command_timeout_ms
        if deadline_ms is not None:
            until_ms = min(until_ms, deadline_ms)
        rounds = Rounds(self._topology, calls, until_ms, self._endpoint.safe_url)
        pause_ms: int | None = 0 if calls else None
        while pause_ms is not None:
            if pause_ms:
                await loop_timers.sleep(pause_ms / 1000)
            try:
                await self.connect(deadline_ms)
            except BrokerError as exc:
                rounds.fail(exc)
                break
            batches = rounds.batches()
            for batch, results in zip(batches, await self._exchange(batches, deadline_ms), strict=True):
                rounds.record(batch, results)
            pause_ms = rounds.pause_ms()
        return rounds.results

    async def connect(self, deadline_ms: int | None = None) -> None:
        """Read the slot map and set the clock, unless both are known; ``deadline_ms`` as in :meth:`run_many`."""
        if not self._is_ready:
            async with self._connecting:
                if not self._topology.is_known:
                    self._topology.set(await self._read_map(deadline_ms))
                if self._clock is not None and self._clock.due:
                    await self._set_clock(self._clock, deadline_ms)
                    while self._clock.is_uncertain:
                        await self._set_clock(self._clock, deadline_ms)
                if self._topology_version != self._topology.version:
                    self._topology_version = self._topology.version
                    await self._close_unused()

    async def close(self) -> None:
        """Close the connections. Calls that are waiting fail with ``BrokerUnavailableError``."""
        for client in tuple(self._clients.values()):
            await client.close()

    @property
    def _is_ready(self) -> bool:
        return (
            self._topology.is_known
            and self._topology_version == self._topology.version
            and (self._clock is None or not self._clock.due)
        )

    async def _exchange(self, batches: Sequence[Batch], deadline_ms: int | None) -> Sequence[list[Any] | BrokerError]:
        attempts = [_attempt(self._client(batch.address).try_many(batch.calls, deadline_ms)) for batch in batches]
        return [await attempts[0]] if len(attempts) == 1 else await asyncio.gather(*attempts)

    async def _read_map(self, deadline_ms: int | None) -> SlotMap:
        errors: list[BrokerError] = []
        for address in self._topology.candidates():
            # Not on a connection with a name, as in ClusterClient.
            client = self._client(address) if self._name is None else AsyncClient(self._endpoint.at(*address))
            try:
                slot_map: SlotMap = (await client.run_many([slots(address)], deadline_ms))[0]
            except (BrokerUnavailableError, BrokerNotReadyError) as exc:
                errors.append(exc)
            except BrokerError as exc:
                raise (no_cluster_error(self._endpoint.safe_url) if is_no_cluster(exc) else exc) from exc
            else:
                return slot_map
            finally:
                if self._name is not None:
                    await client.close()
        raise errors[-1]

    async def _set_clock(self, clock: ServerClock, deadline_ms: int | None) -> None:
        errors: list[BrokerError] = []
        for address in self._topology.by_preference():
            sent_ms = mono_ms()
            result = await _attempt(self._client(address).run_many([TIME], deadline_ms))
            if not isinstance(result, BrokerError):
                clock.set(result[0], sent_ms, mono_ms())
                return
            self._topology.record_failure(address)
            errors.append(name_node(result, address))
        raise errors[-1]

    async def _close_unused(self) -> None:
        """Close the connections to nodes that no longer have slots."""
        known = self._topology.primaries()
        for address in [address for address in self._clients if address not in known]:
            await self._clients.pop(address).close()

    def _client(self, address: Address) -> AsyncClient:
        if (client := self._clients.get(address)) is None:
            client = self._clients[address] = AsyncClient(self._endpoint.at(*address), None, self._name)
        return client


async def _attempt(use: Coroutine[Any, Any, R]) -> R | BrokerError:
    try:
        return await use
    except BrokerError as exc:
        return exc
