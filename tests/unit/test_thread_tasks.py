"""Interrupting a function in a thread."""

from __future__ import annotations

import contextvars
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from bulltask.errors import SoftTimeLimitExceeded, TaskCancelled
from bulltask.worker.cancellation import InterruptibleCall, TaskThreads
from bulltask.worker.slots import Slots


def spin(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number
    return total


def test_interrupts_at_random_moments_never_affect_the_next_call_in_the_thread(rng: random.Random) -> None:
    interrupted = completed = 0
    with ThreadPoolExecutor(1) as thread:
        for _ in range(500):
            rounds = rng.randrange(3_000)
            call = InterruptibleCall(partial(spin, rounds))
            future = thread.submit(call.run)
            spin(rng.randrange(3_000))
            call.interrupt(rng.choice([SoftTimeLimitExceeded, TaskCancelled]))
            raised, result = future.result(60)
            if raised is None:
                completed += 1
                assert result == spin(rounds)
            else:
                interrupted += 1
                assert isinstance(raised, SoftTimeLimitExceeded | TaskCancelled)
            assert thread.submit(spin, 1_000).result(60) == spin(1_000)
    assert interrupted + completed == 500


def test_a_call_that_is_interrupted_before_it_starts_does_not_start() -> None:
    called: list[bool] = []
    call = InterruptibleCall(lambda: called.append(True))
    call.interrupt(TaskCancelled)
    raised, _ = call.run()
    assert isinstance(raised, TaskCancelled)
    assert called == []


def test_an_interrupt_after_the_end_has_no_effect() -> None:
    call = InterruptibleCall(lambda: 7)
    assert call.run() == (None, 7)
    call.interrupt(TaskCancelled)
    assert spin(1_000) == 499_500


def test_a_long_call_is_interrupted_while_it_runs() -> None:
    running = threading.Event()

    def forever() -> None:
        running.set()
        while True:
            spin(10)

    call = InterruptibleCall(forever)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(call.run)
        assert running.wait(60)
        call.interrupt(SoftTimeLimitExceeded)
        assert isinstance(future.result(60)[0], SoftTimeLimitExceeded)


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, ValueError])
async def test_any_exception_of_a_task_is_returned(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("why")

    threads, (slot,) = TaskThreads(1), Slots(1, 1).children[0].slots()
    threads.reserve(slot)
    assert threads.all_busy
    raised, _ = await threads.run(slot, lambda _: None, fail)
    assert isinstance(raised, kind)
    assert not threads.all_busy


async def test_context_variables_of_one_task_are_not_visible_to_the_next() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def increment() -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    threads, (slot,) = TaskThreads(1), Slots(1, 1).children[0].slots()
    assert [await threads.run(slot, lambda _: None, increment) for _ in range(2)] == [(None, 1), (None, 1)]


def test_without_threads_none_is_ever_busy() -> None:
    threads = TaskThreads(0)
    assert not threads.enabled
    assert not threads.all_busy
