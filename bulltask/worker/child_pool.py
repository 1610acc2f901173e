"""The child processes of a worker: starts them, replaces dead ones, and stops them.

Begin with :class:`ChildPool`. The launchers fork or spawn, :class:`Descendants` ends what a child has started, and
:class:`StackCollector` and :class:`MemoryCheck` look at the running children.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bulltask.config.config import Config
from bulltask.config.process import BLOCKED_AT_START, CHILD_MARK, anonymous_file, fork_with_blocked_signals, memory_kib
from bulltask.jobs.clock import mono_ms, value_class
from bulltask.observe.bus import Bus
from bulltask.observe.counters import NotedAttempt
from bulltask.observe.events import (
    OUT_OF_MEMORY,
    ChildDied,
    ChildExited,
    ChildKilled,
    ChildStarted,
    ChildStopped,
    StacksDumped,
)
from bulltask.worker.guard import HAS_PROC, end_group, mark_of
from bulltask.worker.recovery import EndedAttempt, JobsOfDeadChild, KilledAttempt
from bulltask.worker.slots import (
    HAS_JOB,
    STACKS_NAME,
    UNKNOWN_ATTEMPT,
    CancelReason,
    ChildBlock,
    ChildLimit,
    ExitCode,
    ProcessState,
    Slot,
    Slots,
    SlotState,
    SlotView,
    free_slots,
)

__all__ = [
    "ChildBootError",
    "ChildPool",
    "Descendants",
    "ForkLauncher",
    "IdleCheck",
    "Launcher",
    "MemoryCheck",
    "SpawnLauncher",
    "StackCollector",
    "choose_launcher",
    "lead_group",
    "limit_native_threads",
    "mark_programs",
    "reap_inherited",
    "thread_count",
]


HARD_MEMORY_LIMIT: Final = "hard_memory_limit"
UNRESPONSIVE: Final = "unresponsive"
BLOCKED_LOOP: Final = "blocked_loop"
_MIN_LIFETIME_MS: Final = 1_000  # tests that kill children soon set it to 0
_MAX_BOOT_FAILURES: Final = 5
_END_MS: Final = 5_000
"""How long a dead child's jobs wait until its processes have ended. A killed process that is still there after that is
in the kernel, and will run no more of its own code."""
_SEARCH_MS: Final = 900
"""The supervisor looks for orphans of living children each second, but not if it was just woken up. It costs 60 µs."""
EXIT_TIMEOUT: Final = "exit_timeout"
_BLOCKED_MS: Final = 500
"""An event loop that has turned less than this ago is not blocked: it says so only a few times a second."""
_UNSTARTED: Final = {SlotState.PREFETCHED, SlotState.RELEASING, SlotState.RELEASED}
_WITHOUT_ATTEMPT: Final = {*_UNSTARTED, SlotState.FREE, SlotState.RESERVED, SlotState.WRITTEN, SlotState.ENDED}
"""The states of a slot whose job another child can take over without running an attempt twice."""
_STOPPED: Final = -1
"""Instead of the time of a child's last activity: it was stopped."""


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
    unresponsive: str = ""
    is_stopped: bool = False

    @property
    def is_blocked(self) -> bool:
        """Whether the child was killed because its event loop was blocked, so that attempts could not be cancelled."""
        return bool(self.loop_blocked) or any(attempt.blocked_ms for attempt in self.killed_attempts.values())

    @property
    def is_leaving(self) -> bool:
        """Whether the child acquires no more jobs, so that another child takes its place."""
        return self.stop_requested or self.block.reached_limit is not ChildLimit.NONE

    @property
    def has_attempt(self) -> bool:
        """Whether an attempt is running, or its outcome is nowhere but in the child's own memory."""
        return not all(slot.state in _WITHOUT_ATTEMPT or slot.outcome for slot in self.slots)


