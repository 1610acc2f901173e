"""A cancel request is raised in the task code of its attempt, and nowhere else."""

from __future__ import annotations

import asyncio
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bulltask.errors import SoftTimeLimitExceeded, TaskCancelled, TimeLimitExceeded
from bulltask.jobs.clock import mono_ms
from bulltask.jobs.fields import TimeLimits
from bulltask.worker import cancellation
from bulltask.worker.cancellation import Cancellation, TaskExecution, call_task, uninterrupted
from bulltask.worker.slots import IDLE_MS, CancelReason, Deadlines, Slot, Slots

LIMITS = TimeLimits(1_000, 2_000)


class Child:
    """The parts of a child and of a supervisor that cancellation needs."""

    def __init__(self) -> None:
        block = Slots(1, 1).children[0]
        block.reset()
        self.slot: Slot = block.slots()[0]
        self.cancelled = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.cancellation = Cancellation(block, self._cancel_spark, lambda: self.loop)
        self.cancellation.install()

    def _cancel_spark(self) -> None:
        self.cancelled += 1

    def begin(self) -> TaskExecution:
        self.slot.activate(0, "job-1", 0)
        execution = TaskExecution(self.slot, "mail", LIMITS)
        self.cancellation.execution = execution
        return execution

    def request(self, cause: CancelReason = CancelReason.SOFT_LIMIT) -> None:
        self.slot.request_cancel(self.slot.read().attempt, cause)
        os.kill(os.getpid(), signal.SIGUSR2)

    def call(self, function: Callable[..., Any]) -> Any:
        return call_task(self.cancellation.raise_if_cancelled, function)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    before = signal.getsignal(signal.SIGUSR2)
    yield Child()
    signal.signal(signal.SIGUSR2, before)


def test_a_cancel_request_is_raised_once_after_spark_jobs_were_cancelled(child: Child) -> None:
    child.begin()
    seen = []

    def task() -> str:
        try:
            child.request()
        except SoftTimeLimitExceeded as exc:
            seen.append(str(exc))
        child.request()  # sends the signal again
        return "value"

    assert child.call(task) == "value"
    assert seen == ["task mail ran longer than its soft time limit of 1 s"]
    assert child.cancelled == 1
    assert child.slot.read().acknowledged


def test_a_request_before_the_call_prevents_the_call(child: Child) -> None:
    child.begin()
    child.request()  # for example while a Spark session starts
    assert not child.slot.read().acknowledged
    called = []
    with pytest.raises(SoftTimeLimitExceeded):
        child.call(lambda: called.append(1))
    assert called == []


def test_a_request_after_the_call_does_nothing_and_does_not_reach_the_next_attempt(child: Child) -> None:
    child.begin()
    child.call(lambda: None)
    child.request()
    child.begin()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert child.call(lambda: "next") == "next"
    assert child.slot.cancel_reason is CancelReason.NONE


def test_a_request_for_an_earlier_attempt_is_ignored(child: Child) -> None:
    child.begin()
    earlier = child.slot.read().attempt
    child.begin()
    child.slot.request_cancel(earlier, CancelReason.REVOKED)

    def task() -> str:
        os.kill(os.getpid(), signal.SIGUSR2)
        return "value"

    assert child.call(task) == "value"


def test_a_request_inside_a_signal_handler_is_raised_on_the_next_signal(child: Child) -> None:
    child.begin()
    done = []

    def close() -> None:
        child.request()
        done.append("closed")

    before = signal.signal(signal.SIGTERM, uninterrupted(close))
    try:

        def task() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("continued")
            os.kill(os.getpid(), signal.SIGUSR2)  # as the supervisor does until the child acknowledges
            done.append("never")

        with pytest.raises(SoftTimeLimitExceeded):
            child.call(task)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done == ["closed", "continued"]


def test_a_cancellation_that_was_lost_in_a_finalizer_is_raised_again(child: Child) -> None:
    child.begin()

    class Thing:
        pass

    def task() -> str:
        thing = Thing()
        weakref.finalize(thing, child.request)  # Python prints and drops exceptions in a finalizer
        reference = weakref.ref(thing, lambda _: child.request())
        del thing
        assert reference() is None
        assert not child.slot.read().acknowledged
        os.kill(os.getpid(), signal.SIGUSR2)
        return "never"

    with pytest.raises(SoftTimeLimitExceeded):
        child.call(task)


