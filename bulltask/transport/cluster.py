"""A client of a Redis Cluster: routes calls to the node that has their keys, even while slots move and nodes fail."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from bulltask.clock import ServerClock, mono_ms
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError, BulltaskError
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.cluster_slots import Address, RoutedCall, SlotMap, SlotRedirectError, route_calls, slots
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.redis_errors import is_transient_in_cluster

__all__ = ["ClusterClient", "ClusterPool"]

R = TypeVar("R")

_ASKING: Final[Call[Any]] = command("ASKING")
_MIN_PAUSE_MS: Final = 10
_MAX_PAUSE_MS: Final = 500


class ClusterClient:
    """Makes calls to the nodes of a cluster, as ``Client`` makes them to one server.

    A call to the wrong node is not executed there, so it is redirected. A call that no node can execute at the moment
    is retried until the command timeout. If a node is unreachable, an error is raised, because it is unknown whether
    the node executed the call; the slot map is read again for the next call.

    It is not thread-safe, and must not be used after a fork.

    Args:
        endpoint: One of the nodes, from which the others are discovered.
        clock: Set from the nodes; ``None`` for no clock.
    """

    def __init__(self, endpoint: Endpoint, clock: ServerClock | None) -> None:
        self._endpoint, self._clock = endpoint.for_cluster(), clock
        self._clients: dict[Address, Client] = {}
        self._map: SlotMap | None = None
        self._moved: dict[int, Address] = {}
        self._deadline_ms: int | None = None

    def set_deadline(self, deadline_ms: int | None) -> None:
        """Limit all calls, and connecting, to ``deadline_ms`` (``mono_ms``); ``None``: the endpoint's timeouts."""
        self._deadline_ms = deadline_ms
        for client in self._clients.values():
            client.set_deadline(deadline_ms)

    def connect(self) -> None:
        """Connect to a node now, which sets the clock; raises the errors of :meth:`run`."""
        self._client(self._slot_map().address(None)).connect()

    def run(self, call: Call[R]) -> R:
        """Make one call; raises the same errors as ``Client.run``."""
        result: R = self.run_many([call])[0]
        return result

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls, in one round trip per node, and return their results in order.

        Raises:
            BrokerError, JobError: For the first call that failed; others may have been made.
        """
        results = self.try_many(calls)
        for result in results:
            if isinstance(result, BulltaskError):
                raise result
        return results

    def try_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make independent calls; the result of a failed call is its error.

        Raises:
            BrokerUnavailableError: A node could not be reached; it is unknown which calls were executed.
            BrokerError: Calls that belong together have keys in several slots; no call was sent.
        """
        results: list[Any] = [None] * len(calls)
        pending, pause_ms = list(route_calls(calls)), _MIN_PAUSE_MS
        until_ms = mono_ms() + self._endpoint.command_timeout_ms if self._deadline_ms is None else self._deadline_ms
        while True:
            pending, must_wait = self._round(calls, pending, results)
            if not pending:
                return results
            # A round that begins after the deadline would report a late reply instead of a moving slot.
            if mono_ms() + pause_ms * must_wait >= until_ms:
                self._give_up(pending, results)
                return results
            if must_wait:
                threading.Event().wait(pause_ms / 1000)
                pause_ms = min(2 * pause_ms, _MAX_PAUSE_MS)

    def run_at(self, address: Address, call: Call[R]) -> R:
        """Make a call without keys on one node."""
        return self._use(address, lambda client: client.run(call))

    def nodes(self) -> dict[Address, SlotMap]:
        """Read the slot map of each node that has slots; nodes learn of changes one by one."""
        self._map = None
        return {address: self.run_at(address, slots(address)) for address in self._slot_map().primaries()}

    def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        for client in self._clients.values():
            client.close()

    def close_if_dead(self) -> None:
        """Close connections that nodes have closed."""
        for client in self._clients.values():
            client.close_if_dead()

    def _round(
        self, calls: Sequence[Call[Any]], pending: Sequence[RoutedCall], results: list[Any]
    ) -> tuple[list[RoutedCall], bool]:
        """Make the calls once. Returns the calls to retry, and whether to wait first."""
        retried: list[RoutedCall] = []
        must_wait = False
        for address, group in self._by_node(pending).items():
            batches = [_calls_of(routed, calls) for routed in group]
            replies = iter(self._use(address, partial(_send, batches)))
            for routed in group:
                outcome = next(replies)
                for position, result in zip(routed.positions, outcome, strict=True):
                    results[position] = result
                if (error := _rerouting_error(outcome)) is not None:
                    rerouted, wait = self._reroute(routed, error, address)
                    retried.append(rerouted)
                    must_wait = must_wait or wait
        return retried, must_wait

    def _give_up(self, pending: Sequence[RoutedCall], results: list[Any]) -> None:
        """Turn redirects that are still unresolved into errors with an explanation."""
        for routed in pending:
            for position in routed.positions:
                if isinstance(results[position], SlotRedirectError):
                    results[position] = BrokerNotReadyError(
                        f"slot {routed.slot} of the Redis Cluster at {self._endpoint.safe_url} is being moved. Scripts "
                        "and transactions wait until the move is complete, which has taken longer than the timeout"
                    )

    def _reroute(self, routed: RoutedCall, error: BrokerError, address: Address) -> tuple[RoutedCall, bool]:
        """Return the new route for a call that was not executed, and whether to wait before it is retried."""
        if not isinstance(error, SlotRedirectError):
            self._map = None
            return replace(routed, ask=None), True
        target = (error.host or address[0], error.port)
        if error.moving:
            # A transaction cannot be sent with ASKING: it waits until the slot has been moved.
            is_single = len(routed.positions) == 1
            return replace(routed, ask=target if is_single else None), not is_single
        previous, self._moved[error.slot] = self._moved.get(error.slot), target
        return replace(routed, ask=None), previous is not None  # wait while two nodes redirect to each other

    def _by_node(self, pending: Sequence[RoutedCall]) -> dict[Address, list[RoutedCall]]:
        groups: dict[Address, list[RoutedCall]] = {}
        for routed in pending:
            moved = None if routed.slot is None else self._moved.get(routed.slot)
            address = routed.ask or moved or self._slot_map().address(routed.slot)
            groups.setdefault(address, []).append(routed)
        return groups

    def _use(self, address: Address, use: Callable[[Client], R]) -> R:
        try:
            return use(self._client(address))
        except BrokerUnavailableError as exc:
            self._map, self._moved = None, {}
            exc.refused = False  # the node is gone, but another node may replace it
            raise

    def _slot_map(self) -> SlotMap:
        if self._map is None:
            self._map, self._moved = self._read_map(), {}
        return self._map

    def _read_map(self) -> SlotMap:
        errors: list[BrokerError] = []
        for address in dict.fromkeys([*self._clients, self._endpoint.address]):
            try:
                return self._client(address).run(slots(address))
            except (BrokerUnavailableError, BrokerNotReadyError) as exc:
                errors.append(exc)
        raise errors[-1]

    def _client(self, address: Address) -> Client:
        if (client := self._clients.get(address)) is None:
            client = self._clients[address] = Client(self._endpoint.at(*address), self._clock)
            client.set_deadline(self._deadline_ms)
        return client


