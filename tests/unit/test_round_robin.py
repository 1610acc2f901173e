"""Which queue is polled next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.clock import ServerClock
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import NO_JOB, Fetched
from bulltask.worker.child import round_robin as module
from bulltask.worker.child.round_robin import LONGEST_LIMIT_MS, PROBE_MS, RoundRobin

START_MS = 1_000_000
SERVER_AHEAD_MS = 7_000_000


class Time:
    """Monotonic and server time under the test's control; the server's is ahead."""

    def __init__(self) -> None:
        self.mono_ms = START_MS

    def pass_ms(self, ms: int) -> None:
        self.mono_ms += ms


class Clock(ServerClock):
    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time

    def now_ms(self) -> int:
        return self._time.mono_ms + SERVER_AHEAD_MS


@pytest.fixture(scope="module")
def time() -> Iterator[Time]:
    """The time of this module's rotations."""
    moment = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mono_ms", lambda: moment.mono_ms)
        yield moment


def round_robin(time: Time, queues: int) -> RoundRobin:
    return RoundRobin([QueueKeys("bull", f"q{index}") for index in range(queues)], Clock(time))


def ask(turns: RoundRobin, lengths: list[int]) -> int | None:
    """Ask as a child does; take a job of the first queue that has one."""
    for index in turns.candidates():
        if lengths[index]:
            lengths[index] -= 1
            turns.acquired_from(index)
            return index
        turns.record_empty(index, NO_JOB)
    return None


@given(queues=st.integers(1, 6), rounds=st.integers(1, 5))
def test_full_queues_are_served_in_turn(time: Time, queues: int, rounds: int) -> None:
    turns, lengths = round_robin(time, queues), [100] * queues
    assert [ask(turns, lengths) for _ in range(queues * rounds)] == [*range(queues)] * rounds


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_every_job_is_found_and_no_queue_waits_for_more_than_one_job_of_each_other(
    time: Time, lengths: list[int]
) -> None:
    turns = round_robin(time, len(lengths))
    left, last_seen = list(lengths), [0] * len(lengths)
    for step in range(1, sum(lengths) + 1):
        index = ask(turns, left)
        assert index is not None
        last_seen[index] = step
        waiting = [step - seen for seen, length in zip(last_seen, left, strict=True) if length]
        assert max(waiting, default=0) <= len(lengths)
    assert ask(turns, left) is None


def test_an_empty_queue_is_not_polled_again_at_once_while_others_are_busy(time: Time) -> None:
    turns = round_robin(time, 2)
    turns.record_empty(1, NO_JOB)
    assert list(turns.candidates()) == [0]
    time.pass_ms(PROBE_MS - 1)
    assert list(turns.candidates()) == [0]
    time.pass_ms(1)
    assert list(turns.candidates()) == [0, 1]


def test_a_finished_job_is_followed_by_a_fetch_from_the_next_queue_that_may_have_jobs(time: Time) -> None:
    turns = round_robin(time, 3)
    assert [turns.after(0), turns.after(1), turns.after(2)] == [1, 2, 0]
    turns.record_empty(1, NO_JOB)
    assert turns.after(0) == 2
    turns.record_empty(2, NO_JOB)
    assert turns.after(0) == 0
    assert round_robin(time, 1).after(0) == 0


def test_a_marker_opens_its_queue(time: Time) -> None:
    turns = round_robin(time, 2)
    turns.record_empty(0, NO_JOB)
    turns.record_empty(1, NO_JOB)
    turns.record_marker(1, 0)
    assert list(turns.candidates()) == [1]


def test_a_marker_of_a_job_that_is_due_this_millisecond_opens_its_queue(time: Time) -> None:
    turns = round_robin(time, 1)
    turns.record_empty(0, NO_JOB)
    turns.record_marker(0, time.mono_ms + SERVER_AHEAD_MS)
    assert list(turns.candidates()) == [0]


