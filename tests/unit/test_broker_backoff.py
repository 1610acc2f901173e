"""How long a process waits while Redis is lost or answers with errors, and which events it emits."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any

import pytest

from bulltask.config.config import Conf
from bulltask.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
)
from bulltask.events import Bus, Event, RedisDisconnected, RedisReconnected, RedisReconnecting, RedisRecovered
from bulltask.events import RedisRefused as Refused
from bulltask.transport.keys import QueueKeys
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff

MOST_S = 1.2  # the jitter comes on top of the longest pause
QUEUES = [QueueKeys("bull", "{mail}", "mail"), QueueKeys("bull", "{sms}", "sms")]


def backoff(**settings: Any) -> tuple[ReconnectBackoff, list[Event]]:
    bus, heard = Bus(), list[Event]()
    bus.subscribe(Event, heard.append)
    return ReconnectBackoff(bus, Conf(settings, {}).freeze()), heard


def nothing_listens() -> BrokerUnavailableError:
    exc = BrokerUnavailableError("refused")
    exc.refused = True
    return exc


def pauses(watched: ReconnectBackoff, exc: BrokerError, count: int = 40) -> list[int]:
    return [watched.record_failure(exc) for _ in range(count)]


@pytest.mark.parametrize("exc", [BrokerOutOfMemoryError(), BrokerAuthError(), BrokerError("ERR")])
def test_after_an_error_reply_the_delay_is_at_most_run_retry_delay(exc: BrokerError) -> None:
    found = pauses(backoff(run_retry_delay=3, broker_reconnect_delay_max=60)[0], exc)
    assert found[0] <= 0.1 * MOST_S * 1000
    assert 3_000 * 0.8 <= max(found) <= 3_000 * MOST_S
    assert all(later > 0.5 * earlier for earlier, later in pairwise(found)), "it grows"


def test_after_a_lost_connection_the_delay_is_that_of_reconnects_whatever_run_retry_delay_is() -> None:
    found = pauses(backoff(run_retry_delay=1, broker_reconnect_delay_max=60)[0], BrokerUnavailableError("timed out"))
    assert 60_000 * 0.8 <= max(found) <= 60_000 * MOST_S


def test_errors_that_pass_by_themselves_are_retried_every_second() -> None:
    assert max(pauses(backoff()[0], BrokerNotReadyError("LOADING"))) <= 1_000 * MOST_S
    assert max(pauses(backoff(run_retry_delay=0.5)[0], BrokerNotReadyError("READONLY"))) <= 500 * MOST_S


FAULTS = [
    BrokerUnavailableError("timed out"),
    nothing_listens(),
    BrokerNotReadyError("READONLY"),
    BrokerOutOfMemoryError("OOM"),
]


@pytest.mark.parametrize(("first", "then"), list(permutations(FAULTS, 2)))
def test_attempts_after_one_kind_of_error_do_not_lengthen_the_delay_after_another(
    first: BrokerError, then: BrokerError
) -> None:
    watched, _ = backoff()
    pauses(watched, first)
    assert watched.record_failure(then) <= 0.1 * MOST_S * 1000
    assert watched.record_failure(first) > 0.5 * 1000, "what goes on is not asked for more often because of it"


@pytest.mark.parametrize("exc", [*FAULTS, BrokerAuthError("NOAUTH"), BrokerError("ERR")])
def test_by_default_no_delay_is_longer_than_four_seconds(exc: BrokerError) -> None:
    assert max(pauses(backoff()[0], exc)) <= 4_000
    queue_backoff = QueueBackoff(QUEUES, Bus(), Conf({}, {}).freeze())
    assert max(queue_backoff.record_failure(0, exc) for _ in range(40)) <= 4_000


def test_many_jobs_with_the_same_error_wait_together_and_count_as_one_attempt() -> None:
    watched, heard = backoff(broker_reconnect_delay=1)
    waits = [watched.record_shared_failure(BrokerUnavailableError("reset")) for _ in range(100)]
    assert max(waits) <= 1_000 * MOST_S
    assert max(waits) - min(waits) <= 1_000, "the later ones wait no longer than the first"
    assert [event.attempt for event in heard if isinstance(event, RedisReconnecting)] == [1]
    watched.reset()
    assert watched.record_shared_failure(BrokerUnavailableError("reset again")) >= 1_000 * 0.8


def test_an_error_reply_and_its_end_are_reported_once_and_no_reconnect_is_counted() -> None:
    watched, heard = backoff()
    pauses(watched, BrokerOutOfMemoryError("full"), 5)
    watched.reset()
    watched.reset()
    assert heard[0] == Refused("", "full")
    (told,) = heard[1:]
    assert isinstance(told, RedisRecovered)
    assert (told.queue, told.attempt) == ("", 5)


def test_every_error_of_an_outage_is_reported_once_whichever_came_first() -> None:
    watched, heard = backoff()
    lost, loading, login = BrokerUnavailableError("gone"), BrokerNotReadyError("LOADING"), BrokerAuthError("WRONGPASS")
    for exc in (BrokerOutOfMemoryError("full"), lost, loading, lost, login, loading, login):
        watched.record_failure(exc)
    watched.reset()
    watched.record_failure(login)
    told = [event for event in heard if not isinstance(event, RedisReconnecting)]
    assert [type(event) for event in told] == [Refused, RedisDisconnected, Refused, Refused, RedisReconnected, Refused]
    errors = [event.error for event in told if isinstance(event, Refused)]
    assert errors == ["full", "LOADING", "WRONGPASS", "WRONGPASS"]


def test_a_reply_that_is_not_from_redis_is_reported_although_the_connection_was_lost_before() -> None:
    watched, heard = backoff()
    page = BrokerUnavailableError("HTTP")
    page.answered = True
    for exc in (BrokerUnavailableError("reset"), page, BrokerUnavailableError("reset"), page, nothing_listens()):
        watched.record_failure(exc)
    assert [event.error for event in heard if isinstance(event, RedisDisconnected)] == ["reset", "HTTP"]


def test_errors_of_each_queue_are_reported_and_delayed_separately() -> None:
    bus, heard = Bus(), list[Event]()
    bus.subscribe(Event, heard.append)
    queue_backoff = QueueBackoff(QUEUES, bus, Conf({"run_retry_delay": 2}, {}).freeze())
    mail = [queue_backoff.record_failure(0, BrokerError("WRONGTYPE")) for _ in range(20)]
    assert 2_000 * 0.8 <= max(mail) <= 2_000 * MOST_S
    assert queue_backoff.record_failure(1, BrokerError("NOPERM")) <= 0.1 * MOST_S * 1000
    queue_backoff.record_failure(0, BrokerAuthError("NOPERM"))
    queue_backoff.reset(0)
    queue_backoff.reset(0)
    assert heard[:3] == [Refused("mail", "WRONGTYPE"), Refused("sms", "NOPERM"), Refused("mail", "NOPERM")]
    (told,) = heard[3:]
    assert isinstance(told, RedisRecovered)
    assert (told.queue, told.attempt) == ("mail", 21)


@pytest.mark.parametrize("exc", [BrokerUnavailableError(), BrokerNotReadyError(), BrokerOutOfMemoryError()])
def test_errors_of_the_whole_server_do_not_concern_a_queue(exc: BrokerError) -> None:
    assert not QueueBackoff.concerns_queue(exc)
    assert QueueBackoff.concerns_queue(BrokerError("WRONGTYPE"))
    assert QueueBackoff.concerns_queue(BrokerAuthError("NOPERM"))
