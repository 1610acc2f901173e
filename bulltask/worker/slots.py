"""Shared memory through which the supervisor reads its children's state.

A child has one slot for each job that it may run at a time. The child writes the state, queue and job id; the
supervisor writes the token before it starts the child. No job is lost in a crash, because every job that a dead child
had acquired, or was acquiring, is locked with one of the child's tokens.

A control page precedes the children's blocks. The supervisor writes it and all children read it.

To cancel an attempt, the supervisor writes a request into a word of the slot that only the supervisor writes to. The
request contains the attempt's number, so a late request does not cancel the slot's next attempt.

A slot has a sequence number that is odd while the slot is being written (a seqlock). A reader that finds an odd or
changed number reads again; if several reads fail, only the token is certain.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

from bulltask.worker.control_page import ControlPage
from bulltask.worker.states import CancelReason, ProcessState, RetireReason, SlotState

__all__ = [
    "ID_BYTES",
    "STACKS_NAME",
    "UNKNOWN_ATTEMPT",
    "ChildBlock",
    "Deadlines",
    "Slot",
    "SlotView",
    "Slots",
    "anonymous_file",
]

ID_BYTES: Final = 768
"""Maximum length of a job id in a slot; a job with a longer id (from another client) is found by the slot's token."""

STACKS_NAME: Final = "bulltask-stacks"
"""Name of the file for a child's stacks, as shown in ``/proc``."""

_WORD: Final = 8
_HEADER_WORDS: Final = 16
_TOKEN_BYTES: Final = 64
_TOKEN_AT: Final = _HEADER_WORDS * _WORD
_ID_AT: Final = _TOKEN_AT + _TOKEN_BYTES
_SLOT_BYTES: Final = _ID_AT + ID_BYTES
_CHILD_BYTES: Final = 64

# Words of a slot's header.
(
    _SEQ,
    _STATE,
    _QUEUE,
    _SINCE,
    _ID_LENGTH,
    _ATTEMPT,
    _SOFT_AT,
    _HARD_AT,
    _HARD_MS,
    _FLAGS,
    _CANCEL,
    _ACKNOWLEDGED,
    _WAITING,
) = range(13)
# Words of a child's block.
_RUN_STATE, _STACKS_FD, _STACKS_REQUESTED, _STACKS_COMPLETED, _HAS_DEADLINES, _RETIRE_REASON = range(6)

_MAX_READS: Final = 5
_REASON_BITS: Final = 3
_IS_ASYNC: Final = 1
_WILL_RETRY: Final = 2
_IN_BATCH: Final = 4

UNKNOWN_ATTEMPT: Final = -1
"""The attempt number of a slot that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The deadlines of an attempt, with the data that the supervisor needs to enforce them without running user code.

    Attributes:
        soft_at_ms, hard_at_ms: Monotonic times, 0 for none.
        hard_ms: The duration of the hard limit.
        is_async: Whether the task is async or runs in a thread, so that its child may run other attempts, too.
        will_retry: Whether the job is retried after the hard limit, if it has attempts left.
        in_batch: Whether the same call also runs other jobs, so this attempt cannot be cancelled alone.
    """

    soft_at_ms: int = 0
    hard_at_ms: int = 0
    hard_ms: int = 0
    is_async: bool = False
    will_retry: bool = False
    in_batch: bool = False


_NO_DEADLINES: Final = Deadlines()


@dataclass(frozen=True, slots=True)
class SlotView:
    """A consistent copy of a slot.

    Attributes:
        job_id: The job, ``""`` if unknown (being written, or too long for a slot).
        since_ms: When the slot entered this state (monotonic time).
        attempt: The number of the slot's current attempt, counted by the child; :data:`UNKNOWN_ATTEMPT` if unknown.
        deadlines: The deadlines of that attempt.
        cancel_reason: Why the supervisor is cancelling that attempt.
        acknowledged: Whether the child has passed the cancel request to the task.
    """

    state: SlotState
    token: str
    queue_index: int
    job_id: str
    since_ms: int
    attempt: int = field(default=0, compare=False)
    deadlines: Deadlines = field(default=_NO_DEADLINES, compare=False)
    cancel_reason: CancelReason = field(default=CancelReason.NONE, compare=False)
    acknowledged: bool = field(default=False, compare=False)


