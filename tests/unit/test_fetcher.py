"""How a child acquires jobs when calls fail or are slow, without a server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.config.parsers import TaskRate
from bulltask.config.settings import Settings
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.events import Bus
from bulltask.jobs.clock import mono_ms
from bulltask.transport.call import Call, FetchedJob, NoJob, QueueKeys
from bulltask.worker import fetch
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.slots import ControlPage, SlotPool, Slots, SlotState

CONFIG = Settings({"lock_duration": 30}, {}).freeze()
FIELDS = {"name": "send", "data": "{}", "opts": json.dumps({"attempts": 1}), "timestamp": "1", "ats": "1"}
JOB = FetchedJob("7", [text.encode() for pair in FIELDS.items() for text in pair])
CONNECTION_LOST = BrokerUnavailableError("gone")


class FakeChild:
    """A child's fetcher with one slot. Its connection returns the replies that a test sets."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.now_ms, self.connected = list(replies), 1_000, False
        self.scripts: list[str] = []
        self.pauses: list[float] = []
        self.connections: list[bool] = []
        broker: Any = SimpleNamespace(
            clock=SimpleNamespace(now_ms=lambda: 5_000),
            config=CONFIG,
            worker_client=lambda: self,
            blocking_client=lambda _: self,
            keys=lambda queue: QueueKeys("bull", f"{{{queue}}}", queue),
            topology=None,
        )
        self.control = ControlPage(memoryview(bytearray(4096)), None)
        wakeup_pipe: Any = SimpleNamespace(wait=self.pause)
        slots = Slots(1, 1)
        (block,) = slots.children
        block.reset()
        self.pool = SlotPool(block.slots())
        self.fetcher = JobFetcher(broker, ["mail"], Bus(), "worker", wakeup_pipe, self.control, self.pool)
        slot = self.pool.take()
        assert slot is not None
        self.slot = slot

    def pause(self, ms: float) -> None:
        self.pauses.append(ms)
        if not self.replies:
            self.fetcher.closing = True

    def connect(self) -> None:
        self.connected = True

    def close(self) -> None:
        self.connected = False

    def try_many(self, calls: list[Call[Any]]) -> list[Any]:
        return [None for _ in calls]

    run_many = try_many

    def wait(self, call: Call[Any], *_: object) -> Any:
        return self.run(call)

    def wait_then(self, call: Call[Any], _fetch: Call[Any], *_: object) -> Any:
        return self.run(call), NoJob()

    def run(self, call: Call[Any]) -> Any:
        self.connections.append(self.connected)
        self.scripts.append("" if call.script is None else call.script.name)
        reply = self.replies.pop(0)
        if callable(reply):
            reply = reply()
        if isinstance(reply, BaseException):
            raise reply
        return reply


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the child's monotonic clock and return the fake."""
    clock = SimpleNamespace(ms=10_000)
    monkeypatch.setattr(fetch, "mono_ms", lambda: clock.ms)
    return clock


def test_a_child_connects_before_it_fetches_a_job() -> None:
    child = FakeChild(JOB)
    acquired = child.fetcher.acquire(child.slot)
    assert acquired is not None
    assert (acquired.job.id, acquired.job.name, acquired.max_concurrent) == ("7", "send", 0)
    assert child.connections == [True]
    assert child.slot.read().state is SlotState.ACTIVE


def test_a_child_releases_jobs_of_a_fetch_whose_reply_was_lost() -> None:
    child = FakeChild(CONNECTION_LOST, [], JOB)
    assert child.fetcher.acquire(child.slot) is not None
    assert len(child.pauses) == 1
    assert child.scripts == ["moveToActive", "findByToken", "moveToActive"]
    assert child.connections == [True, True, True]


def test_a_child_that_closes_during_an_outage_keeps_its_slot_reserved() -> None:
    child = FakeChild(CONNECTION_LOST)
    assert child.fetcher.acquire(child.slot) is None
    assert len(child.pauses) == 1
    assert child.slot.read().state is SlotState.RESERVED


@pytest.mark.parametrize("error", [CONNECTION_LOST, BrokerNotReadyError("a failover is in progress")])
def test_a_job_that_could_not_be_released_is_released_later_whatever_the_error_was(error: BrokerError) -> None:
    child = FakeChild(JOB, [], JOB)
    acquired = child.fetcher.acquire(child.slot)
    assert acquired is not None

    def fail(_: object) -> list[Any]:
        raise error

    child.try_many = fail  # type: ignore[method-assign, assignment]
    child.fetcher.release_unstarted([acquired])
    child.pool.clear(child.slot)
    assert child.slot.read().state is SlotState.RESERVED
    assert child.fetcher.acquire(child.slot) is not None
    assert child.scripts == ["moveToActive", "findByToken", "moveToActive"]


def test_a_wait_is_interrupted_only_if_no_job_may_be_acquired() -> None:
    continued: list[bool] = []

    def child_is_signaled(paused: bool) -> None:
        def signal() -> None:
            child.control.paused = paused
            child.fetcher.interrupt_wait()
            continued.append(paused)
            child.fetcher.closing = True

        child = FakeChild(NoJob(), signal, *([[]] if paused else []))  # findByToken, after an interrupted fetch
        assert child.fetcher.acquire(child.slot) is None

    child_is_signaled(paused=False)
    child_is_signaled(paused=True)
    assert continued == [False]


@pytest.mark.parametrize(
    ("lasted_ms", "replies", "state"),
    [
        (15_000, [], "acquired"),
        (15_001, [True], "acquired"),
        (15_001, [False], "lost"),
        (15_001, [BrokerError("ERR")], "without reply"),
    ],
)
def test_a_fetch_longer_than_half_the_lock_duration_renews_the_lock(
    time: SimpleNamespace, lasted_ms: int, replies: list[Any], state: str
) -> None:
    child = FakeChild(*replies)
    child.slot.enter(SlotState.RESERVED, time.ms)
    time.ms += lasted_ms
    acquired = child.fetcher.adopt(0, child.slot, JOB)
    assert (acquired is not None) == (state == "acquired")
    assert len(child.scripts) == len(replies)
    child.pool.clear(child.slot)
    assert (child.slot.read().state is SlotState.RESERVED) == (state == "without reply")


def test_a_marker_is_read_as_its_queue_and_the_time_of_the_next_job() -> None:
    wait = FakeChild().fetcher._marker_wait
    assert wait._read_marker([b"bull:{mail}:marker", b"0", b"1700.5"]) == (0, 1700.5)
    assert wait._read_marker(None) is None


@pytest.mark.parametrize(("delay_ms", "after"), [(0, SlotState.ACTIVE), (500, SlotState.FREE)])
def test_a_throttled_job_is_not_running_while_the_script_removes_its_lock(
    monkeypatch: pytest.MonkeyPatch, delay_ms: int, after: SlotState
) -> None:
    child, states = FakeChild(), list[int]()
    child.slot.enter(SlotState.RESERVED, mono_ms())
    acquired = child.fetcher.adopt(0, child.slot, JOB)
    assert acquired is not None

    def run(_: Call[Any]) -> int:
        states.append(child.slot.state)
        return delay_ms

    monkeypatch.setattr(child, "run", run)
    assert child.fetcher.throttle_if_limited(acquired, TaskRate(1, 1_000)) is (delay_ms > 0)
    assert (states, child.slot.state) == ([SlotState.FINISHING], after)
