"""Shared memory of the supervisor and its children: slots, child blocks, and the control page.

Begin with :class:`Slot` and :class:`SlotState`. :class:`SlotPool` owns a child's free slots, and :class:`ChildLimits`
ends a child that has run enough jobs, or needs too much memory. (Limits of attempts are in ``limits.py``.)
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from enum import IntEnum
from typing import Final, Generic, Protocol, TypeVar
from uuid import uuid4

from bulltask.config.config import Config
from bulltask.config.process import memory_kib
from bulltask.jobs.clock import mono_ms, value_class
from bulltask.jobs.errors import ConfigError
from bulltask.observe.bus import Bus
from bulltask.observe.events import ChildLimitReached
from bulltask.transport.endpoint import PrimaryState
from bulltask.worker.health import HEALTH_AT, HealthPage

if sys.platform != "win32":  # there, tasks that run in the test's or the caller's process import this module
    import fcntl

__all__ = [
    "BUSY",
    "HAS_JOB",
    "IDLE_MS",
    "ID_BYTES",
    "LONG_MS",
    "STACKS_NAME",
    "UNKNOWN_ATTEMPT",
    "CancelReason",
    "ChildBlock",
    "ChildLimit",
    "ChildLimits",
    "ControlPage",
    "Deadlines",
    "ExitCode",
    "ProcessState",
    "Slot",
    "SlotPool",
    "SlotState",
    "SlotView",
    "Slots",
    "WakeupPipe",
    "free_slots",
]


class SlotState(IntEnum):
    """State of a child's slot. The child writes it; in a takeover, the supervisor does, too."""

    FREE = 0
    RESERVED = 1  # a fetch has been sent, so the token may lock a job that the child has not received yet
    ACTIVE = 2  # a job is running
    FINISHING = 3  # its outcome is being written, and the token may already lock the next job
    PREFETCHED = 4  # a prefetched job, whose attempt has not started
    ENDED = 5  # the attempt has ended; the slot contains the call that writes its outcome
    WRITTEN = 6  # the supervisor has written the outcome, because the child's next job takes too long
    NO_REPLY = 7  # the supervisor has received no reply to that call
    RELEASING = 8  # the supervisor is releasing the job that the token locks, or has received no reply to that call
    RELEASED = (
        9  # the child has sent the outcome; the supervisor has released the job that the call had fetched, if any
    )


HAS_JOB: Final = frozenset(SlotState) - {
    SlotState.FREE,
    SlotState.RESERVED,
    SlotState.WRITTEN,
    SlotState.RELEASING,
    SlotState.RELEASED,
}
"""The states of a slot that has a job. After a takeover, another worker may have acquired the job."""

BUSY: Final = HAS_JOB - {SlotState.PREFETCHED}
"""The states of a slot whose job is running, or whose outcome is being written."""


class CancelReason(IntEnum):
    """Why the supervisor cancels an attempt; a larger number replaces a smaller one."""

    NONE = 0
    SOFT_LIMIT = 1  # the task can clean up, and may even continue
    SHUTDOWN = 2  # the worker is about to kill its children
    HARD_LIMIT = 3
    REVOKED = 4


class ChildLimit(IntEnum):
    """Why a child acquires no more jobs and is replaced; the child writes it, the supervisor reads it."""

    NONE = 0
    MAX_TASKS_PER_CHILD = 1
    MAX_MEMORY_PER_CHILD = 2


class ProcessState(IntEnum):
    """State of a supervisor or child (Celery's RUN, CLOSE, TERMINATE). It never decreases."""

    INIT = 0
    RUN = 1
    CLOSE = 2  # warm shutdown: no new jobs, running jobs may finish
    TERMINATE = 3  # cold shutdown: children are killed, their jobs are released
    CLOSED = 4


# One slot: what a child tells its supervisor about one of the jobs that it may have at a time. No job is lost in a
# crash, because every job that a dead child had acquired, or was acquiring, is locked with one of its slots' tokens.
#
# The child writes the state, queue and job id; the supervisor writes the token before it starts the child.
# In a takeover, the supervisor also writes the state.
#
# To cancel an attempt, the supervisor writes a request into a word of the slot that only the supervisor writes to. The
# request contains the attempt's number, so a late request does not cancel the slot's next attempt.
#
# A slot has a sequence number that is odd while the slot is being written (a seqlock). A reader that finds an odd or
# changed number reads again; if several reads fail, only the token is certain.


