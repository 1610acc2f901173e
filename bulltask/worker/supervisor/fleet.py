"""The children: started, replaced when they die, told to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bulltask.clock import mono_ms
from bulltask.events import Bus, ChildDied, ChildStarted
from bulltask.states import RunState, SlotState
from bulltask.worker.slots import ChildBlock, Slot, Slots, SlotView
from bulltask.worker.supervisor.launch import Launcher
from bulltask.worker.supervisor.recovery import Orphans

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


class Fleet:
    """Responsible for having as many living children as were asked for.

    Args:
        slots: the shared memory; one block per child.
        launch: starts the child of an index and returns its pid.
        bus: hears of every start and death.
    """

    def __init__(self, slots: Slots, launch: Launcher, bus: Bus) -> None:
        self._slots, self._launch, self._bus = slots, launch, bus
        self._children: dict[int, _Child] = {}
        self._not_before_ms = [0] * len(slots.children)
        self._boot_failures = 0

    @property
    def alive(self) -> int:
        """How many children live."""
        return len(self._children)

    def views(self) -> Iterator[SlotView]:
        """The slots of all living children."""
        for child in self._children.values():
            for slot in child.slots:
                yield slot.read()

    def hold_strength(self) -> int | None:
        """Start children that are missing; return in how many ms one is due that must still wait, if any."""
        waits = []
        for index in range(len(self._slots.children)):
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

    def quiet(self) -> None:
        """Tell every child to take no more jobs and to end when its own are settled."""
        for child in self._children.values():
            child.told_to_stop = True
            _send(child.pid, signal.SIGTERM)

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
        self._children[index] = _Child(pid, mono_ms(), block.slots())
        self._bus.emit(ChildStarted(index, pid))

    def _bury(self, index: int, child: _Child, status: int) -> Orphans:
        del self._children[index]
        block, how = self._slots.children[index], _cause(status)
        held = [view for view in (slot.read() for slot in child.slots) if view.state is not SlotState.FREE]
        tokens = tuple(view.token for view in held)
        running = frozenset(view.token for view in held if view.state is SlotState.ACTIVE)
        if not child.told_to_stop:
            self._bus.emit(ChildDied(index, child.pid, how, len(tokens)))
        self._note_boot(block, child)
        now_ms = mono_ms()
        # A child that dies young is replaced at most once a second: a job that kills each of its children must not
        # keep the machine busy with forking.
        young = now_ms - child.started_ms < _SHORT_LIFE_MS
        self._not_before_ms[index] = child.started_ms + _SHORT_LIFE_MS if young else 0
        return Orphans(tokens, running, now_ms, how, child.told_to_stop)

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


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
