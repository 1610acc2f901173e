"""The clients of a Redis Cluster: they route each call to the node that has its keys, even while slots move.

:class:`Rounds` decides without I/O which call goes to which node, and which are made again; :class:`ClusterClient` and
:class:`AsyncClusterClient` make the calls. They share what they know about the nodes in a :class:`Topology`.
"""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from bulltask.jobs import clock as loop_timers
from bulltask.jobs.clock import ServerClock, mono_ms
from bulltask.jobs.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError, BulltaskError, ConfigError
from bulltask.jobs.job import NewJob
from bulltask.jobs.stored_job import read_errbacks
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import AllNodesCall, Call, PackedCall, QueueKeys, command
from bulltask.transport.client import Client
from bulltask.transport.cluster_slots import (
    Address,
    RoutedCall,
    SlotMap,
    SlotRedirectError,
    guarded,
    route_calls,
    slot_of,
    slot_of_key,
    slots,
)
from bulltask.transport.discovery import TIME
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.redis_errors import (
    is_no_cluster,
    is_transient_in_cluster,
    is_try_again,
    no_cluster_error,
    result_or_raise,
)

__all__ = [
    "AsyncClusterClient",
    "Backoff",
    "Batch",
    "ClusterClient",
    "HashSlotWaits",
    "Topology",
    "check_one_slot",
]

R = TypeVar("R")
T = TypeVar("T")

PROBE_MS: Final = 500
"""Timeout of the first call to a node that was silent."""

_SILENT_MS: Final = 5_000
"""How long a node that did not reply is not called."""

_ASKING: Final[Call[Any]] = command("ASKING")
_PING: Final[Call[Any]] = command("PING")
_UNREACHABLE: Final = (BrokerUnavailableError, BrokerNotReadyError)
_MIN_PAUSE_MS: Final = 10
_MAX_PAUSE_MS: Final = 500

_CONNECT_MS: Final = 1_000
"""Timeout for a new connection of :class:`HashSlotWaits`, which reads no other replies meanwhile."""

_MAX_REDIRECTS: Final = 3
"""How many times a call is redirected during one wait. If that is not enough, the nodes disagree."""


class Topology:
    """The slot map that the clients of one cluster share, so that each change is learned once.

    It makes no calls: a client reads the map when :attr:`is_known` is false, at first from one of the ``seeds``, the
    nodes in the URL; :attr:`version` counts these maps. Any number of threads may use it without a lock, and so may a
    forked process, because every method makes a single change.
    """

    def __init__(self, seeds: Sequence[Address]) -> None:
        self._seeds = tuple(seeds)
        self._map: SlotMap | None = None
        self._moved: dict[int, Address] = {}
        self._nodes: tuple[Address, ...] = ()
        self._failed: Address | None = None
        self._silent_until_ms: dict[Address, int] = {}
        self.is_known = False
        self.version = 0

    def set(self, slot_map: SlotMap) -> None:
        """Set the map that a node has returned."""
        self._map = slot_map
        self._moved = {}
        self._nodes = tuple(slot_map.primaries())
        self.is_known = True
        self.version += 1

    def forget(self) -> None:
        """Read the map again before the next call, because a node has become a replica, or is gone."""
        self.is_known = False

    def record_redirect(self, error: BrokerError, address: Address) -> None:
        """Take note of why a node did not execute a call: its slot has another node, or the map is outdated."""
        if isinstance(error, SlotRedirectError):
            if not error.moving:
                self._moved[error.slot] = target_of(error, address)
        elif not is_try_again(error):  # otherwise, the node will redirect the call when the slot has been moved
            self.forget()

    def record_failure(self, address: Address, took_ms: int = 0) -> None:
        """Record that a node is unreachable: another node may have its slots, and the map is not read from it.

        A node that hangs (``took_ms``) is not tried again for a while, because each attempt would take a whole timeout,
        and delay the calls to other nodes.
        """
        self._failed = address
        self.is_known = False
        if took_ms >= PROBE_MS:
            self._silent_until_ms[address] = mono_ms() + _SILENT_MS

    def record_reply(self, address: Address) -> None:
        """Record that a node that was silent has replied."""
        self._silent_until_ms.pop(address, None)

    def was_silent(self, address: Address) -> bool:
        """Whether a node did not reply to the last call. Before the next one, ``PING`` it with a short timeout."""
        return address in self._silent_until_ms

    def is_silent(self, address: Address) -> bool:
        """Whether a node should not be called at the moment, because it did not reply to the last call."""
        return self._silent_until_ms.get(address, 0) > mono_ms()

    def address(self, slot: int | None) -> Address:
        """Return a slot's node, a reachable one for ``None``; raises ``BrokerNotReadyError`` if it has none."""
        assert self._map is not None
        if slot is None:
            return self.by_preference()[0]
        return self._moved.get(slot) or self._map.address(slot)

    def primaries(self) -> tuple[Address, ...]:
        """Return all nodes that had slots when the map was read, in the order of their addresses."""
        return self._nodes

    def by_preference(self) -> list[Address]:
        """Return :meth:`primaries`, nodes that were unreachable last."""
        return sorted(self._nodes, key=self._has_failed)

    def candidates(self) -> list[Address]:
        """Return the nodes that may know the map, in the order in which to ask them."""
        known = dict.fromkeys((*self._nodes, *self._moved.values(), *self._seeds))
        return sorted(known, key=self._has_failed)

    def _has_failed(self, address: Address) -> bool:
        return address == self._failed or address in self._silent_until_ms


