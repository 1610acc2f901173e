"""How many jobs a child acquires in one round trip."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from bulltask.worker import prefetch
from bulltask.worker.prefetch import PrefetchCount, PrefetchLoop
from bulltask.worker.slots import Slots


def count_after(*durations_ms: float, maximum: int = 16) -> PrefetchCount:
    count = PrefetchCount(maximum)
    for duration_ms in durations_ms:
        count.record(duration_ms)
    return count


def test_jobs_are_prefetched_only_after_several_short_ones_in_a_row() -> None:
    assert count_after().jobs == 1
    assert count_after(*[0.1] * 10).jobs == 1
    assert count_after(*[0.1] * 40).jobs == 16


def test_a_long_job_ends_prefetching_immediately() -> None:
    count = count_after(*[0.1] * 40)
    count.record(20)
    assert count.jobs == 1
    count = count_after(*[0.1] * 40)
    count.record_long_job()
    assert count.jobs == 1


def test_the_jobs_of_one_round_trip_take_about_five_milliseconds() -> None:
    assert count_after(*[1.0] * 100).jobs == 5
    assert count_after(*[2.4] * 100).jobs == 2


def test_one_job_is_prefetched_while_two_do_not_fit_into_one_round_trip_and_none_will_be_released() -> None:
    assert count_after(*[3.0] * 100).jobs == 2
    assert count_after(*[7.5] * 100).jobs == 2
    assert count_after(*[7.6] * 100).jobs == 1
    assert count_after(*[3.0] * 100, maximum=1).jobs == 1


def test_the_setting_is_the_maximum_and_turns_prefetching_off() -> None:
    assert count_after(*[0.0] * 200, maximum=4).jobs == 4
    assert count_after(*[0.0] * 200, maximum=0).jobs == 1


def test_a_child_with_short_jobs_asks_to_be_watched_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms, asked = 0, list[int]()
    monkeypatch.setattr(prefetch, "mono_ms", lambda: now_ms)
    slots, fetcher, unused = Slots(1, 1), Mock(), Mock()
    fetcher.round_robin.cancelled = frozenset()
    shared = slots.children[0], slots.control
    loop = PrefetchLoop(fetcher, unused, unused, unused, *shared, 16, (), lambda: asked.append(now_ms))
    assert not loop.is_useful
    assert asked == []
    for _ in range(40):
        loop.count.record(0.1)
    for time_ms in (1_000, 1_050, 1_099, 1_100):
        now_ms = time_ms
        assert not loop.is_useful, "the supervisor does not watch it yet"
        loop.record_idle()
    assert asked == [1_000, 1_100]
    slots.control.watches, now_ms = True, 2_000
    _ = loop.is_useful
    assert asked == [1_000, 1_100]