class Slot:
    """A slot. Only its child writes to it, except for :meth:`request_cancel`."""

    __slots__ = ("_bytes", "_words", "token")

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._words = memory[: _HEADER_WORDS * _WORD].cast("q")
        self.token = bytes(memory[_TOKEN_AT:_ID_AT]).rstrip(b"\0").decode()

    @property
    def since_ms(self) -> int:
        """When the slot entered its state (monotonic time)."""
        return self._words[_SINCE]

    def reserve(self, now_ms: int) -> None:
        """Record that a fetch is starting: from now on, the token may lock a job."""
        self._set(SlotState.RESERVED, now_ms)

    def activate(self, queue_index: int, job_id: str, now_ms: int) -> None:
        """Record that a job was acquired and is running."""
        encoded = job_id.encode("utf-8", "surrogateescape")
        words = self._words
        words[_SEQ] += 1
        words[_STATE], words[_QUEUE], words[_SINCE] = SlotState.ACTIVE, queue_index, now_ms
        words[_ATTEMPT] += 1
        words[_SOFT_AT] = words[_HARD_AT] = words[_FLAGS] = 0
        fits = len(encoded) <= ID_BYTES
        words[_ID_LENGTH] = len(encoded) if fits else -1
        if fits:
            self._bytes[_ID_AT : _ID_AT + len(encoded)] = encoded
        words[_SEQ] += 1

    def set_deadlines(self, deadlines: Deadlines) -> None:
        """Record the deadlines of the job's attempt, which is about to start."""
        words = self._words
        words[_SEQ] += 1
        words[_SOFT_AT], words[_HARD_AT] = deadlines.soft_at_ms, deadlines.hard_at_ms
        words[_HARD_MS] = deadlines.hard_ms
        words[_FLAGS] = (
            _IS_ASYNC * deadlines.is_async | _WILL_RETRY * deadlines.will_retry | _IN_BATCH * deadlines.in_batch
        )
        words[_SEQ] += 1

    @property
    def cancel_reason(self) -> CancelReason:
        """Why the supervisor is cancelling the current attempt; ``NONE`` if it is not."""
        request = self._words[_CANCEL]
        if request >> _REASON_BITS != self._words[_ATTEMPT]:
            return CancelReason.NONE
        return CancelReason(request % (1 << _REASON_BITS))

    def request_cancel(self, attempt: int, reason: CancelReason) -> None:
        """Request the cancellation of an attempt; the child reads the request after a signal."""
        self._words[_CANCEL] = attempt << _REASON_BITS | reason

    def acknowledge(self, acknowledged: bool = True) -> None:
        """Acknowledge the cancel request, or withdraw the acknowledgement, so that the request is sent again."""
        self._words[_ACKNOWLEDGED] = self._words[_CANCEL] if acknowledged else 0

    @property
    def is_free(self) -> bool:
        """Whether the slot has no job: a quick check without the seqlock of :meth:`read`."""
        return self._words[_STATE] == SlotState.FREE

    @property
    def waiting(self) -> bool:
        """True while the child waits for a job with this slot, which is free."""
        return bool(self._words[_WAITING])

    @waiting.setter
    def waiting(self, waiting: bool) -> None:
        self._words[_WAITING] = waiting

    def is_overdue(self, now_ms: int) -> bool:
        """Whether a deadline of the attempt may have passed: a quick check without the seqlock of :meth:`read`."""
        words = self._words
        return words[_STATE] == SlotState.ACTIVE and (0 < words[_SOFT_AT] <= now_ms or 0 < words[_HARD_AT] <= now_ms)

    def settle(self, now_ms: int) -> None:
        """Record that the job's outcome is being written; its lock is still needed."""
        self._set(SlotState.SETTLING, now_ms)

    def free(self, now_ms: int) -> None:
        """Record that the token locks no job."""
        self._set(SlotState.FREE, now_ms)

    def _set(self, state: SlotState, now_ms: int) -> None:
        words = self._words
        words[_SEQ] += 1
        words[_STATE], words[_SINCE] = state, now_ms
        words[_SEQ] += 1

    def read(self) -> SlotView:
        """Return a consistent copy, for the supervisor."""
        words = self._words
        for _ in range(_MAX_READS):
            seq = words[_SEQ]
            state, queue, since, length = words[_STATE], words[_QUEUE], words[_SINCE], words[_ID_LENGTH]
            attempt, deadlines, cancel_reason = words[_ATTEMPT], self._deadlines(), self.cancel_reason
            raw = bytes(self._bytes[_ID_AT : _ID_AT + max(0, length)])
            if seq % 2 == 0 and words[_SEQ] == seq:
                job_id = raw.decode("utf-8", "surrogateescape")
                acknowledged = cancel_reason is not CancelReason.NONE and words[_ACKNOWLEDGED] == words[_CANCEL]
                return SlotView(
                    SlotState(state), self.token, queue, job_id, since, attempt, deadlines, cancel_reason, acknowledged
                )
        # The child was stopped or killed while it was writing, so only the token is certain.
        return SlotView(SlotState.ACTIVE, self.token, 0, "", 0, UNKNOWN_ATTEMPT)

    def _deadlines(self) -> Deadlines:
        words = self._words
        soft_at_ms, hard_at_ms, flags = words[_SOFT_AT], words[_HARD_AT], words[_FLAGS]
        if not (soft_at_ms or hard_at_ms or flags):
            return _NO_DEADLINES
        return Deadlines(
            soft_at_ms=soft_at_ms,
            hard_at_ms=hard_at_ms,
            hard_ms=words[_HARD_MS],
            is_async=bool(flags & _IS_ASYNC),
            will_retry=bool(flags & _WILL_RETRY),
            in_batch=bool(flags & _IN_BATCH),
        )