def test_a_marker_of_a_job_that_is_due_later_only_shortens_the_wait(time: Time) -> None:
    turns = round_robin(time, 1)
    turns.record_empty(0, NO_JOB)
    turns.record_marker(0, time.mono_ms + SERVER_AHEAD_MS + 250.5)
    assert list(turns.candidates()) == []
    assert turns.wait_ms(5_000) == 250
    time.pass_ms(60)
    assert turns.wait_ms(5_000) == 190


def test_a_wait_ends_when_the_next_delayed_job_is_due_by_the_servers_time(time: Time) -> None:
    turns = round_robin(time, 2)
    now_ms = time.mono_ms + SERVER_AHEAD_MS
    turns.record_empty(0, Fetched(due_ms=now_ms + 400))
    turns.record_empty(1, Fetched(due_ms=now_ms + 300))
    assert turns.wait_ms(5_000) == 300
    assert turns.wait_ms(200) == 200
    time.pass_ms(1_000)
    assert turns.wait_ms(5_000) == 1, "never zero: that would be for ever to Redis"
    turns.record_empty(0, NO_JOB)
    turns.record_empty(1, NO_JOB)
    assert turns.wait_ms(5_000) == 5_000


def test_a_rate_limited_queue_is_neither_polled_nor_waited_for_before_its_time(time: Time) -> None:
    turns = round_robin(time, 2)
    turns.record_empty(0, Fetched(limited_ms=500))
    turns.record_empty(1, NO_JOB)
    assert turns.waitable() == [1]
    assert turns.wait_ms(5_000) == 500
    turns.reopen_all()
    assert list(turns.candidates()) == [1]
    time.pass_ms(500)
    assert turns.waitable() == [0, 1]
    turns.reopen_all()
    assert list(turns.candidates()) == [0, 1]


def test_a_queue_with_a_long_rate_limit_is_polled_now_and_then_because_limits_are_removed(time: Time) -> None:
    turns = round_robin(time, 1)
    turns.record_empty(0, Fetched(limited_ms=3_600_000))
    assert turns.waitable() == []
    assert turns.wait_ms(3_600_000) == LONGEST_LIMIT_MS == 30_000
    time.pass_ms(30_000)
    turns.reopen_all()
    assert list(turns.candidates()) == [0]


def test_a_rate_limit_that_a_task_has_set_outlasts_markers_and_empty_replies(time: Time) -> None:
    turns = round_robin(time, 2)
    turns.rate_limited(0, 500)
    turns.record_marker(0, 0)
    assert list(turns.candidates()) == [1]
    turns.record_empty(0, NO_JOB)  # the answer to a call that was made before
    turns.record_marker(0, 0)
    assert turns.waitable() == [1]
    assert list(turns.candidates()) == [1]
    time.pass_ms(500)
    assert list(turns.candidates()) == [0, 1]


def test_after_a_wait_without_a_marker_every_queue_is_polled(time: Time) -> None:
    turns = round_robin(time, 3)
    for index in range(3):
        turns.record_empty(index, NO_JOB)
    assert list(turns.candidates()) == []
    turns.reopen_all()
    assert sorted(turns.candidates()) == [0, 1, 2]


def test_a_queue_with_an_error_is_not_polled_during_its_delay_and_ends_no_wait_before(time: Time) -> None:
    turns = round_robin(time, 2)
    turns.record_empty(0, Fetched(due_ms=time.mono_ms + SERVER_AHEAD_MS + 50))
    turns.record_error(0, 60_000)
    time.pass_ms(100)
    turns.reopen_all()
    assert list(turns.candidates()) == turns.waitable() == [1]
    assert turns.wait_ms(5_000) == 5_000, "a delayed job of the queue is due, and cannot be had"
    time.pass_ms(59_000)
    assert turns.wait_ms(5_000) == 900
    time.pass_ms(900)
    turns.reopen_all()
    assert sorted(turns.candidates()) == turns.waitable() == [0, 1]
