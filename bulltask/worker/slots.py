"""Shared memory through which the supervisor reads its children's state.

A child has one slot for each job that it may have at a time (:mod:`bulltask.worker.slot`). No job is lost in a crash,
because every job that a dead child had acquired, or was acquiring, is locked with one of the child's tokens.

A control page precedes the children's blocks. The supervisor writes its instructions there; the
children read them, and take permits from it.

While jobs are short, a child prefetches several and writes several outcomes in one round trip. It then stores each
outcome in its slot first, and holds its block's lock except while it runs a task's code. If that code takes too long,
the supervisor takes the lock, releases the jobs that have not started, and writes the outcomes
(:mod:`bulltask.worker.supervisor.takeover`).
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Final
from uuid import uuid4

from bulltask.worker.control_page import ControlPage
from bulltask.worker.slot import OUTCOME_BYTES, SLOT_BYTES, TOKEN_AT, Slot
from bulltask.worker.states import ProcessState, RetireReason

if sys.platform != "win32":  # there, tasks that run in the test's or the caller's process import this module
    import fcntl

__all__ = ["LONG_MS", "STACKS_NAME", "ChildBlock", "Slots"]

STACKS_NAME: Final = "bulltask-stacks"
"""Name of the file for a child's stacks, as shown in ``/proc``."""

LONG_MS: Final = 10
"""A job that takes longer than this must not delay those that its child has prefetched."""

_CHILD_BYTES: Final = 128

# Indexes of the 64-bit words at the start of a child's block.
(
    _RUN_STATE,
    _STACKS_FD,
    _STACKS_REQUESTED,
    _STACKS_COMPLETED,
    _HAS_DEADLINES,
    _RETIRE_REASON,
    _PREFETCHES,
    _RUNNING_SINCE,
    _PID,
    _LOOP_TURNED,
    _LOOP_HELD,
) = range(11)


