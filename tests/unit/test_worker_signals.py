"""The parts of a worker that handle signals."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pty
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bulltask.events import Bus, ChildDied, ChildExited, ChildStarted, Event, StacksDumped
from bulltask.testing.worker import wait_until
from bulltask.worker.child import StackDumper, tasks_text
from bulltask.worker.child_pool import ChildPool, StackCollector
from bulltask.worker.recovery import JobsOfDeadChild
from bulltask.worker.slots import ChildBlock, ChildLimit, ProcessState, Slots, SlotState, WakeupPipe
from bulltask.worker.supervisor import SIGNAL_METHODS, STOP_METHODS, ProcessSpec, SignalQueue

# Python 3.12 warns about a fork in a process with threads (xdist's). These children only write to memory and exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNAL_METHODS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


@pytest.fixture
def wakeup_pipe() -> Iterator[WakeupPipe]:
    pipe = WakeupPipe()
    yield pipe
    pipe.close()


# ---- SignalQueue -----------------------------------------------------------------------------------------------------


def test_signals_are_popped_in_the_order_of_their_arrival(wakeup_pipe: WakeupPipe) -> None:
    queue = SignalQueue()
    queue.install(wakeup_pipe)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        signal.raise_signal(number)
    assert queue.contains({"restart"})
    assert queue.contains(STOP_METHODS)
    assert not queue.contains({"pause"})
    assert queue.pop_all() == ["restart", "dump_stacks", "warm_shutdown"]
    assert not queue.contains(STOP_METHODS)


def test_early_signals_are_recorded_except_stop_signals(wakeup_pipe: WakeupPipe) -> None:
    before = signal.getsignal(signal.SIGTERM)
    queue = SignalQueue()
    queue.install_early()
    assert signal.getsignal(signal.SIGTERM) is before
    signal.raise_signal(signal.SIGUSR2)
    queue.install(wakeup_pipe)
    assert queue.pop_all() == ["ignore"]


def test_pending_signals_are_delivered_when_install_unblocks_them(wakeup_pipe: WakeupPipe) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNAL_METHODS)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)  # other threads do not block signals
    queue = SignalQueue()
    queue.install(wakeup_pipe)
    assert queue.pop_all() == ["ignore"]


def test_an_ignored_hangup_stays_ignored(wakeup_pipe: WakeupPipe) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    queue = SignalQueue()
    queue.install_early()
    queue.install(wakeup_pipe)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


# ---- ProcessSpec -----------------------------------------------------------------------------------------------------


def test_the_restart_command_has_the_interpreter_options() -> None:
    assert ProcessSpec().command == [sys.executable, *sys.orig_argv[1:]]


def test_a_closed_terminal_is_detected_but_not_a_missing_terminal() -> None:
    master, slave = pty.openpty()
    saved = os.dup(0)
    try:
        os.dup2(slave, 0)
        os.close(slave)
        process_spec = ProcessSpec()
        assert not process_spec.terminal_closed
        os.close(master)
        assert process_spec.terminal_closed
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        assert not ProcessSpec().terminal_closed
    finally:
        os.dup2(saved, 0)
        os.close(saved)


# ---- ChildPool -------------------------------------------------------------------------------------------------------

ChildMain = Callable[[ChildBlock], None]


class PoolHarness:
    """A child pool whose children run a function of the test, and the events of the pool."""

    def __init__(self, child_main: ChildMain, max_children: int = 4, target: int = 1) -> None:
        self.slots = Slots(max_children, 3)
        self.emitted: list[Event] = []
        self._child_main = child_main
        bus = Bus()
        bus.subscribe(Event, self.emitted.append)
        self.pool = ChildPool(self.slots, self._launch, StackCollector(bus), bus, target)

    def _launch(self, index: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self._child_main(self.slots.children[index])
            finally:
                os._exit(0)
        return pid

    def wait_for_death(self) -> list[JobsOfDeadChild]:
        """Wait until a child dies."""
        return wait_until(self.pool.reap, what="a dead child")

    def close(self) -> None:
        self.pool.kill()
        wait_until(lambda: self.pool.reap() is not None and self.pool.alive == 0)


@pytest.fixture
def start_pool() -> Iterator[Callable[..., PoolHarness]]:
    harnesses: list[PoolHarness] = []

    def start(child_main: ChildMain, **options: int) -> PoolHarness:
        harnesses.append(PoolHarness(child_main, **options))
        harnesses[-1].pool.start_missing()
        return harnesses[-1]

    yield start
    for harness in harnesses:
        harness.close()


def wait_for_term(block: ChildBlock) -> None:
    # Blocked until sigwait(): with a handler, a signal before pause() would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    block.run_state = ProcessState.RUN
    signal.sigwait({signal.SIGTERM})
    block.run_state = ProcessState.CLOSED


def running(harness: PoolHarness, index: int = 0) -> bool:
    return harness.slots.children[index].run_state is ProcessState.RUN


def pid_of(harness: PoolHarness, index: int = 0) -> int:
    return [event.pid for event in harness.emitted if isinstance(event, ChildStarted) and event.index == index][-1]


def test_an_exited_child_is_distinguished_from_a_dead_child(start_pool: Callable[..., PoolHarness]) -> None:
    exited = start_pool(wait_for_term)
    wait_until(lambda: running(exited))
    os.kill(pid_of(exited), signal.SIGTERM)
    assert exited.wait_for_death()[0].intentional, "its jobs do not count as crashed"
    assert exited.emitted[-1] == ChildExited(0, pid_of(exited), "signal")

    died = start_pool(lambda block: setattr(block, "run_state", ProcessState.RUN))
    assert not died.wait_for_death()[0].intentional
    assert died.emitted[-1] == ChildDied(0, pid_of(died), "exit code 0", 0)


def test_running_jobs_of_a_dead_child_are_distinguished_from_other_jobs(start_pool: Callable[..., PoolHarness]) -> None:
    def child_main(block: ChildBlock) -> None:
        reserved, active, finishing = block.slots()
        reserved.enter(SlotState.RESERVED, 1)
        active.activate(0, "1", 1)
        finishing.activate(0, "2", 1)
        finishing.enter(SlotState.FINISHING, 2)
        os.kill(os.getpid(), signal.SIGKILL)

    harness = start_pool(child_main)
    dead = harness.wait_for_death()[0]
    tokens = [slot.token for slot in harness.slots.children[0].slots()]
    assert dead.tokens == tuple(tokens)
    assert dead.running == {tokens[1]}


def test_a_pool_grows_to_its_maximum_and_shrinks_to_one_child(start_pool: Callable[..., PoolHarness]) -> None:
    harness = start_pool(wait_for_term, max_children=3, target=2)
    assert harness.pool.grow()
    assert not harness.pool.grow()
    harness.pool.start_missing()
    wait_until(lambda: all(running(harness, index) for index in range(3)))
    assert harness.pool.shrink()
    assert harness.wait_for_death()[0].intentional
    harness.pool.start_missing()
    assert harness.pool.alive == harness.pool.target == 2
    assert harness.pool.shrink()
    assert not harness.pool.shrink()
    assert not any(isinstance(event, ChildDied | ChildExited) for event in harness.emitted), "the pool has stopped them"


def retiring(block: ChildBlock) -> bool:
    return block.reached_limit is not ChildLimit.NONE


def test_a_retiring_child_is_replaced_before_it_has_exited(start_pool: Callable[..., PoolHarness]) -> None:
    def child_main(block: ChildBlock) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        block.run_state = ProcessState.RUN
        block.reached_limit = ChildLimit.MAX_TASKS_PER_CHILD
        signal.sigwait({signal.SIGTERM})
        block.run_state = ProcessState.CLOSED

    harness = start_pool(child_main, max_children=2)
    for index in range(2):
        wait_until(partial(retiring, harness.slots.children[index]))
        assert harness.pool.start_missing() is None, "the replacement is not delayed"
    assert harness.pool.alive == 2, "there is no room for a third child"
    os.kill(pid_of(harness, 0), signal.SIGTERM)
    assert harness.wait_for_death()[0].intentional
    assert harness.emitted[-1] == ChildExited(0, pid_of(harness, 0), "max_tasks_per_child")
    harness.pool.start_missing()
    assert [event.index for event in harness.emitted if isinstance(event, ChildStarted)] == [0, 1, 0]


# ---- stacks ----------------------------------------------------------------------------------------------------------


async def deepest(inside: threading.Event) -> None:
    asyncio.get_running_loop().call_soon(inside.set)
    await asyncio.Event().wait()


def generator(inside: threading.Event):
    yield from deepest(inside).__await__()


class Awaitable:
    def __init__(self, inside: threading.Event) -> None:
        self.inside = inside

    def __await__(self):
        return generator(self.inside)


async def outermost(inside: threading.Event) -> None:
    await Awaitable(inside)


async def wait_for_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def test_the_stack_of_an_async_task_includes_coroutines_and_generators() -> None:
    loop, inside = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        future = asyncio.run_coroutine_threadsafe(outermost(inside), loop)
        assert inside.wait(10)
        text = tasks_text(loop)
        assert "1 asyncio tasks" in text
        positions = [text.index(f"in {name}\n") for name in ("outermost", "generator", "deepest", "wait")]
        assert positions == sorted(positions)
        future.cancel()
        asyncio.run_coroutine_threadsafe(wait_for_other_tasks(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_the_text_of_tasks_is_empty_without_an_event_loop() -> None:
    assert tasks_text(None) == ""


def test_a_compiled_coroutine_is_not_shown_as_running() -> None:
    class Compiled(Coroutine[Any, Any, None]):
        """Has no ``cr_running``, like Cython's coroutines."""

        def send(self, _: object) -> None:
            text.append(tasks_text(asyncio.get_running_loop()))
            raise StopIteration

        def throw(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

        def __await__(self) -> Any:
            return self

    async def main() -> None:
        await asyncio.create_task(Compiled(), name="compiled")

    text: list[str] = []
    asyncio.run(main())
    assert "Task 'compiled' (outermost call first)" in text[0]


def test_a_child_dumps_stacks_even_if_the_app_has_registered_faulthandler(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    (block,) = Slots(1, 1).children
    block.reset()
    bus, dumps = Bus(), list[StacksDumped]()
    bus.subscribe(StacksDumped, dumps.append)
    with (tmp_path / "stacks-of-the-app").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            StackDumper(block, lambda: None, bus, 0).install()
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)
            os.close(block.stacks_fd)
    assert "most recent call first" in dumps[0].stacks