ID_BYTES: Final = 768
"""Maximum length of a job id in a slot; a job with a longer id (from another client) is found by the slot's token."""

OUTCOME_BYTES: Final = 4096
"""Maximum length of a call in a slot; a larger outcome is written immediately."""

_WORD: Final = 8
_HEADER_WORDS: Final = 16
_TOKEN_BYTES: Final = 64

TOKEN_AT: Final = _HEADER_WORDS * _WORD
_ID_AT: Final = TOKEN_AT + _TOKEN_BYTES

SLOT_BYTES: Final = _ID_AT + ID_BYTES
"""Size of a slot without its outcome."""

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
    _OUTCOME_LENGTH,
    _ORDER,
    _HOLDS_LOOP,
) = range(16)

_MAX_READS: Final = 5
_REASON_BITS: Final = 3
_IS_ASYNC: Final = 1
_WILL_RETRY: Final = 2
_IN_BATCH: Final = 4

_next_order: Final = itertools.count(1).__next__

UNKNOWN_ATTEMPT: Final = -1
"""The attempt number of a slot that is being written."""


@value_class(kw_only=True)
class Deadlines:
    """The deadlines of an attempt, with the data that the supervisor needs to enforce them without running user code.

    Attributes:
        soft_at_ms, hard_at_ms: Monotonic times, 0 for none.
        is_async: Whether the task is async or runs in a thread, so that its child may run other attempts, too.
        will_retry: Whether the job is retried after the hard limit: it has attempts left, and the task allows it.
        in_batch: Whether the same call also runs other jobs, so this attempt cannot be cancelled alone.
    """

    soft_at_ms: int = 0
    hard_at_ms: int = 0
    hard_ms: int = 0
    is_async: bool = False
    will_retry: bool = False
    in_batch: bool = False


_NO_DEADLINES: Final = Deadlines()

T = TypeVar("T", bound=int)


