"""When the supervisor takes jobs over from a child, without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.worker.slots import Slots, anonymous_file
from bulltask.worker.states import SlotState
from bulltask.worker.supervisor.takeover import LONG_MS, Takeover

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
        self.released: list[str] = []
        self.release_reply: object = None
        self.failures: list[BrokerError] = []
        backoff: Any = SimpleNamespace(is_active=False, record_failure=self.failures.append)
        client: Any = self
        self.takeover = Takeover(lambda: [(self.block, self.slots)], self.control, [KEYS], client, backoff)

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
        self.block.running_since_ms = mono_ms() - ms_since_start
        self.takeover.tick(mono_ms(), 0)

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
    finished.finish(b"call 1", 2)
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
    assert worker.slots[0].state == SlotState.FINISHED
    assert worker.released == ["4", "3"]


def test_after_a_damaged_reply_the_child_knows_that_the_outcome_may_be_written(worker: FakeWorker) -> None:
    worker.replies[b"call 1"] = [[b"name"], b"9", 0, 0]
    worker.tick()
    assert worker.slots[0].state == SlotState.UNCERTAIN
    assert worker.released == ["4", "3"]


def test_after_a_lost_reply_the_child_knows_that_the_outcome_may_be_written(worker: FakeWorker) -> None:
    worker.replies[b"call 1"] = BrokerUnavailableError("gone")
    worker.tick()
    assert worker.slots[0].state == SlotState.UNCERTAIN
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


def test_the_supervisor_watches_while_a_child_prefetches_and_two_seconds_longer(worker: FakeWorker) -> None:
    now_ms = mono_ms()
    assert worker.takeover.interval_ms == 100
    worker.takeover.tick(now_ms, 0)
    assert (worker.control.watches, worker.takeover.interval_ms) == (True, 20)
    worker.block.prefetches = False
    worker.takeover.tick(now_ms + 2_000, 0)
    assert worker.control.watches
    worker.takeover.tick(now_ms + 2_001, 0)
    assert (worker.control.watches, worker.takeover.interval_ms) == (False, 100)
