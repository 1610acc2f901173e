"""Slots of a Redis Cluster: which one a call belongs to, which calls stay together, and which node has which slots.

A cluster divides all keys into 16,384 slots, by the part of a key in braces, and each slot is on one node. The keys of
a queue with braces (``bull:{emails}:…``) are in one slot.
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
    "A cluster takes only keys of one slot in a call. Spell the queue with braces (queue_hash_tag=True, which is the "
    "default: queue 'emails' is BullMQ's '{emails}'), or give all queues a prefix with braces ('{bull}')"
)

_NO_KEY: Final = frozenset("ASKING CLIENT CLUSTER CONFIG DBSIZE EXEC HELLO INFO MULTI PING SCAN SCRIPT TIME".split())
_SCRIPTS: Final = frozenset("EVAL EVALSHA EVAL_RO EVALSHA_RO".split())
_SUBCOMMANDS: Final = frozenset("MEMORY OBJECT XINFO".split())


class SlotRedirectError(BrokerError):
    """Another node of the Redis Cluster has the key (``MOVED`` or ``ASK``).

    Attributes:
        slot: Of the key.
        host: The node's address, ``""`` for the host that replied.
        port: Of the node.
        moving: The slot is being moved there (``ASK``).
    """

    slot = -1
    host = ""
    port = 0
    moving = False


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """Calls that go to one node together: a single one, or a transaction.

    Attributes:
        positions: Their positions among all calls.
        slot: Of their keys; ``None`` if they have none.
        ask: The node to which the slot is being moved, and which has the key already.
    """

    positions: tuple[int, ...]
    slot: int | None
    ask: Address | None = None


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Which node has which slots, as one node sees it.

    Attributes:
        starts: First slot of each range, in order.
        ends: Last slot of each range.
        addresses: The primary that has the range.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    addresses: tuple[Address, ...]

    def address(self, slot: int | None) -> Address:
        """Return the node that has a slot; any node for calls without keys.

        Raises:
            BrokerNotReadyError: No node has it.
        """
        if slot is None:
            return self.addresses[0]
        place = bisect_right(self.starts, slot) - 1
        if place < 0 or self.ends[place] < slot:
            raise BrokerNotReadyError(
                f"no node of the Redis Cluster has slot {slot} now; see redis-cli --cluster check"
            )
        return self.addresses[place]

    def primaries(self) -> list[Address]:
        """Return all nodes that have slots."""
        return sorted(set(self.addresses))


def slots(asked: Address) -> Call[SlotMap]:
    """``CLUSTER SLOTS``: the map as a node sees it.

    Args:
        asked: The node; one that does not know its own address omits it.

    Raises:
        BrokerNotReadyError: No node has any slots (when the reply is parsed).
    """

    def parse_reply(reply: Any) -> SlotMap:
        ranges = sorted((int(one[0]), int(one[1]), _address(one[2], asked)) for one in reply)
        if not ranges:
            raise BrokerNotReadyError("the Redis Cluster has no slots yet; redis-cli --cluster create assigns them")
        starts, ends, addresses = zip(*ranges, strict=True)
        return SlotMap(starts, ends, addresses)

    return command("CLUSTER", "SLOTS", parse_reply=parse_reply)


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = (node[0] or b"").decode()
    return (asked[0] if host in {"", "?"} else host), int(node[1])


def route_calls(calls: Sequence[Call[Any]]) -> Iterator[RoutedCall]:
    """Group calls; ``MULTI``, ``EXEC`` and the calls between them stay together.

    Raises:
        BrokerError: Calls that belong together have keys of several slots.
    """
    together: list[int] = []
    for place, call in enumerate(calls):
        together.append(place)
        opened = calls[together[0]].args[0] == "MULTI"
        if not opened or call.args[0] == "EXEC":
            yield RoutedCall(tuple(together), slot_of([calls[one] for one in together]))
            together = []


def slot_of(calls: Sequence[Call[Any]]) -> int | None:
    """Return the slot of all keys of some calls; ``None`` if they have none.

    Raises:
        BrokerError: There are several.
    """
    keys = [key for call in calls for key in _keys(call)]
    found = {key_slot(key.encode("utf-8", "surrogateescape")) for key in keys}
    if len(found) > 1:
        raise BrokerError(f"the keys {keys[0]} and others belong on several nodes of the Redis Cluster. {CROSS_SLOT}")
    return found.pop() if found else None


def _keys(call: Call[Any]) -> Sequence[str]:
    if call.script is not None:
        return [str(key) for key in call.args[1 : call.script.key_count + 1]]
    name = call.args[0]
    if name in _NO_KEY:
        return ()
    if name in _SCRIPTS:
        return [str(key) for key in call.args[3 : int(call.args[2]) + 3]]
    return [str(call.args[2 if name in _SUBCOMMANDS else 1])]