class ChildPool:
    """Keeps the target number of children running.

    A child that is leaving, because it was stopped or has reached a limit, does not count, although it may still run
    its last jobs.

    Attributes:
        interrupt_at_ms: When the attempts that are still running are cancelled, because the worker will soon kill the
            children (monotonic time); ``None`` for never.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        slots: Slots,
        launch: Launcher,
        stacks: StackCollector,
        bus: Bus,
        target: int,
        descendants: Descendants | None = None,
        take_notes: Callable[[int], Sequence[NotedAttempt]] = lambda _index: (),
    ) -> None:
        self._take_notes = take_notes
        self._oom_kills = OutOfMemoryKills()
        self._slots = slots
        self._launch = launch
        self._bus = bus
        self._target = target
        self._descendants = descendants
        self._searched_ms = 0
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
    def ready(self) -> int:
        """The number of children that run jobs or wait for them."""
        staying = [self._children[index] for index in self._staying()]
        running = [child for child in staying if child.block.run_state is ProcessState.RUN]
        return len(running) - len(self.halted.keys() & {child.pid for child in running})

    @property
    def halted(self) -> dict[int, str]:
        """The children that make no progress, by pid: ``unresponsive`` (soon replaced), or ``stopped``.

        Those that are not replaced, because they run jobs, come first.
        """
        halted = [child for child in self._children.values() if child.unresponsive or child.is_stopped]
        return {
            child.pid: "unresponsive" if child.unresponsive else "stopped"
            for child in sorted(halted, key=lambda child: not child.has_attempt)
        }

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
            jobs = {index: sum(not slot.is_free for slot in self._children[index].slots) for index in staying}
            _request_stop(self._children[min(staying, key=lambda index: (jobs[index], -index))])
        return True

    def resize(self, target: int) -> None:
        """Grow or shrink to ``target`` children; the children with the fewest jobs are stopped."""
        while self._target < target and self.grow():
            pass
        while self._target > target and self.shrink():
            pass

    def replace(self) -> int:
        """Stop every child when its jobs have ended, and start another one in its place now; return how many."""
        staying = self._staying()
        for index in staying:
            _request_stop(self._children[index])
        return len(staying)

    def notify_all(self) -> None:
        """Signal all children, so that they read what the control page has for them."""
        for child in self._children.values():
            _send(child.pid, signal.SIGUSR2)

    @property
    def pids(self) -> list[int]:
        """The process ids of the children, in the order of their indexes."""
        return [child.pid for _, child in sorted(self._children.items())]

    @property
    def is_paused(self) -> bool:
        """Whether the children acquire no jobs until the worker is resumed."""
        control = self._slots.control
        return control.paused and not control.stopping

    def free_slots(self, per_child: int) -> int | None:
        """Return how many more jobs the waiting children can run; ``None`` while one is starting or missing."""
        free = 0
        for index in self._staying():
            child = self._children[index]
            if child.block.run_state is ProcessState.INIT:
                return None
            free += free_slots(child.slots, per_child)
        return free if len(self._staying()) == self._target else None

    def idle_slots(self) -> tuple[tuple[str, int], ...]:
        """Return the token and last attempt of each slot; ``()`` if a child has a job, or may have acquired one.

        If two calls return the same result, no child has had a job in between.
        """
        attempts = []
        for child in self._children.values():
            if not (child.is_leaving or any(slot.waiting for slot in child.slots)):
                return ()
            for slot in child.slots:
                waiting, view = slot.waiting, slot.read()
                if view.state is not SlotState.FREE and not (waiting and view.state is SlotState.RESERVED):
                    return ()
                attempts.append((view.token, view.attempt))
        return tuple(attempts)

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

    def views_by_pid(self) -> Iterator[tuple[int, SlotView]]:
        """Yield the slots of all children, with the children's process ids."""
        for child in self._children.values():
            for slot in child.slots:
                yield child.pid, slot.read()

    @property
    def has_short_limits(self) -> bool:
        """Whether a child has had attempts with time limits so short that it must be looked at often."""
        return any(child.block.has_short_limits for child in self._children.values())

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

        That is for how long, and the attempt that blocks the loop: none if it is code of no attempt, ``None`` if the
        child does not know.
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

        With ``is_crash``, a crash of each of its jobs is counted, because each may be the cause.
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

    def idle_children(self) -> Iterator[tuple[int, int, int]]:
        """Yield the index, the pid and the time of the last activity of each child that could ask for a job.

        A child that looks for a job changes the state of a slot before and after each call to Redis. One that leaves
        is among them until it knows that it should, which ends its call. Instead of the time, ``_STOPPED`` is
        yielded for a child that was stopped, whatever it was doing, unless it runs an attempt.
        """
        for index, child in self._children.items():
            if child.is_stopped:
                if not child.has_attempt:
                    yield index, child.pid, _STOPPED
                continue
            states = {slot.state for slot in child.slots}
            if child.block.run_state is not ProcessState.RUN or not states <= {SlotState.FREE, SlotState.RESERVED}:
                continue
            is_asking = SlotState.RESERVED in states or any(slot.waiting for slot in child.slots)
            if is_asking if child.is_leaving else not self.is_paused:
                yield index, child.pid, max(slot.since_ms for slot in child.slots)

    def note_stopped(self) -> None:
        """Note which children were stopped, and report those that run jobs: they are not replaced."""
        for index, child in self._children.items():
            if child.unresponsive:
                continue
            is_stopped = _state_of(child.pid) == "T"
            if is_stopped and not child.is_stopped and child.has_attempt:
                self._bus.emit(ChildStopped(index, child.pid, sum(slot.state in HAS_JOB for slot in child.slots)))
            child.is_stopped = is_stopped

    def suspect(self, index: int, silent_ms: int, step: int) -> None:
        """Take the next step against a child that seems to hang: log its stacks, stop it, kill it."""
        child = self._children[index]
        what = "was stopped" if child.is_stopped else "had not asked for a job"
        child.unresponsive = f"it {what} for {silent_ms / 1000:.0f} s"
        if step == 0 and not child.is_stopped:
            self.stacks.request(index, child.pid, child.block)
        else:
            child.stop_requested |= step > 1
            _send(child.pid, signal.SIGKILL if step > 1 else signal.SIGSTOP)

    def acquit(self, pid: int) -> None:
        """Let a child that was suspected continue."""
        for child in self._children.values():
            if child.pid == pid:
                child.unresponsive = ""
                _send(pid, signal.SIGCONT)

    def kill_for_memory(self, index: int, used_kib: int, limit_kib: int) -> None:
        """Kill the child with this index, because its memory exceeds the limit."""
        child = self._children[index]
        if not (child.killed_attempts or child.exceeded_memory):
            used, limit = f"{used_kib / 1024:.0f} MiB", f"{limit_kib / 1024:.0f} MiB"
            child.exceeded_memory = f"its memory, {used}, exceeded worker_hard_memory_limit, {limit}"
            _send(child.pid, signal.SIGKILL)

    def start_missing(self) -> int | None:
        """Start missing children; return the milliseconds (at least 1) until the next delayed start, if any."""
        now_ms = mono_ms()
        self._delayed_until_ms = [until for until in self._delayed_until_ms if until > now_ms]
        missing = self._target - len(self._staying()) - len(self._delayed_until_ms)
        free = [index for index in range(self.max_children) if index not in self._children]
        for index in free[: max(0, missing)]:
            self._start(index)
        return min((until - now_ms for until in self._delayed_until_ms), default=None)

    def reap(self) -> list[JobsOfDeadChild]:
        """Collect dead children whose processes have ended, too; return the jobs of each.

        Until then, their jobs keep their locks, because those processes may still be working on them. Raises
        :class:`ChildBootError` if several children in a row died before they could acquire a job.
        """
        pids, orphans, now_ms = {child.pid for child in self._children.values()}, None, mono_ms()
        if self._descendants is not None and now_ms - self._searched_ms >= _SEARCH_MS:
            orphans = self._descendants.find(pids)
            self._searched_ms = now_ms
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
        """Ask every child to stop once its jobs are finished (warm shutdown).

        With ``finishing``, checkpointed tasks also run to completion, instead of ending between two items.
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
        return sum(view.state in {SlotState.ACTIVE, SlotState.FINISHING} for view in self.views())

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
        exit_reason = child.exceeded_memory or child.loop_blocked or child.unresponsive or _exit_reason(status)
        is_expected = child.stop_requested or child.killed_attempts
        if exit_reason == "SIGKILL" and not is_expected and self._oom_kills.claim():
            exit_reason = OUT_OF_MEMORY
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
            and view.attempt in {killed.attempt, UNKNOWN_ATTEMPT}  # it may have ended just before the kill
        }
        self._emit_end(index, child, exit_reason, views, exited=exited, has_timed_out=has_timed_out)
        self._count_boot_failures(block, child)
        now_ms = mono_ms()
        # If a child lived for less than a second, its replacement starts when that second is over, so that a job that
        # crashes every child does not keep the machine busy with forks. A child that was leaving already has one.
        if not child.is_leaving and now_ms - child.started_ms < _MIN_LIFETIME_MS:
            self._delayed_until_ms.append(child.started_ms + _MIN_LIFETIME_MS)
        intentional = child.stop_requested or exited or bool(child.killed_attempts)
        unstarted, outcomes = _prefetched(child.slots)
        ended = tuple(_ended(child.slots[noted.slot], noted) for noted in self._take_notes(index))
        return JobsOfDeadChild(
            tokens,
            running,
            now_ms,
            exit_reason,
            intentional,
            killed_attempts,
            jobs,
            unstarted,
            outcomes,
            ended,
            child.pid,
        )

    def _emit_end(
        self,
        index: int,
        child: _Child,
        exit_reason: str,
        views: Sequence[SlotView],
        *,
        exited: bool,
        has_timed_out: bool,
    ) -> None:
        jobs = len(views), tuple(view.job_id for view in views if view.job_id and view.state in HAS_JOB)[:_JOB_IDS]
        if child.killed_attempts:
            killed = child.killed_attempts.values()
            cancel_reason = BLOCKED_LOOP if child.is_blocked else max(attempt.reason for attempt in killed).name.lower()
            self._bus.emit(ChildKilled(index, child.pid, cancel_reason, *jobs))
        elif child.loop_blocked and not exited:
            self._bus.emit(ChildKilled(index, child.pid, BLOCKED_LOOP, *jobs))
        elif child.unresponsive and not exited:
            self._bus.emit(ChildKilled(index, child.pid, UNRESPONSIVE, len(jobs[1]), jobs[1]))
        elif child.exceeded_memory and not exited:
            self._bus.emit(ChildKilled(index, child.pid, HARD_MEMORY_LIMIT, *jobs))
        elif exited and has_timed_out:
            self._bus.emit(ChildKilled(index, child.pid, EXIT_TIMEOUT, *jobs))
        elif exited and not child.stop_requested:
            reason = child.block.reached_limit
            self._bus.emit(ChildExited(index, child.pid, reason.name.lower() if reason else "signal"))
        elif not child.stop_requested:
            counted = exit_reason == "SIGKILL" and self._oom_kills.are_counted
            self._bus.emit(ChildDied(index, child.pid, exit_reason, *jobs, counted))

    def _count_boot_failures(self, block: ChildBlock, child: _Child) -> None:
        if block.run_state is not ProcessState.INIT or child.stop_requested:
            self._boot_failures = 0
            return
        self._boot_failures += 1
        if self._boot_failures >= _MAX_BOOT_FAILURES:
            raise ChildBootError(f"{self._boot_failures} children in a row died before they could acquire a job")


def _ended(slot: Slot, noted: NotedAttempt) -> EndedAttempt:
    """Return an attempt of a dead child. If its slot has another job, the reply to the outcome contained that job."""
    return EndedAttempt(noted, slot.order != noted.order, slot.token, *slot.job_when_dead())


def _prefetched(slots: Sequence[Slot]) -> tuple[frozenset[str], dict[str, bytes]]:
    """Return the tokens of jobs that have not started, and the stored outcomes of those that have ended."""
    unstarted = frozenset(slot.token for slot in slots if slot.state in _UNSTARTED)
    ended = (slot for slot in slots if slot.state in {SlotState.ENDED, SlotState.FINISHING, SlotState.NO_REPLY})
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


class MemoryCheck:
    """Kills a child whose memory exceeds the hard limit while it runs a job.

    This counts as a crash of its jobs, not as a failed attempt, just as if the kernel's OOM killer had killed the
    child, because the supervisor cannot know which job used the memory. A child without a job is not killed. It checked
    its memory itself after its last job (:class:`~bulltask.worker.slots.ChildLimits`).
    """

    interval_ms = 200

    def __init__(self, pool: ChildPool, limit_kib: int) -> None:
        self._pool = pool
        self._limit_kib = limit_kib

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check all children that are running a job."""
        for index, pid in self._pool.busy_children():
            with suppress(OSError):  # the child has just died
                if (used_kib := memory_kib(pid)) > self._limit_kib:
                    self._pool.kill_for_memory(index, used_kib, self._limit_kib)


