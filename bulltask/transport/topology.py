"""What the clients of a Redis Cluster know about its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bulltask.clock import mono_ms
from bulltask.errors import BrokerNotReadyError
from bulltask.transport.cluster_slots import Address, SlotMap

__all__ = ["PROBE_MS", "Topology"]

PROBE_MS: Final = 500
"""Timeout of the first call to a node that was silent."""

_SILENT_MS: Final = 5_000
"""How long a node that did not reply is not called."""


class Topology:
    """The slot map that the clients of one cluster share, so that each change is learned once.

    It makes no calls: a client reads the map when :attr:`is_known` is false. Any number of threads may use it without
    a lock, and so may a forked process, because every method makes a single change.

    Args:
        seeds: The nodes in the URL, from which the others are discovered.

    Attributes:
        version: The number of slot maps that were read.
    """

    def __init__(self, seeds: Sequence[Address]) -> None:
        self._seeds = tuple(seeds)
        self._map: SlotMap | None = None
        self._moved: dict[int, Address] = {}
        self._nodes: tuple[Address, ...] = ()
        self._failed: Address | None = None
        self._is_current = False
        self._silent_until_ms: dict[Address, int] = {}
        self.version = 0

    @property
    def is_known(self) -> bool:
        """False if the map must be read before the next call."""
        return self._is_current

    def set(self, slot_map: SlotMap) -> None:
        """Set the map that a node has returned."""
        self._map, self._moved, self._nodes = slot_map, {}, tuple(slot_map.primaries())
        self._is_current = True
        self.version += 1

    def forget(self) -> None:
        """Read the map again before the next call, because a node has become a replica, or is gone."""
        self._is_current = False

    def record_move(self, slot: int, address: Address) -> None:
        """Record the new node of a slot, until the map is read again."""
        self._moved[slot] = address

    def record_failure(self, address: Address, took_ms: int = 0) -> None:
        """Record that a node is unreachable: another node may have its slots, and the map is not read from it.

        Args:
            address: The node.
            took_ms: How long it took to notice the failure. A node that hangs is not tried again for a while, because
                each attempt would take a whole timeout, and delay the calls to other nodes.
        """
        self._failed = address
        self._is_current = False
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
        """Return the node that serves a slot; for ``None``, a node for calls without keys, preferably a reachable one.

        Raises:
            BrokerNotReadyError: No node serves the slot.
        """
        assert self._map is not None
        if slot is None:
            return self.by_preference()[0]
        return self._moved.get(slot) or self._map.address(slot)

    def serves(self, slot: int | None) -> bool:
        """Return whether a node serves a slot."""
        try:
            self.address(slot)
        except BrokerNotReadyError:
            return False
        return True

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