class Backoff:
    """Pauses of 10 ms to 500 ms, each twice as long as the previous one."""

    def __init__(self) -> None:
        self.next_ms = _MIN_PAUSE_MS

    def pause_ms(self) -> int:
        """Return how long to wait now."""
        pause_ms = self.next_ms
        self.next_ms = min(2 * self.next_ms, _MAX_PAUSE_MS)
        return pause_ms


@dataclass(slots=True)
class Batch:
    """The calls of a round for one node: routed ones, which are single calls and transactions."""

    address: Address
    routed: list[RoutedCall] = field(default_factory=list)
    calls: list[Call[Any]] = field(default_factory=list)

    def add(self, routed: RoutedCall, calls: Sequence[Call[Any]]) -> None:
        """Add a routed call, some of ``calls``."""
        self.routed.append(routed)
        selected = [calls[position] for position in routed.positions]
        if routed.ask is not None:
            # With the source, because if the node did not have the script, the resent call would not follow an ASKING.
            selected = [_ASKING, *map(_with_source, selected)]
        self.calls += selected

    def outcomes(self, results: Sequence[Any]) -> list[tuple[RoutedCall, Sequence[Any]]]:
        """Return the results of each routed call."""
        pairs, start = [], 0
        for routed in self.routed:
            end = start + len(routed.positions) + (routed.ask is not None)
            outcome = results[start:end]
            if routed.ask is not None:  # without ASKING's; if the ACL forbids it, its error is each call's result
                asking, *outcome = outcome
                outcome = [asking] * len(outcome) if isinstance(asking, BulltaskError) else outcome
            pairs.append((routed, outcome))
            start = end
        return pairs