@value_class
class SlotView:
    """A consistent copy of a slot.

    Attributes:
        job_id: The job, ``""`` if unknown (being written, or too long for a slot).
        since_ms: When the slot entered this state (monotonic time).
        attempt: Differs for each attempt in the slot, and each time that its deadlines are postponed, so that a cancel
            request reaches the right one; not a count. :data:`UNKNOWN_ATTEMPT` if unknown.
        acknowledged: Whether the child has passed the cancel request to the task.
        holds_loop: Whether this attempt blocks the event loop of its child.
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
    holds_loop: bool = field(default=False, compare=False)


class _SharedWords(Protocol):
    _words: memoryview[int]


class _Word(Generic[T]):
    """A 64-bit word of shared memory as an attribute."""

    def __init__(self, index: int, kind: Callable[[int], T]) -> None:
        self._index = index
        self._kind = kind

    def __get__(self, shared: _SharedWords, _: object) -> T:
        return self._kind(shared._words[self._index])  # noqa: SLF001

    def __set__(self, shared: _SharedWords, value: T) -> None:
        shared._words[self._index] = value  # noqa: SLF001


class Slot:
    """A slot. Only its child writes to it, except for :meth:`request_cancel` and in a takeover.

    Attributes:
        index: Its position among the slots of its child.
    """

    __slots__ = ("_bytes", "_outcome", "_words", "index", "token")

    def __init__(self, memory: memoryview, outcome: memoryview, index: int = 0) -> None:
        self.index = index
        self._bytes = memory
        self._outcome = outcome
        self._words = memory[: _HEADER_WORDS * _WORD].cast("q")
        self.token = bytes(memory[TOKEN_AT:_ID_AT]).rstrip(b"\0").decode()

    @property
    def since_ms(self) -> int:
        """When the slot entered its state (monotonic time)."""
        return self._words[_SINCE]

    @property
    def order(self) -> int:
        """Orders the jobs of a child, of which many come in one millisecond. It is not a count: a job may get two."""
        return self._words[_ORDER]

    def enter(self, state: SlotState, now_ms: int) -> None:
        """Record that the slot is in another state now."""
        words = self._words
        words[_SEQ] += 1
        words[_STATE], words[_SINCE] = state, now_ms
        words[_SEQ] += 1

    def activate(self, queue_index: int, job_id: str, now_ms: int, state: SlotState = SlotState.ACTIVE) -> int:
        """Record that a job was acquired, and is running or prefetched; return the time of the slot's last change."""
        encoded = job_id.encode("utf-8", "surrogateescape")
        words = self._words
        before_ms = words[_SINCE]
        words[_SEQ] += 1
        words[_STATE], words[_QUEUE], words[_SINCE] = state, queue_index, now_ms
        words[_ORDER] = _next_order()
        words[_ATTEMPT] += 1
        words[_SOFT_AT] = words[_HARD_AT] = words[_FLAGS] = words[_OUTCOME_LENGTH] = 0
        fits = len(encoded) <= ID_BYTES
        words[_ID_LENGTH] = len(encoded) if fits else -1
        if fits:
            self._bytes[_ID_AT : _ID_AT + len(encoded)] = encoded
        words[_SEQ] += 1
        return before_ms

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
        """Acknowledge the cancel request, or withdraw the acknowledgment, so that the request is sent again."""
        self._words[_ACKNOWLEDGED] = self._words[_CANCEL] if acknowledged else 0

    def hold_loop(self, holds: bool) -> None:
        """Record whether the current attempt blocks the event loop of its child."""
        self._words[_HOLDS_LOOP] = self._words[_ATTEMPT] if holds else 0

    def postpone(self, delay_ms: int) -> None:
        """Postpone the deadlines of the current attempt. It gets a new number, so a cancel request is void."""
        words = self._words
        words[_SEQ] += 1
        for deadline in (_SOFT_AT, _HARD_AT):
            words[deadline] += delay_ms if words[deadline] else 0
        words[_ATTEMPT] += 1
        words[_SEQ] += 1

    @property
    def is_free(self) -> bool:
        """Whether the slot has no job: a quick check without the seqlock of :meth:`read`."""
        return self._words[_STATE] == SlotState.FREE

    waiting = _Word(_WAITING, bool)
    """True while the child waits for a job with this slot, which is free, or reserved if the wait also fetches."""

    def is_overdue(self, now_ms: int) -> bool:
        """Whether a deadline of the attempt may have passed: a quick check without the seqlock of :meth:`read`."""
        words = self._words
        return words[_STATE] == SlotState.ACTIVE and (0 < words[_SOFT_AT] <= now_ms or 0 < words[_HARD_AT] <= now_ms)

    def end(self, call: bytes, now_ms: int) -> bool:
        """Store the call that writes the attempt's outcome; return False if it is too long."""
        if len(call) > OUTCOME_BYTES:
            return False
        self._outcome[: len(call)] = call
        words = self._words
        words[_SEQ] += 1
        words[_STATE], words[_SINCE], words[_OUTCOME_LENGTH] = SlotState.ENDED, now_ms, len(call)
        words[_SEQ] += 1
        return True

    @property
    def outcome(self) -> bytes:
        """The call that writes the outcome, ``b""`` if there is none; the token may then lock the next job."""
        return bytes(self._outcome[: self._words[_OUTCOME_LENGTH]])

    @property
    def is_sent(self) -> bool:
        """Whether the call that writes the outcome has been sent, and is stored here, and its reply has not been read.

        A quick check without the seqlock of :meth:`read`.
        """
        return self._words[_STATE] == SlotState.FINISHING and self._words[_OUTCOME_LENGTH] > 0

    @property
    def state(self) -> int:
        """The slot's :class:`SlotState`: a quick check without the seqlock of :meth:`read`."""
        return self._words[_STATE]

    def free(self, now_ms: int) -> None:
        """Record that the token locks no job."""
        self._words[_OUTCOME_LENGTH] = 0
        self.enter(SlotState.FREE, now_ms)

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
                cancel = cancel_reason, acknowledged, words[_HOLDS_LOOP] == attempt
                return SlotView(SlotState(state), self.token, queue, job_id, since, attempt, deadlines, *cancel)
        # The child was stopped or killed while it was writing, so only the token is certain.
        return SlotView(SlotState.ACTIVE, self.token, 0, "", 0, UNKNOWN_ATTEMPT)

    def job_when_dead(self) -> tuple[int, str]:
        """Return the queue's index and the id of the job that a dead child's slot had last, ``""`` if it is too long.

        Unlike :meth:`read`, also if the child died while it was writing another part of the slot.
        """
        length = max(0, self._words[_ID_LENGTH])
        return self._words[_QUEUE], bytes(self._bytes[_ID_AT : _ID_AT + length]).decode("utf-8", "surrogateescape")

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


