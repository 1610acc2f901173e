"""Rounds of calls in a Redis Cluster: which call goes to which node, and which are made again. It does no I/O.

The sync and the async client of a cluster differ only in how they make the calls of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError, BulltaskError
from bulltask.transport.call import AllNodesCall, Call, command
from bulltask.transport.cluster_slots import Address, RoutedCall, SlotRedirectError, guarded, route_calls
from bulltask.transport.redis_errors import is_transient_in_cluster, is_try_again
from bulltask.transport.topology import Topology

__all__ = ["Backoff", "Batch", "Rounds", "moving_slot_error", "name_node", "redirect_of", "target_of"]

_ASKING: Final[Call[Any]] = command("ASKING")
_MIN_PAUSE_MS: Final = 10
_MAX_PAUSE_MS: Final = 500


class Backoff:
    """Pauses of 10 ms to 500 ms, each twice as long as the previous one."""

    def __init__(self) -> None:
        self.next_ms = _MIN_PAUSE_MS

    def pause_ms(self) -> int:
        """Return how long to wait now."""
        pause_ms, self.next_ms = self.next_ms, min(2 * self.next_ms, _MAX_PAUSE_MS)
        return pause_ms


@dataclass(slots=True)
class Batch:
    """The calls of a round for one node.

    Attributes:
        address: The node.
        routed: The routed calls, single ones and transactions, that ``calls`` consists of.
        calls: The calls to send, in one round trip.
    """

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
            pairs.append((routed, outcome if routed.ask is None else _drop_asking(outcome)))
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
        watched: The node of the last ``WATCH`` (:attr:`watched`).
        waits: Whether calls that no node can execute at the moment are retried; otherwise, they fail.

    Attributes:
        results: The result of each call, or its error.
        watched: The node on which a ``WATCH`` is in force; a transaction that another node would execute is an error.
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
        self._topology, self._calls, self._until_ms, self._url = topology, [*map(guarded, calls)], until_ms, url
        self._pending = list(route_calls(self._calls))
        self._redirected: set[int | None] = set()
        self._waiting: set[int | None] = set()
        self._refused: set[Address] = set()
        self._backoff, self._must_wait, self._has_sent = Backoff(), False, False
        self._waits, self._parts = waits, dict[int, list[Any]]()
        self.results: list[Any] = [None] * len(calls)
        self.watched = watched

    def batches(self) -> list[Batch]:
        """Return the calls of the next round by node; the slot map must be known."""
        pending, self._pending, self._must_wait = self._pending, [], False
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
        was_sent = True
        if isinstance(error, BrokerUnavailableError):
            self._topology.record_failure(batch.address)
            if error.refused:
                self._refused.add(batch.address)
                was_sent = False
        for routed in batch.routed:
            self._set(routed, [name_node(error, batch.address)] * len(routed.positions))
            if not was_sent and routed.node is None:
                self._retry(replace(routed, ask=None), wait=False)

    def fail(self, error: BrokerError) -> None:
        """Make all remaining calls fail with this error.

        Raises:
            BrokerError: No call has been sent.
        """
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
        if isinstance(error, SlotRedirectError) and not error.moving:
            self._topology.record_move(error.slot, target_of(error, address))
        if self._name(routed) == "MULTI" and self.watched is not None:
            self._abort_watched(routed)
            return
        if not isinstance(error, SlotRedirectError):
            if not is_try_again(error):  # otherwise, the node will redirect the call when the slot has been moved
                self._topology.forget()
            self._retry(replace(routed, ask=None), wait=True)
            return
        target = target_of(error, address)
        if error.moving:
            # Calls that belong together cannot be sent with ASKING: they wait until the slot has been moved.
            is_single = len(routed.positions) == 1 and self._name(routed) != "WATCH"
            self._retry(replace(routed, ask=target if is_single else None), wait=not is_single)
            return
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
                if self._topology.serves(routed.slot):
                    self.results[position] = name_node(error, self._topology.address(routed.slot))
                elif routed.slot is not None:
                    error.node = f"slot {routed.slot}"  # no node serves it; those of other slots may be available

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


def _drop_asking(outcome: Sequence[Any]) -> list[Any]:
    """Return the results without ``ASKING``'s; if the ACL forbids ``ASKING``, its error is each call's result."""
    asking, *results = outcome
    return [asking] * len(results) if isinstance(asking, BulltaskError) else results