class Rounds:
    """The calls of one request, their results, and the calls that are still to be made.

    A call to the wrong node is not executed there, so it is redirected. A call that no node can execute at the moment
    is retried until the deadline. If a node is unreachable, this is the result of its calls, because it is unknown
    whether the node has executed them. If it refused the connection, nothing was sent, so a node that has replaced it
    gets the calls.

    Args:
        topology: The nodes.
        calls: The calls.
        until_ms: No round begins later (``mono_ms``).
        url: The cluster, without its password, for messages.
        watched: The node on which a ``WATCH`` is in force; a transaction that another node would execute is an error.
        waits: Whether calls that no node can execute at the moment are retried; otherwise, they fail.
    """

    def __init__(
        self,
        topology: Topology,
        calls: Sequence[Call[Any]],
        until_ms: int,
        url: str,
        watched: Address | None = None,
        *,
        waits: bool = True,
    ) -> None:
        self._topology = topology
        self._calls = [*map(guarded, calls)]
        self._until_ms = until_ms
        self._url = url
        self._pending = list(route_calls(self._calls))
        self._redirected: set[int | None] = set()
        self._waiting: set[int | None] = set()
        self._refused: set[Address] = set()
        self._backoff = Backoff()
        self._must_wait = False
        self._has_sent = False
        self._waits = waits
        self._parts = dict[int, list[Any]]()
        self.results: list[Any] = [None] * len(calls)
        self.watched = watched

    def batches(self) -> list[Batch]:
        """Return the calls of the next round by node; the slot map must be known."""
        pending = self._pending
        self._pending = []
        self._must_wait = False
        self._waiting = set()
        by_node: dict[Address, Batch] = {}
        for routed in pending:
            if isinstance(self._calls[routed.positions[0]], AllNodesCall):
                for node in self._topology.primaries():
                    by_node.setdefault(node, Batch(node)).add(replace(routed, node=node), self._calls)
                continue
            try:
                address = self._address(routed)
            except BrokerNotReadyError as exc:  # no node serves the slot
                self._topology.forget()
                self._set(routed, [exc] * len(routed.positions))
                self._retry(routed, wait=True)
                continue
            if address in self._refused:
                continue  # no other node has replaced it: the error remains the result
            if self._name(routed) == "MULTI" and self.watched not in {None, address}:
                self._abort_watched(routed)
                continue
            by_node.setdefault(address, Batch(address)).add(routed, self._calls)
        return list(by_node.values())

    def record(self, batch: Batch, results: Sequence[Any] | BrokerError) -> None:
        """Record the results of a batch, or the error of its node."""
        self._has_sent = True
        if isinstance(results, BrokerError):
            self._record_error(batch, results)
            return
        for routed, outcome in batch.outcomes(results):
            self._set(routed, outcome)
            error = None if routed.node else next(filter(None, map(redirect_of, outcome)), None)
            if error is None:
                self._record_watch(routed, outcome, batch.address)
            else:
                self._reroute(routed, error, batch.address)

    def _record_error(self, batch: Batch, error: BrokerError) -> None:
        is_refused = isinstance(error, BrokerUnavailableError) and error.refused  # so nothing was sent
        if isinstance(error, BrokerUnavailableError):
            self._topology.record_failure(batch.address)
        if is_refused:
            self._refused.add(batch.address)
        for routed in batch.routed:
            self._set(routed, [name_node(error, batch.address)] * len(routed.positions))
            if is_refused and routed.node is None:
                self._retry(replace(routed, ask=None), wait=False)

    def fail(self, error: BrokerError) -> None:
        """Make all remaining calls fail with this error, or raise it if no call has been sent."""
        if not self._has_sent:
            raise error
        for routed in self._pending:
            self._set(routed, [error] * len(routed.positions))
        self._pending = []

    def pause_ms(self) -> int | None:
        """Return how long to wait before the next round; ``None`` if there is none."""
        if not self._pending:
            return None
        if self._must_wait and not self._waits:
            self._give_up([routed for routed in self._pending if routed.slot in self._waiting])
            self._pending = [routed for routed in self._pending if routed.slot not in self._waiting]
            return 0 if self._pending else None
        # A round that begins after the deadline would report a late reply instead of a moving slot.
        if mono_ms() + self._backoff.next_ms * self._must_wait >= self._until_ms:
            self._give_up(self._pending)
            return None
        return self._backoff.pause_ms() if self._must_wait else 0

    def _address(self, routed: RoutedCall) -> Address:
        if self._name(routed) == "UNWATCH" and self.watched is not None:
            return self.watched
        return routed.ask or self._topology.address(routed.slot)

    def _reroute(self, routed: RoutedCall, error: BrokerError, address: Address) -> None:
        """Route a call that was not executed again."""
        self._topology.record_redirect(error, address)
        if self._name(routed) == "MULTI" and self.watched is not None:
            self._abort_watched(routed)
        elif not isinstance(error, SlotRedirectError):
            self._retry(replace(routed, ask=None), wait=True)
        elif error.moving:
            # Calls that belong together cannot be sent with ASKING: they wait until the slot has been moved.
            is_single = len(routed.positions) == 1 and self._name(routed) != "WATCH"
            self._retry(replace(routed, ask=target_of(error, address) if is_single else None), wait=not is_single)
        else:
            self._retry(replace(routed, ask=None), wait=routed.slot in self._redirected)  # nodes redirect to each other
            self._redirected.add(routed.slot)

    def _retry(self, routed: RoutedCall, *, wait: bool) -> None:
        self._pending.append(routed)
        if wait:
            self._must_wait = True
            self._waiting.add(routed.slot)

    def _record_watch(self, routed: RoutedCall, outcome: Sequence[Any], address: Address) -> None:
        name = self._name(routed)
        if name == "WATCH":
            self.watched = None if isinstance(outcome[0], BulltaskError) else address
        elif name in {"MULTI", "UNWATCH"}:
            self.watched = None

    def _abort_watched(self, routed: RoutedCall) -> None:
        """Make a transaction fail if its watched key is now on another node, which does not watch the key."""
        self.watched = None
        error = BrokerNotReadyError(
            f"the Redis Cluster at {self._url} did not execute a transaction, because slot {routed.slot}, with a "
            "watched key, is moving to another node"
        )
        self._set(routed, [error] * len(routed.positions))

    def _give_up(self, calls: Sequence[RoutedCall]) -> None:
        """Turn replies about a moving slot into errors with an explanation, which name the node."""
        for routed in calls:
            for position in routed.positions:
                error = self.results[position]
                if isinstance(error, SlotRedirectError) or is_try_again(error):
                    error = moving_slot_error(routed.slot, self._url)
                if not isinstance(error, BrokerError):
                    continue
                try:
                    self.results[position] = name_node(error, self._topology.address(routed.slot))
                except BrokerNotReadyError:  # no node serves the slot; those of other slots may be available
                    error.node = f"slot {routed.slot}"

    def _set(self, routed: RoutedCall, outcome: Sequence[Any]) -> None:
        if routed.node is not None:
            self._add(routed.positions[0], outcome[0])
            return
        for position, result in zip(routed.positions, outcome, strict=True):
            self.results[position] = result

    def _add(self, position: int, result: Any) -> None:
        """Add one node's result of a call that is made on every node."""
        results, call = self._parts.setdefault(position, []), self._calls[position]
        results.append(result)
        assert isinstance(call, AllNodesCall)
        errors = [part for part in results if isinstance(part, BulltaskError)]
        self.results[position] = errors[0] if errors else call.merge(results)

    def _name(self, routed: RoutedCall) -> object:
        return self._calls[routed.positions[0]].args[0]