# Indexes of the page's 64-bit words.
_PAUSED, _HAS_PERMITS, _PERMITS, _STARTED, _FINISHING, _WATCHES, _PRIMARY = range(7)
_CHANGES_SEQ, _CHANGES_LENGTH = range(10, 12)
_STOPPING = 2

_CHANGES_BYTES: Final = 65_536
"""Size of the memory for :class:`bulltask.worker.orders.Changes`; what is not used needs no memory."""


def free_slots(slots: Sequence[Slot], per_child: int) -> int:
    """Return how many more jobs a child can run now: 0 if it does not wait for jobs, whatever slots are free.

    A child runs ``per_child`` jobs at a time; its other slots are for prefetched jobs.
    """
    if not any(slot.waiting for slot in slots):
        return 0
    return min(sum(slot.is_free or slot.waiting for slot in slots), per_child)


class ControlPage:
    """The supervisor's instructions for all children, including children that start later.

    Attributes:
        has_permits: Whether the number of jobs is limited, so that a child needs a permit for each job. The lock of the
            file's first byte makes changes of permits atomic.
    """

    def __init__(self, memory: memoryview, lock_fd: int | None, changes: memoryview | None = None) -> None:
        self._words = memory.cast("q")
        self._changes = memoryview(b"") if changes is None else changes
        self._lock_fd = lock_fd
        # Not read from shared memory for every job: it does not change after the first child has started.
        self.has_permits = bool(self._words[_HAS_PERMITS])

    @property
    def paused(self) -> bool:
        """True while children must not acquire jobs, also if the worker stops; running jobs continue."""
        return bool(self._words[_PAUSED])

    @paused.setter
    def paused(self, paused: bool) -> None:
        if not self.stopping:
            self._words[_PAUSED] = paused

    @property
    def stopping(self) -> bool:
        """True once the worker stops. A child whose task has replaced the handler of SIGTERM learns it only here."""
        return self._words[_PAUSED] == _STOPPING

    @property
    def run_state(self) -> str:
        """``run``, ``paused`` or ``closing``, as others see the worker's state."""
        return "closing" if self.stopping else "paused" if self.paused else "run"

    def stop(self) -> None:
        """Let no child acquire a job any more."""
        self._words[_PAUSED] = _STOPPING

    finishing = _Word(_FINISHING, bool)
    """True while the worker stops, but running jobs may take as long as they need."""

    watches = _Word(_WATCHES, bool)
    """True while the supervisor checks often whether a job delays those that its child has prefetched."""

    def primary(self) -> PrimaryState:
        """Return what the supervisor knows about the primary that sentinels monitor."""
        return PrimaryState(*self._words[_PRIMARY : _PRIMARY + 3])

    def set_primary(self, state: PrimaryState) -> None:
        """Pass what the supervisor knows to the children."""
        words = (state.epoch, state.failover_until_ms, state.known_ms)
        for offset, word in enumerate(words):
            self._words[_PRIMARY + offset] = word

    @property
    def changes_number(self) -> int:
        """How often :meth:`set_changes` was called."""
        return self._words[_CHANGES_SEQ] // 2

    def changes(self) -> bytes:
        """Return what was changed in this worker at run time (:class:`bulltask.worker.orders.Changes`)."""
        words, changes = self._words, b""
        for _ in range(_MAX_READS):
            seq = words[_CHANGES_SEQ]
            changes = bytes(self._changes[: words[_CHANGES_LENGTH]])
            if seq % 2 == 0 and words[_CHANGES_SEQ] == seq:
                break  # otherwise, the supervisor is writing, and a signal follows
        return changes

    def set_changes(self, changes: bytes) -> bool:
        """Store what has been changed; return False if it is too long. A signal makes the children read it."""
        if len(changes) > len(self._changes):
            return False
        words = self._words
        words[_CHANGES_SEQ] += 1
        self._changes[: len(changes)] = changes
        words[_CHANGES_LENGTH] = len(changes)
        words[_CHANGES_SEQ] += 1
        return True

    def limit_jobs(self, jobs: int) -> None:
        """Let all children together start at most ``jobs`` jobs; call this before the first child starts.

        Raises ``ConfigError`` on a platform without anonymous files, which permits need.
        """
        if self._lock_fd is None:
            raise ConfigError("--max-jobs needs memfd_create, which this platform does not have")
        self.has_permits = True
        self._words[_HAS_PERMITS], self._words[_PERMITS] = True, jobs

    @property
    def exhausted(self) -> bool:
        """True while no permit is left. A child whose fetch finds no job returns its permit."""
        return self.has_permits and self._words[_PERMITS] <= 0

    @property
    def permits_used(self) -> int:
        """Number of jobs that were started with a permit."""
        return self._words[_STARTED]

    def take_permit(self) -> bool:
        """Take a permit before a fetch; return False if there is none."""
        with self._locked() as words:
            if words[_PERMITS] <= 0:
                return False
            words[_PERMITS] -= 1
            return True

    def record_permit(self, *, used: bool) -> None:
        """Record whether the fetch has acquired a job; if it has not, give the permit back."""
        with self._locked() as words:
            words[_STARTED if used else _PERMITS] += 1

    @contextmanager
    def _locked(self) -> Iterator[memoryview[int]]:
        assert self._lock_fd is not None, "call limit_jobs() first"
        # The kernel releases the lock of a process that is killed.
        fcntl.lockf(self._lock_fd, fcntl.LOCK_EX, 1)
        try:
            yield self._words
        finally:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1)


