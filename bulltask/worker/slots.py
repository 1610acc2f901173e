"""What every child is doing, in memory that the supervisor shares with all of them.

One record per slot; a child has one slot for each job that it may hold at once. The child writes state, queue and job
id; the supervisor writes the token before the child exists, so there is no moment at which a kill leaves a job that
nobody can find: whatever a dead child had taken or was just taking is locked with one of its tokens.

Before the children's blocks is a page that the supervisor writes and all children read: what it wants of them.

The supervisor may want a run ended. It says so in a word of the slot that it alone writes, together with the number of
the run that it means: the child counts its runs, so an order that comes late never hits the next job.

A record has a sequence number that is odd while it is written (a seqlock). A reader that meets an odd or changed
number tries again, and in the end knows at least the token.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

from bulltask.worker.states import CancelReason, ProcessState, SlotState

__all__ = [
    "ID_BYTES",
    "STACKS_NAME",
    "UNKNOWN_RUN",
    "ChildBlock",
    "ControlPage",
    "Deadlines",
    "Slot",
    "SlotView",
    "Slots",
    "anonymous_file",
]

ID_BYTES: Final = 768
"""Room for a job id; longer ones (only foreign producers make them) are found by the slot's token."""

STACKS_NAME: Final = "bulltask-stacks"
"""Name of the file into which a child writes its stacks, as ``/proc`` shows it."""

_WORD: Final = 8
_HEADER_WORDS: Final = 16
_TOKEN_BYTES: Final = 64
_TOKEN_AT: Final = _HEADER_WORDS * _WORD
_ID_AT: Final = _TOKEN_AT + _TOKEN_BYTES
_SLOT_BYTES: Final = _ID_AT + ID_BYTES
_CHILD_BYTES: Final = 64

# Words of a slot's header.
_SEQ, _STATE, _QUEUE, _SINCE, _ID_LENGTH, _RUN, _SOFT_AT, _HARD_AT, _HARD_MS, _FLAGS, _CANCEL, _ACKNOWLEDGED = range(12)
# Words of a child's block.
_RUN_STATE, _STACKS_FD, _STACKS_ASKED, _STACKS_ANSWERED, _HAS_DEADLINES = range(5)

# Words of the orders.
_PAUSED: Final = 0

_READ_TRIES: Final = 5
_REASON_BITS: Final = 3
_IS_ASYNC: Final = 1
_RETRIED: Final = 2

UNKNOWN_RUN: Final = -1
"""The run of a slot that its child was just writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """When the supervisor ends a run, and what it must know for that: it runs no code of users.

    Attributes:
        soft_at_ms, hard_at_ms: monotonic times, 0 for none.
        hard_ms: the length of the hard limit.
        is_async: the run shares its child's event loop.
        retried: a run that was ended by the hard limit is tried again, if the job has attempts left.
    """

    soft_at_ms: int = 0
    hard_at_ms: int = 0
    hard_ms: int = 0
    is_async: bool = False
    retried: bool = False


_NO_DEADLINES: Final = Deadlines()


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot at one moment.

    Attributes:
        job_id: the job, ``""`` when it is not known (being written, or longer than the record).
        since_ms: monotonic time since which the slot is in this state.
        run: counts the jobs that the slot has had; :data:`UNKNOWN_RUN` when it is not known.
        deadlines: of that run.
        cancel_reason: why the supervisor wants that run ended.
        acknowledged: the child has obeyed that order.
    """

    state: SlotState
    token: str
    queue_index: int
    job_id: str
    since_ms: int
    run: int = field(default=0, compare=False)
    deadlines: Deadlines = field(default=_NO_DEADLINES, compare=False)
    cancel_reason: CancelReason = field(default=CancelReason.NONE, compare=False)
    acknowledged: bool = field(default=False, compare=False)