def moving_slot_error(slot: int | None, url: str) -> BrokerNotReadyError:
    """Return the error for a call that waited too long for a slot that is being moved."""
    return BrokerNotReadyError(
        f"slot {slot} of the Redis Cluster at {url} is being moved. Scripts and transactions wait until the move is "
        "complete, which has taken longer than the timeout"
    )


def name_node(error: BrokerError, address: Address) -> BrokerError:
    """Note in an error which node is unreachable or not ready, and return the error."""
    if isinstance(error, BrokerUnavailableError | BrokerNotReadyError):
        error.node = f"{address[0]}:{address[1]}"
    if isinstance(error, BrokerUnavailableError):
        error.refused = False  # the node is gone, but another node may replace it
    return error


def target_of(error: SlotRedirectError, address: Address) -> Address:
    """Return the node to which ``address`` has redirected a call."""
    return error.host or address[0], error.port


def redirect_of(result: object) -> BrokerError | None:
    """Return the error if it means that the call was not executed and must be made again; otherwise ``None``."""
    if isinstance(result, SlotRedirectError) or (isinstance(result, BrokerError) and is_transient_in_cluster(result)):
        return result
    return None


def _with_source(call: Call[Any]) -> Call[Any]:
    if call.script is None:
        return call
    return command(call.script.by_source, call.script.source, *call.args, parse_reply=call.parse_reply)


