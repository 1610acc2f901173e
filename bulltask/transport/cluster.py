"""A Redis Cluster: calls go to the node that has their keys, also while slots move and nodes fail."""

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
from bulltask.transport.faults import is_transient_in_cluster

__all__ = ["ClusterClient", "ClusterPool"]

R = TypeVar("R")

_ASKING: Final[Call[Any]] = command("ASKING")
_FIRST_PAUSE_MS: Final = 10
_LONGEST_PAUSE_MS: Final = 500


class ClusterClient:
    """Responsible for carrying calls to the nodes of a cluster, as ``Client`` carries them to one server.

    Calls that were sent to the wrong node are not executed there, so they are sent on; what nobody can serve for the
    moment is tried again for as long as a command may take. A node that cannot be reached is an error, because nobody
    knows what it has executed; who makes the call again then finds the cluster as it is.

    Not for several threads, and never across a fork.

    Args:
        endpoint: one of the nodes, by which the others are found.
        clock: is set by the nodes that are talked to; ``None``: never.
    """

    def __init__(self, endpoint: Endpoint, clock: ServerClock | None) -> None:
        self._endpoint, self._clock = endpoint.for_cluster(), clock
        self._clients: dict[Address, Client] = {}
        self._map: SlotMap | None = None
        self._moved: dict[int, Address] = {}
        self._ends_ms: int | None = None

    def set_deadline(self, deadline_ms: int | None) -> None:
        """Let everything take no longer than to ``deadline_ms`` (``mono_ms``); ``None``: the endpoint's times."""
        self._ends_ms = deadline_ms
        for client in self._clients.values():
            client.set_deadline(deadline_ms)

    def connect(self) -> None:
        """Connect to a node now, which sets the clock; see :meth:`run` for what may be raised."""
        self._client(self._known().address(None)).connect()

    def run(self, call: Call[R]) -> R:
        """Make one call; raises what ``Client.run`` raises."""
        result: R = self.run_many([call])[0]
        return result

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls, in one round trip for each node, and return their results in order.

        Raises:
            BrokerError, JobError: for the first call that failed; others may have been made.
        """
        results = self.try_many(calls)
        for result in results:
            if isinstance(result, BulltaskError):
                raise result
        return results

    def try_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """:meth:`run_many` for calls that mean something alone: each one's error stands in its place.

        Raises:
            BrokerUnavailableError: a node could not be reached; nobody knows which of the calls were executed.
            BrokerError: calls that have to go together have keys of several slots; none was sent.
        """
        results: list[Any] = [None] * len(calls)
        left, pause_ms = list(route_calls(calls)), _FIRST_PAUSE_MS
        until_ms = mono_ms() + self._endpoint.command_timeout_ms if self._ends_ms is None else self._ends_ms
        while True:
            left, pausing = self._round(calls, left, results)
            if not left:
                return results
            # A round that begins when the time is over would say that the reply was late, not that the slot is moving.
            if mono_ms() + pause_ms * pausing >= until_ms:
                self._give_up(left, results)
                return results
            if pausing:
                threading.Event().wait(pause_ms / 1000)
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def run_at(self, address: Address, call: Call[R]) -> R:
        """Make a call without keys at one node."""
        return self._reached(address, lambda client: client.run(call))

    def nodes(self) -> dict[Address, SlotMap]:
        """Ask each node that has slots which nodes there are and what they have; they hear of it one by one."""
        self._map = None
        return {address: self.run_at(address, slots(address)) for address in self._known().primaries()}

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        for client in self._clients.values():
            client.close()

    def close_if_dead(self) -> None:
        """Close connections that nodes have ended meanwhile."""
        for client in self._clients.values():
            client.close_if_dead()

    def _round(
        self, calls: Sequence[Call[Any]], left: Sequence[RoutedCall], results: list[Any]
    ) -> tuple[list[RoutedCall], bool]:
        """Run all route_calls once; those that have to be run again, and whether to wait before."""
        again: list[RoutedCall] = []
        pausing = False
        for address, group in self._by_node(left).items():
            words = [_words(errand, calls) for errand in group]
            answers = iter(self._reached(address, partial(_send, words)))
            for errand in group:
                answer = next(answers)
                for place, result in zip(errand.places, answer, strict=True):
                    results[place] = result
                if (turned := _turned(answer)) is not None:
                    further, waits = self._further(errand, turned, address)
                    again.append(further)
                    pausing = pausing or waits
        return again, pausing

    def _give_up(self, left: Sequence[RoutedCall], results: list[Any]) -> None:
        """Say of calls that were sent from node to node what that means; other answers say it themselves."""
        for errand in left:
            for place in errand.places:
                if isinstance(results[place], SlotRedirectError):
                    results[place] = BrokerNotReadyError(
                        f"slot {errand.slot} of the Redis Cluster at {self._endpoint.safe_url} is being moved. Scripts "
                        "and transactions wait until it has arrived, and that takes longer than this call may"
                    )

    def _further(self, errand: RoutedCall, turned: BrokerError, address: Address) -> tuple[RoutedCall, bool]:
        """Where an errand goes next that was not run, and whether that is only worth it after a while."""
        if not isinstance(turned, SlotRedirectError):
            self._map = None
            return replace(errand, ask=None), True
        there = (turned.host or address[0], turned.port)
        if turned.moving:
            # A transaction cannot ask: it waits until the slot has arrived.
            alone = len(errand.places) == 1
            return replace(errand, ask=there if alone else None), not alone
        known, self._moved[turned.slot] = self._moved.get(turned.slot), there
        return replace(errand, ask=None), known is not None  # two nodes that name each other will agree soon

    def _by_node(self, left: Sequence[RoutedCall]) -> dict[Address, list[RoutedCall]]:
        groups: dict[Address, list[RoutedCall]] = {}
        for errand in left:
            moved = None if errand.slot is None else self._moved.get(errand.slot)
            address = errand.ask or moved or self._known().address(errand.slot)
            groups.setdefault(address, []).append(errand)
        return groups

    def _reached(self, address: Address, use: Callable[[Client], R]) -> R:
        try:
            return use(self._client(address))
        except BrokerUnavailableError as exc:
            self._map, self._moved = None, {}
            exc.refused = False  # nobody listens there any more, but another node may take its place
            raise

    def _known(self) -> SlotMap:
        if self._map is None:
            self._map, self._moved = self._ask_for_map(), {}
        return self._map

    def _ask_for_map(self) -> SlotMap:
        faults: list[BrokerError] = []
        for address in dict.fromkeys([*self._clients, self._endpoint.address]):
            try:
                return self._client(address).run(slots(address))
            except (BrokerUnavailableError, BrokerNotReadyError) as exc:
                faults.append(exc)
        raise faults[-1]

    def _client(self, address: Address) -> Client:
        if (found := self._clients.get(address)) is None:
            found = self._clients[address] = Client(self._endpoint.at(*address), self._clock)
            found.set_deadline(self._ends_ms)
        return found


class ClusterPool:
    """Lends clients of a cluster, as :class:`~bulltask.transport.client.ClientPool` lends those of a server.

    Args:
        endpoint: one of the nodes.
        clock: as in :class:`ClusterClient`.
    """

    def __init__(self, endpoint: Endpoint, clock: ServerClock | None) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._idle: deque[ClusterClient] = deque()

    @contextmanager
    def client(self, deadline_ms: int | None = None) -> Iterator[ClusterClient]:
        """Lend a client for a ``with`` statement; one is enough unless a signal handler interrupts a send to send.

        Args:
            deadline_ms: what is done with it takes no longer than to there (``mono_ms``).
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