class Slot:
    """One record; the methods that write are for the child that owns it, but for :meth:`give_order`."""

    __slots__ = ("_bytes", "_words", "token")

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._words = memory[: _HEADER_WORDS * _WORD].cast("q")
        self.token = bytes(memory[_TOKEN_AT:_ID_AT]).rstrip(b"\0").decode()

    @property
    def since_ms(self) -> int:
        """Monotonic time since which the slot is in its state."""
        return self._words[_SINCE]

    def reserve(self, now_ms: int) -> None:
        """A fetch begins: from here on the token may hold a job."""
        self._set(SlotState.RESERVED, now_ms)

    def activate(self, queue_index: int, job_id: str, now_ms: int) -> None:
        """A job was taken and runs."""
        encoded = job_id.encode("utf-8", "surrogateescape")
        words = self._words
        words[_SEQ] += 1
        words[_STATE], words[_QUEUE], words[_SINCE] = SlotState.ACTIVE, queue_index, now_ms
        words[_RUN] += 1
        words[_SOFT_AT] = words[_HARD_AT] = words[_FLAGS] = 0
        fits = len(encoded) <= ID_BYTES
        words[_ID_LENGTH] = len(encoded) if fits else -1
        if fits:
            self._bytes[_ID_AT : _ID_AT + len(encoded)] = encoded
        words[_SEQ] += 1

    def set_deadlines(self, deadlines: Deadlines) -> None:
        """The job's run begins now, and may last so long."""
        words = self._words
        words[_SEQ] += 1
        words[_SOFT_AT], words[_HARD_AT] = deadlines.soft_at_ms, deadlines.hard_at_ms
        words[_HARD_MS] = deadlines.hard_ms
        words[_FLAGS] = _IS_ASYNC * deadlines.is_async | _RETRIED * deadlines.retried
        words[_SEQ] += 1

    @property
    def cancel_reason(self) -> CancelReason:
        """Why the supervisor wants the run ended that goes on in this slot."""
        cancel_reason = self._words[_CANCEL]
        return (
            CancelReason(cancel_reason % (1 << _REASON_BITS))
            if cancel_reason >> _REASON_BITS == self._words[_RUN]
            else CancelReason.NONE
        )

    def request_cancel(self, run: int, reason: CancelReason) -> None:
        """The supervisor wants a run ended; a signal tells the child to look."""
        self._words[_CANCEL] = run << _REASON_BITS | reason

    def acknowledge(self, acknowledged: bool = True) -> None:
        """The child obeys the order, or must be told again."""
        self._words[_ACKNOWLEDGED] = self._words[_CANCEL] if acknowledged else 0

    def is_overdue(self, now_ms: int) -> bool:
        """Whether a deadline of its run may have passed; a quick look, :meth:`read` knows it."""
        words = self._words
        return words[_STATE] == SlotState.ACTIVE and (0 < words[_SOFT_AT] <= now_ms or 0 < words[_HARD_AT] <= now_ms)

    def settle(self, now_ms: int) -> None:
        """The job's outcome is being written; its lock is still needed."""
        self._set(SlotState.SETTLING, now_ms)

    def free(self, now_ms: int) -> None:
        """The token holds nothing."""
        self._set(SlotState.FREE, now_ms)

    def _set(self, state: SlotState, now_ms: int) -> None:
        words = self._words
        words[_SEQ] += 1
        words[_STATE], words[_SINCE] = state, now_ms
        words[_SEQ] += 1

    def read(self) -> SlotView:
        """Return a view that is true of one moment, for the supervisor."""
        words = self._words
        for _ in range(_READ_TRIES):
            seq = words[_SEQ]
            state, queue, since, length = words[_STATE], words[_QUEUE], words[_SINCE], words[_ID_LENGTH]
            run, deadlines, cancel_reason = words[_RUN], self._deadlines(), self.cancel_reason
            raw = bytes(self._bytes[_ID_AT : _ID_AT + max(0, length)])
            if seq % 2 == 0 and words[_SEQ] == seq:
                job_id = raw.decode("utf-8", "surrogateescape")
                acknowledged = cancel_reason is not CancelReason.NONE and words[_ACKNOWLEDGED] == words[_CANCEL]
                return SlotView(
                    SlotState(state), self.token, queue, job_id, since, run, deadlines, cancel_reason, acknowledged
                )
        # The child was stopped or killed in the middle of writing: only the token is certain.
        return SlotView(SlotState.ACTIVE, self.token, 0, "", 0, UNKNOWN_RUN)

    def _deadlines(self) -> Deadlines:
        words = self._words
        soft_at_ms, hard_at_ms, flags = words[_SOFT_AT], words[_HARD_AT], words[_FLAGS]
        if not (soft_at_ms or hard_at_ms):
            return _NO_DEADLINES
        return Deadlines(
            soft_at_ms=soft_at_ms,
            hard_at_ms=hard_at_ms,
            hard_ms=words[_HARD_MS],
            is_async=bool(flags & _IS_ASYNC),
            retried=bool(flags & _RETRIED),
        )


