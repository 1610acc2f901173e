"""The child processes: starts them, replaces dead ones, and stops them."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from bulltask.clock import mono_ms
from bulltask.events import Bus, ChildDied, ChildExited, ChildKilled, ChildStarted
from bulltask.worker.descendants import Descendants
from bulltask.worker.slot import Slot, SlotView
from bulltask.worker.slots import ChildBlock, Slots
from bulltask.worker.states import HAS_JOB, CancelReason, ProcessState, RetireReason, SlotState
from bulltask.worker.supervisor.killed_attempts import KilledAttempt
from bulltask.worker.supervisor.launch import Launcher
from bulltask.worker.supervisor.recovery import JobsOfDeadChild
from bulltask.worker.supervisor.stacks import StackCollector

__all__ = ["ChildBootError", "ChildPool"]

HARD_MEMORY_LIMIT: Final = "hard_memory_limit"
BLOCKED_LOOP: Final = "blocked_loop"
_MIN_LIFETIME_MS: Final = 1_000
_MAX_BOOT_FAILURES: Final = 5
_END_MS: Final = 5_000
"""How long a dead child's jobs wait until its processes have ended. A killed process that is still there after that is
in the kernel, and will run no more of its own code."""
_SEARCH_MS: Final = 1_000
"""The interval at which the supervisor looks for orphans of living children. It costs 60 µs."""
EXIT_TIMEOUT: Final = "exit_timeout"
_BLOCKED_MS: Final = 500
"""An event loop that has turned less than this ago is not blocked: it says so only a few times a second."""
_UNSTARTED: Final = {SlotState.PREFETCHED, SlotState.RELEASING, SlotState.RELEASED}


class ChildBootError(Exception):
    """Several children in a row died during startup."""


@dataclass(slots=True)
class _Child:
    pid: int
    started_ms: int
    block: ChildBlock
    slots: list[Slot]
    stop_requested: bool = False
    killed_attempts: dict[str, KilledAttempt] = field(default_factory=dict)
    exceeded_memory: str = ""
    dead_since_ms: int | None = None
    status: int | None = None
    loop_blocked: str = ""

    @property
    def is_blocked(self) -> bool:
        """Whether the child was killed because its event loop was blocked, so that attempts could not be cancelled."""
        return bool(self.loop_blocked) or any(attempt.blocked_ms for attempt in self.killed_attempts.values())

    @property
    def is_leaving(self) -> bool:
        """Whether the child acquires no more jobs, so that another child takes its place."""
        return self.stop_requested or self.block.retire_reason is not RetireReason.NONE


class ChildPool:
    """Keeps the target number of children running.

    A child that is leaving, because it was stopped or has reached a limit, does not count, although it may still run
    its last jobs.

    Args:
        slots: The shared memory, with one block per child.
        launch: Starts the child with the given index and returns its pid.
        stacks: Collects the children's stacks.
        bus: Receives an event for every start and exit.
        target: The initial number of children; the shared memory has room for more.
        descendants: The processes that the children start; ``None`` to leave them alone.

    Attributes:
        interrupt_at_ms: When the attempts that are still running are cancelled, because the worker will soon kill the
            children (monotonic time); ``None`` for never.
    """

    def __init__(
        self,
        slots: Slots,
        launch: Launcher,
        stacks: StackCollector,
        bus: Bus,
        target: int,
        descendants: Descendants | None = None,
    ) -> None:
        self._slots, self._launch, self._bus, self._target = slots, launch, bus, target
        self._descendants, self._searched_ms = descendants, 0
        self.stacks = stacks
        self.interrupt_at_ms: int | None = None
        self._children: dict[int, _Child] = {}
        self._slots_by_token: dict[str, tuple[int, Slot]] = {}
        self._delayed_until_ms: list[int] = []
        self._boot_failures = 0

    @property
    def alive(self) -> int:
        """The number of children that are alive."""
        return len(self._children)

    @property
    def target(self) -> int:
        """The number of children that should be running."""
        return self._target

    @property
    def max_children(self) -> int:
        """The maximum number of children."""
        return len(self._slots.children)

    def request_stacks(self) -> None:
        """Request the stacks of every child; :attr:`stacks` collects them."""
        for index, child in sorted(self._children.items()):
            self.stacks.request(index, child.pid, self._slots.children[index])

    def grow(self) -> bool:
        """Add one to the target; False at the maximum. :meth:`start_missing` starts the child."""
        if self._target == self.max_children:
            return False
        self._target += 1
        return True

    def shrink(self) -> bool:
        """Subtract one from the target and stop the child with the fewest jobs; False if only one is left."""
        if self._target == 1:
            return False
        self._target -= 1
        staying = self._staying()
        if len(staying) > self._target:
            _request_stop(self._children[min(staying, key=lambda index: (self._jobs_of(index), -index))])
        return True

    def resize(self, target: int) -> None:
        """Grow or shrink to ``target`` children; the children with the fewest jobs are stopped."""
        while self._target < target and self.grow():
            pass
        while self._target > target and self.shrink():
            pass

    @property
    def is_paused(self) -> bool:
        """Whether the children acquire no jobs until the worker is resumed."""
        control = self._slots.control
        return control.paused and not control.stopping

    def free_slots(self, per_child: int) -> int | None:
        """Return how many more jobs the children that wait for jobs can run; ``None`` while a child is starting.

        Args:
            per_child: How many jobs a child can run at a time; its other slots are for prefetched jobs.
        """
        free = 0
        for index in self._staying():
            child = self._children[index]
            if child.block.run_state is ProcessState.INIT:
                return None
            if any(slot.waiting for slot in child.slots):
                free += min(sum(slot.is_free or slot.waiting for slot in child.slots), per_child)
        return free if len(self._staying()) == self._target else None

    def idle_slots(self) -> tuple[tuple[str, int], ...]:
        """Return the token and last attempt of each slot; ``()`` if a child has a job, or may have acquired one.

        If two calls return the same result, no child has had a job in between.
        """
        views = []
        for child in self._children.values():
            if not (child.is_leaving or any(slot.waiting for slot in child.slots)):
                return ()
            views += [slot.read() for slot in child.slots if not slot.waiting]
        if any(view.state is not SlotState.FREE for view in views):
            return ()
        return tuple((view.token, view.attempt) for view in views)

    def set_paused(self, paused: bool) -> None:
        """Pause or resume all children, including those that start later."""
        self._slots.control.paused = paused
        # The flag is in shared memory. The signal ends a child's wait for jobs, so that the child reads the flag.
        for child in self._children.values():
            _send(child.pid, signal.SIGTSTP if paused else signal.SIGCONT)

    def blocks(self) -> Iterator[tuple[ChildBlock, Sequence[Slot]]]:
        """Yield the block and the slots of each child."""
        for child in self._children.values():
            yield child.block, child.slots

    def views(self) -> Iterator[SlotView]:
        """Yield the slots of all children."""
        for child in self._children.values():
            for slot in child.slots:
                yield slot.read()

    def overdue_views(self, now_ms: int) -> Iterator[SlotView]:
        """Yield the slots whose attempt may have passed a deadline."""
        for index, child in self._children.items():
            if self._slots.children[index].has_deadlines:
                for slot in child.slots:
                    if slot.is_overdue(now_ms):
                        yield slot.read()

    def overdue_in_child(self, token: str, now_ms: int) -> list[SlotView]:
        """Return the overdue attempts in the child with this token."""
        slots = self._children[self.index_of(token)].slots
        return [slot.read() for slot in slots if slot.is_overdue(now_ms)]

    def view(self, token: str) -> SlotView | None:
        """Return the slot with this token; ``None`` if its child is dead."""
        entry = self._slots_by_token.get(token)
        return None if entry is None else entry[1].read()

    def index_of(self, token: str) -> int:
        """Return the index of the child with this token."""
        return self._slots_by_token[token][0]

    def request_cancel(self, token: str, attempt: int, reason: CancelReason) -> None:
        """Write a request to cancel an attempt; :meth:`notify` makes the child read it."""
        self._slots_by_token[token][1].request_cancel(attempt, reason)

    def notify(self, token: str) -> None:
        """Signal the child with this token, so that it reads its cancel requests."""
        _send(self._children[self.index_of(token)].pid, signal.SIGUSR2)

    def kill_to_cancel(self, killed_attempt: KilledAttempt) -> None:
        """Kill the child to cancel an attempt."""
        child = self._children[self.index_of(killed_attempt.token)]
        child.killed_attempts[killed_attempt.token] = killed_attempt
        _send(child.pid, signal.SIGKILL)

    def loop_blockers(self, token: str, since_ms: int) -> tuple[int, Sequence[SlotView] | None] | None:
        """Return what blocks the event loop of the child with this token; ``None`` if it has turned since ``since_ms``.

        Returns:
            For how long, and the attempt that blocks the loop, or none if it is code that no attempt runs; ``None`` for
            the attempts if the child does not know.
        """
        child = self._children[self.index_of(token)]
        turned_ms = child.block.loop_turned_ms
        if not 0 < turned_ms < since_ms or mono_ms() - turned_ms < _BLOCKED_MS:
            return None
        if not child.block.loop_held:
            return mono_ms() - turned_ms, None
        views = [slot.read() for slot in child.slots]
        return mono_ms() - turned_ms, [view for view in views if view.holds_loop and view.state is SlotState.ACTIVE]

    def kill_blocked(self, token: str, blocked_ms: int, *, is_crash: bool) -> None:
        """Kill a child whose event loop is blocked by something that belongs to no attempt, or by an unknown one.

        Args:
            is_crash: Count a crash of each of its jobs, because each may be the cause.
        """
        child = self._children[self.index_of(token)]
        child.loop_blocked = f"its event loop was blocked for {blocked_ms / 1000:.1f} s"
        child.stop_requested |= not is_crash
        _send(child.pid, signal.SIGKILL)

    def busy_children(self) -> list[tuple[int, int]]:
        """Return the index and the pid of each child that is running a job."""
        return [
            (index, child.pid)
            for index, child in self._children.items()
            if any(slot.read().state is SlotState.ACTIVE for slot in child.slots)
        ]

    def kill_for_memory(self, index: int, used_kib: int, limit_kib: int) -> None:
        """Kill the child with this index, because its memory exceeds the limit."""
        child = self._children[index]
        if not (child.killed_attempts or child.exceeded_memory):
            used, limit = f"{used_kib / 1024:.0f} MiB", f"{limit_kib / 1024:.0f} MiB"
            child.exceeded_memory = f"its memory, {used}, exceeded worker_hard_memory_limit, {limit}"
            _send(child.pid, signal.SIGKILL)

    def start_missing(self) -> int | None:
        """Start missing children; return the milliseconds until the next delayed start, if any."""
        now_ms = mono_ms()
        self._delayed_until_ms = [until for until in self._delayed_until_ms if until > now_ms]
        missing = self._target - len(self._staying()) - len(self._delayed_until_ms)
        free = [index for index in range(self.max_children) if index not in self._children]
        for index in free[: max(0, missing)]:
            self._start(index)
        return min((until - now_ms for until in self._delayed_until_ms), default=None)

    def reap(self) -> list[JobsOfDeadChild]:
        """Collect dead children whose processes have ended, too; return the jobs of each.

        Until then, their jobs keep their locks, because those processes may still be working on them.

        Raises:
            ChildBootError: Several children in a row died before they could acquire a job.
        """
        pids, orphans, now_ms = {child.pid for child in self._children.values()}, None, mono_ms()
        if self._descendants is not None and now_ms - self._searched_ms >= _SEARCH_MS:
            orphans, self._searched_ms = self._descendants.find(pids), now_ms
        dead = [(index, child) for index, child in self._children.items() if _has_exited(child)]
        if self._descendants is not None and orphans and not dead:
            self._descendants.note(orphans, pids)
        return [self._remove_dead(index, child, _reap(child)) for index, child in dead if self._end(child, pids)]

    def _end(self, child: _Child, pids: Collection[int]) -> bool:
        """End the processes of a dead child; return whether it can be reaped."""
        child.dead_since_ms = child.dead_since_ms or mono_ms()
        if self._descendants is None or self._descendants.end(child.pid, pids):
            return True
        return mono_ms() - child.dead_since_ms >= _END_MS

    def close(self, *, finishing: bool = False) -> None:
        """Ask every child to stop once its jobs are settled (warm shutdown).

        Args:
            finishing: Checkpointed tasks also run to completion, instead of ending between two items.
        """
        self._slots.control.finishing = finishing
        self._slots.control.stop()
        for child in self._children.values():
            _request_stop(child)

    def kill(self) -> None:
        """Kill every child; the slots show which jobs to recover."""
        for child in self._children.values():
            child.stop_requested = True
            _send(child.pid, signal.SIGKILL)

    def running(self) -> int:
        """Return how many jobs the children are running."""
        return sum(view.state in {SlotState.ACTIVE, SlotState.SETTLING} for view in self.views())

    def _jobs_of(self, index: int) -> int:
        return sum(not slot.is_free for slot in self._children[index].slots)

    def _staying(self) -> list[int]:
        return [index for index, child in self._children.items() if not child.is_leaving]

    def _start(self, index: int) -> None:
        block = self._slots.children[index]
        block.reset()
        pid = self._launch(index)
        child = self._children[index] = _Child(pid, mono_ms(), block, block.slots())
        block.pid = pid
        self._slots_by_token.update({slot.token: (index, slot) for slot in child.slots})
        self._bus.emit(ChildStarted(index, pid))

    def _remove_dead(self, index: int, child: _Child, status: int) -> JobsOfDeadChild:
        del self._children[index]
        for slot in child.slots:
            del self._slots_by_token[slot.token]
        block = self._slots.children[index]
        block.pid = 0
        exit_reason = child.exceeded_memory or child.loop_blocked or _exit_reason(status)
        views = [view for view in (slot.read() for slot in child.slots) if view.state is not SlotState.FREE]
        tokens = tuple(view.token for view in views)
        running = frozenset(view.token for view in views if view.state is SlotState.ACTIVE)
        # Other slots still contain the id of their previous job, which another worker may have acquired.
        with_job = [view for view in views if view.job_id and view.state in HAS_JOB]
        jobs = tuple((view.queue_index, view.token, view.job_id) for view in with_job)
        has_timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        # A task that calls os._exit(0) is a crash.
        exited = (status == 0 or has_timed_out) and block.run_state is ProcessState.CLOSED
        killed_attempts = {
            view.token: killed
            for view in views
            if (killed := child.killed_attempts.get(view.token) or _cancelled(view, blocked=child.is_blocked))
            and killed.may_match(view)
        }
        self._emit_end(index, child, exit_reason, len(tokens), exited=exited, has_timed_out=has_timed_out)
        self._count_boot_failures(block, child)
        now_ms = mono_ms()
        # If a child lived for less than a second, its replacement starts when that second is over, so that a job that
        # crashes every child does not keep the machine busy with forks. A child that was leaving already has one.
        if not child.is_leaving and now_ms - child.started_ms < _MIN_LIFETIME_MS:
            self._delayed_until_ms.append(child.started_ms + _MIN_LIFETIME_MS)
        intentional = child.stop_requested or exited or bool(child.killed_attempts)
        unstarted, outcomes = _prefetched(child.slots)
        return JobsOfDeadChild(
            tokens, running, now_ms, exit_reason, intentional, killed_attempts, jobs, unstarted, outcomes
        )

    def _emit_end(
        self, index: int, child: _Child, exit_reason: str, jobs: int, *, exited: bool, has_timed_out: bool
    ) -> None:
        if child.killed_attempts:
            killed = child.killed_attempts.values()
            cancel_reason = BLOCKED_LOOP if child.is_blocked else max(attempt.reason for attempt in killed).name.lower()
            self._bus.emit(ChildKilled(index, child.pid, cancel_reason, jobs))
        elif child.loop_blocked and not exited:
            self._bus.emit(ChildKilled(index, child.pid, BLOCKED_LOOP, jobs))
        elif child.exceeded_memory and not exited:
            self._bus.emit(ChildKilled(index, child.pid, HARD_MEMORY_LIMIT, jobs))
        elif exited and has_timed_out:
            self._bus.emit(ChildKilled(index, child.pid, EXIT_TIMEOUT, jobs))
        elif exited and not child.stop_requested:
            reason = child.block.retire_reason
            self._bus.emit(ChildExited(index, child.pid, reason.name.lower() if reason else "signal"))
        elif not child.stop_requested:
            self._bus.emit(ChildDied(index, child.pid, exit_reason, jobs))

    def _count_boot_failures(self, block: ChildBlock, child: _Child) -> None:
        if block.run_state is not ProcessState.INIT or child.stop_requested:
            self._boot_failures = 0
            return
        self._boot_failures += 1
        if self._boot_failures >= _MAX_BOOT_FAILURES:
            raise ChildBootError(f"{self._boot_failures} children in a row died before they could acquire a job")


def _prefetched(slots: Sequence[Slot]) -> tuple[frozenset[str], dict[str, bytes]]:
    """Return the tokens of jobs that have not started, and the stored outcomes of those that have ended."""
    unstarted = frozenset(slot.token for slot in slots if slot.state in _UNSTARTED)
    ended = (slot for slot in slots if slot.state in {SlotState.ENDED, SlotState.SETTLING, SlotState.UNCERTAIN})
    return unstarted, {slot.token: outcome for slot in ended if (outcome := slot.outcome)}


def _cancelled(view: SlotView, *, blocked: bool) -> KilledAttempt | None:
    """Return the attempt in a dead child's slot if it was being cancelled, and so must not run again as after a crash.

    The child died before the attempt had ended, and before it was killed for it. If its event loop was blocked, an
    attempt that was to end at its limit could not end.
    """
    reasons = {CancelReason.REVOKED} if blocked else {CancelReason.HARD_LIMIT, CancelReason.REVOKED}
    return KilledAttempt.of(view) if view.state is SlotState.ACTIVE and view.cancel_reason in reasons else None


def _has_exited(child: _Child) -> bool:
    """Return whether a child has exited, without reaping it, so that no other process gets its pid."""
    try:
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        pid, status = os.waitpid(child.pid, os.WNOHANG)  # macOS with Python 3.12 and older
        child.status = status if pid else child.status
    except ChildProcessError:
        child.status = child.status or 0
    return child.status is not None


def _reap(child: _Child) -> int:
    return os.waitpid(child.pid, 0)[1] if child.status is None else child.status


def _exit_reason(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _request_stop(child: _Child) -> None:
    child.stop_requested = True
    _send(child.pid, signal.SIGTERM)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
