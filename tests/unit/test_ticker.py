"""The intervals at which the ticker runs the supervisor's services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.config.settings import Settings
from bulltask.errors import BrokerUnavailableError
from bulltask.events import Bus, ServiceFailed
from bulltask.worker import supervisor
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.supervisor import Ticker

START_MS = 1_000_000


class Time:
    def __init__(self) -> None:
        self.now_ms = START_MS


@pytest.fixture(scope="module")
def time() -> Iterator[Time]:
    """Replace the monotonic time of the module ``services``."""
    fake = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "mono_ms", lambda: fake.now_ms)
        yield fake


class RecordingService:
    """A service that records its ticks. Each tick takes ``duration_ms``."""

    def __init__(self, time: Time, interval_ms: int, log: list[str] | None = None, duration_ms: int = 0) -> None:
        self.interval_ms, self.duration_ms = interval_ms, duration_ms
        self.ticks: list[tuple[int, int]] = []
        self._time, self._log = time, log
        self._running = False

    def tick(self, now_ms: int, missed: int, /) -> None:
        assert not self._running, "ticks never overlap"
        self._running = True
        self.ticks.append((now_ms - START_MS, missed))
        if self._log is not None:
            self._log.append(f"{self.interval_ms}")
        self._time.now_ms += self.duration_ms
        self._running = False


def new_ticker(*services: RecordingService) -> Ticker:
    return Ticker(services, ReconnectBackoff(Bus(), Settings({}, {}).freeze()), Bus())


@pytest.fixture(autouse=True)
def _reset_time(time: Time) -> None:
    time.now_ms = START_MS


def test_all_services_run_at_the_start_in_their_order(time: Time) -> None:
    log: list[str] = []
    ticker = new_ticker(*(RecordingService(time, interval_ms, log) for interval_ms in (300, 100, 200)))
    assert ticker.wait_ms(5_000) == 0
    ticker.run_due()
    assert log == ["300", "100", "200"]
    assert ticker.wait_ms(5_000) == 100
    assert ticker.wait_ms(50) == 50


def test_a_service_runs_once_per_interval(time: Time) -> None:
    service = RecordingService(time, 100)
    ticker = new_ticker(service)
    for now_ms in (0, 50, 99, 100, 150, 199, 200, 201):
        time.now_ms = START_MS + now_ms
        ticker.run_due()
    assert service.ticks == [(0, 0), (100, 0), (200, 0)]


def test_late_ticks_do_not_drift(time: Time) -> None:
    service = RecordingService(time, 100)
    ticker = new_ticker(service)
    for now_ms in (0, 130, 200, 260, 299, 300):
        time.now_ms = START_MS + now_ms
        ticker.run_due()
    assert [now_ms for now_ms, _ in service.ticks] == [0, 130, 200, 300]
    assert ticker.wait_ms(5_000) == 100


def test_missed_ticks_are_counted_and_not_repeated(time: Time) -> None:
    service = RecordingService(time, 100)
    ticker = new_ticker(service)
    ticker.run_due()
    time.now_ms = START_MS + 350
    ticker.run_due()
    ticker.run_due()
    assert service.ticks == [(0, 0), (350, 2)]
    assert ticker.wait_ms(5_000) == 50
    time.now_ms = START_MS + 400
    ticker.run_due()
    assert service.ticks[-1] == (400, 0)


def test_a_slow_service_misses_ticks_and_does_not_block_others(time: Time) -> None:
    log: list[str] = []
    slow, other = RecordingService(time, 100, log, duration_ms=250), RecordingService(time, 500, log)
    ticker = new_ticker(slow, other)
    for _ in range(3):
        ticker.run_due()
    assert [missed for _, missed in slow.ticks] == [0, 1, 2]
    assert log == ["100", "500", "100", "500", "100"]


def test_services_share_their_wake_ups_although_their_first_ticks_take_time(time: Time) -> None:
    services = [RecordingService(time, interval_ms, duration_ms=7) for interval_ms in (500, 500, 1_000, 100)]
    ticker = new_ticker(*services)
    ticker.run_due()
    for service in services:
        service.duration_ms = 0
    woken = []
    while time.now_ms < START_MS + 1_000:
        time.now_ms += ticker.wait_ms(5_000)
        woken.append(time.now_ms - START_MS)
        ticker.run_due()
    assert woken == list(range(100, 1_001, 100))
    assert [len(service.ticks) for service in services] == [3, 3, 2, 11]


def test_a_service_that_needs_a_shorter_interval_now_does_not_wait_for_the_longer_one(time: Time) -> None:
    service, other = RecordingService(time, 500), RecordingService(time, 500)
    ticker = new_ticker(service, other)
    ticker.run_due()
    time.now_ms += 130
    assert ticker.wait_ms(5_000) == 370
    service.interval_ms = 100
    assert ticker.wait_ms(5_000) == 0
    ticker.run_due()
    assert ticker.wait_ms(5_000) == 70
    service.interval_ms = 500
    assert ticker.wait_ms(5_000) == 370
    assert [now_ms for now_ms, _ in service.ticks] == [0, 130]


@given(
    interval_ms=st.integers(1, 1_000),
    steps_ms=st.lists(st.integers(0, 5_000), max_size=50),
)
def test_every_interval_is_a_tick_or_a_missed_tick(time: Time, interval_ms: int, steps_ms: list[int]) -> None:
    time.now_ms = START_MS
    service = RecordingService(time, interval_ms)
    ticker = new_ticker(service)
    ticker.run_due()
    for step_ms in steps_ms:
        time.now_ms += step_ms
        ticker.run_due()
        passed = (time.now_ms - START_MS) // interval_ms + 1
        assert sum(1 + missed for _, missed in service.ticks) == passed
        assert 0 < ticker.wait_ms(10_000) <= interval_ms


def test_the_ticker_stops_retrying_after_too_many_reconnects(time: Time) -> None:
    backoff = ReconnectBackoff(Bus(), Settings({"broker_connection_max_retries": 1}, {}).freeze())
    ticker = Ticker([], backoff, Bus())
    backoff.record_failure(BrokerUnavailableError())
    assert not ticker.is_exhausted
    backoff.record_failure(BrokerUnavailableError())
    assert ticker.is_exhausted


def test_a_service_that_raises_is_reported_and_runs_again(time: Time) -> None:
    class Broken(RecordingService):
        def tick(self, now_ms: int, missed: int, /) -> None:
            super().tick(now_ms, missed)
            raise OverflowError("Integer value out of range")

    bus, events = Bus(), list[ServiceFailed]()
    bus.subscribe(ServiceFailed, events.append)
    broken, other = Broken(time, 100), RecordingService(time, 100)
    ticker = Ticker([broken, other], ReconnectBackoff(Bus(), Settings({}, {}).freeze()), bus)
    for now_ms in (0, 100):
        time.now_ms = START_MS + now_ms
        ticker.run_due()
    assert broken.ticks == other.ticks == [(0, 0), (100, 0)]
    assert [(event.service, event.failures) for event in events] == [("Broken", 1), ("Broken", 2)]
