"""When the supervisor takes jobs over from a child, without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.config.process import anonymous_file
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.jobs.clock import mono_ms
from bulltask.transport.call import Call, QueueKeys
from bulltask.worker.recovery import Takeover
from bulltask.worker.slots import IDLE_MS, LONG_MS, Slots, SlotState

KEYS = QueueKeys("bull", "{mail}", "mail")


class FakeWorker:
    """One child with four slots, and a client that returns the replies that a test sets."""

    def __init__(self, fd: int) -> None:
        slots = Slots(1, 4, fd)
        (self.block,) = slots.children
        self.block.reset()
        self.slots, self.control = self.block.slots(), slots.control
        self.replies: dict[bytes, Any] = {}
        self.sent: list[bytes] = []
        self.locked: list[tuple[str, str]] = []
        self.released: list[str] = []
        self.release_reply: object = None
        self.failures: list[BrokerError] = []
        backoff: Any = SimpleNamespace(is_active=False, record_failure=self.failures.append)
        client: Any = self
        self.takeover = Takeover(lambda: [(self.block, self.slots)], self.control, [KEYS], client, backoff)

    def run(self, _: Call[Any]) -> list[tuple[str, str]]:
        """Find the jobs that the tokens of sent calls lock."""
        return self.locked

    def send_packed(self, packed: list[bytes]) -> list[Any]:
        self.sent += packed
        replies = [self.replies.get(call, 0) for call in packed]
        for reply in replies:
            if isinstance(reply, BrokerUnavailableError):
                raise reply
        return replies

    def try_many(self, calls: list[Call[Any]]) -> list[Any]:
        self.released += [str(call.argv[0]) for call in calls]
        if isinstance(self.release_reply, BrokerUnavailableError):
            raise self.release_reply
        return [self.release_reply for _ in calls]

    def tick(self, ms_since_start: int = LONG_MS) -> None:
        """Tick that long after the running job has started."""
        now_ms = mono_ms()
        self.block.running_since_ms = now_ms - ms_since_start
        self.takeover.tick(now_ms, 0)

    @property
    def states(self) -> list[int]:
        return [slot.state for slot in self.slots]


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    """A worker whose child has a finished job, a running one and two prefetched ones."""
    fd = anonymous_file("test-slots")
    if fd is None:
        pytest.skip("children prefetch only on platforms with anonymous files")
    worker = FakeWorker(fd)
    finished, running, *prefetched = worker.slots
    finished.activate(0, "1", 1)
    finished.end(b"call 1", 2)
    running.activate(0, "2", 2)
    for number, slot in enumerate(prefetched, 3):
        slot.activate(0, str(number), number, SlotState.PREFETCHED)
    worker.block.prefetches = True
    yield worker
    os.close(fd)


def test_jobs_are_taken_over_when_another_one_has_been_running_for_ten_milliseconds(worker: FakeWorker) -> None:
    before = worker.states
    worker.tick(0)
    assert worker.states == before
    worker.tick()
    assert worker.states == [SlotState.WRITTEN, SlotState.ACTIVE, SlotState.FREE, SlotState.FREE]
    assert (worker.sent, worker.released) == (
        [b"call 1"],
        ["4", "3"],
    )  # in reverse, to keep their order


def test_nothing_is_taken_over_if_the_long_job_does_not_block_the_child(worker: FakeWorker) -> None:
    before = worker.states
    worker.takeover.tick(mono_ms(), 0)  # an async job: the child runs no prefetched one
    assert worker.states == before


def test_the_next_job_that_an_outcome_has_fetched_is_released(worker: FakeWorker) -> None:
    worker.replies[b"call 1"] = [[b"name", b"send"], b"9", 0, 0]
    worker.tick()
    assert worker.released == ["9", "4", "3"]
    assert worker.slots[0].state == SlotState.WRITTEN


@pytest.mark.parametrize("reply", [-2, BrokerError("ERR")])
def test_an_outcome_that_redis_rejects_is_left_to_the_child(worker: FakeWorker, reply: object) -> None:
    worker.replies[b"call 1"] = reply
    worker.tick()
    assert worker.slots[0].state == SlotState.ENDED
    assert worker.released == ["4", "3"]


def test_after_a_damaged_reply_the_child_knows_that_the_outcome_may_be_written(worker: FakeWorker) -> None:
    worker.replies[b"call 1"] = [[b"name"], b"9", 0, 0]
    worker.tick()
    assert worker.slots[0].state == SlotState.NO_REPLY
    assert worker.released == ["4", "3"]


def test_after_a_lost_reply_the_child_knows_that_the_outcome_may_be_written(worker: FakeWorker) -> None:
    worker.replies[b"call 1"] = BrokerUnavailableError("gone")
    worker.tick()
    assert worker.slots[0].state == SlotState.NO_REPLY
    assert worker.slots[2].state == SlotState.PREFETCHED
    assert len(worker.failures) == 1


@pytest.mark.parametrize("reply", [BrokerUnavailableError("gone"), BrokerError("ERR")])
def test_the_child_does_not_start_a_job_that_may_have_been_released(worker: FakeWorker, reply: object) -> None:
    worker.release_reply = reply
    worker.tick()
    assert worker.states == [SlotState.WRITTEN, SlotState.ACTIVE, SlotState.RELEASING, SlotState.RELEASING]


def test_the_child_looks_for_the_next_job_of_an_outcome_if_it_may_not_have_been_released(worker: FakeWorker) -> None:
    worker.replies[b"call 1"] = [[b"name", b"send"], b"9", 0, 0]
    worker.release_reply = BrokerUnavailableError("gone")
    worker.tick()
    assert worker.slots[0].state == SlotState.RELEASING


def test_a_job_that_a_sent_call_has_fetched_is_released_first(worker: FakeWorker) -> None:
    sent = worker.slots[0]
    sent.enter(SlotState.FINISHING, 3)
    worker.locked = [(sent.token, "9")]
    worker.tick()
    assert (worker.sent, worker.released) == ([], ["9", "4", "3"])
    assert sent.state == SlotState.RELEASED


def test_a_sent_call_that_has_fetched_no_job_is_checked_once(worker: FakeWorker) -> None:
    for slot in worker.slots[2:]:
        slot.free(3)
    sent = worker.slots[0]
    sent.enter(SlotState.FINISHING, 3)
    worker.tick()
    assert (worker.sent, worker.released, sent.state) == ([], [], SlotState.RELEASED)
    worker.locked = [(sent.token, "9")]  # of another call of the child, after the long job
    worker.tick()
    assert (worker.released, sent.state) == ([], SlotState.RELEASED)


def test_a_call_that_was_sent_but_not_executed_is_made_by_the_supervisor(worker: FakeWorker) -> None:
    sent = worker.slots[0]
    sent.enter(SlotState.FINISHING, 3)
    worker.locked, worker.replies[b"call 1"] = [(sent.token, "1")], [[b"name", b"send"], b"9", 0, 0]
    worker.tick()
    assert (worker.sent, worker.released) == ([b"call 1"], ["9", "4", "3"])
    assert sent.state == SlotState.WRITTEN


def test_a_sent_call_that_redis_executes_meanwhile_is_checked_again(worker: FakeWorker) -> None:
    sent = worker.slots[0]
    sent.enter(SlotState.FINISHING, 3)
    worker.locked, worker.replies[b"call 1"] = [(sent.token, "1")], -2
    worker.tick()
    assert sent.state == SlotState.FINISHING
    worker.locked = [(sent.token, "9")]
    worker.tick()
    assert (worker.released, sent.state) == (["4", "3", "9"], SlotState.RELEASED)


def test_the_child_looks_for_a_job_that_a_sent_call_has_fetched_if_it_may_not_have_been_released(
    worker: FakeWorker,
) -> None:
    sent = worker.slots[0]
    sent.enter(SlotState.FINISHING, 3)
    worker.locked, worker.release_reply = [(sent.token, "9")], BrokerUnavailableError("gone")
    worker.tick()
    assert sent.state == SlotState.RELEASING


def test_the_outcome_of_an_async_job_is_left_to_the_child(worker: FakeWorker) -> None:
    for slot in worker.slots:
        slot.free(3)
    finishing, running, *_ = worker.slots
    finishing.activate(0, "1", 1)
    finishing.enter(SlotState.FINISHING, 3)
    running.activate(0, "2", 2)
    worker.tick()
    assert finishing.state == SlotState.FINISHING


def test_the_supervisor_watches_while_a_child_prefetches_and_two_seconds_longer(worker: FakeWorker) -> None:
    now_ms = mono_ms()
    worker.block.prefetches = False
    assert worker.takeover.interval_ms == IDLE_MS
    worker.block.prefetches = True
    assert worker.takeover.interval_ms == 20, "the child need not wait"
    worker.takeover.tick(now_ms, 0)
    assert (worker.control.watches, worker.takeover.interval_ms) == (True, 20)
    worker.block.prefetches = False
    worker.takeover.tick(now_ms + 2_000, 0)
    assert worker.control.watches
    worker.takeover.tick(now_ms + 2_001, 0)
    assert (worker.control.watches, worker.takeover.interval_ms) == (False, IDLE_MS)


def test_jobs_that_were_acquired_in_one_millisecond_keep_their_order(worker: FakeWorker) -> None:
    finished, running, *prefetched = worker.slots
    for number, slot in enumerate(reversed(prefetched), 3):
        slot.activate(0, str(number), 1, SlotState.PREFETCHED)
    for slot in (finished, running):
        slot.enter(SlotState.FINISHING, 3)
    worker.locked = [(finished.token, "5"), (running.token, "6")]
    running.end(b"call 2", 3)
    running.enter(SlotState.FINISHING, 3)
    worker.tick()
    assert worker.released == ["6", "5", "4", "3"]
