"""Which sentinel is queried next, and which epoch applies, without servers."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from bulltask.errors import BrokerUnavailableError
from bulltask.transport import discovery
from bulltask.transport import endpoint as known_primary
from bulltask.transport.discovery import SentinelEvents
from bulltask.transport.endpoint import Endpoint, KnownPrimary, PrimaryState

SENTINELS = ("a", "b", "c")


def test_after_a_silent_sentinel_the_next_one_is_asked_first() -> None:
    known = KnownPrimary()
    assert list(known.in_order(SENTINELS)) == ["a", "b", "c"]
    known.ask_next()
    assert list(known.in_order(SENTINELS)) == ["b", "c", "a"]


def test_checks_rotate_among_the_sentinels_and_skip_silent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 20_000
    monkeypatch.setattr(known_primary, "mono_ms", lambda: now_ms)
    known = KnownPrimary()
    assert [known.next_to_check(SENTINELS) for _ in range(4)] == ["b", "c", "a", "b"]
    known.record_silence("c")
    assert [known.next_to_check(SENTINELS) for _ in range(3)] == ["a", "b", "a"]
    now_ms += 10_000
    assert [known.next_to_check(SENTINELS) for _ in range(3)] == ["b", "c", "a"]


def test_a_sentinel_that_missed_a_failover_does_not_change_the_epoch() -> None:
    known = KnownPrimary()
    known.record(5)
    for _ in range(3):
        known.observe(4, "a", 3)
    assert known.epoch == 5
    known.observe(6, "b", 3)
    assert known.epoch == 6


def test_the_epoch_is_lowered_if_a_majority_of_the_sentinels_report_a_lower_one() -> None:
    known = KnownPrimary()
    known.record(5)
    known.observe(0, "a", 3)
    known.observe(0, "b", 3)
    assert known.epoch == 0


def test_a_process_asks_a_sentinel_every_5_s_unless_another_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 20_000
    monkeypatch.setattr(known_primary, "mono_ms", lambda: now_ms)
    known, state = KnownPrimary(), PrimaryState(epoch=7, known_ms=25_000)
    assert (known.takes_check(), known.takes_check()) == (True, False)
    now_ms += 5_000
    assert known.takes_check()
    known.follow(lambda: state)
    now_ms += 300
    assert (known.takes_check(), known.epoch) == (False, 7)


def test_a_child_asks_itself_while_its_supervisor_waits_for_the_old_primary(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 20_000
    monkeypatch.setattr(known_primary, "mono_ms", lambda: now_ms)
    known = KnownPrimary()
    known.follow(lambda: PrimaryState(epoch=7, known_ms=20_000))
    now_ms += 301
    assert (known.takes_check(), known.takes_check()) == (True, False)
    known.observe(8, "a", 3)
    assert known.epoch == 8
    now_ms += 101
    assert known.takes_check()


def test_a_failover_ends_with_another_epoch_or_when_it_is_aborted_or_after_5_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 20_000
    monkeypatch.setattr(known_primary, "mono_ms", lambda: now_ms)
    known, follower, published = KnownPrimary(), KnownPrimary(), list[PrimaryState]()
    known.publish(published.append)
    follower.follow(lambda: published[-1])
    known.record(1)
    for end in (lambda: known.record(2), lambda: known.record_failover(in_progress=False)):
        known.record_failover(in_progress=True)
        known.record(known.epoch)
        known.record_events()
        assert known.is_failing_over
        assert follower.is_failing_over
        end()
        assert not known.is_failing_over
        assert not follower.is_failing_over
    known.record_failover(in_progress=True)
    now_ms += 5_000
    assert not known.is_failing_over
    assert not follower.is_failing_over


def test_a_fork_of_the_process_that_reads_the_events_changes_nothing_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, published = KnownPrimary(), list[PrimaryState]()
    known.publish(published.append)
    count = len(published)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    known.record(9)
    assert len(published) == count


@pytest.mark.parametrize(("who", "seconds"), [("sender", 1), ("sender that hears another one", 10), ("supervisor", 10)])
def test_a_program_that_hears_no_sentinel_tries_every_second_to_reach_one(
    monkeypatch: pytest.MonkeyPatch, who: str, seconds: int
) -> None:
    endpoint = Endpoint("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main", 100, 100)
    known = endpoint.primary
    assert known is not None
    if who == "supervisor":  # it has one thread, which the attempts would delay
        known.publish(lambda _: None)
    events = SentinelEvents(endpoint, known, b"", lambda _, __: None)

    def subscribed(address: object) -> object:
        if who == "sender that hears another one" and address == endpoint.seeds[0]:
            return object()
        raise BrokerUnavailableError("down")

    monkeypatch.setattr(events, "_subscribed", subscribed)
    monkeypatch.setattr(discovery, "mono_ms", lambda: 50_000)
    for address in endpoint.seeds:
        events._subscribe(address)
    assert events._retry_ms[endpoint.seeds[1]] == 50_000 + seconds * 1_000


@pytest.mark.parametrize(("name", "count"), [(b"main", 1), (b"other", 0)])
def test_the_sentinel_that_reports_another_primary_of_this_service_is_known(
    monkeypatch: pytest.MonkeyPatch, name: bytes, count: int
) -> None:
    endpoint = Endpoint("redis+sentinel://127.0.0.1:1/main", 100, 100)
    assert endpoint.primary is not None
    message = (b"pmessage", b"+switch-master", b"+switch-master", name + b" 10.0.0.1 6379 10.0.0.2 6379")
    connection = SimpleNamespace(messages=lambda *_: [message], close=lambda: None)
    events = SentinelEvents(endpoint, endpoint.primary, b"", lambda _, __: None)
    monkeypatch.setattr(events, "_subscribed", lambda _: connection)
    events._subscribe(endpoint.seeds[0])
    assert list(events.poll()) == list(endpoint.seeds)[:count]