_MARGIN_MS: Final = 10_000
"""How much later than its timeouts allow a child may ask for a job: the machine may be overloaded."""


_NOTE_MS: Final = 5_000
"""Interval at which the states of processes are read, which costs 20 µs for each child."""


class IdleCheck:
    """Replaces a child that could take jobs and does not ask for any: it was stopped, or it hangs.

    Only a child without a job is replaced. It is suspected when its silence has lasted for longer than the timeouts of
    its calls: its stacks are logged; a second later it is stopped, so that it cannot acquire a job in the last moment;
    and then it is killed, if it has been silent all the time. A child that a debugger holds is left alone.

    A child that was stopped is suspected sooner, whether it is starting, waiting, leaving or exiting: Redis may give it
    a job, whose lock would be renewed for ever. If it has prefetched jobs, they are released. One that runs a job is
    only reported.

    Time counts only while this service runs, so a machine that was suspended causes no alarm. While the worker is
    paused, or Redis fails, children may wait longer.
    """

    interval_ms = 1_000

    def __init__(self, pool: ChildPool, config: Config, is_off: Callable[[], bool]) -> None:
        self._pool = pool
        calls_ms = config.connect_timeout_ms + 2 * config.command_timeout_ms
        self._max_silence_ms = config.drain_delay_ms + calls_ms + _MARGIN_MS
        self._is_off = is_off
        self._silences: dict[tuple[int, int], tuple[int, int]] = {}
        self._last_ms = 0
        self._next_note_ms = 0

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Check all children that run no job."""
        elapsed_ms = min(now_ms - self._last_ms, 2 * self.interval_ms)
        self._last_ms = now_ms
        if now_ms >= self._next_note_ms:
            self._next_note_ms = now_ms + _NOTE_MS
            self._pool.note_stopped()
        before = self._silences
        self._silences = {}
        for index, pid, active_ms in () if self._is_off() else self._pool.idle_children():
            silent_ms, step = before.pop((pid, active_ms), (-elapsed_ms, 0))
            silent_ms += elapsed_ms
            max_silence_ms = _MARGIN_MS if active_ms == _STOPPED else self._max_silence_ms
            if silent_ms >= max_silence_ms and _state_of(pid) != "t":
                self._pool.suspect(index, silent_ms, step)
                step += 1
            self._silences[pid, active_ms] = silent_ms, step
        for (pid, _), (_, step) in before.items():
            if step:
                self._pool.acquit(pid)


def _state_of(pid: int) -> str:
    """Return the state of a process: ``T`` if it was stopped, ``t`` if a debugger holds it; ``""`` if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