STACKS_NAME: Final = "bulltask-stacks"
"""Name of the file for a child's stacks, as shown in ``/proc``."""

LONG_MS: Final = 10
"""A job that takes longer than this must not delay those that its child has prefetched."""

IDLE_MS: Final = 500
"""The supervisor's interval while nothing needs a shorter one; a child that needs one sends it a ``SIGCHLD``."""

_CHILD_BYTES: Final = 128

# Indexes of the 64-bit words at the start of a child's block.
(
    _RUN_STATE,
    _STACKS_FD,
    _STACKS_REQUESTED,
    _STACKS_COMPLETED,
    _HAS_DEADLINES,
    _REACHED_LIMIT,
    _PREFETCHES,
    _RUNNING_SINCE,
    _PID,
    _LOOP_TURNED,
    _LOOP_HELD,
    _HAS_SHORT_LIMITS,
) = range(12)


class ChildBlock:
    """The slots and the state of one child; the lock of a byte of the file is the block's lock.

    A child that prefetches holds it except while it runs a task's code, so that the supervisor can take jobs over.
    """

    def __init__(self, memory: memoryview, per_child: int, lock_fd: int | None, lock_at: int) -> None:
        self._memory = memory
        self._per_child = per_child
        self._words = memory[:_CHILD_BYTES].cast("q")
        self._lock_fd = lock_fd
        self._lock_at = lock_at

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

    prefetches = _Word(_PREFETCHES, bool)
    """Whether the child's jobs are short, so that it could prefetch them."""

    run_state = _Word(_RUN_STATE, ProcessState)
    """The child's state; ``RUN`` while it fetches jobs."""

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

    has_deadlines = _Word(_HAS_DEADLINES, bool)
    """True if one of the child's attempts has had a deadline; other children need no check."""

    has_short_limits = _Word(_HAS_SHORT_LIMITS, bool)
    """True if an attempt had less than ``IDLE_MS`` until a deadline, so that the supervisor must look more often."""

    reached_limit = _Word(_REACHED_LIMIT, ChildLimit)
    """Why the child acquires no more jobs and exits when its jobs have finished; ``NONE`` if it continues."""

    def reset(self) -> None:
        """Clear the block and give every slot a new token; the supervisor does this before it starts a child."""
        used = _CHILD_BYTES + self._per_child * SLOT_BYTES  # not the outcomes, whose pages may never be needed
        self._memory[:used] = bytes(used)
        for index in range(self._per_child):
            start = _CHILD_BYTES + index * SLOT_BYTES + TOKEN_AT
            token = str(uuid4()).encode()
            self._memory[start : start + len(token)] = token

    pid = _Word(_PID, int)
    """The child's process id; 0 if there is no child."""

    running_since_ms = _Word(_RUNNING_SINCE, int)
    """When the running task started (monotonic time), if prefetched jobs are waiting for it to end; otherwise 0."""

    loop_turned_ms = _Word(_LOOP_TURNED, int)
    """When the child's event loop has last turned (monotonic time); 0 while no async job is running."""

    loop_held = _Word(_LOOP_HELD, bool)
    """Whether the child knows what blocks its event loop: the job of the slot that holds it, or of none."""

    def slots(self) -> list[Slot]:
        """Return the child's slots."""
        memory, outcomes = self._memory[_CHILD_BYTES:], self._memory[_CHILD_BYTES + self._per_child * SLOT_BYTES :]
        return [
            Slot(
                memory[index * SLOT_BYTES : (index + 1) * SLOT_BYTES],
                outcomes[index * OUTCOME_BYTES : (index + 1) * OUTCOME_BYTES],
                index,
            )
            for index in range(self._per_child)
        ]


