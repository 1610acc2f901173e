"""Blocking calls in several slots of a Redis Cluster at once: one connection per slot."""

from __future__ import annotations

import select
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.cluster_rounds import name_node, target_of
from bulltask.transport.cluster_slots import Address, SlotRedirectError
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.topology import Topology

__all__ = ["HashSlotWaits"]

R = TypeVar("R")

_CONNECT_MS: Final = 1_000
"""Timeout for a new connection, because the replies from other nodes are not read meanwhile."""

_MAX_REDIRECTS: Final = 3
"""How many times a call is redirected during one wait. If that is not enough, the nodes disagree."""


@dataclass(slots=True)
class _Waiter:
    """A connection that waits for the keys of one slot.

    Attributes:
        address: The node to which it is connected.
        identity: The connection's id on that node.
    """

    address: Address
    client: Client
    identity: int = 0


class HashSlotWaits:
    """Makes blocking calls in several slots, and ends all of them when the first one returns.

    A node of a cluster rejects a blocking command whose keys are in several slots, even if it has all of them.

    It is not thread-safe, and must not be used after a fork.

    Args:
        endpoint: The cluster, with timeouts for blocking calls.
        topology: Its nodes.
        client: Ends the waits, and reads the slot map.
    """

    def __init__(self, endpoint: Endpoint, topology: Topology, client: ClusterClient) -> None:
        self._endpoint, self._topology, self._client = endpoint, topology, client
        self._waiters: dict[int, _Waiter] = {}

    def wait(self, calls: Mapping[int, Call[R]], wait_ms: int) -> dict[int, R | BrokerError]:
        """Make the calls, and wait until one of them returns, or fails.

        A call that has not returned by then is unblocked with ``CLIENT UNBLOCK``, and returns what it returns after its
        timeout.

        Args:
            calls: A blocking call for each slot, with a timeout of at least ``wait_ms``.
            wait_ms: Maximum wait.

        Returns:
            The result of each call, or its error. Several may have returned at the same time.

        Raises:
            BrokerError: No node of the cluster is reachable.
        """
        until_ms = mono_ms() + wait_ms
        results: dict[int, R | BrokerError] = {}
        try:
            self._client.connect()
            waiting = {slot for slot, call in calls.items() if self._begin(slot, call, results)}
            redirects = 0
            while waiting and not results:
                for slot in self._ready(waiting, until_ms - mono_ms()):
                    waiting.discard(slot)
                    result = self._receive(slot, calls[slot])
                    if self._is_redirected(slot, result) and (redirects := redirects + 1) <= _MAX_REDIRECTS:
                        if self._begin(slot, calls[slot], results):
                            waiting.add(slot)
                    else:
                        results[slot] = result
                if mono_ms() >= until_ms:
                    break
            for slot in sorted(waiting):
                results[slot] = self._end(slot, calls[slot])
        except BaseException:
            self.close()  # otherwise, the next wait would read the replies
            raise
        return results

    def close(self) -> None:
        """Close the connections; they are opened again when needed."""
        for waiter in self._waiters.values():
            waiter.client.close()

    def _begin(self, slot: int, call: Call[R], results: dict[int, R | BrokerError]) -> bool:
        """Send a call; return False, and set its result to the error, if that is not possible."""
        began_ms = mono_ms()
        try:
            waiter = self._waiter(slot)
            waiter.client.set_deadline(mono_ms() + _CONNECT_MS)
            try:
                waiter.identity = waiter.client.connection_id()
            finally:
                waiter.client.set_deadline(None)
            waiter.client.send([call.packed()])
        except BrokerError as exc:
            results[slot] = self._failed(slot, exc, mono_ms() - began_ms)
            return False
        return True

    def _ready(self, waiting: set[int], timeout_ms: int) -> list[int]:
        """Return the slots whose replies have arrived within ``timeout_ms``."""
        poll, slots = select.poll(), {}
        for slot in waiting:
            descriptor = self._waiters[slot].client.fileno()
            slots[descriptor] = slot
            poll.register(descriptor, select.POLLIN)
        ready = [slots[descriptor] for descriptor, _ in poll.poll(max(0, timeout_ms))]
        return [slot for slot in ready if self._waiters[slot].client.has_reply()]

    def _receive(self, slot: int, call: Call[R]) -> R | BrokerError:
        client = self._waiters[slot].client
        try:
            result: R | BrokerError = client.results([call], client.receive(1))[0]
        except BrokerError as exc:
            return self._failed(slot, exc)
        return result

    def _end(self, slot: int, call: Call[R]) -> R | BrokerError:
        """End a call that is still blocked; return its result."""
        waiter = self._waiters[slot]
        try:
            self._client.run_at(waiter.address, command("CLIENT", "UNBLOCK", waiter.identity))
        except BrokerError as exc:
            waiter.client.close()
            return exc
        return self._receive(slot, call)

    def _is_redirected(self, slot: int, result: object) -> bool:
        """Return whether the slot is on another node, which is recorded."""
        if not isinstance(result, SlotRedirectError) or result.moving:
            return False
        self._topology.record_move(slot, target_of(result, self._waiters[slot].address))
        return True

    def _failed(self, slot: int, error: BrokerError, took_ms: int = 0) -> BrokerError:
        """Return the error, with its node; another node may have the slot by now."""
        waiter = self._waiters.get(slot)
        if isinstance(error, BrokerUnavailableError) and waiter is not None:
            if not self._topology.is_silent(waiter.address):
                self._topology.record_failure(waiter.address, took_ms)
            return name_node(error, waiter.address)
        return error

    def _waiter(self, slot: int) -> _Waiter:
        """Return the connection to the node that serves the slot."""
        address, waiter = self._topology.address(slot), self._waiters.get(slot)
        if self._topology.is_silent(address):
            raise BrokerUnavailableError(f"the node {address[0]}:{address[1]} does not reply")
        if waiter is None or waiter.address != address:
            if waiter is not None:
                waiter.client.close()
            waiter = self._waiters[slot] = _Waiter(address, Client(self._endpoint.at(*address), None))
        return waiter
