"""Slots of a Redis Cluster: the slot of a call, the calls that stay together, and the map from slots to nodes.

A cluster divides all keys into 16,384 slots, by the hash tag in a key, and each slot is on one node. The keys of a
queue with a hash tag (``bull:{emails}:…``) are in one slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Final

from redis.crc import key_slot

from bulltask.jobs.clock import value_class
from bulltask.jobs.codec import ON_SURROGATE
from bulltask.jobs.errors import BrokerError, BrokerNotReadyError
from bulltask.lua.loader import Script
from bulltask.transport.call import Arg, Call, PackedCall, command, guard_key, is_wait_for_replicas

__all__ = [
    "CROSS_SLOT",
    "Address",
    "RoutedCall",
    "SlotMap",
    "SlotRedirectError",
    "guarded",
    "route_calls",
    "slot_of",
    "slot_of_key",
    "slots",
]

Address = tuple[str, int]
"""Host and port of a node."""

CROSS_SLOT: Final = (
    "All keys of a call must be in one slot of the cluster. Use queue names with a hash tag (queue_hash_tag=True, the "
    "default: queue 'emails' is BullMQ's '{emails}'), or a prefix with a hash tag for all queues ('{bull}')"
)

_NO_KEY: Final = (
    "ASKING CLIENT CLUSTER CONFIG DBSIZE DISCARD EXEC FLUSHALL FLUSHDB HELLO INFO MULTI PING SCAN SCRIPT TIME UNWATCH "
    "WAIT"
)
_POSITIONS: Final[Mapping[Arg, int]] = {
    "MEMORY": 2,
    "OBJECT": 2,
    "XINFO": 2,
    **dict.fromkeys(_NO_KEY.split(), 0),
}
"""The position of the first key, where it is not 1; 0 for commands without keys."""
_SCRIPTS: Final = frozenset("EVAL EVALSHA EVAL_RO EVALSHA_RO".split())
_KEY_COUNT: Final = 2  # the position of a script's number of keys
_CACHED_KEYS: Final = 1_000

_UNGUARDED: Final = frozenset({"lastIdOfRange", "pageAfter"})
"""Scripts that access only their single declared key, so that readers can continue while a slot moves."""


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


@value_class
class RoutedCall:
    """Calls that go to one node together: a single call, or a transaction.

    Attributes:
        positions: The positions of the calls among all calls.
        slot: The slot of their keys; ``None`` if they have no keys.
        ask: The node that the slot is being moved to, and that already has the key.
        node: The node, for a call that is made on every node.
    """

    positions: tuple[int, ...]
    slot: int | None
    ask: Address | None = None
    node: Address | None = None


@value_class
class SlotMap:
    """A node's map from slots to nodes: each range's first and last slot, in order, and its primary."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    addresses: tuple[Address, ...]

    def address(self, slot: int | None) -> Address:
        """Return the node of a slot, any node for ``None``; raises ``BrokerNotReadyError`` if there is none."""
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

    The reply omits the address of a ``node`` that does not know it. Its parser raises ``BrokerNotReadyError`` if no
    node has any slots.
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

    ``WATCH`` stays together with the calls after it: what they read must not change until the transaction. ``WAIT``
    stays together with the calls before it (up to another ``WAIT``): it covers only what its connection has written.
    """
    group: list[int] = []
    last = len(calls) - 1
    last_wait = max((position for position, call in enumerate(calls) if is_wait_for_replicas(call)), default=-1)
    for position, call in enumerate(calls):
        group.append(position)
        match calls[group[0]].args[0]:
            case _ if group[0] <= last_wait:
                is_complete = is_wait_for_replicas(call)
            case "MULTI":
                is_complete = call.args[0] == "EXEC"
            case "WATCH":
                is_complete = position == last
            case _:
                is_complete = True
        if is_complete:
            yield RoutedCall(tuple(group), slot_of([calls[member] for member in group]))
            group = []


def slot_of(calls: Sequence[Call[Any]]) -> int | None:
    """Return the slot of the calls' keys; ``None`` if they have no keys.

    Only the first key of each call is considered. If others are in another slot, the server rejects the call. Raises
    ``BrokerError`` if the calls' first keys are in several slots.
    """
    first: int | None = None
    for call in calls:
        if (key := _first_key(call)) is None:
            continue
        slot = slot_of_key(key)
        if first is not None and slot != first:
            raise BrokerError(
                f"the key {_text(key)} and others are in several slots of the Redis Cluster. {CROSS_SLOT}"
            )
        first = slot
    return first


@lru_cache(maxsize=_CACHED_KEYS)
def slot_of_key(key: Arg) -> int:
    """Return the slot of a key."""
    return key_slot(key if isinstance(key, bytes) else _text(key).encode("utf-8", ON_SURROGATE))


def guarded(call: Call[Any]) -> Call[Any]:
    """Return a script call with one more key, the guard key, so that it does not run while its slot moves.

    Redis checks only the keys that a call declares. BullMQ's scripts also access keys that they do not declare; while a
    slot moves, these may be on the other node. A script would then see a job as missing, or fail partway through and
    leave what it has written. The guard key never exists, so one declared key is always missing: until the move is
    complete, the node replies ``TRYAGAIN`` or ``ASK``, and the new node replies ``TRYAGAIN``. Scripts ignore surplus
    keys.

    A key without a hash tag has no guard, because the other keys of its queue are in other slots anyway.
    """
    if call.script is not None:
        count = call.script.key_count
        if not count or call.script.name in _UNGUARDED or (guard := _guard(call.args[1])) is None:
            return call
        args = (count + 1, *call.args[1 : count + 1], guard, *call.args[count + 1 :])
        return Call(args, call.parse_reply, _with_one_more_key(call.script))
    if call.args[0] in _SCRIPTS and not isinstance(call, PackedCall):
        count = int(call.args[_KEY_COUNT])
        end = _KEY_COUNT + count + 1
        if not count or (guard := _guard(call.args[_KEY_COUNT + 1])) is None:
            return call
        args = (*call.args[:_KEY_COUNT], count + 1, *call.args[_KEY_COUNT + 1 : end], guard, *call.args[end:])
        return Call(args, call.parse_reply)
    return call


@cache
def _with_one_more_key(script: Script) -> Script:
    return replace(script, key_count=script.key_count + 1)


@lru_cache(maxsize=_CACHED_KEYS)
def _guard(key: Arg) -> str | None:
    return guard_key(_text(key))


def _first_key(call: Call[Any]) -> Arg | None:
    args = call.args
    if call.script is not None:
        return args[1] if call.script.key_count else None
    name = args[0]
    if name in _SCRIPTS:
        return args[_KEY_COUNT + 1] if int(args[_KEY_COUNT]) else None
    if name == "XREAD":
        return args[args.index("STREAMS") + 1]
    position = _POSITIONS.get(name, 1)
    return args[position] if position else None


def _text(key: Arg) -> str:
    return key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else str(key)
