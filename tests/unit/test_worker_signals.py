"""The parts of a worker that handle signals."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from bulltask.events import Bus, ChildDied, ChildExited, ChildStarted, Event
from bulltask.testing.wait import wait_until
from bulltask.worker.child.stacks import tasks_text
from bulltask.worker.slots import ChildBlock, Slots
from bulltask.worker.states import ProcessState
from bulltask.worker.supervisor.child_pool import ChildPool
from bulltask.worker.supervisor.process_spec import ProcessSpec
from bulltask.worker.supervisor.recovery import OrphanedJobs
from bulltask.worker.supervisor.signals import SIGNAL_METHODS, STOP_METHODS, SignalQueue
from bulltask.worker.supervisor.stacks import StackCollector
from bulltask.worker.wakeup_pipe import WakeupPipe

# Python 3.12 and later: a runner such as xdist has threads; these children only write to memory and leave.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def _signals_are_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNAL_METHODS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


@pytest.fixture
def wakeup_pipe() -> Iterator[WakeupPipe]:
    made = WakeupPipe()
    yield made
    made.close()


# ---- the queue -------------------------------------------------------------------------------------------------------


def test_signals_come_out_as_methods_in_their_order(wakeup_pipe: WakeupPipe) -> None:
    queue = SignalQueue()
    queue.install(wakeup_pipe)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        signal.raise_signal(number)
    assert queue.contains({"restart"})
    assert queue.contains(STOP_METHODS)
    assert not queue.contains({"pause"})
    assert queue.pop_all() == ["restart", "dump_stacks", "warm_shutdown"]
    assert not queue.contains(STOP_METHODS)


def test_while_the_app_is_imported_signals_are_recorded_except_those_that_stop_it(
    wakeup_pipe: WakeupPipe,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    queue = SignalQueue()
    queue.install_early()
    assert signal.getsignal(signal.SIGTERM) is before
    signal.raise_signal(signal.SIGUSR2)
    queue.install(wakeup_pipe)
    assert queue.pop_all() == ["ignore"]


def test_blocked_signals_are_delivered(wakeup_pipe: WakeupPipe) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNAL_METHODS)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)  # other threads hold nothing back
    queue = SignalQueue()
    queue.install(wakeup_pipe)
    assert queue.pop_all() == ["ignore"]


def test_a_hangup_that_is_ignored_stays_ignored(wakeup_pipe: WakeupPipe) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    queue = SignalQueue()
    queue.install_early()
    queue.install(wakeup_pipe)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


# ---- the origin ------------------------------------------------------------------------------------------------------


def test_the_command_has_the_interpreters_own_options() -> None:
    assert ProcessSpec().command == [sys.executable, *sys.orig_argv[1:]]


def test_a_closed_terminal_is_noticed_and_a_missing_one_is_not() -> None:
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


# ---- the fleet -------------------------------------------------------------------------------------------------------

Life = Callable[[ChildBlock], None]


class Children:
    """A fleet whose children live as the test says, and what is emitted of them."""

    def __init__(self, life: Life, room: int = 4, wanted: int = 1) -> None:
        self.slots = Slots(room, 3)
        self.emitted: list[Event] = []
        self._life = life
        bus = Bus()
        bus.subscribe(Event, self.emitted.append)
        self.pool = ChildPool(self.slots, self._launch, StackCollector(bus), bus, wanted)

    def _launch(self, index: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self._life(self.slots.children[index])
            finally:
                os._exit(0)
        return pid

    def buried(self) -> list[OrphanedJobs]:
        """Wait until one dies."""
        return wait_until(self.pool.reap, what="a dead child")

    def close(self) -> None:
        self.pool.kill()
        wait_until(lambda: self.pool.reap() is not None and self.pool.alive == 0)


@pytest.fixture
def children() -> Iterator[Callable[..., Children]]:
    made: list[Children] = []

    def make(life: Life, **options: int) -> Children:
        made.append(Children(life, **options))
        made[-1].pool.start_missing()
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait_for_term(block: ChildBlock) -> None:
    # Blocked until sigwait() takes it: with a handler, a signal that came before pause() would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    block.run_state = ProcessState.RUN
    signal.sigwait({signal.SIGTERM})
    block.run_state = ProcessState.CLOSED


def running(made: Children, index: int = 0) -> bool:
    return made.slots.children[index].run_state is ProcessState.RUN


def pid_of(made: Children, index: int = 0) -> int:
    return [event.pid for event in made.emitted if isinstance(event, ChildStarted) and event.index == index][-1]


def test_a_dead_child_is_distinguished_from_one_that_exited(children: Callable[..., Children]) -> None:
    left = children(wait_for_term)
    wait_until(lambda: running(left))
    os.kill(pid_of(left), signal.SIGTERM)
    assert left.buried()[0].intentional, "what it may have left behind is no crash"
    assert left.emitted[-1] == ChildExited(0, pid_of(left))

    died = children(lambda block: setattr(block, "run_state", ProcessState.RUN))
    assert not died.buried()[0].intentional
    assert died.emitted[-1] == ChildDied(0, pid_of(died), "exit code 0", 0)


def test_orphaned_jobs_that_ran_are_distinguished_from_the_others(children: Callable[..., Children]) -> None:
    def life(block: ChildBlock) -> None:
        taking, running_one, settling = block.slots()
        taking.reserve(1)
        running_one.activate(0, "1", 1)
        settling.activate(0, "2", 1)
        settling.settle(2)
        os.kill(os.getpid(), signal.SIGKILL)

    made = children(life)
    orphans = made.buried()[0]
    tokens = [slot.token for slot in made.slots.children[0].slots()]
    assert orphans.tokens == tuple(tokens)
    assert orphans.running == {tokens[1]}


def test_a_pool_grows_to_its_maximum_and_shrinks_to_one_by_stopping_the_last_child(
    children: Callable[..., Children],
) -> None:
    made = children(wait_for_term, room=3, wanted=2)
    assert made.pool.grow()
    assert not made.pool.grow()
    made.pool.start_missing()
    wait_until(lambda: all(running(made, index) for index in range(3)))
    assert made.pool.shrink()
    assert made.buried()[0].intentional
    made.pool.start_missing()
    assert made.pool.alive == made.pool.target == 2
    assert made.pool.shrink()
    assert not made.pool.shrink()
    assert not any(isinstance(event, ChildDied | ChildExited) for event in made.emitted), "they were told to"


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


async def others_ended() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def test_the_stack_of_a_task_leads_through_coroutines_and_generators_to_where_it_waits() -> None:
    loop, inside = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        future = asyncio.run_coroutine_threadsafe(outermost(inside), loop)
        assert inside.wait(10)
        text = tasks_text(loop)
        assert "1 asyncio tasks" in text
        places = [text.index(f"in {name}\n") for name in ("outermost", "generator", "deepest", "wait")]
        assert places == sorted(places)
        future.cancel()
        asyncio.run_coroutine_threadsafe(others_ended(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_without_a_loop_there_are_no_tasks() -> None:
    assert tasks_text(None) == ""