_FORK_SAFE: Final = frozenset({"jemalloc_bg_thd"})
"""Names of fork-safe threads. ``import pyarrow`` starts this one; jemalloc stops it for a fork."""

Launcher = Callable[[int], int]
"""Starts the child with the given index and returns its pid."""


class ForkLauncher:
    """Starts a child with a fork, which is fast, because the tasks are already imported."""

    def __init__(self, run: Callable[[int, int], None]) -> None:
        self._run = run

    def __call__(self, index: int) -> int:
        """Fork."""
        # Freeze existing objects, so that garbage collection in a child does not copy their memory pages.
        gc.collect()
        gc.freeze()
        parent_pid = os.getpid()
        pid = fork_with_blocked_signals()
        if pid == 0:
            self._run(index, parent_pid)
            os._exit(ExitCode.FAILED)  # not reached: run() exits the process
        return pid


class SpawnLauncher:
    """Starts a child as a new interpreter that imports the app again: slower, but safe with threads.

    ``write_spec`` writes the spec of a child to a file, because a command line would show the broker's password, and
    returns the file's descriptor and those that the child shares.
    """

    def __init__(self, write_spec: Callable[[int], tuple[int, tuple[int, ...]]]) -> None:
        self._write_spec = write_spec

    def __call__(self, index: int) -> int:
        """Spawn."""
        spec_fd, shared = self._write_spec(index)
        try:
            for fd in (spec_fd, *shared):
                os.set_inheritable(fd, True)
            args = [sys.executable, "-m", "bulltask.worker.spawned", str(spec_fd)]
            # TERM is not blocked, because a child that is still importing the app has no job and may exit immediately.
            return os.posix_spawn(sys.executable, args, dict(os.environ), setsigmask=BLOCKED_AT_START)
        finally:
            for fd in shared:
                os.set_inheritable(fd, False)
            os.close(spec_fd)


