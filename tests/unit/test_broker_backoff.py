"""Delays and events while Redis is unreachable or replies with errors."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any

import pytest

from bulltask.config.settings import Settings
from bulltask.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
)
from bulltask.events import Bus, Event, RedisDisconnected, RedisReconnected, RedisReconnecting, RedisRecovered
from bulltask.events import RedisErrorReply as ErrorReply
from bulltask.transport.call import QueueKeys
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff

MAX_JITTER = 1.2  # jitter may lengthen even the maximum delay
QUEUES = [QueueKeys("bull", "{mail}", "mail"), QueueKeys("bull", "{sms}", "sms")]


def backoff(**settings: Any) -> tuple[ReconnectBackoff, list[Event]]:
    bus, events = Bus(), list[Event]()
    bus.subscribe(Event, events.append)
    return ReconnectBackoff(bus, Settings(settings, {}).freeze()), events


def connection_refused() -> BrokerUnavailableError:
    exc = BrokerUnavailableError("refused")
    exc.refused = True
    return exc


def delays(backoff: ReconnectBackoff, exc: BrokerError, count: int = 40) -> list[int]:
    return [backoff.record_failure(exc) for _ in range(count)]


@pytest.mark.parametrize("exc", [BrokerOutOfMemoryError(), BrokerAuthError(), BrokerError("ERR")])
def test_the_delay_after_an_error_reply_is_at_most_run_retry_delay(exc: BrokerError) -> None:
    waits = delays(backoff(run_retry_delay=3, broker_reconnect_delay_max=60)[0], exc)
    assert waits[0] <= 0.1 * MAX_JITTER * 1000
    assert 3_000 * 0.8 <= max(waits) <= 3_000 * MAX_JITTER
    assert all(later > 0.5 * earlier for earlier, later in pairwise(waits)), "the delay grows"


def test_the_delay_after_a_lost_connection_ignores_run_retry_delay() -> None:
    waits = delays(backoff(run_retry_delay=1, broker_reconnect_delay_max=60)[0], BrokerUnavailableError("timed out"))
    assert 60_000 * 0.8 <= max(waits) <= 60_000 * MAX_JITTER


def test_temporary_errors_are_retried_every_second() -> None:
    assert max(delays(backoff()[0], BrokerNotReadyError("LOADING"))) <= 1_000 * MAX_JITTER
    assert max(delays(backoff(run_retry_delay=0.5)[0], BrokerNotReadyError("READONLY"))) <= 500 * MAX_JITTER


ERRORS = [
    BrokerUnavailableError("timed out"),
    connection_refused(),
    BrokerNotReadyError("READONLY"),
    BrokerOutOfMemoryError("OOM"),
]


@pytest.mark.parametrize(("first", "then"), list(permutations(ERRORS, 2)))
def test_each_kind_of_error_has_a_separate_delay(first: BrokerError, then: BrokerError) -> None:
    reconnect, _ = backoff()
    delays(reconnect, first)
    assert reconnect.record_failure(then) <= 0.1 * MAX_JITTER * 1000
    assert reconnect.record_failure(first) > 0.5 * 1000, "another kind of error does not reset the delay"


@pytest.mark.parametrize("exc", [*ERRORS, BrokerAuthError("NOAUTH"), BrokerError("ERR")])
def test_default_delays_are_at_most_four_seconds(exc: BrokerError) -> None:
    assert max(delays(backoff()[0], exc)) <= 4_000
    queue_backoff = QueueBackoff(QUEUES, Bus(), Settings({}, {}).freeze())
    assert max(queue_backoff.record_failure(0, exc) for _ in range(40)) <= 4_000


def test_jobs_with_the_same_error_share_a_delay_and_count_as_one_attempt() -> None:
    reconnect, events = backoff(broker_reconnect_delay=1)
    waits = [reconnect.record_shared_failure(BrokerUnavailableError("reset")) for _ in range(100)]
    assert max(waits) <= 1_000 * MAX_JITTER
    assert max(waits) - min(waits) <= 1_000, "later jobs wait no longer than the first"
    assert [event.attempt for event in events if isinstance(event, RedisReconnecting)] == [1]
    reconnect.reset()
    assert reconnect.record_shared_failure(BrokerUnavailableError("reset again")) >= 1_000 * 0.8


def test_a_redis_error_and_its_end_are_reported_once() -> None:
    reconnect, events = backoff()
    delays(reconnect, BrokerOutOfMemoryError("full"), 5)
    reconnect.reset()
    reconnect.reset()
    assert events[0] == ErrorReply("", "full")
    (recovered,) = events[1:]
    assert isinstance(recovered, RedisRecovered)
    assert (recovered.queue, recovered.attempt) == ("", 5)
    assert recovered.duration_ms < 60_000


def test_every_error_of_an_outage_is_reported_once_in_any_order() -> None:
    reconnect, events = backoff()
    lost, loading, auth = BrokerUnavailableError("gone"), BrokerNotReadyError("LOADING"), BrokerAuthError("WRONGPASS")
    for exc in (BrokerOutOfMemoryError("full"), lost, loading, lost, auth, loading, auth):
        reconnect.record_failure(exc)
    reconnect.reset()
    reconnect.record_failure(auth)
    reported = [event for event in events if not isinstance(event, RedisReconnecting)]
    types = [type(event) for event in reported]
    assert types == [ErrorReply, RedisDisconnected, ErrorReply, ErrorReply, RedisReconnected, ErrorReply]
    errors = [event.error for event in reported if isinstance(event, ErrorReply)]
    assert errors == ["full", "LOADING", "WRONGPASS", "WRONGPASS"]


def test_a_reply_in_another_protocol_is_reported_after_a_lost_connection() -> None:
    reconnect, events = backoff()
    http = BrokerUnavailableError("HTTP")
    http.wrong_protocol = True
    reset = BrokerUnavailableError("reset")
    for exc in (reset, http, reset, http, connection_refused()):
        reconnect.record_failure(exc)
    assert [event.error for event in events if isinstance(event, RedisDisconnected)] == ["reset", "HTTP"]


def test_each_queue_has_separate_error_reports_and_delays() -> None:
    bus, events = Bus(), list[Event]()
    bus.subscribe(Event, events.append)
    queue_backoff = QueueBackoff(QUEUES, bus, Settings({"run_retry_delay": 2}, {}).freeze())
    mail = [queue_backoff.record_failure(0, BrokerError("WRONGTYPE")) for _ in range(20)]
    assert 2_000 * 0.8 <= max(mail) <= 2_000 * MAX_JITTER
    assert queue_backoff.record_failure(1, BrokerError("NOPERM")) <= 0.1 * MAX_JITTER * 1000
    queue_backoff.record_failure(0, BrokerAuthError("NOPERM"))
    queue_backoff.reset(0)
    queue_backoff.reset(0)
    assert events[:3] == [ErrorReply("mail", "WRONGTYPE"), ErrorReply("sms", "NOPERM"), ErrorReply("mail", "NOPERM")]
    (recovered,) = events[3:]
    assert isinstance(recovered, RedisRecovered)
    assert (recovered.queue, recovered.attempt) == ("mail", 21)


@pytest.mark.parametrize("exc", [BrokerUnavailableError(), BrokerNotReadyError(), BrokerOutOfMemoryError()])
def test_server_errors_are_not_queue_errors(exc: BrokerError) -> None:
    assert not QueueBackoff.affects_queue(exc)
    assert QueueBackoff.affects_queue(BrokerError("WRONGTYPE"))
    assert QueueBackoff.affects_queue(BrokerAuthError("NOPERM"))
