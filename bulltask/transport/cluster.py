"""A client of a Redis Cluster: routes calls to the node that has their keys, even while slots move and nodes fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from bulltask.clock import ServerClock, mono_ms
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError, BulltaskError
from bulltask.transport.call import AllNodesCall, Call, PackedCall, command
from bulltask.transport.client import Client
from bulltask.transport.cluster_rounds import (
    Backoff,
    Batch,
    Rounds,
    moving_slot_error,
    name_node,
    redirect_of,
    target_of,
)
from bulltask.transport.cluster_slots import Address, SlotMap, SlotRedirectError, guarded, slot_of, slots
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.redis_errors import is_no_cluster, is_try_again, no_cluster_error, result_or_raise
from bulltask.transport.server_info import TIME
from bulltask.transport.topology import PROBE_MS, Topology

__all__ = ["ClusterClient"]

R = TypeVar("R")
T = TypeVar("T")

_PING: Final[Call[Any]] = command("PING")
_UNREACHABLE: Final = (BrokerUnavailableError, BrokerNotReadyError)


class ClusterClient:
    """Makes calls to the nodes of a cluster, as ``Client`` makes them to one server.

    A call to the wrong node is not executed there, so it is redirected. A call that no node can execute at the moment
    is retried until the command timeout, if the client ``waits``. If a node is unreachable, its calls fail, because it
    is unknown whether the node executed them; the slot map is read again for the next call.

    It is not thread-safe, and a forked process must create a new client (see
    :class:`~bulltask.transport.client_pool.ClientPool`).

    Args:
        endpoint: Nodes from which the others are discovered.
        clock: Set from the first node that has slots, in the order of addresses, when connecting and every few
            seconds; ``None`` for no clock.
        name: The name of the connections in ``CLIENT LIST``. A client with a name does not set the clock, so that only
            the nodes of its calls show the name.
        topology: The nodes, if other clients share them.
        waits: Whether a call that no node can execute at the moment is retried. If not, it fails immediately, because
            the caller has calls to other nodes to make.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: ServerClock | None,
        name: str | None = None,
        topology: Topology | None = None,
        *,
        waits: bool = True,
    ) -> None:
        self._endpoint, self._clock, self._name = endpoint.for_cluster(), clock if name is None else None, name
        self._waits = waits
        self._topology = Topology(endpoint.seeds) if topology is None else topology
        self._topology_version = 0
        self._clients: dict[Address, Client] = {}
        self._watched: Address | None = None
        self._deadline_ms: int | None = None
        self._interrupted = threading.Event()

    @property
    def safe_url(self) -> str:
        """The cluster's URL without its password."""
        return self._endpoint.safe_url

    def set_deadline(self, deadline_ms: int | None) -> None:
        """Limit all calls, and connecting, to ``deadline_ms`` (``mono_ms``); ``None``: the endpoint's timeouts."""
        self._deadline_ms = deadline_ms
        for client in self._clients.values():
            client.set_deadline(deadline_ms)

    def connect(self) -> None:
        """Read the slot map and set the clock, unless both are known; raises the errors of :meth:`run`."""
        self._ensure_map()
        if self._clock is not None and self._clock.due:
            self._set_clock(self._clock)
            while self._clock.is_uncertain:
                self._set_clock(self._clock)

    def run(self, call: Call[R]) -> R:
        """Make one call; raises the same errors as ``Client.run``."""
        result: R = self.run_many([call])[0]
        return result

    def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        """Make several calls, in one round trip per node, and return their results in order.

        Raises:
            BrokerError, JobError: For the first call that failed; others may have been made.
        """
        results = self.try_many(list(calls))
        for result in results:
            if isinstance(result, BulltaskError):
                raise result
        return results

    def try_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes] | None = None) -> list[Any]:  # noqa: ARG002
        """Make independent calls; the result of a failed call is its error.

        Args:
            calls: The calls.
            packed: Ignored: :meth:`pack` returns the same bytes.

        Raises:
            BrokerUnavailableError: No node replies.
            BrokerError: Calls that belong together have keys in several slots; no call was sent.
        """
        self._interrupted.clear()
        rounds = Rounds(self._topology, calls, self._until_ms(), self.safe_url, self._watched, waits=self._waits)
        if self._clock is not None and self._clock.due and calls:
            self.connect()
        pause_ms: int | None = 0 if calls else None
        while pause_ms is not None:
            if pause_ms and self._interrupted.wait(pause_ms / 1000):
                raise BrokerUnavailableError(f"a call to the Redis Cluster at {self.safe_url} was interrupted")
            try:
                self._ensure_map()
            except BrokerError as exc:
                rounds.fail(exc)
                break
            batches = rounds.batches()
            for batch, results in zip(batches, self._exchange(batches), strict=True):
                rounds.record(batch, results)
            pause_ms = rounds.pause_ms()
        self._watched = rounds.watched
        return rounds.results

    def start_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes]) -> Callable[[], list[Any]]:
        """Make calls, as in ``SyncClient``; this client waits for their replies, because a node may redirect a call."""
        results = self.try_many(calls, packed)
        return lambda: results

    def pack(self, call: Call[Any]) -> bytes:
        """Return the bytes that :meth:`send_packed` sends for a call."""
        return guarded(call).packed()

    def send_packed(self, packed: Sequence[bytes]) -> list[Any]:
        """Make calls that another process has packed (:meth:`pack`); return the raw replies, or errors.

        Raises:
            BrokerUnavailableError: As in :meth:`try_many`.
        """
        return self.try_many([PackedCall(item) for item in packed])

    def wait(self, call: Call[R], wait_ms: int, ping: Callable[[], object]) -> R:
        """Make a call that blocks, as ``Client.wait`` does; all of its keys are in one slot.

        If the slot moves during the wait, the wait begins again on the new node.
        """
        (reply,) = self._wait([call], wait_ms, ping)
        result: R = result_or_raise(reply)
        return result

    def wait_then(
        self, call: Call[R], then: Call[T], wait_ms: int, ping: Callable[[], object]
    ) -> tuple[R, T | BulltaskError]:
        """Make a call that blocks and one after it, as ``Client.wait_then`` does; all keys are in one slot."""
        first, second = self._wait([call, guarded(then)], wait_ms, ping)
        if redirect_of(first) is not None and redirect_of(second) is None:
            # The slot was moved back between the two calls. The second one was made, so its result must not be lost.
            return call.parse_reply(None), second
        if redirect_of(second) is not None and not isinstance(first, BulltaskError):
            second = self.try_many([then])[0]
        return result_or_raise(first), second

    def dry_run(self, calls: Sequence[Call[Any]]) -> list[Any] | None:
        """Like ``Client.dry_run``, on every node, because each has its own permissions; returns all replies.

        Redis checks permissions before it redirects a call, so the calls need not have keys of the node.
        """
        replies = [self._use(address, lambda client: client.dry_run(calls)) for address in self._primaries()]
        return [reply for of_node in replies for reply in of_node or ()] if any(replies) else None

    def run_on_all_nodes(self, call: Call[R]) -> list[R]:
        """Make a call without keys on every node that has slots; raises the first node's error."""
        results: list[R] = self.run(AllNodesCall(_as_list(call), lambda parts: [part for (part,) in parts]))
        return results

    def run_at(self, address: Address, call: Call[R]) -> R:
        """Make a call without keys on one node."""
        return self._use(address, lambda client: client.run(call))

    def nodes(self) -> dict[Address, SlotMap]:
        """Read the slot map of each node that has slots; nodes learn of changes one by one."""
        self._topology.forget()
        return {address: self.run_at(address, slots(address)) for address in self._primaries()}

    def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        for client in self._clients.values():
            client.close()

    def close_if_dead(self) -> None:
        """Close connections that nodes have closed."""
        for client in self._clients.values():
            client.close_if_dead()

    def interrupt(self) -> None:
        """Abort the call that another thread is waiting for; it raises ``BrokerUnavailableError`` immediately."""
        self._interrupted.set()
        for client in tuple(self._clients.values()):
            client.interrupt()

    def _exchange(self, batches: Sequence[Batch]) -> Sequence[list[Any] | BrokerError]:
        """Make the calls of a round: send to all nodes before waiting for the first reply."""
        if len(batches) == 1:
            return [self._attempt(batches[0].address, lambda client: client.try_many(batches[0].calls))]
        try:
            sent = [self._attempt(batch.address, _send_to(batch)) for batch in batches]
            return [
                outcome if isinstance(outcome, BrokerError) else self._attempt(batch.address, _receive_from(batch))
                for batch, outcome in zip(batches, sent, strict=True)
            ]
        except BaseException:
            # After an interrupt, the replies from the other nodes would be read as the replies to later calls.
            for batch in batches:
                self._client(batch.address).close()
            raise

    def _wait(self, calls: Sequence[Call[Any]], wait_ms: int, ping: Callable[[], object]) -> list[Any]:
        """Make a blocking call and one after it; return the results, or errors.

        Raises:
            BrokerError: The node is unreachable, or none executes the blocking call within ``wait_ms``.
        """
        self._interrupted.clear()
        until_ms, backoff, slot = mono_ms() + wait_ms, Backoff(), slot_of(calls)
        while True:
            self._ensure_map()
            address = self._topology.address(slot)
            results = self._use(address, lambda client: client.wait_many(calls, wait_ms, ping), blocks=True)
            error = redirect_of(results[0])
            if error is None or redirect_of(results[-1]) is None:
                return results
            if isinstance(error, SlotRedirectError) and not error.moving:
                self._topology.record_move(error.slot, target_of(error, address))
            elif not isinstance(error, SlotRedirectError) and not is_try_again(error):
                self._topology.forget()
            pause_ms = backoff.pause_ms()
            if mono_ms() + pause_ms >= until_ms or self._interrupted.wait(pause_ms / 1000):
                return [moving_slot_error(slot, self.safe_url)] * len(calls)

    def _attempt(self, address: Address, use: Callable[[Client], R], *, blocks: bool = False) -> R | BrokerError:
        client, started_ms = self._client(address), mono_ms()
        try:
            if self._topology.was_silent(address):
                self._probe(address, client)
            return use(client)
        except BrokerUnavailableError as exc:
            if not self._topology.is_silent(address):
                # A blocking call that took a long time does not mean that the node hangs.
                self._topology.record_failure(address, 0 if blocks else mono_ms() - started_ms)
            return exc
        except BrokerError as exc:
            return exc

    def _use(self, address: Address, use: Callable[[Client], R], *, blocks: bool = False) -> R:
        result = self._attempt(address, use, blocks=blocks)
        if isinstance(result, BrokerError):
            raise name_node(result, address)
        return result

    def _probe(self, address: Address, client: Client) -> None:
        """Check whether a node that was silent replies; raises ``BrokerUnavailableError`` if it does not."""
        if self._topology.is_silent(address):
            raise BrokerUnavailableError(f"the node {address[0]}:{address[1]} of {self.safe_url} does not reply")
        until_ms = mono_ms() + PROBE_MS
        client.set_deadline(until_ms if self._deadline_ms is None else min(until_ms, self._deadline_ms))
        try:
            client.run(_PING)
        finally:
            client.set_deadline(self._deadline_ms)
        self._topology.record_reply(address)

    def _primaries(self) -> Sequence[Address]:
        self._ensure_map()
        return self._topology.primaries()

    def _ensure_map(self) -> None:
        if not self._topology.is_known:
            self._topology.set(self._read_map())
        if self._topology_version != self._topology.version:
            self._topology_version = self._topology.version
            known = self._topology.primaries()
            for address in [address for address in self._clients if address not in known]:
                self._clients.pop(address).close()

    def _read_map(self) -> SlotMap:
        errors: list[BrokerError] = []
        for address in self._topology.candidates():
            # Not on a connection with a name, which would show the worker of another node's queue on this node.
            client = self._client(address) if self._name is None else self._new_client(address, None)
            try:
                return client.run(slots(address))
            except _UNREACHABLE as exc:
                errors.append(exc)
            except BrokerError as exc:
                raise (no_cluster_error(self.safe_url) if is_no_cluster(exc) else exc) from exc
            finally:
                if self._name is not None:
                    client.close()
        raise errors[-1]

    def _set_clock(self, clock: ServerClock) -> None:
        """Set the clock from the first node that replies, so that all processes use the same node's time."""
        errors: list[BrokerError] = []
        for address in self._topology.by_preference():
            sent_ms = mono_ms()
            result = self._attempt(address, lambda client: client.run(TIME))
            if not isinstance(result, BrokerError):
                clock.set(result, sent_ms, mono_ms())
                return
            self._topology.record_failure(address)
            errors.append(name_node(result, address))
        raise errors[-1]

    def _until_ms(self) -> int:
        return mono_ms() + self._endpoint.command_timeout_ms if self._deadline_ms is None else self._deadline_ms

    def _client(self, address: Address) -> Client:
        if (client := self._clients.get(address)) is None:
            client = self._clients[address] = self._new_client(address, self._name)
        return client

    def _new_client(self, address: Address, name: str | None) -> Client:
        client = Client(self._endpoint.at(*address), None, name)
        client.set_deadline(self._deadline_ms)
        return client


def _as_list(call: Call[R]) -> Call[list[R]]:
    return Call(call.args, lambda reply: [call.parse_reply(reply)])


def _send_to(batch: Batch) -> Callable[[Client], None]:
    return lambda client: client.send([call.packed() for call in batch.calls])


def _receive_from(batch: Batch) -> Callable[[Client], list[Any]]:
    return lambda client: client.results(batch.calls, client.receive(len(batch.calls)))
