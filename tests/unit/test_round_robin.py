"""The order in which a child polls its queues."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.jobs.clock import ServerClock
from bulltask.transport.call import NO_JOB, NoJob, QueueKeys
from bulltask.worker import fetch
from bulltask.worker.fetch import EMPTY_POLL_MS, MAX_LIMIT_MS, RoundRobin

START_MS = 1_000_000
SERVER_AHEAD_MS = 7_000_000


class Time:
    """Fake monotonic time. The server's time is ahead."""

    def __init__(self) -> None:
        self.mono_ms = START_MS

    def advance_ms(self, ms: int) -> None:
        self.mono_ms += ms


class Clock(ServerClock):
    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time

    def now_ms(self) -> int:
        return self._time.mono_ms + SERVER_AHEAD_MS


@pytest.fixture(scope="module")
def time() -> Iterator[Time]:
    """Replace the time of the module ``round_robin``."""
    fake = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "mono_ms", lambda: fake.mono_ms)
        yield fake


def round_robin(time: Time, queues: int) -> RoundRobin:
    return RoundRobin([QueueKeys("bull", f"q{index}") for index in range(queues)], Clock(time))


def poll(rotation: RoundRobin, lengths: list[int]) -> int | None:
    """Poll the queues as a child does, and acquire a job of the first queue that has one."""
    for index in rotation.candidates():
        if lengths[index]:
            lengths[index] -= 1
            rotation.acquired_from(index)
            return index
        rotation.record_empty(index, NO_JOB)
    return None


@given(queues=st.integers(1, 6), rounds=st.integers(1, 5))
def test_full_queues_are_polled_round_robin(time: Time, queues: int, rounds: int) -> None:
    rotation, lengths = round_robin(time, queues), [100] * queues
    assert [poll(rotation, lengths) for _ in range(queues * rounds)] == [*range(queues)] * rounds


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_a_queue_waits_for_at_most_one_job_of_each_other_queue(time: Time, lengths: list[int]) -> None:
    rotation = round_robin(time, len(lengths))
    left, last_seen = list(lengths), [0] * len(lengths)
    for step in range(1, sum(lengths) + 1):
        index = poll(rotation, left)
        assert index is not None
        last_seen[index] = step
        waiting = [step - seen for seen, length in zip(last_seen, left, strict=True) if length]
        assert max(waiting, default=0) <= len(lengths)
    assert poll(rotation, left) is None


def test_an_empty_queue_is_polled_again_after_the_poll_interval(time: Time) -> None:
    rotation = round_robin(time, 2)
    rotation.record_empty(1, NO_JOB)
    assert list(rotation.candidates()) == [0]
    time.advance_ms(EMPTY_POLL_MS - 1)
    assert list(rotation.candidates()) == [0]
    time.advance_ms(1)
    assert list(rotation.candidates()) == [0, 1]


def test_the_fetch_after_a_job_uses_the_next_queue_that_may_have_jobs(time: Time) -> None:
    rotation = round_robin(time, 3)
    assert [rotation.after(0), rotation.after(1), rotation.after(2)] == [1, 2, 0]
    rotation.record_empty(1, NO_JOB)
    assert rotation.after(0) == 2
    rotation.record_empty(2, NO_JOB)
    assert rotation.after(0) == 0
    assert round_robin(time, 1).after(0) == 0


def test_a_marker_makes_its_queue_a_candidate_again(time: Time) -> None:
    rotation = round_robin(time, 2)
    rotation.record_empty(0, NO_JOB)
    rotation.record_empty(1, NO_JOB)
    rotation.record_marker(1, 0)
    assert list(rotation.candidates()) == [1]


def test_the_marker_of_a_due_job_makes_its_queue_a_candidate_again(time: Time) -> None:
    rotation = round_robin(time, 1)
    rotation.record_empty(0, NO_JOB)
    rotation.record_marker(0, time.mono_ms + SERVER_AHEAD_MS)
    assert list(rotation.candidates()) == [0]


