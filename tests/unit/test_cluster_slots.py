"""Which calls go to which node of a Redis Cluster, worked out without one."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    ResponseError,
    TryAgainError,
)

from bulltask.errors import BrokerError, BrokerNotReadyError
from bulltask.transport.call import Call, command
from bulltask.transport.cluster_slots import RoutedCall, SlotMap, SlotRedirectError, route_calls, slot_of, slots
from bulltask.transport.faults import is_transient_in_cluster, reply_error
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.stream import span_end
from bulltask.transport.transaction import atomic

MAIL, NEWS = QueueKeys("bull", "{mail}"), QueueKeys("bull", "{news}")
SLOT, OTHER = 4_247, 5_161  # CLUSTER KEYSLOT {mail}, {news}


def test_all_keys_of_a_queue_with_braces_are_in_one_slot() -> None:
    keys = [MAIL.wait, MAIL.events, MAIL.job("1"), MAIL.fence("w1"), MAIL.own]
    assert slot_of([command("EXISTS", key) for key in keys]) == SLOT


@pytest.mark.parametrize(
    "call",
    [
        command("HMGET", MAIL.job("1"), "name"),
        command("XINFO", "STREAM", MAIL.events),
        command("EVALSHA", "sha", 1, MAIL.events, "argument"),
        command("EVAL_RO", "body", 2, MAIL.events, MAIL.wait, NEWS.wait),  # the last one is an argument
        span_end(MAIL, "0-0", "+", 5),
    ],
)
def test_the_keys_of_every_kind_of_call_are_found(call: Call[Any]) -> None:
    assert slot_of([call]) == SLOT


@pytest.mark.parametrize("words", [("SCAN", "0"), ("INFO",), ("EVAL", "return 1", 0)])
def test_calls_without_keys_have_no_slot(words: tuple[str, ...]) -> None:
    assert slot_of([command(*words)]) is None


def test_the_calls_of_a_transaction_stay_together() -> None:
    first: Call[Any] = command("EXISTS", MAIL.wait)
    second: Call[Any] = command("EXISTS", NEWS.wait)
    calls = [first, *atomic([first, first], "here"), second, *atomic([second], "here")]
    assert list(route_calls(calls)) == [
        RoutedCall((0,), SLOT),
        RoutedCall((1, 2, 3, 4), SLOT),
        RoutedCall((5,), OTHER),
        RoutedCall((6, 7, 8), OTHER),
    ]


def test_a_transaction_over_several_slots_is_refused_with_advice() -> None:
    bare = QueueKeys("bull", "mail")
    calls = atomic([command("EXISTS", bare.wait), command("EXISTS", bare.events)], "here")
    with pytest.raises(BrokerError, match=r"bull:mail:wait and others .* \(queue_hash_tag=True"):
        list(route_calls(calls))


def test_a_prefix_with_braces_keeps_a_queue_together_as_well() -> None:
    keys = QueueKeys("{bull}", "mail")
    assert slot_of([command("EXISTS", key) for key in (keys.wait, keys.events, keys.own)]) is not None


def test_the_map_says_who_has_a_slot() -> None:
    reply = [
        [8_000, 16_383, [b"10.0.0.2", 7_002, b"id"], [b"10.0.0.9", 7_009, b"replica"]],
        [0, 5_999, [b"", 7_001, b"id"]],
        [6_500, 7_000, [None, 7_003, b"id"]],
    ]
    found = slots(("me", 1)).parse_reply(reply)
    assert found == SlotMap(
        (0, 6_500, 8_000), (5_999, 7_000, 16_383), (("me", 7_001), ("me", 7_003), ("10.0.0.2", 7_002))
    )
    asked = {slot: found.address(slot)[1] for slot in (0, 5_999, 6_500, 7_000, 8_000, 16_383)}
    assert asked == {0: 7_001, 5_999: 7_001, 6_500: 7_003, 7_000: 7_003, 8_000: 7_002, 16_383: 7_002}
    for nobodys in (6_000, 6_499, 7_001, 7_999):
        with pytest.raises(BrokerNotReadyError, match=f"slot {nobodys}"):
            found.address(nobodys)


@pytest.mark.parametrize(
    ("fault", "moving"),
    [
        (MovedError("3 10.0.0.2:7002"), False),
        (AskError("3 10.0.0.2:7002"), True),
        (ResponseError("MOVED 3 10.0.0.2:7002"), False),  # of redis-py 5
        (ResponseError("ASK 3 10.0.0.2:7002"), True),
    ],
)
def test_redirects_are_read_from_every_kind_of_reply(fault: ResponseError, moving: bool) -> None:
    error = reply_error(fault, "redis://here")
    assert isinstance(error, SlotRedirectError)
    assert (error.slot, error.host, error.port, error.moving) == (3, "10.0.0.2", 7_002, moving)


@pytest.mark.parametrize(
    "fault", [TryAgainError("Multiple keys"), ResponseError("TRYAGAIN Multiple keys"), ClusterDownError("is down")]
)
def test_transient_errors_of_a_cluster_are_recognised(fault: ResponseError) -> None:
    error = reply_error(fault, "redis://here")
    error.__cause__ = fault
    assert is_transient_in_cluster(error)
    other = reply_error(BusyLoadingError("loading"), "redis://here")
    other.__cause__ = BusyLoadingError("loading")
    assert not is_transient_in_cluster(other)


def test_a_cluster_without_slots_is_not_ready() -> None:
    with pytest.raises(BrokerNotReadyError, match="no slots yet"):
        slots(("me", 1)).parse_reply([])
