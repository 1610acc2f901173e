"""Routing of calls by their hash slots, without a Redis Cluster."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from bulltask.errors import BrokerError, BrokerNotReadyError
from bulltask.lua import loader
from bulltask.transport.call import Call, PackedCall, QueueKeys, command, guard_key, script_call
from bulltask.transport.cluster_slots import (
    RoutedCall,
    SlotMap,
    SlotRedirectError,
    guarded,
    route_calls,
    slot_of,
    slot_of_key,
    slots,
)
from bulltask.transport.operation import atomic
from bulltask.transport.redis_errors import is_transient_in_cluster, reply_error
from bulltask.transport.streams import last_id_of_range

MAIL, NEWS = QueueKeys("bull", "{mail}"), QueueKeys("bull", "{news}")
SLOT, OTHER = 4_247, 5_161  # CLUSTER KEYSLOT {mail}, {news}


def test_all_keys_of_a_queue_with_a_hash_tag_are_in_one_slot() -> None:
    keys = [MAIL.wait, MAIL.events, MAIL.job("1"), MAIL.added_ids("w1"), MAIL.bulltask_base]
    assert slot_of([command("EXISTS", key) for key in keys]) == SLOT


@pytest.mark.parametrize(
    "call",
    [
        command("HMGET", MAIL.job("1"), "name"),
        command("XINFO", "STREAM", MAIL.events),
        command("EVALSHA", "sha", 1, MAIL.events, "argument"),
        command("EVAL_RO", "body", 2, MAIL.events, MAIL.wait, NEWS.wait),  # the last key is an argument
        command("EVALSHA", "sha", "1", MAIL.events.encode()),
        command("XREAD", "COUNT", 5, "BLOCK", 10, "STREAMS", MAIL.events, "$"),
        command("BZPOPMIN", MAIL.marker, MAIL.probe, "1.000"),
        last_id_of_range(MAIL, "0-0", "+", 5),
        PackedCall(last_id_of_range(MAIL, "0-0", "+", 5).packed()),
        PackedCall(command("HSET", MAIL.job("1"), "stalled", 1).packed()),
    ],
)
def test_the_slot_of_every_kind_of_call_is_found(call: Call[Any]) -> None:
    assert slot_of([call]) == SLOT


def test_a_key_that_is_not_utf_8_has_the_slot_of_the_bytes_that_are_sent() -> None:
    assert slot_of_key("bull:{mail}:de:a\ud800") == SLOT
    assert slot_of_key("bull:{\ud800}:wait") == slot_of_key("bull:{\ufffd}:wait")
    assert slot_of_key("bull:{\udcff}:wait") == slot_of_key(b"bull:{\xff}:wait")


@pytest.mark.parametrize(
    "args", [("SCAN", "0"), ("INFO",), ("EVAL", "return 1", 0), ("UNWATCH",), ("DISCARD",), ("FLUSHDB", "SYNC")]
)
def test_calls_without_keys_have_no_slot(args: tuple[str, ...]) -> None:
    assert slot_of([command(*args)]) is None


def test_the_calls_of_a_transaction_are_routed_together() -> None:
    first: Call[Any] = command("EXISTS", MAIL.wait)
    second: Call[Any] = command("EXISTS", NEWS.wait)
    calls = [first, *atomic([first, first], "server"), second, *atomic([second], "server")]
    assert list(route_calls(calls)) == [
        RoutedCall((0,), SLOT),
        RoutedCall((1, 2, 3, 4), SLOT),
        RoutedCall((5,), OTHER),
        RoutedCall((6, 7, 8), OTHER),
    ]


def test_watch_and_the_calls_behind_it_are_routed_together() -> None:
    watched: list[Call[Any]] = [command("EXISTS", NEWS.wait), command("WATCH", MAIL.wait), command("GET", MAIL.wait)]
    assert list(route_calls(watched)) == [RoutedCall((0,), OTHER), RoutedCall((1, 2), SLOT)]


def test_a_wait_for_replicas_is_routed_with_the_calls_before_it() -> None:
    mail: Call[Any] = command("SET", MAIL.replicated, "")
    news: Call[Any] = command("SET", NEWS.replicated, "")
    wait: Call[Any] = command("WAIT", 1, 100)
    calls = [mail, mail, wait, *atomic([news], "server"), wait, mail, news]
    assert list(route_calls(calls)) == [
        RoutedCall((0, 1, 2), SLOT),
        RoutedCall((3, 4, 5, 6), OTHER),
        RoutedCall((7,), SLOT),
        RoutedCall((8,), OTHER),
    ]


@pytest.mark.parametrize("prefix", ["bull", "shop", "{bull}", "a{b}c"])
@pytest.mark.parametrize("name", ["{mail}", "mail{shop}"])
def test_the_guard_key_is_in_the_slot_of_its_queue_and_under_its_prefix(prefix: str, name: str) -> None:
    keys = QueueKeys(prefix, name)
    for key in (keys.wait, keys.base, keys.job("1"), keys.revoked, keys.bulltask_base):
        guard = guard_key(key)
        assert guard is not None
        assert guard != key
        assert slot_of_key(guard) == slot_of_key(key)
        assert guard.startswith((f"{prefix}:", f"bulltask:{prefix}:" if prefix != "bull" else "bulltask:"))
    assert guard_key("bull:mail:wait") is None


def test_a_script_gets_the_guard_key_behind_its_own_keys() -> None:
    call = script_call(loader.official_script("getRateLimitTtl"), (MAIL.limiter, MAIL.meta), (7,), int)
    guard = guard_key(MAIL.meta)
    assert guarded(call).packed().count(b"$") == 7
    assert guarded(call).args == (3, MAIL.limiter, MAIL.meta, guard, 7)
    assert guarded(call).keys == (MAIL.limiter, MAIL.meta, guard)
    assert guarded(call).argv == (7,)
    assert guarded(call).parse_reply is int
    plain: Call[Any] = command("EVAL", "body", 1, MAIL.limiter, 7)
    assert guarded(plain).args == ("EVAL", "body", 2, MAIL.limiter, guard, 7)


def test_calls_that_access_only_their_declared_keys_have_no_guard() -> None:
    packed = PackedCall(command("EVALSHA", "sha", 1, MAIL.limiter).packed())
    for call in (last_id_of_range(MAIL, "0-0", "+", 5), command("GET", MAIL.wait), command("INFO"), packed):
        assert guarded(call) is call


def test_a_transaction_across_slots_is_rejected_with_advice() -> None:
    untagged = QueueKeys("bull", "mail")
    calls = atomic([command("EXISTS", untagged.wait), command("EXISTS", untagged.events)], "server")
    with pytest.raises(BrokerError, match=r"bull:mail:events and others .* \(queue_hash_tag=True"):
        list(route_calls(calls))


def test_a_prefix_with_a_hash_tag_keeps_a_queue_in_one_slot() -> None:
    keys = QueueKeys("{bull}", "mail")
    assert slot_of([command("EXISTS", key) for key in (keys.wait, keys.events, keys.bulltask_base)]) is not None


def test_the_slot_map_returns_the_address_of_a_slot() -> None:
    reply = [
        [8_000, 16_383, [b"10.0.0.2", 7_002, b"id"], [b"10.0.0.9", 7_009, b"replica"]],
        [0, 5_999, [b"", 7_001, b"id"]],
        [6_500, 7_000, [None, 7_003, b"id"]],
    ]
    slot_map = slots(("seed", 1)).parse_reply(reply)
    assert slot_map == SlotMap(
        (0, 6_500, 8_000), (5_999, 7_000, 16_383), (("seed", 7_001), ("seed", 7_003), ("10.0.0.2", 7_002))
    )
    ports = {slot: slot_map.address(slot)[1] for slot in (0, 5_999, 6_500, 7_000, 8_000, 16_383)}
    assert ports == {0: 7_001, 5_999: 7_001, 6_500: 7_003, 7_000: 7_003, 8_000: 7_002, 16_383: 7_002}
    for unassigned in (6_000, 6_499, 7_001, 7_999):
        with pytest.raises(BrokerNotReadyError, match=f"slot {unassigned}"):
            slot_map.address(unassigned)


@pytest.mark.parametrize(
    ("cause", "moving"),
    [
        (MovedError("3 10.0.0.2:7002"), False),
        (AskError("3 10.0.0.2:7002"), True),
        (ResponseError("MOVED 3 10.0.0.2:7002"), False),  # as redis-py 5 raises it
        (ResponseError("ASK 3 10.0.0.2:7002"), True),
    ],
)
def test_redirects_are_read_from_errors_of_all_redis_py_versions(cause: ResponseError, moving: bool) -> None:
    error = reply_error(cause, "redis://server")
    assert isinstance(error, SlotRedirectError)
    assert (error.slot, error.host, error.port, error.moving) == (3, "10.0.0.2", 7_002, moving)


@pytest.mark.parametrize(
    "cause",
    [
        TryAgainError("Multiple keys"),
        ResponseError("TRYAGAIN Multiple keys"),
        ClusterDownError("is down"),
        ReadOnlyError("You can't write against a read only replica."),
        ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)"),
    ],
)
def test_transient_cluster_errors_are_recognized(cause: ResponseError) -> None:
    error = reply_error(cause, "redis://server")
    error.__cause__ = cause
    assert isinstance(error, BrokerNotReadyError)
    assert is_transient_in_cluster(error)
    other = reply_error(BusyLoadingError("loading"), "redis://server")
    other.__cause__ = BusyLoadingError("loading")
    assert not is_transient_in_cluster(other)


def test_a_cluster_without_slots_is_not_ready() -> None:
    with pytest.raises(BrokerNotReadyError, match="no slots yet"):
        slots(("seed", 1)).parse_reply([])