def test_a_marker_of_a_delayed_job_shortens_the_wait(time: Time) -> None:
    rotation = round_robin(time, 1)
    rotation.record_empty(0, NO_JOB)
    rotation.record_marker(0, time.mono_ms + SERVER_AHEAD_MS + 250.5)
    assert list(rotation.candidates()) == []
    assert rotation.wait_ms(5_000) == 250
    time.advance_ms(60)
    assert rotation.wait_ms(5_000) == 190


def test_a_wait_ends_when_the_next_delayed_job_is_due_by_the_servers_time(time: Time) -> None:
    rotation = round_robin(time, 2)
    now_ms = time.mono_ms + SERVER_AHEAD_MS
    rotation.record_empty(0, NoJob(due_ms=now_ms + 400))
    rotation.record_empty(1, NoJob(due_ms=now_ms + 300))
    assert rotation.wait_ms(5_000) == 300
    assert rotation.wait_ms(200) == 200
    time.advance_ms(1_000)
    assert rotation.wait_ms(5_000) == 1, "not zero, for which Redis would wait forever"
    rotation.record_empty(0, NO_JOB)
    rotation.record_empty(1, NO_JOB)
    assert rotation.wait_ms(5_000) == 5_000


def test_a_rate_limited_queue_is_not_polled_until_its_limit_ends(time: Time) -> None:
    rotation = round_robin(time, 2)
    rotation.record_empty(0, NoJob(limited_ms=500))
    rotation.record_empty(1, NO_JOB)
    assert rotation.waitable() == [1]
    assert rotation.wait_ms(5_000) == 500
    rotation.reopen()
    assert list(rotation.candidates()) == [1]
    time.advance_ms(500)
    assert rotation.waitable() == [0, 1]
    rotation.reopen()
    assert list(rotation.candidates()) == [0, 1]


def test_a_queue_with_a_long_rate_limit_is_polled_at_intervals(time: Time) -> None:
    # The limit may be removed before it ends.
    rotation = round_robin(time, 1)
    rotation.record_empty(0, NoJob(limited_ms=3_600_000))
    assert rotation.waitable() == []
    assert rotation.wait_ms(3_600_000) == MAX_LIMIT_MS == 5_000
    time.advance_ms(5_000)
    rotation.reopen()
    assert list(rotation.candidates()) == [0]


def test_markers_and_empty_replies_do_not_end_a_rate_limit_set_by_a_task(time: Time) -> None:
    rotation = round_robin(time, 2)
    rotation.rate_limited(0, 500)
    rotation.record_marker(0, 0)
    assert list(rotation.candidates()) == [1]
    rotation.record_empty(0, NO_JOB)  # the reply to an earlier call
    rotation.record_marker(0, 0)
    assert rotation.waitable() == [1]
    assert list(rotation.candidates()) == [1]
    time.advance_ms(500)
    assert list(rotation.candidates()) == [0, 1]


def test_every_queue_is_polled_after_a_wait_without_a_marker(time: Time) -> None:
    rotation = round_robin(time, 3)
    for index in range(3):
        rotation.record_empty(index, NO_JOB)
    assert list(rotation.candidates()) == []
    rotation.reopen()
    assert sorted(rotation.candidates()) == [0, 1, 2]


def test_a_queue_with_an_error_is_not_polled_during_its_delay(time: Time) -> None:
    rotation = round_robin(time, 2)
    rotation.record_empty(0, NoJob(due_ms=time.mono_ms + SERVER_AHEAD_MS + 50))
    rotation.record_error(0, 60_000)
    time.advance_ms(100)
    rotation.reopen()
    assert list(rotation.candidates()) == rotation.waitable() == [1]
    assert rotation.wait_ms(5_000) == 5_000, "a due job of the queue does not shorten the wait"
    time.advance_ms(59_000)
    assert rotation.wait_ms(5_000) == 900
    time.advance_ms(900)
    rotation.reopen()
    assert sorted(rotation.candidates()) == rotation.waitable() == [0, 1]