def choose_launcher(
    method: str, fork: ForkLauncher, spawn: SpawnLauncher | None, warn: Callable[[str], None]
) -> Launcher:
    """Return the function that starts children: by ``fork``, ``spawn``, or ``auto``.

    ``auto`` forks unless this process has other threads, now or when a child starts: a fork copies only the calling
    thread, but also the locks that other threads hold, which are never released. Only an app that was given with ``-A``
    can be spawned; ``warn`` is called once if ``auto`` cannot fork safely.
    """
    if method == "fork" or (method == "spawn" and spawn is not None):
        return fork if method == "fork" or spawn is None else spawn
    warned, threads_now = False, thread_count()  # a fork of any process ends the threads of OpenBLAS

    def start(index: int) -> int:
        nonlocal warned
        threads = max(threads_now, thread_count())
        if threads <= 1 and method == "auto":
            return fork(index)
        if not warned:
            warned = True
            result = (
                "children are started as new interpreters"
                if spawn
                else "the worker forks anyway, because only one that was started with -A can start new interpreters"
            )
            warn(f"The app has started threads ({threads - 1}), which do not survive a fork: {result}")
        return fork(index) if spawn is None else spawn(index)

    return start


def limit_native_threads() -> None:
    """Prevent NumPy, which the app may import, from starting threads, unless the environment sets their number.

    NumPy's OpenBLAS starts a thread per core when it is imported. Then children could not be forked, and each child
    would have a thread per core. Dask sets the same variable for its workers.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def thread_count() -> int:
    """Return the number of threads that are not fork-safe; on Linux including threads of C libraries."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return threading.active_count()
    return sum(_name_of(task) not in _FORK_SAFE for task in tasks.iterdir())


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # the thread has ended
        return ""