class ClusterClient:
    """Makes calls to the nodes of a cluster, as ``Client`` makes them to one server (see :class:`Rounds`).

    It is not thread-safe, and a forked process must create a new client (see
    :class:`~bulltask.transport.client.ClientPool`).

    Args:
        endpoint: Nodes from which the others are discovered.
        clock: Set from the first node that has slots, in the order of addresses, when connecting and every few seconds.
        name: The name of the connections in ``CLIENT LIST``. A client with a name does not set the clock, so that only
            the nodes of its calls show the name.
        topology: The nodes, if other clients share them.
        waits: Whether a call that no node can execute at the moment is retried until the command timeout. If not, it
            fails immediately, because the caller has calls to other nodes to make.
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
        self._endpoint = endpoint.for_cluster()
        self._clock = clock if name is None else None
        self._name = name
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

    @property
    def database(self) -> int:
        """The number of the database."""
        return 0

    def set_deadline(self, deadline_ms: int | None) -> None:
        """Limit all calls, and connecting, to ``deadline_ms`` (``mono_ms``); ``None``: the endpoint's timeouts."""
        self._deadline_ms = deadline_ms
        for client in self._clients.values():
            client.set_deadline(deadline_ms)

    def connect(self) -> None:
        """Read the slot map and set the clock, unless both are known; raises the errors of :meth:`run`."""
        self._ensure_map()
        if self._clock is not None and mono_ms() >= self._clock.due_at_ms:
            self._set_clock(self._clock)
            while self._clock.is_uncertain:
                self._set_clock(self._clock)

    def run(self, call: Call[R]) -> R:
        """Make one call; raises the same errors as ``Client.run``."""
        result: R = self.run_many([call])[0]
        return result

    def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        """Make several calls, in one round trip per node; errors as in ``SyncClient``."""
        return [result_or_raise(result) for result in self.try_many(list(calls))]

    def try_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes] | None = None) -> list[Any]:  # noqa: ARG002
        """Make independent calls, as in ``SyncClient``; ``packed`` is ignored: :meth:`pack` returns the same bytes.

        Raises ``BrokerUnavailableError`` if no node replies, and ``BrokerError`` if calls that belong together have
        keys in several slots; then no call was sent.
        """
        self._interrupted.clear()
        rounds = Rounds(self._topology, calls, self._until_ms(), self.safe_url, self._watched, waits=self._waits)
        if self._clock is not None and mono_ms() >= self._clock.due_at_ms and calls:
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
        """Make calls that another process has packed, as in ``SyncClient``."""
        return self.try_many([PackedCall(item) for item in packed])

    def wait(self, call: Call[R], wait_ms: int, ping: Callable[[], object]) -> R:
        """Make a call that blocks, with keys in one slot; if the slot moves, the wait begins again on the new node."""
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
        as_list = Call(call.args, lambda reply: [call.parse_reply(reply)])
        results: list[R] = self.run(AllNodesCall(as_list, lambda parts: [part for (part,) in parts]))
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
        """Make a blocking call and one after it; return the results, or errors."""
        self._interrupted.clear()
        until_ms, backoff, slot = mono_ms() + wait_ms, Backoff(), slot_of(calls)
        while True:
            self._ensure_map()
            address = self._topology.address(slot)
            results = self._use(address, lambda client: client.wait_many(calls, wait_ms, ping), blocks=True)
            error = redirect_of(results[0])
            if error is None or redirect_of(results[-1]) is None:
                return results
            self._topology.record_redirect(error, address)
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


def _send_to(batch: Batch) -> Callable[[Client], None]:
    return lambda client: client.send([call.packed() for call in batch.calls])


def _receive_from(batch: Batch) -> Callable[[Client], list[Any]]:
    return lambda client: client.results(batch.calls, client.receive(len(batch.calls)))