class ClusterPool:
    """A pool of cluster clients, like :class:`~bulltask.transport.client.ClientPool` for a single server.

    Args:
        endpoint: One of the nodes.
        clock: As in :class:`ClusterClient`.
    """

    def __init__(self, endpoint: Endpoint, clock: ServerClock | None) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._idle: deque[ClusterClient] = deque()

    @contextmanager
    def client(self, deadline_ms: int | None = None) -> Iterator[ClusterClient]:
        """Return a client for a ``with`` statement. A second client is needed only if a signal handler interrupts a
        send.

        Args:
            deadline_ms: Deadline (``mono_ms``) for all of the client's calls.
        """
        try:
            client = self._idle.pop()
        except IndexError:
            client = ClusterClient(self._endpoint, self._clock)
        client.close_if_dead()
        client.set_deadline(deadline_ms)
        try:
            yield client
        finally:
            self._idle.append(client)

    def close(self) -> None:
        """Close idle connections."""
        idle, self._idle = self._idle, deque()
        for client in idle:
            client.close()


def _calls_of(routed: RoutedCall, calls: Sequence[Call[Any]]) -> list[Call[Any]]:
    """Return the calls to send for a routed call."""
    selected = [calls[position] for position in routed.positions]
    if routed.ask is None:
        return selected
    # With the body, because if the node did not have the script, the resent call would not follow an ASKING.
    return [_ASKING, *(_with_body(call) for call in selected)]


def _with_body(call: Call[Any]) -> Call[Any]:
    if call.script is None:
        return call
    return command(call.script.by_body, call.script.body, *call.args, parse_reply=call.parse_reply)


def _send(groups: Sequence[Sequence[Call[Any]]], client: Client) -> list[list[Any]]:
    """Make several groups of calls in one round trip. Returns the results of each group."""
    results = iter(client.try_many([call for group in groups for call in group]))
    replies = [[next(results) for _ in group] for group in groups]
    return [
        _drop_asking(outcome) if group[0] is _ASKING else outcome
        for group, outcome in zip(groups, replies, strict=True)
    ]


def _drop_asking(outcome: Sequence[Any]) -> list[Any]:
    """Return the results without ``ASKING``'s; if the ACL forbids ``ASKING``, its error is each call's result."""
    asking, *results = outcome
    return [asking] * len(results) if isinstance(asking, BulltaskError) else results


def _rerouting_error(outcome: Sequence[Any]) -> BrokerError | None:
    """Return the error that prevented calls from being executed, so they must be retried; ``None`` if none did."""
    for result in outcome:
        if isinstance(result, SlotRedirectError) or (
            isinstance(result, BrokerError) and is_transient_in_cluster(result)
        ):
            return result
    return None