_CLAIM_MS: Final = 1_000
_JOB_IDS: Final = 10


class OutOfMemoryKills:
    """Tells whether the kernel has killed a child because memory was used up.

    The kernel counts such kills for the control group of a process, or, without one, for the machine. It does not say
    which process it has killed, so a kill is attributed to a child that died of ``KILL`` up to a second later.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or next(filter(_counts_kills, _kill_counters()), None)
        self._count = self._read()
        self._unclaimed = 0
        self._checked_ms = 0

    @property
    def are_counted(self) -> bool:
        """Whether the kernel counts such kills here."""
        return self._path is not None

    def claim(self) -> bool:
        """Return whether there was such a kill that has not been claimed yet."""
        if mono_ms() - self._checked_ms > _CLAIM_MS:
            self._unclaimed = 0
        count = self._read()
        self._checked_ms = mono_ms()
        self._unclaimed += count - self._count
        self._count = count
        if self._unclaimed <= 0:
            return False
        self._unclaimed -= 1
        return True

    def _read(self) -> int:
        return 0 if self._path is None else _kills_in(self._path) or 0


def _kill_counters() -> Iterator[Path]:
    """Yield the files that may contain the number of kills: of cgroups (version 2, then 1), then of the machine."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                root, name = Path("/sys/fs/cgroup"), "memory.events"
            elif "memory" in controllers.split(","):
                root, name = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
            else:
                continue
            yield root / group.lstrip("/") / name
            yield root / name  # the group's own root, in a container
    yield Path("/proc/vmstat")


