"""A child's event loop, without a server: slots, outages and shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.config.settings import Settings
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.events import Bus, Event, JobCompleted, JobFailed
from bulltask.jobs.job import RunningJob
from bulltask.testing.worker import wait_until
from bulltask.transport.call import Call, QueueKeys
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
        self.loop = AsyncLoop(self.pool, fake, finisher, lambda: fake, fake, fake)

    def start_job(self, max_concurrent: int = 0, opts: bytes = b'{"attempts":1}') -> Slot:
        """Acquire a job and start its attempt."""
        slot = self.loop.wait_for_slot(lambda: False)
        assert slot is not None
        slot.activate(0, "7", 1)
        attempt: Any = None
        job = RunningJob.from_hash("mail", "7", [*FIELDS, b"opts", opts])
        self.loop.start(AcquiredJob(slot, 0, KEYS, job, max_concurrent), attempt)
        return slot

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
    fake.finish()
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


def test_the_loop_thread_ends_with_the_child(child: Child) -> None:
    child.start_job()
    child.finish()
    child.loop.drain()
    assert child.scripts[-1] == "closed"
    loop = child.loop.running_loop()
    assert loop is not None
    assert loop.is_closed()