class ChildBlock:
    """The slots and the state of one child."""

    def __init__(self, memory: memoryview, per_child: int) -> None:
        self._memory, self._per_child = memory, per_child
        self._words = memory[:_CHILD_BYTES].cast("q")

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
        self._memory[:] = bytes(len(self._memory))
        for index in range(self._per_child):
            start = _CHILD_BYTES + index * _SLOT_BYTES + _TOKEN_AT
            token = str(uuid4()).encode()
            self._memory[start : start + len(token)] = token

    def slots(self) -> list[Slot]:
        """Return the child's slots."""
        starts = (_CHILD_BYTES + index * _SLOT_BYTES for index in range(self._per_child))
        return [Slot(self._memory[start : start + _SLOT_BYTES]) for start in starts]


class Slots:
    """The shared memory: the control page, and one block per child.

    It has no name in the file system, so a killed worker leaves no files.

    Args:
        children: The maximum number of children; a block that is never used needs no memory.
        per_child: How many jobs a child may run at a time.
        fd: A descriptor from :func:`anonymous_file`, which spawned children need; ``None`` for anonymous memory.
    """

    def __init__(self, children: int, per_child: int, fd: int | None = None) -> None:
        self.per_child = per_child
        size = _CHILD_BYTES + per_child * _SLOT_BYTES
        page = os.sysconf("SC_PAGE_SIZE")
        self._stride = -(-size // page) * page  # no two children write to one page
        total = page + self._stride * children
        if fd is not None and os.fstat(fd).st_size == 0:
            os.ftruncate(fd, total)
        self._memory = memoryview(mmap.mmap(-1 if fd is None else fd, total))
        self.control = ControlPage(self._memory[:page], fd)
        starts = (page + index * self._stride for index in range(children))
        self.children = [ChildBlock(self._memory[start : start + size], per_child) for start in starts]


def anonymous_file(name: str) -> int | None:
    """Return a descriptor of an anonymous file, which spawned children can share; ``None`` if unsupported.

    Args:
        name: Shown in ``/proc/PID/fd``.
    """
    return os.memfd_create(name) if hasattr(os, "memfd_create") else None