def _counts_kills(path: Path) -> bool:
    return _kills_in(path) is not None


def _kills_in(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


_TIMEOUT_MS: Final = 1_000
"""Maximum wait for a dump. A child that is running Python code responds within milliseconds. A child that is stuck in C
code writes the stacks of its threads, but not its asyncio tasks."""

_POLL_MS: Final = 20


@value_class
class _StackRequest:
    index: int
    pid: int
    block: ChildBlock
    until_ms: int


class StackCollector:
    """Requests the stacks of children, and emits what they write.

    A child writes into an anonymous file. The supervisor reads it and logs one line, so the stacks of several children
    are never mixed, and the supervisor does not block on a child that hangs.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._pending: list[_StackRequest] = []

    def dump_supervisor(self) -> None:
        """Emit the stacks of this process."""
        fd = anonymous_file(STACKS_NAME)
        if fd is None:
            return
        try:
            faulthandler.dump_traceback(fd, all_threads=True)
            text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        finally:
            os.close(fd)
        self._bus.emit(StacksDumped(None, os.getpid(), text))

    def request(self, index: int, pid: int, block: ChildBlock) -> None:
        """Request the stacks of a child; :meth:`collect` emits them."""
        with suppress(OSError):
            os.truncate(_file_of(pid, block), 0)
        block.request_stacks()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        self._pending.append(_StackRequest(index, pid, block, mono_ms() + _TIMEOUT_MS))

    def collect(self) -> int | None:
        """Emit the dumps that are complete; return when to check again in ms, ``None`` if no dump is pending."""
        incomplete = []
        for request in self._pending:
            if request.block.stacks_pending and mono_ms() < request.until_ms:
                incomplete.append(request)
                continue
            with suppress(OSError):  # the child has exited
                text = _file_of(request.pid, request.block).read_text(errors="replace")
                self._bus.emit(StacksDumped(request.index, request.pid, text))
        self._pending = incomplete
        return _POLL_MS if incomplete else None


def _file_of(pid: int, block: ChildBlock) -> Path:
    """Return the path of a child's file in ``/proc``; another process may have its pid by now."""
    path = Path(f"/proc/{pid}/fd/{block.stacks_fd}")
    if STACKS_NAME not in str(path.readlink()):
        raise FileNotFoundError(path)
    return path


# Finds and ends what a child process has started: processes, and their processes.
#
# A child leads a process group, unless the standard input is a terminal: there, only the foreground group can read, and
# a task may use ``breakpoint()``. Programs that a child starts also have a mark in their environment, because they may
# have a session of their own. A fork without a program has no such mark, but the descriptor of the shared memory.


_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_TASKS: Final = Path("/proc/self/task")


def lead_group() -> None:
    """Let this child lead a process group, unless a task may read from the terminal."""
    if not os.isatty(0):
        with suppress(OSError):  # it leads a session
            os.setpgid(0, 0)


def mark_programs(worker_id: str) -> None:
    """Mark all programs that this child will start."""
    os.environ[CHILD_MARK] = f"{worker_id}/{os.getpid()}"


class Descendants:
    """What the children of this supervisor have started.

    As process 1 of a container, the supervisor also reaps what was started before it.

    On Linux, the kernel makes an orphan a child of the supervisor. When a child has died, its processes are therefore
    among the supervisor's children. Those of a living child are, too, if their parent has exited: they are recognized
    by their group or mark, and otherwise end with the last child that was alive when they appeared.

    On other systems, only the process group of a dead child ends.
    """

    def __init__(self, worker_id: str, helpers: Callable[[], Collection[int]]) -> None:
        self._worker_id = worker_id
        self._helpers = helpers
        self._group = os.getpgid(0)
        self._orphans: dict[int, set[int]] = {}
        if HAS_PROC:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
        self._earlier = set(_children())  # started by the app's modules, for example

    def find(self, children: Collection[int]) -> list[int]:
        """Return the orphans that are running, and reap the others."""
        if os.getpid() == 1:
            self._earlier = reap_inherited({*children, *self._helpers()}) & self._earlier
        known = {*children, *self._helpers(), *self._earlier}
        found = [pid for pid in _children() if pid not in known and _is_running(pid)]
        self._orphans = {pid: candidates for pid, candidates in self._orphans.items() if pid in found}
        return found

    def note(self, orphans: Collection[int], children: Collection[int]) -> None:
        """Note that any of these children may have started the new orphans; all were alive after :meth:`find`."""
        for pid in orphans:
            self._orphans.setdefault(pid, set(children))

    def end(self, child: int, children: Collection[int]) -> bool:
        """Kill the processes of a child that has exited, and is not reaped yet; return whether none is left."""
        end_group(child)
        remaining = False
        for pid in self.find(children):
            if self._is_of(pid, child):
                remaining = True
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        return not remaining

    def _is_of(self, pid: int, child: int) -> bool:
        try:
            group = os.getpgid(pid)
        except OSError:
            return False
        if group == child:
            return True
        mark = mark_of(pid, CHILD_MARK)
        if mark == f"{CHILD_MARK}=":
            return False
        if mark.startswith(f"{CHILD_MARK}={self._worker_id}/"):
            return mark.endswith(f"/{child}")
        if group == self._group and not os.isatty(0):
            return False  # of a process that the supervisor has started before
        candidates = self._orphans.setdefault(pid, set())  # it is new, so its parent was the child
        candidates.discard(child)
        return not candidates


def reap_inherited(own: Collection[int]) -> set[int]:
    """As process 1, reap the processes that this one has inherited, and return those that are running.

    Another process has no such children, or its app has started them and waits for them.
    """
    return {pid for pid in _children() if pid not in own and _is_running(pid)} if os.getpid() == 1 else set()


def _is_running(pid: int) -> bool:
    """Return whether a child is running; otherwise, reap it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def _children() -> list[int]:
    """Return the pids of this process's children."""
    if not HAS_PROC:
        return []
    try:
        return [int(pid) for task in _TASKS.iterdir() for pid in (task / "children").read_text().split()]
    except OSError:  # a kernel without this file
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        return [pid for pid in pids if _parent_of(pid) == os.getpid()]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