class ChildBlock:
    """The slots and the state of one child.

    Args:
        memory: The block.
        per_child: The number of its slots.
        lock_fd, lock_at: The file and the byte in it whose lock is the block's lock; ``None`` on platforms without
            anonymous files.
    """

    def __init__(self, memory: memoryview, per_child: int, lock_fd: int | None, lock_at: int) -> None:
        self._memory, self._per_child = memory, per_child
        self._words = memory[:_CHILD_BYTES].cast("q")
        self._lock_fd, self._lock_at = lock_fd, lock_at

    @property
    def can_lock(self) -> bool:
        """Whether this platform has the block's lock."""
        return self._lock_fd is not None

    def lock(self) -> None:
        """Take the block's lock. The kernel releases the lock of a process that dies."""
        fcntl.lockf(self._lock_fd, fcntl.LOCK_EX, 1, self._lock_at)  # type: ignore[arg-type]

    def try_lock(self) -> bool:
        """Take the block's lock, unless the other process has it."""
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._lock_at)  # type: ignore[arg-type]
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        """Release the block's lock."""
        fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, self._lock_at)  # type: ignore[arg-type]

    @property
    def prefetches(self) -> bool:
        """Whether the child's jobs are short, so that it could prefetch them."""
        return bool(self._words[_PREFETCHES])

    @prefetches.setter
    def prefetches(self, prefetches: bool) -> None:
        self._words[_PREFETCHES] = prefetches

    @property
    def run_state(self) -> ProcessState:
        """The child's state; ``RUN`` while it fetches jobs."""
        return ProcessState(self._words[_RUN_STATE])

    @run_state.setter
    def run_state(self, state: ProcessState) -> None:
        self._words[_RUN_STATE] = state

    @property
    def stacks_fd(self) -> int:
        """The child's descriptor of its stacks file; -1 until it has one."""
        return self._words[_STACKS_FD] - 1

    @stacks_fd.setter
    def stacks_fd(self, fd: int) -> None:
        self._words[_STACKS_FD] = fd + 1  # so that 0, the value after reset(), means none

    @property
    def stacks_pending(self) -> bool:
        """True from the supervisor's request until the child's dump is complete."""
        return self._words[_STACKS_REQUESTED] != self._words[_STACKS_COMPLETED]

    def request_stacks(self) -> None:
        """Request a dump; the child reads the request after a signal."""
        self._words[_STACKS_REQUESTED] += 1

    def complete_stacks(self) -> None:
        """Record that the child's dump is complete."""
        self._words[_STACKS_COMPLETED] = self._words[_STACKS_REQUESTED]

    @property
    def has_deadlines(self) -> bool:
        """True if one of the child's attempts has had a deadline; other children need no check."""
        return bool(self._words[_HAS_DEADLINES])

    @has_deadlines.setter
    def has_deadlines(self, has: bool) -> None:
        self._words[_HAS_DEADLINES] = has

    @property
    def retire_reason(self) -> RetireReason:
        """Why the child acquires no more jobs and exits when its jobs have finished; ``NONE`` if it continues."""
        return RetireReason(self._words[_RETIRE_REASON])

    @retire_reason.setter
    def retire_reason(self, reason: RetireReason) -> None:
        self._words[_RETIRE_REASON] = reason

    def reset(self) -> None:
        """Clear the block and give every slot a new token; the supervisor does this before it starts a child."""
        used = _CHILD_BYTES + self._per_child * SLOT_BYTES  # not the outcomes, whose pages may never be needed
        self._memory[:used] = bytes(used)
        for index in range(self._per_child):
            start = _CHILD_BYTES + index * SLOT_BYTES + TOKEN_AT
            token = str(uuid4()).encode()
            self._memory[start : start + len(token)] = token

    @property
    def pid(self) -> int:
        """The child's process id; 0 if there is no child."""
        return self._words[_PID]

    @pid.setter
    def pid(self, pid: int) -> None:
        self._words[_PID] = pid

    @property
    def running_since_ms(self) -> int:
        """When the running task started (monotonic time), if prefetched jobs are waiting for it to end; otherwise 0."""
        return self._words[_RUNNING_SINCE]

    @running_since_ms.setter
    def running_since_ms(self, since_ms: int) -> None:
        self._words[_RUNNING_SINCE] = since_ms

    @property
    def loop_turned_ms(self) -> int:
        """When the child's event loop has last turned (monotonic time); 0 while no async job is running."""
        return self._words[_LOOP_TURNED]

    @loop_turned_ms.setter
    def loop_turned_ms(self, turned_ms: int) -> None:
        self._words[_LOOP_TURNED] = turned_ms

    @property
    def loop_held(self) -> bool:
        """Whether the child knows what blocks its event loop: the job of the slot that holds it, or of none."""
        return bool(self._words[_LOOP_HELD])

    @loop_held.setter
    def loop_held(self, held: bool) -> None:
        self._words[_LOOP_HELD] = held

    def slots(self) -> list[Slot]:
        """Return the child's slots."""
        memory, outcomes = self._memory[_CHILD_BYTES:], self._memory[_CHILD_BYTES + self._per_child * SLOT_BYTES :]
        return [
            Slot(
                memory[index * SLOT_BYTES : (index + 1) * SLOT_BYTES],
                outcomes[index * OUTCOME_BYTES : (index + 1) * OUTCOME_BYTES],
            )
            for index in range(self._per_child)
        ]


class Slots:
    """The shared memory: the control page, and one block per child.

    It has no name in the file system, so a killed worker leaves no files.

    Args:
        children: The maximum number of children; a block that is never used needs no memory.
        per_child: How many slots a child has.
        fd: A descriptor from :func:`bulltask.process.anonymous_file`, which spawned children need; ``None`` for
            anonymous memory.
    """

    def __init__(self, children: int, per_child: int, fd: int | None = None) -> None:
        self.per_child = per_child
        size = _CHILD_BYTES + per_child * (SLOT_BYTES + OUTCOME_BYTES)
        page = mmap.PAGESIZE
        self._stride = -(-size // page) * page  # no two children write to one page
        total = page + self._stride * children
        if fd is not None and os.fstat(fd).st_size == 0:
            os.ftruncate(fd, total)
        self._memory = memoryview(mmap.mmap(-1 if fd is None else fd, total))
        self.control = ControlPage(self._memory[:page], fd)
        starts = (page + index * self._stride for index in range(children))
        self.children = [ChildBlock(self._memory[start : start + size], per_child, fd, start) for start in starts]