class AsyncClusterClient:
    """One connection to each node, which the tasks of one event loop share; arguments as for :class:`ClusterClient`.

    The calls of one task for one queue are executed in their order, but a call that a node redirects may be executed
    after later calls. ``WATCH`` is not supported, because the tasks share the connections.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: ServerClock | None = None,
        name: str | None = None,
        topology: Topology | None = None,
    ) -> None:
        self._endpoint = endpoint.for_cluster()
        self._clock = clock if name is None else None
        self._name = name
        self._topology = Topology(endpoint.seeds) if topology is None else topology
        self._topology_version = 0
        self._clients: dict[Address, AsyncClient] = {}
        self._connecting = asyncio.Lock()

    async def run(self, call: Call[R]) -> R:
        """Make one call; raises the same errors as ``AsyncClient.run``."""
        result: R = (await self.run_many([call]))[0]
        return result

    async def run_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """Make several calls in one round trip to each node; arguments and errors as in ``AsyncClient.run_many``."""
        return [result_or_raise(result) for result in await self.try_many(calls, deadline_ms)]

    async def try_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """Make independent calls; the result of a failed call is its error, unless no node replies."""
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
                if self._clock is not None and mono_ms() >= self._clock.due_at_ms:
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
            and (self._clock is None or mono_ms() < self._clock.due_at_ms)
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
            except _UNREACHABLE as exc:
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


@dataclass(slots=True)
class _Waiter:
    """A connection to the node of one slot; ``identity`` is its id there, for ``CLIENT UNBLOCK``."""

    address: Address
    client: Client
    identity: int = 0


class HashSlotWaits:
    """Makes blocking calls in several slots, and ends all of them when the first one returns.

    A node of a cluster rejects a blocking command whose keys are in several slots, even if it has all of them. It is
    not thread-safe, and must not be used after a fork. The ``client`` ends the waits, and reads the slot map.
    """

    def __init__(self, endpoint: Endpoint, topology: Topology, client: ClusterClient) -> None:
        self._endpoint = endpoint
        self._topology = topology
        self._client = client
        self._waiters: dict[int, _Waiter] = {}

    def wait(self, calls: Mapping[int, Call[R]], wait_ms: int) -> dict[int, R | BrokerError]:
        """Make a blocking call for each slot, with at least this timeout, and wait until one returns, or fails.

        The others are unblocked with ``CLIENT UNBLOCK``, and return what they return after their timeout. Return the
        result of each call, or its error: several may have returned at the same time.
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
        self._topology.record_redirect(result, self._waiters[slot].address)
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


def check_one_slot(jobs: Iterable[tuple[QueueKeys, NewJob]]) -> None:
    """Check that a cluster can store the jobs of a flow in one transaction, and later run them.

    A worker finishes a job and updates its parent, or adds its error callbacks, in one script, whose keys must be in
    one slot, too. If they were not, only that script would fail, after the task has run. Therefore this raises
    ``ConfigError``.
    """
    slots: dict[str, int] = {}
    for keys, job in jobs:
        slots[keys.base[:-1]] = slot_of_key(keys.base)
        if job.parent is not None:
            slots[str(job.parent.data["queueKey"])] = slot_of_key(job.parent.key)
        for errback in read_errbacks(job.options.canvas.get("errbacks", "[]")):
            slots[errback.queue] = slot_of_key(f"{errback.queue}:")
    if len(set(slots.values())) > 1:
        queues = ", ".join(f"{queue} (slot {slot})" for queue, slot in sorted(slots.items()))
        raise ConfigError(
            "in a Redis Cluster, the queues of a flow or canvas, of its parent job and of its error callbacks must be "
            f"in one slot, but these are in several: {queues}. Nothing was sent. Put the queues into one slot: give "
            "them names with the same tag ('mail{shop}', 'news{shop}'; in Node.js: new Queue('mail{shop}')), or set "
            "prefix='{bull}' in every app and Node.js client, which puts all queues on one node"
        )