def test_another_exception_in_a_finalizer_does_not_repeat_a_request(child: Child) -> None:
    child.begin()

    class Thing:
        def __del__(self) -> None:
            raise ValueError

    def task() -> str:
        with pytest.raises(SoftTimeLimitExceeded):
            child.request()
        thing = Thing()
        del thing
        assert child.slot.read().acknowledged
        return "value"

    assert child.call(task) == "value"


def test_a_revocation_replaces_a_soft_limit_and_always_cancels(child: Child) -> None:
    execution = child.begin()

    def task() -> str:
        for cause in (CancelReason.SOFT_LIMIT, CancelReason.REVOKED):
            with pytest.raises((SoftTimeLimitExceeded, TaskCancelled)):
                child.request(cause)
        return "value"

    assert child.call(task) == "value"
    assert isinstance(execution.resolve(None), TaskCancelled)
    assert isinstance(execution.resolve(ValueError()), TaskCancelled)


def test_the_hard_limit_of_a_sync_task_is_not_raised_in_the_child(child: Child) -> None:
    child.begin()

    def task() -> str:
        child.request(CancelReason.HARD_LIMIT)
        return "value"

    assert child.call(task) == "value"


@pytest.mark.parametrize("cause", [CancelReason.SOFT_LIMIT, CancelReason.HARD_LIMIT, CancelReason.REVOKED])
async def test_an_async_attempt_is_cancelled_and_ends_with_the_exception_for_the_reason(
    child: Child, cause: CancelReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "_POLL_S", 60)  # the signal suffices
    child.loop = asyncio.get_running_loop()
    execution = child.begin()
    task = child.cancellation.enter_async(execution)
    child.request(cause)
    raised: BaseException | None = None
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as exc:
        raised = exc
    child.cancellation.leave_async(task)
    ended = {
        CancelReason.SOFT_LIMIT: SoftTimeLimitExceeded,
        CancelReason.HARD_LIMIT: TimeLimitExceeded,
        CancelReason.REVOKED: TaskCancelled,
    }
    assert type(execution.resolve(raised)) is ended[cause]
    after = execution.resolve(None)
    assert (after is None) == (cause is CancelReason.SOFT_LIMIT), "a task that returns completes after a soft limit"
    await asyncio.sleep(0)  # the cancellation does not reach later awaits


async def test_the_event_loop_finds_a_request_by_polling_if_the_signal_is_lost(child: Child) -> None:
    execution = child.begin()
    task = child.cancellation.enter_async(execution)
    child.slot.request_cancel(child.slot.read().attempt, CancelReason.SOFT_LIMIT)
    with pytest.raises(asyncio.CancelledError, match="soft time limit of 1 s"):
        await asyncio.sleep(60)
    child.cancellation.leave_async(task)


def test_a_spark_error_does_not_prevent_a_cancellation(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConnectionError

    monkeypatch.setattr(child.cancellation, "_cancel_spark", fail)
    child.begin()
    with pytest.raises(SoftTimeLimitExceeded):
        child.call(child.request)


async def test_attempts_share_one_poll_timer_that_ends_with_the_last_attempt(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[Callable[[], None]] = []
    monkeypatch.setattr(cancellation, "LoopTimer", lambda _, poll: timers.append(poll))
    execution = child.begin()

    async def attempt() -> None:
        task = child.cancellation.enter_async(execution)
        await asyncio.sleep(0)
        child.cancellation.leave_async(task)

    await asyncio.gather(attempt(), attempt())
    assert len(timers) == 1
    timers.pop()()
    assert timers == [], "no attempt is running"
    task = child.cancellation.enter_async(execution)
    timers.pop()()
    assert len(timers) == 1, "an attempt is running"
    child.cancellation.leave_async(task)


def test_only_the_first_deadline_that_the_supervisor_could_miss_wakes_it(child: Child) -> None:
    woken = list[int]()
    child.cancellation.wake_supervisor = lambda: woken.append(1)
    far_ms, near_ms = mono_ms() + 10 * IDLE_MS, mono_ms() + IDLE_MS // 2
    for soft_ms, hard_ms, wakes in ((0, 0, 0), (far_ms, 0, 0), (0, far_ms, 0), (far_ms, near_ms, 1), (near_ms, 0, 1)):
        child.cancellation.set_deadlines(child.slot, Deadlines(soft_at_ms=soft_ms, hard_at_ms=hard_ms))
        assert len(woken) == wakes