class Slots:
    """The shared memory: a page with orders and the worker's health, and one block per child.

    A block that is never used needs no memory.

    It has no name in the file system, so a killed worker leaves no files. Spawned children need its descriptor.

    Attributes:
        pids_at: Where the memory has the children's process ids, in bytes, for the guard process.
    """

    def __init__(self, children: int, per_child: int, fd: int | None = None) -> None:
        self.per_child = per_child
        size = _CHILD_BYTES + per_child * (SLOT_BYTES + OUTCOME_BYTES)
        page = mmap.PAGESIZE
        control = page + -(-_CHANGES_BYTES // page) * page
        stride = -(-size // page) * page  # no two children write to one page
        total = control + stride * children
        if fd is not None and os.fstat(fd).st_size == 0:
            os.ftruncate(fd, total)
        self._memory = memoryview(mmap.mmap(-1 if fd is None else fd, total))
        self.control = ControlPage(self._memory[:HEALTH_AT], fd, self._memory[page:control])
        self.health = HealthPage(self._memory[HEALTH_AT:page])
        starts = range(control, total, stride)
        self.children = [ChildBlock(self._memory[start : start + size], per_child, fd, start) for start in starts]
        self.pids_at = range(control + _PID * _WORD, total, stride)


class SlotPool:
    """Owns a child's free slots.

    Who takes a slot owns it until its job has ended, and then gives it back: what has fetched no job, or has written
    the job's outcome. The main thread takes slots, the one that was given back last first, so that unused slots need no
    memory; the event loop's thread gives back those of its jobs.

    Attributes:
        without_reply: The slots with whose token a fetch without a reply may have locked a job, and the indexes of the
            queues that may have the job. They stay reserved, so that the supervisor looks for the job.
        ran_out: Called when there is no free slot.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._free = list(reversed(slots))
        self.count = len(slots)
        self.without_reply: dict[Slot, set[int]] = {}
        self.ran_out: Callable[[], None] = lambda: None

    @property
    def taken(self) -> int:
        """The number of slots that are not free."""
        return self.count - len(self._free)

    def take(self) -> Slot | None:
        """Take a free slot; ``None`` if there is none."""
        if self._free:
            return self._free.pop()
        self.ran_out()
        return None

    def take_reserved(self, count: int) -> list[Slot]:
        """Take up to ``count`` slots for a fetch."""
        slots: list[Slot] = []
        while len(slots) < count and (slot := self.take()) is not None:
            slot.enter(SlotState.RESERVED, mono_ms())
            slots.append(slot)
        return slots

    def clear(self, slot: Slot) -> None:
        """Record that a slot has no job, before its owner uses it again."""
        if slot in self.without_reply:
            slot.enter(SlotState.RESERVED, mono_ms())
        else:
            slot.free(mono_ms())

    def give_back(self, *slots: Slot) -> None:
        """Give slots back that have no job any more; any thread may call it."""
        for slot in slots:
            self.clear(slot)
            self._free.append(slot)


class WakeupPipe:
    """Wakes the main thread of a process when a signal arrives or another thread calls :meth:`wake`.

    The interpreter writes to the pipe when a signal arrives, before any handler runs, so a signal that arrives just
    before the wait is not missed.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or as soon as the pipe has data."""
        readable, _, _ = select.select([self._read], [], [], max(0.0, timeout_ms) / 1000)
        if readable:
            os.read(self._read, 4096)

    def wake(self) -> None:
        """End the wait; callable from any thread."""
        with suppress(BlockingIOError):  # the pipe is full, so the wait ends anyway
            os.write(self._write, b"\0")

    def close(self) -> None:
        """Close the pipe."""
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)


class ExitCode(IntEnum):
    """Why a process exited."""

    OK = 0
    FAILED = 1
    USAGE = 2  # click's exit code for invalid options
    BOOT_FAILED = 3  # a child could not start; after several in a row, the worker exits with this code too
    # Wrong password, commands forbidden by the ACL, a redis:// URL that points to a cluster node or a Sentinel, or a
    # database that does not exist.
    BROKER_UNUSABLE = 4
    BROKER_UNREACHABLE = 5  # Redis was unavailable for more than broker_connection_max_retries attempts


class ChildLimits:
    """The limits of a child: when it reaches one, it acquires no more jobs, finishes its jobs, exits, and is replaced.

    The limits are Celery's ``worker_max_tasks_per_child`` and ``worker_max_memory_per_child``. Unlike in Celery, a
    child can run several jobs at a time, so the jobs that it has acquired are counted, not those that have finished.
    The replacement starts when the child acquires no more jobs, not when its last job has finished, which may take a
    long time. The current memory is compared; Celery compares the maximum so far, even if it has been freed.

    Attributes:
        exist: Whether there is any limit, so that the child's jobs must be counted.
    """

    def __init__(self, config: Config, block: ChildBlock, index: int, bus: Bus, supervisor_pid: int) -> None:
        self._block = block
        self._index = index
        self._bus = bus
        self._supervisor_pid = supervisor_pid
        self._max_tasks = config.max_tasks_per_child
        self._max_memory_kib = config.max_memory_kib or config.hard_memory_kib
        self._memory_kib: int | None = None
        self._jobs = 0
        # It disables NextJobs, which would acquire a job together with the outcome of the last one.
        self.limits_jobs = self._max_tasks is not None
        self.limits_memory = self._max_memory_kib is not None
        self.exist = self.limits_memory or self._max_tasks is not None
        self._lock = threading.Lock()
        self._reason = ChildLimit.NONE

    def count_job(self) -> bool:
        """Count a job that the child has acquired; return True if the child must not acquire another one."""
        with self._lock:  # the main thread and the event loop call this
            self._jobs += 1
        if self._jobs != self._max_tasks:
            return False
        self._reason = ChildLimit.MAX_TASKS_PER_CHILD
        return True

    def check_memory(self) -> None:
        """End the child if its memory exceeds the limit; call this after a task, on any thread.

        The check runs only after a task: if new children exceeded the limit before their first one, the worker would
        replace them forever and run no jobs.
        """
        if self._max_memory_kib is None or self._reason is not ChildLimit.NONE:
            return
        self._memory_kib = memory_kib()
        if self._memory_kib > self._max_memory_kib:
            self._reason = ChildLimit.MAX_MEMORY_PER_CHILD
            # The handler of SIGTERM closes the fetcher on the main thread, which may be waiting for a job, and stops
            # checkpointed tasks, which would use more memory. After the last job that it may have, they go on.
            os.kill(os.getpid(), signal.SIGTERM)

    def announce(self, running: Callable[[], int]) -> None:
        """Let the supervisor replace the child, if it has reached a limit, once the child acquires no more jobs."""
        if self._reason is ChildLimit.NONE:
            return
        self._block.reached_limit = self._reason
        limit = self._reason.name.lower()
        self._bus.emit(ChildLimitReached(self._index, os.getpid(), limit, self._jobs, running(), self._memory_kib))
        # The supervisor's SIGCHLD handler only ends the loop's wait; the loop then starts the missing child.
        os.kill(self._supervisor_pid, signal.SIGCHLD)
