"""Slots of a Redis Cluster: the slot of a call, the calls that stay together, and the map from slots to nodes.

A cluster divides all keys into 16,384 slots, by the hash tag in a key, and each slot is on one node. The keys of a
queue with a hash tag (``bull:{emails}:…``) are in one slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.crc import key_slot

from bulltask.errors import BrokerError, BrokerNotReadyError
from bulltask.transport.call import Call, command

__all__ = ["CROSS_SLOT", "Address", "RoutedCall", "SlotMap", "SlotRedirectError", "route_calls", "slot_of", "slots"]

Address = tuple[str, int]
"""Host and port of a node."""

CROSS_SLOT: Final = (
    "All keys of a call must be in one slot of the cluster. Use queue names with a hash tag (queue_hash_tag=True, the "
    "default: queue 'emails' is BullMQ's '{emails}'), or a prefix with a hash tag for all queues ('{bull}')"
)

_NO_KEY: Final = frozenset("ASKING CLIENT CLUSTER CONFIG DBSIZE EXEC HELLO INFO MULTI PING SCAN SCRIPT TIME".split())
_SCRIPTS: Final = frozenset("EVAL EVALSHA EVAL_RO EVALSHA_RO".split())
_SUBCOMMANDS: Final = frozenset("MEMORY OBJECT XINFO".split())


class SlotRedirectError(BrokerError):
    """Another node of the Redis Cluster has the key (``MOVED`` or ``ASK``).

    Attributes:
        slot: The key's slot.
        host: The node's host, ``""`` for the host that replied.
        port: The node's port.
        moving: Whether the slot is still being moved to that node (``ASK``).
    """

    slot = -1
    host = ""
    port = 0
    moving = False


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """Calls that go to one node together: a single call, or a transaction.

    Attributes:
        positions: The positions of the calls among all calls.
        slot: The slot of their keys; ``None`` if they have no keys.
        ask: The node that the slot is being moved to, and that already has the key.
    """

    positions: tuple[int, ...]
    slot: int | None
    ask: Address | None = None


@dataclass(frozen=True, slots=True)
class SlotMap:
    """A node's map from slots to nodes.

    Attributes:
        starts: First slot of each range, in order.
        ends: Last slot of each range.
        addresses: The primary of each range.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    addresses: tuple[Address, ...]

    def address(self, slot: int | None) -> Address:
        """Return the node that serves a slot; any node for calls without keys.

        Raises:
            BrokerNotReadyError: No node serves the slot.
        """
        if slot is None:
            return self.addresses[0]
        index = bisect_right(self.starts, slot) - 1
        if index < 0 or self.ends[index] < slot:
            raise BrokerNotReadyError(
                f"no node of the Redis Cluster currently serves slot {slot}; see redis-cli --cluster check"
            )
        return self.addresses[index]

    def primaries(self) -> list[Address]:
        """Return all nodes that have slots."""
        return sorted(set(self.addresses))


def slots(node: Address) -> Call[SlotMap]:
    """Build the call for ``CLUSTER SLOTS``, which returns a node's slot map.

    Args:
        node: The node; if it does not know its own address, its reply omits it.

    Raises:
        BrokerNotReadyError: No node has any slots (when the reply is parsed).
    """

    def parse_reply(reply: Any) -> SlotMap:
        ranges = sorted((int(entry[0]), int(entry[1]), _address(entry[2], node)) for entry in reply)
        if not ranges:
            raise BrokerNotReadyError("the Redis Cluster has no slots yet; redis-cli --cluster create assigns them")
        starts, ends, addresses = zip(*ranges, strict=True)
        return SlotMap(starts, ends, addresses)

    return command("CLUSTER", "SLOTS", parse_reply=parse_reply)


def _address(entry: Sequence[Any], node: Address) -> Address:
    host = (entry[0] or b"").decode()
    return (node[0] if host in {"", "?"} else host), int(entry[1])


def route_calls(calls: Sequence[Call[Any]]) -> Iterator[RoutedCall]:
    """Group calls; ``MULTI``, ``EXEC`` and the calls between them stay together.

    Raises:
        BrokerError: Calls that belong together have keys in several slots.
    """
    group: list[int] = []
    for position, call in enumerate(calls):
        group.append(position)
        in_transaction = calls[group[0]].args[0] == "MULTI"
        if not in_transaction or call.args[0] == "EXEC":
            yield RoutedCall(tuple(group), slot_of([calls[member] for member in group]))
            group = []


def slot_of(calls: Sequence[Call[Any]]) -> int | None:
    """Return the slot that contains all of the calls' keys; ``None`` if they have no keys.

    Raises:
        BrokerError: The keys are in several slots.
    """
    keys = [key for call in calls for key in _keys(call)]
    key_slots = {key_slot(key.encode("utf-8", "surrogateescape")) for key in keys}
    if len(key_slots) > 1:
        raise BrokerError(f"the keys {keys[0]} and others are in several slots of the Redis Cluster. {CROSS_SLOT}")
    return key_slots.pop() if key_slots else None


def _keys(call: Call[Any]) -> Sequence[str]:
    if call.script is not None:
        return [str(key) for key in call.args[1 : call.script.key_count + 1]]
    name = call.args[0]
    if name in _NO_KEY:
        return ()
    if name in _SCRIPTS:
        return [str(key) for key in call.args[3 : int(call.args[2]) + 3]]
    return [str(call.args[2 if name in _SUBCOMMANDS else 1])]
