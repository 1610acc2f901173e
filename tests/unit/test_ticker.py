"""When the ticker runs the supervisor's services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.config.config import Conf
from bulltask.errors import BrokerUnavailableError
from bulltask.events import Bus, ServiceFailed
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.supervisor import services as module
from bulltask.worker.supervisor.services import Ticker

START_MS = 1_000_000


class Time:
    def __init__(self) -> None:
        self.now_ms = START_MS


@pytest.fixture(scope="module")
def time() -> Iterator[Time]:
    """The monotonic time of this module's tickers, under the tests' control."""
    moment = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mono_ms", lambda: moment.now_ms)
        yield moment


class Note:
    """A service that notes its ticks; each takes ``lasts_ms``."""

    def __init__(self, time: Time, interval_ms: int, journal: list[str] | None = None, lasts_ms: int = 0) -> None:
        self.interval_ms, self.lasts_ms = interval_ms, lasts_ms
        self.ticks: list[tuple[int, int]] = []
        self._time, self._journal = time, journal
        self._running = False

    def tick(self, now_ms: int, missed: int, /) -> None:
        assert not self._running, "ticks never overlap"
        self._running = True
        self.ticks.append((now_ms - START_MS, missed))
        if self._journal is not None:
            self._journal.append(f"{self.interval_ms}")
        self._time.now_ms += self.lasts_ms
        self._running = False


def ticker(*services: Note) -> Ticker:
    return Ticker(services, ReconnectBackoff(Bus(), Conf({}, {}).freeze()), Bus())


@pytest.fixture(autouse=True)
def _at_the_start(time: Time) -> None:
    time.now_ms = START_MS


def test_everything_is_due_at_the_start_in_the_order_of_urgency(time: Time) -> None:
    journal: list[str] = []
    clockwork = ticker(Note(time, 300, journal), Note(time, 100, journal), Note(time, 200, journal))
    assert clockwork.wait_ms(5_000) == 0
    clockwork.run_due()
    assert journal == ["300", "100", "200"]
    assert clockwork.wait_ms(5_000) == 100
    assert clockwork.wait_ms(50) == 50


def test_a_service_ticks_when_its_interval_is_over_and_not_before(time: Time) -> None:
    service = Note(time, 100)
    clockwork = ticker(service)
    for now_ms in (0, 50, 99, 100, 150, 199, 200, 201):
        time.now_ms = START_MS + now_ms
        clockwork.run_due()
    assert service.ticks == [(0, 0), (100, 0), (200, 0)]


def test_ticks_that_come_late_do_not_drift(time: Time) -> None:
    service = Note(time, 100)
    clockwork = ticker(service)
    for now_ms in (0, 130, 200, 260, 299, 300):
        time.now_ms = START_MS + now_ms
        clockwork.run_due()
    assert [now_ms for now_ms, _ in service.ticks] == [0, 130, 200, 300]
    assert clockwork.wait_ms(5_000) == 100


def test_missed_ticks_are_counted_and_not_repeated(time: Time) -> None:
    service = Note(time, 100)
    clockwork = ticker(service)
    clockwork.run_due()
    time.now_ms = START_MS + 350
    clockwork.run_due()
    clockwork.run_due()
    assert service.ticks == [(0, 0), (350, 2)]
    assert clockwork.wait_ms(5_000) == 50
    time.now_ms = START_MS + 400
    clockwork.run_due()
    assert service.ticks[-1] == (400, 0)


def test_a_service_that_takes_longer_than_its_interval_misses_ticks_and_lets_others_run(time: Time) -> None:
    journal: list[str] = []
    slow, other = Note(time, 100, journal, lasts_ms=250), Note(time, 500, journal)
    clockwork = ticker(slow, other)
    for _ in range(3):
        clockwork.run_due()
    assert [missed for _, missed in slow.ticks] == [0, 1, 2]
    assert journal == ["100", "500", "100", "100", "500"]


@given(
    interval_ms=st.integers(1, 1_000),
    steps_ms=st.lists(st.integers(0, 5_000), max_size=50),
)
def test_every_interval_is_a_tick_or_a_missed_one(time: Time, interval_ms: int, steps_ms: list[int]) -> None:
    time.now_ms = START_MS
    service = Note(time, interval_ms)
    clockwork = ticker(service)
    clockwork.run_due()
    for step_ms in steps_ms:
        time.now_ms += step_ms
        clockwork.run_due()
        passed = (time.now_ms - START_MS) // interval_ms + 1
        assert sum(1 + missed for _, missed in service.ticks) == passed
        assert 0 < clockwork.wait_ms(10_000) <= interval_ms


def test_the_ticker_knows_when_redis_was_unavailable_for_too_long(time: Time) -> None:
    backoff = ReconnectBackoff(Bus(), Conf({"broker_connection_max_retries": 1}, {}).freeze())
    clockwork = Ticker([], backoff, Bus())
    backoff.record_failure(BrokerUnavailableError())
    assert not clockwork.is_exhausted
    backoff.record_failure(BrokerUnavailableError())
    assert clockwork.is_exhausted


def test_a_service_that_raises_stops_neither_the_others_nor_itself_and_is_reported(time: Time) -> None:
    class Broken(Note):
        def tick(self, now_ms: int, missed: int, /) -> None:
            super().tick(now_ms, missed)
            raise OverflowError("Integer value out of range")

    bus, heard = Bus(), list[ServiceFailed]()
    bus.subscribe(ServiceFailed, heard.append)
    broken, other = Broken(time, 100), Note(time, 100)
    clockwork = Ticker([broken, other], ReconnectBackoff(Bus(), Conf({}, {}).freeze()), bus)
    for now_ms in (0, 100):
        time.now_ms = START_MS + now_ms
        clockwork.run_due()
    assert broken.ticks == other.ticks == [(0, 0), (100, 0)]
    assert [(event.service, event.failures) for event in heard] == [("Broken", 1), ("Broken", 2)]