def _words(errand: RoutedCall, calls: Sequence[Call[Any]]) -> list[Call[Any]]:
    """The calls to send for an errand."""
    some = [calls[place] for place in errand.places]
    if errand.ask is None:
        return some
    # With its body: a script that has to be sent again because it is not known would come without the word before it.
    return [_ASKING, *(_with_body(call) for call in some)]


def _with_body(call: Call[Any]) -> Call[Any]:
    if call.script is None:
        return call
    return command(call.script.by_body, call.script.body, *call.args, parse_reply=call.parse_reply)


def _send(words: Sequence[Sequence[Call[Any]]], client: Client) -> list[list[Any]]:
    """Make the calls of several route_calls in one round trip; for each errand the results of its own calls."""
    results = iter(client.try_many([call for some in words for call in some]))
    answers = [[next(results) for _ in some] for some in words]
    return [_own(answer) if some[0] is _ASKING else answer for some, answer in zip(words, answers, strict=True)]


def _own(answer: Sequence[Any]) -> list[Any]:
    """The results of an errand's own calls, behind that of ``ASKING``, which the ACL may forbid."""
    asked, *results = answer
    return [asked] * len(results) if isinstance(asked, BulltaskError) else results


def _turned(answer: Sequence[Any]) -> BrokerError | None:
    """The answer that says that an errand was not run and why; ``None`` when it was."""
    for result in answer:
        if isinstance(result, SlotRedirectError) or (
            isinstance(result, BrokerError) and is_transient_in_cluster(result)
        ):
            return result
    return None
