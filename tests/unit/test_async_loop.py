"""A child's event loop, without a server: slots, outages and shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.config.settings import Settings
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.events import Bus, Event, JobCompleted, JobFailed, JobReleased
from bulltask.jobs.job import RunningJob
from bulltask.testing.worker import wait_until
from bulltask.transport.call import Call, FetchedJob, QueueKeys
from bulltask.worker.async_loop import AsyncLoop
from bulltask.worker.cancellation import Cancellation
from bulltask.worker.finish import Finisher
from bulltask.worker.outcomes import AcquiredJob, CompletedOutcome, Outcome
from bulltask.worker.slots import Slot, SlotPool, Slots, SlotState

KEYS = QueueKeys("bull", "{mail}", "mail")
FIELDS = [b"name", b"send", b"data", b"{}", b"timestamp", b"1", b"ats", b"1"]
CONNECTION_LOST = BrokerUnavailableError("gone")


class Child:
    """An event loop with two slots. Its connection returns the replies that a test sets, then ``None``."""

    may_start = True
    threads = SimpleNamespace(free=lambda _: None)

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.scripts: list[str] = []
        self.pauses = self.resets = 0
        self.gate = threading.Event()
        self.gate.set()
        self.woken = threading.Semaphore(0)
        self.events: list[Event] = []
        bus = Bus()
        bus.subscribe(Event, self.events.append)
        clock: Any = SimpleNamespace(now_ms=lambda: 1_000)
        finisher = Finisher(Settings({}, {}).freeze(), clock, bus, "worker")
        slots = Slots(1, 2)
        (block,) = slots.children
        block.reset()
        self.cancellation = Cancellation(block, lambda: None, lambda: None)
        fake: Any = self
        self.pool = SlotPool(block.slots())
        self.loop = AsyncLoop(self.pool, fake, finisher, lambda: fake, fake, fake, run=self.run_sync)

    def acquire_job(self, max_concurrent: int = 0, opts: bytes = b'{"attempts":1}') -> AcquiredJob:
        slot = self.loop.wait_for_slot(lambda: False)
        assert slot is not None
        slot.activate(0, "7", 1)
        job = RunningJob.from_hash("mail", "7", [*FIELDS, b"opts", opts])
        return AcquiredJob(slot, 0, KEYS, job, max_concurrent)

    def start_job(self, max_concurrent: int = 0, opts: bytes = b'{"attempts":1}') -> Slot:
        """Acquire a job and start its attempt."""
        attempt: Any = None
        acquired = self.acquire_job(max_concurrent, opts)
        self.loop.start(acquired, attempt)
        return acquired.slot

    @contextmanager
    def blocked(self) -> Iterator[asyncio.AbstractEventLoop]:
        """Run a job, so that the event loop exists, and then block it."""
        self.start_job()
        self.finish()
        self.events.clear()
        loop, unblock = self.loop.running_loop(), threading.Event()
        assert loop is not None
        loop.call_soon_threadsafe(unblock.wait, 5)
        try:
            yield loop
        finally:
            unblock.set()

    def has_free_slot(self) -> bool:
        stopping = iter([False, True])
        if (slot := self.loop.wait_for_slot(lambda: next(stopping))) is None:
            return False
        self.pool.give_back(slot)
        return True

    def finish(self) -> None:
        self.gate.set()
        self.loop.wait_until_running(at_most=0)

    # This object is also the loop's attempts, connection, backoff and wakeup pipe.

    async def acall(self, *_: object) -> Outcome:
        await asyncio.get_running_loop().run_in_executor(None, self.gate.wait, 10)
        return CompletedOutcome(b"1", 1)

    async def run(self, call: Call[Any]) -> Any:
        return self.run_sync(call)

    def run_sync(self, call: Call[Any]) -> Any:
        self.scripts.append("" if call.script is None else call.script.name)
        reply = self.replies.pop(0) if self.replies else None
        if isinstance(reply, BaseException):
            raise reply
        return reply

    async def close(self) -> None:
        self.scripts.append("closed")

    def record_shared_failure(self, _: BrokerError) -> int:
        self.pauses += 1
        return 1

    def reset(self) -> None:
        self.resets += 1

    def wait(self, ms: float) -> None:
        self.woken.acquire(timeout=min(ms / 1000, 0.2))

    def wake(self) -> None:
        self.woken.release()


@pytest.fixture
def child() -> Iterator[Child]:
    fake = Child()
    yield fake
    fake.gate.set()
    wait_until(lambda: not fake.loop.running(), what="the end of all jobs")
    fake.loop.drain()


def test_a_slot_is_free_again_when_the_outcome_of_its_job_is_written(child: Child) -> None:
    child.gate.clear()
    slots = {child.start_job(), child.start_job()}
    assert len(slots) == 2
    assert not child.has_free_slot()
    child.finish()
    assert [slot.read().state for slot in slots] == [SlotState.FREE] * 2
    assert [type(event) for event in child.events] == [JobCompleted] * 2
    assert child.resets == 2
    wait_until(lambda: not child.loop._tasks, what="the end of both asyncio tasks")
    free = [child.loop.wait_for_slot(lambda: False) for _ in range(2)]
    assert set(free) == slots
    for slot in free:
        assert slot is not None
        child.pool.give_back(slot)


def test_a_job_that_may_have_killed_a_child_runs_alone(child: Child) -> None:
    child.gate.clear()
    child.start_job(max_concurrent=1)
    assert not child.has_free_slot()
    child.finish()
    assert child.has_free_slot()


def test_an_outcome_is_written_after_a_redis_outage(child: Child) -> None:
    child.replies = [CONNECTION_LOST, CONNECTION_LOST]
    child.start_job()
    child.finish()
    assert child.scripts == ["wakeNext:moveToFinished"] * 3
    assert child.pauses == 2
    assert [type(event) for event in child.events] == [JobCompleted]


def test_a_job_whose_outcome_redis_rejects_is_read_again_and_fails(child: Child) -> None:
    child.replies = [BrokerError("ERR the script stopped"), CONNECTION_LOST, BrokerError("WRONGTYPE")]
    child.start_job()
    child.finish()
    assert child.scripts[1:3] == ["", ""], "the child asks until Redis replies, even with an error"
    assert child.pauses == 1
    (event,) = child.events
    assert isinstance(event, JobFailed)
    assert event.error.startswith("the job's outcome could not be stored")


def test_a_deferred_duplicate_is_added_after_the_outcome_even_after_an_outage(child: Child) -> None:
    child.replies = [None, CONNECTION_LOST]
    child.start_job(opts=b'{"attempts":1,"de":{"id":"only-one"}}')
    child.finish()
    first, *others = child.scripts
    assert first == "wakeNext:moveToFinished"
    assert len(others) == 2
    assert others[0] == others[1] != first
    assert child.pauses == 1
    assert [type(event) for event in child.events] == [JobCompleted]


def test_a_child_whose_event_loop_is_blocked_releases_its_job_and_acquires_no_other(child: Child) -> None:
    with child.blocked():
        slot = child.start_job()
        assert not child.loop.keeps_up()
        assert [type(event) for event in child.events] == [JobReleased]
        assert slot.read().state is SlotState.FREE
    wait_until(child.loop.keeps_up, what="the loop turns again")
    assert [type(event) for event in child.events] == [JobReleased]


def test_a_job_whose_asyncio_task_is_cancelled_before_it_starts_is_released(child: Child) -> None:
    with child.blocked() as loop:
        child.start_job()
        loop.call_soon_threadsafe(lambda: all(task.cancel() for task in child.loop._tasks.values()))
    wait_until(lambda: not child.loop.running(), what="the slot is free")
    assert child.scripts[-1].startswith("releaseUnstarted:")
    assert not child.events


def test_a_fetched_job_whose_lock_was_lost_meanwhile_is_not_started(child: Child) -> None:
    acquired, fetched = child.acquire_job(), FetchedJob("7", [])
    child.replies = [False]
    next_jobs: Any = SimpleNamespace(acquired=lambda *_: acquired, lock_ms=30_000)
    child.loop._next_jobs = next_jobs
    asyncio.run(child.loop._start_next(acquired, fetched, 0, was_offered=True))
    assert not child.loop.running()
    assert len(child.scripts) == 1


def test_the_loop_thread_ends_with_the_child(child: Child) -> None:
    child.start_job()
    child.finish()
    child.loop.drain()
    assert child.scripts[-1] == "closed"
    loop = child.loop.running_loop()
    assert loop is not None
    assert loop.is_closed()