# ---- more queues than a child polls at once -------------------------------------------------------------------------


def many(time: Time) -> RoundRobin:
    """Return the order of 1,000 queues, of which a child polls 50 at once, after it has found the first 50 empty."""
    clock = Clock(time)
    rotation = RoundRobin([QueueKeys("bull", f"q{index}") for index in range(1_000)], clock, 50)
    assert poll(rotation, [0] * 1_000) is None
    return rotation


def test_an_idle_child_polls_all_of_many_queues_in_turn_and_few_at_once(time: Time) -> None:
    rotation, polled = many(time), set[int]()
    for _ in range(20):
        time.advance_ms(5_000)
        rotation.reopen()
        found = list(rotation.candidates())
        assert len(found) <= 55
        polled.update(found)
        assert poll(rotation, [0] * 1_000) is None
    assert polled == set(range(1_000))


def test_waits_that_end_early_do_not_lead_to_more_polls(time: Time) -> None:
    rotation, polls = many(time), 0
    for _ in range(100):
        time.advance_ms(50)
        rotation.reopen()
        found = list(rotation.candidates())
        polls += len(found)
        for index in found:
            rotation.record_empty(index, NO_JOB)
    assert polls <= 400  # 5 s of a child that may be busy: five every 100 ms, and one after each wait


def test_the_marker_of_one_of_many_queues_comes_first(time: Time) -> None:
    rotation = many(time)
    rotation.record_marker(777, 0)
    assert next(rotation.candidates()) == 777
    assert rotation.may_stay(777) is (len(list(rotation.candidates())) == 1)


def test_a_delayed_job_of_one_of_many_queues_is_found_when_it_is_due(time: Time) -> None:
    rotation = many(time)
    rotation.record_marker(777, time.mono_ms + SERVER_AHEAD_MS + 1_000)
    assert 777 not in list(rotation.candidates())
    assert rotation.wait_ms(5_000) == 1_000
    time.advance_ms(1_000)
    rotation.reopen()
    assert 777 in list(rotation.candidates())


def test_a_limit_of_one_of_many_queues_ends(time: Time) -> None:
    rotation = many(time)
    rotation.record_marker(777, 0)
    rotation.record_empty(777, NoJob(2_000))
    assert 777 not in list(rotation.candidates())
    time.advance_ms(2_000)
    assert 777 in list(rotation.candidates())


def test_a_child_that_is_busy_with_one_of_many_queues_looks_at_the_others(time: Time) -> None:
    rotation, lengths = many(time), [0] * 1_000
    lengths[7] = 10_000
    lengths[500] = 1
    rotation.record_marker(7, 0)
    jobs = 0
    while poll(rotation, lengths) != 500:
        jobs += 1
        time.advance_ms(20)
    assert jobs <= 1_000  # 20 s: 5 queues every 100 ms


@pytest.mark.parametrize("queues", [3, 30])
def test_no_job_is_fetched_from_a_cancelled_queue_until_it_is_consumed_again(time: Time, queues: int) -> None:
    keys = [QueueKeys("bull", f"q{index}") for index in range(queues)]
    rotation = RoundRobin(keys, Clock(time), 5)
    rotation.cancel(["q1"])
    assert rotation.cancelled == {1}
    assert rotation.after(1) != 1
    assert not rotation.may_stay(1)
    rotation.record_empty(1, NoJob(limited_ms=5, due_ms=SERVER_AHEAD_MS))  # of a fetch that was on its way
    rotation.record_marker(1, 0)
    for _ in range(100):
        time.advance_ms(1_000)
        rotation.reopen()
        assert 1 not in rotation.candidates()
        assert 1 not in rotation.waitable()
        assert rotation.wait_ms(5_000) == 5_000
    assert not rotation.is_skipped(1)  # a job that it has lost must be released nevertheless
    for index in range(queues):
        rotation.record_empty(index, NO_JOB)
    assert rotation.after(0) != 1
    rotation.cancel([])
    assert 1 in rotation.candidates()
    assert 1 in rotation.waitable()