class ControlPage:
    """What the supervisor wants of all children, those included that it has yet to start."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("q")

    @property
    def paused(self) -> bool:
        """True while nobody is to take jobs; those in hand go on."""
        return bool(self._words[_PAUSED])

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._words[_PAUSED] = paused


class ChildBlock:
    """The slots of one child and what it says about itself."""

    def __init__(self, memory: memoryview, per_child: int) -> None:
        self._memory, self._per_child = memory, per_child
        self._words = memory[:_CHILD_BYTES].cast("q")

    @property
    def run_state(self) -> ProcessState:
        """How far the child has come; it is ``RUN`` once it fetches."""
        return ProcessState(self._words[_RUN_STATE])

    @run_state.setter
    def run_state(self, state: ProcessState) -> None:
        self._words[_RUN_STATE] = state

    @property
    def stacks_fd(self) -> int:
        """Descriptor, in the child, of the file into which it writes its stacks; -1 while it has none."""
        return self._words[_STACKS_FD] - 1

    @stacks_fd.setter
    def stacks_fd(self, fd: int) -> None:
        self._words[_STACKS_FD] = fd + 1  # 0 is what a renewed block has

    @property
    def stacks_pending(self) -> bool:
        """True from the supervisor's question until the child's answer is complete."""
        return self._words[_STACKS_ASKED] != self._words[_STACKS_ANSWERED]

    def ask_for_stacks(self) -> None:
        """The supervisor asks; a signal tells the child to look."""
        self._words[_STACKS_ASKED] += 1

    def answer_stacks(self) -> None:
        """The child has written all it can say."""
        self._words[_STACKS_ANSWERED] = self._words[_STACKS_ASKED]

    @property
    def has_deadlines(self) -> bool:
        """True once one of its runs had a deadline: the others need not be looked at."""
        return bool(self._words[_HAS_DEADLINES])

    @has_deadlines.setter
    def has_deadlines(self, has: bool) -> None:
        self._words[_HAS_DEADLINES] = has

    def reset(self) -> None:
        """Clear the block and give every slot a new token; the supervisor does this before it forks."""
        self._memory[:] = bytes(len(self._memory))
        for index in range(self._per_child):
            start = _CHILD_BYTES + index * _SLOT_BYTES + _TOKEN_AT
            token = str(uuid4()).encode()
            self._memory[start : start + len(token)] = token

    def slots(self) -> list[Slot]:
        """The child's slots."""
        starts = (_CHILD_BYTES + index * _SLOT_BYTES for index in range(self._per_child))
        return [Slot(self._memory[start : start + _SLOT_BYTES]) for start in starts]


class Slots:
    """Responsible for the shared memory: the orders, and one block per child.

    It has no name that a killed worker could leave behind: it is anonymous, or a file that exists only as a
    descriptor.

    Args:
        children: how many children there may ever be at once; a block that is never used takes no memory.
        per_child: how many jobs a child may hold at once.
        fd: a file of :func:`anonymous_file` to keep it in, for children that are spawned; anonymous memory if
            ``None``.
    """

    def __init__(self, children: int, per_child: int, fd: int | None = None) -> None:
        self.per_child = per_child
        size = _CHILD_BYTES + per_child * _SLOT_BYTES
        page = os.sysconf("SC_PAGE_SIZE")
        self._stride = -(-size // page) * page  # children do not write to one page
        whole = page + self._stride * children
        if fd is not None and os.fstat(fd).st_size == 0:
            os.ftruncate(fd, whole)
        self._memory = memoryview(mmap.mmap(-1 if fd is None else fd, whole))
        self.control = ControlPage(self._memory[:page])
        starts = (page + index * self._stride for index in range(children))
        self.children = [ChildBlock(self._memory[start : start + size], per_child) for start in starts]


def anonymous_file(name: str) -> int | None:
    """Return a nameless file for memory that spawned children share too; ``None`` where the system has none.

    Args:
        name: shown in ``/proc/PID/fd``, for people.
    """
    return os.memfd_create(name) if hasattr(os, "memfd_create") else None
