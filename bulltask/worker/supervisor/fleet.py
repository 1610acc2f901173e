"""The children: started, replaced when they die, told to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from bulltask.clock import mono_ms
from bulltask.events import Bus, ChildDied, ChildKilled, ChildLeft, ChildStarted
from bulltask.worker.slots import ChildBlock, Slot, Slots, SlotView
from bulltask.worker.states import Cause, RunState, SlotState
from bulltask.worker.supervisor.culprits import Culprit
from bulltask.worker.supervisor.launch import Launcher
from bulltask.worker.supervisor.recovery import Orphans
from bulltask.worker.supervisor.stacks import StackDumps

__all__ = ["Fleet", "FleetBroken"]

_SHORT_LIFE_MS: Final = 1_000
_MOST_BOOT_FAILURES: Final = 5


class FleetBroken(Exception):
    """Children cannot start; replacing them for ever would only hide it."""


@dataclass(slots=True)
class _Child:
    pid: int
    started_ms: int
    slots: list[Slot]
    told_to_stop: bool = False
    culprits: dict[str, Culprit] = field(default_factory=dict)


class Fleet:
    """Responsible for having as many living children as were asked for.

    Args:
        slots: the shared memory; one block per child.
        launch: starts the child of an index and returns its pid.
        stacks: asks children what they are doing.
        bus: hears of every start and death.
        wanted: how many children to begin with; the memory has room for more.
    """

    def __init__(self, slots: Slots, launch: Launcher, stacks: StackDumps, bus: Bus, wanted: int) -> None:
        self._slots, self._launch, self._bus, self._wanted = slots, launch, bus, wanted
        self.stacks = stacks
        self._children: dict[int, _Child] = {}
        self._holders: dict[str, tuple[int, Slot]] = {}
        self._not_before_ms = [0] * len(slots.children)
        self._boot_failures = 0

    @property
    def alive(self) -> int:
        """How many children live."""
        return len(self._children)

    @property
    def wanted(self) -> int:
        """How many children there should be."""
        return self._wanted

    @property
    def most(self) -> int:
        """How many children there may be at most."""
        return len(self._slots.children)

    def ask_for_stacks(self) -> None:
        """Ask every living child what it is doing; :attr:`stacks` tells what they answer."""
        for index, child in sorted(self._children.items()):
            self.stacks.ask(index, child.pid, self._slots.children[index])

    def grow(self) -> bool:
        """Want one child more; False when the memory has room for no more. It is started by :meth:`hold_strength`."""
        if self._wanted == self.most:
            return False
        self._wanted += 1
        return True

    def shrink(self) -> bool:
        """Want one child fewer, and tell the one with the highest index to end; False when only one is left."""
        if self._wanted == 1:
            return False
        self._wanted -= 1
        if (child := self._children.get(self._wanted)) is not None:
            _tell_to_end(child)
        return True

    def set_paused(self, paused: bool) -> None:
        """Have all children, later ones too, take no more jobs, or take jobs again."""
        self._slots.orders.paused = paused
        # The order counts; the signal only ends a child's wait for jobs, so that it looks at the order now.
        for child in self._children.values():
            _send(child.pid, signal.SIGTSTP if paused else signal.SIGCONT)

    def views(self) -> Iterator[SlotView]:
        """The slots of all living children."""
        for child in self._children.values():
            for slot in child.slots:
                yield slot.read()

    def late_views(self, now_ms: int) -> Iterator[SlotView]:
        """Those whose run may have passed one of its deadlines."""
        for index, child in self._children.items():
            if self._slots.children[index].has_deadlines:
                for slot in child.slots:
                    if slot.is_late(now_ms):
                        yield slot.read()

    def view(self, token: str) -> SlotView | None:
        """The slot with this token; ``None`` if its child is dead."""
        holder = self._holders.get(token)
        return None if holder is None else holder[1].read()

    def index_of(self, token: str) -> int:
        """The place of the living child that has a token."""
        return self._holders[token][0]

    def order(self, token: str, run: int, cause: Cause) -> None:
        """Write down that a run is to end; :meth:`nudge` tells its child to look."""
        self._holders[token][1].give_order(run, cause)

    def nudge(self, token: str) -> None:
        """Tell the child that has a token to look at its orders."""
        _send(self._children[self.index_of(token)].pid, signal.SIGUSR2)

    def kill_for(self, culprit: Culprit) -> None:
        """End a child now, because a run of its does not end."""
        child = self._children[self.index_of(culprit.token)]
        child.culprits[culprit.token] = culprit
        _send(child.pid, signal.SIGKILL)

    def hold_strength(self) -> int | None:
        """Start children that are missing; return in how many ms one is due that must still wait, if any."""
        waits = []
        for index in range(self._wanted):
            if index in self._children:
                continue
            wait_ms = self._not_before_ms[index] - mono_ms()
            if wait_ms > 0:
                waits.append(wait_ms)
            else:
                self._start(index)
        return min(waits, default=None)

    def reap(self) -> list[Orphans]:
        """Collect the dead; return what each of them left behind.

        Raises:
            FleetBroken: children keep dying before they work.
        """
        left = []
        for index, child in list(self._children.items()):
            try:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = child.pid, 0
            if pid:
                left.append(self._bury(index, child, status))
        return left

    def close(self) -> None:
        """Tell every child to take no more jobs and to end when its own are settled."""
        for child in self._children.values():
            _tell_to_end(child)

    def kill(self) -> None:
        """End every child now; what they were running is settled from their slots."""
        for child in self._children.values():
            child.told_to_stop = True
            _send(child.pid, signal.SIGKILL)

    def running(self) -> int:
        """How many jobs are in the children's hands."""
        return sum(view.state in {SlotState.ACTIVE, SlotState.SETTLING} for view in self.views())

    def _start(self, index: int) -> None:
        block = self._slots.children[index]
        block.renew()
        pid = self._launch(index)
        child = self._children[index] = _Child(pid, mono_ms(), block.slots())
        self._holders.update({slot.token: (index, slot) for slot in child.slots})
        self._bus.emit(ChildStarted(index, pid))

    def _bury(self, index: int, child: _Child, status: int) -> Orphans:
        del self._children[index]
        for slot in child.slots:
            del self._holders[slot.token]
        block, how = self._slots.children[index], _cause(status)
        held = [view for view in (slot.read() for slot in child.slots) if view.state is not SlotState.FREE]
        tokens = tuple(view.token for view in held)
        running = frozenset(view.token for view in held if view.state is SlotState.ACTIVE)
        # Of a reserved slot the job id is that of its last job.
        known = [view for view in held if view.job_id and view.state is not SlotState.RESERVED]
        jobs = tuple((view.queue_index, view.token, view.job_id) for view in known)
        left = status == 0 and block.run_state is RunState.CLOSED  # os._exit(0) in a task is not leaving
        culprits = {view.token: it for view in held if (it := child.culprits.get(view.token)) and it.may_be(view)}
        if child.culprits:
            cause = max(culprit.cause for culprit in child.culprits.values()).name.lower()
            self._bus.emit(ChildKilled(index, child.pid, cause, len(tokens)))
        elif not child.told_to_stop:
            self._bus.emit(ChildLeft(index, child.pid) if left else ChildDied(index, child.pid, how, len(tokens)))
        self._note_boot(block, child)
        now_ms = mono_ms()
        # A child that dies young is replaced at most once a second: a job that kills each of its children must not
        # keep the machine busy with forking.
        young = now_ms - child.started_ms < _SHORT_LIFE_MS
        self._not_before_ms[index] = child.started_ms + _SHORT_LIFE_MS if young else 0
        wanted = child.told_to_stop or left or bool(child.culprits)
        return Orphans(tokens, running, now_ms, how, wanted, culprits, jobs)

    def _note_boot(self, block: ChildBlock, child: _Child) -> None:
        if block.run_state is not RunState.INIT or child.told_to_stop:
            self._boot_failures = 0
            return
        self._boot_failures += 1
        if self._boot_failures >= _MOST_BOOT_FAILURES:
            raise FleetBroken(f"{self._boot_failures} children in a row died before they could take a job")


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _tell_to_end(child: _Child) -> None:
    child.told_to_stop = True
    _send(child.pid, signal.SIGTERM)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
