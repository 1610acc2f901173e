"""When a worker adds and stops children, without processes."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask.config.parsers import Autoscale
from bulltask.config.settings import Settings
from bulltask.errors import BrokerUnavailableError, ConfigError
from bulltask.events import Bus, ConcurrencyChanged
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.supervisor import Autoscaler


class Pool:
    """A child pool, with the free slots and the jobs that a test sets. A tick is a second, the keepalive 3 s."""

    is_paused = False

    def __init__(self, target: int = 1, maximum: int = 10, minimum: int = 1, per_child: int = 1) -> None:
        self.target, self.free, self.jobs = target, 0, 0
        self.changes: list[int] = []
        self._now_ms = 0
        bus, fake = Bus(), self
        bus.subscribe(ConcurrencyChanged, lambda event: self.changes.append(event.children))
        self.backoff = ReconnectBackoff(bus, Settings({}, {}).freeze())
        pool: Any = fake
        limits = Autoscale(maximum, minimum)
        self.autoscaler = Autoscaler(pool, limits, 3_000, per_child, self.count_jobs, bus, self.backoff)

    def free_slots(self, _per_child: int) -> int | None:
        return self.free

    def resize(self, target: int) -> None:
        self.target = target

    def count_jobs(self) -> int:
        if self.jobs < 0:
            raise BrokerUnavailableError("gone")
        return self.jobs

    def tick(self, *free: int | None, jobs: int = 0) -> list[int]:
        """Tick once for each number of free slots; return the sizes so far."""
        self.jobs = jobs
        for self.free in free:  # type: ignore[assignment]
            self._now_ms += 1_000
            self.autoscaler.tick(self._now_ms, 0)
        return self.changes


def test_the_number_of_children_doubles_while_none_is_idle_and_jobs_wait() -> None:
    assert Pool().tick(0, 0, 0, 0, 0, jobs=100) == [2, 4, 8, 10]


def test_no_more_children_are_added_than_there_are_waiting_jobs() -> None:
    assert Pool(target=4).tick(0, jobs=1) == [5]
    assert Pool(target=4).tick(0, jobs=0) == []


def test_no_children_are_added_while_one_is_idle() -> None:
    assert Pool(target=2).tick(1, 1, jobs=100) == []


def test_children_that_were_never_needed_during_the_keepalive_are_stopped() -> None:
    pool = Pool(target=8)
    assert pool.tick(5, 2, 6) == []
    assert pool.tick(6) == [6], "two were idle all the time"
    assert pool.tick(6, 6, 6, 6, 6) == [6, 1], "the keepalive starts again, and one child remains"


def test_a_moment_without_an_idle_child_restarts_the_keepalive() -> None:
    assert Pool(target=8).tick(5, 5, 5, 0, 5, 5, 5) == []


def test_async_children_are_stopped_if_the_others_have_enough_slots() -> None:
    assert Pool(target=4, per_child=100).tick(*[399] * 4) == [1]
    assert Pool(target=4, per_child=100).tick(*[199] * 4) == [3]


@pytest.mark.parametrize("state", ["starting", "paused", "unreachable", "outage"])
def test_nothing_changes_while_children_start_or_are_paused_or_redis_is_unavailable(state: str) -> None:
    pool = Pool(target=2)
    if state == "paused":
        pool.is_paused = True
    if state == "outage":
        pool.backoff.record_failure(BrokerUnavailableError("gone"))
    assert pool.tick(*[None if state == "starting" else 0] * 3, jobs=-1 if state == "unreachable" else 10) == []
    assert pool.backoff.is_active == (state in {"unreachable", "outage"})


@pytest.mark.parametrize("value", ["10,3", (10, 3), [10, 3], " 10, 3 "])
def test_autoscale_is_the_maximum_and_the_minimum(value: object) -> None:
    config = Settings({"worker_autoscale": value, "worker_concurrency": 5}, {}).freeze()
    assert (config.autoscale, config.children) == (Autoscale(10, 3), 3)


def test_autoscale_with_one_number_has_the_minimum_1() -> None:
    assert Settings({"worker_autoscale": "10"}, {}).freeze().autoscale == Autoscale(10, 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("3,10", "with the maximum first"),
        ("10,0", "one child process always waits"),
        ("many", "MAX,MIN as in '10,3'"),
        ("10,3,1", "MAX,MIN as in '10,3'"),
        ((), "MAX,MIN as in '10,3'"),
    ],
)
def test_an_invalid_autoscale_is_rejected(value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings({"worker_autoscale": value}, {}).freeze()
