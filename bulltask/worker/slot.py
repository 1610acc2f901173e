"""One slot: what a child tells its supervisor about one job, in shared memory (:mod:`bulltask.worker.slots`).

The child writes the state, queue and job id; the supervisor writes the token before it starts the child.
In a takeover, the supervisor also writes the state.

To cancel an attempt, the supervisor writes a request into a word of the slot that only the supervisor writes to. The
request contains the attempt's number, so a late request does not cancel the slot's next attempt.

A slot has a sequence number that is odd while the slot is being written (a seqlock). A reader that finds an odd or
changed number reads again; if several reads fail, only the token is certain.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Final

from bulltask.worker.states import CancelReason, SlotState

__all__ = ["ID_BYTES", "OUTCOME_BYTES", "SLOT_BYTES", "TOKEN_AT", "UNKNOWN_ATTEMPT", "Deadlines", "Slot", "SlotView"]

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


class Slot:
    """A slot. Only its child writes to it, except for :meth:`request_cancel` and in a takeover.

    Args:
        memory: The slot.
        outcome: Room for the call that writes an outcome.
    """

    __slots__ = ("_bytes", "_outcome", "_words", "token")

    def __init__(self, memory: memoryview, outcome: memoryview) -> None:
        self._bytes, self._outcome = memory, outcome
        self._words = memory[: _HEADER_WORDS * _WORD].cast("q")
        self.token = bytes(memory[TOKEN_AT:_ID_AT]).rstrip(b"\0").decode()

    @property
    def since_ms(self) -> int:
        """When the slot entered its state (monotonic time)."""
        return self._words[_SINCE]

    @property
    def order(self) -> int:
        """The position of the slot's job among the jobs that its child has acquired: many come in one millisecond."""
        return self._words[_ORDER]

    def reserve(self, now_ms: int) -> None:
        """Record that a fetch is starting: from now on, the token may lock a job."""
        self._set(SlotState.RESERVED, now_ms)

    def activate(self, queue_index: int, job_id: str, now_ms: int, state: SlotState = SlotState.ACTIVE) -> None:
        """Record that a job was acquired and is running; in state ``PREFETCHED``, it starts with :meth:`start`."""
        encoded = job_id.encode("utf-8", "surrogateescape")
        words = self._words
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

    @property
    def waiting(self) -> bool:
        """True while the child waits for a job with this slot, which is free, or reserved if the wait also fetches."""
        return bool(self._words[_WAITING])

    @waiting.setter
    def waiting(self, waiting: bool) -> None:
        self._words[_WAITING] = waiting

    def is_overdue(self, now_ms: int) -> bool:
        """Whether a deadline of the attempt may have passed: a quick check without the seqlock of :meth:`read`."""
        words = self._words
        return words[_STATE] == SlotState.ACTIVE and (0 < words[_SOFT_AT] <= now_ms or 0 < words[_HARD_AT] <= now_ms)

    def start(self, now_ms: int) -> None:
        """Record that the attempt of a prefetched job is starting."""
        self._set(SlotState.ACTIVE, now_ms)

    def finish(self, call: bytes, now_ms: int) -> bool:
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
        return self._words[_STATE] == SlotState.SETTLING and self._words[_OUTCOME_LENGTH] > 0

    @property
    def state(self) -> int:
        """The slot's :class:`SlotState`: a quick check without the seqlock of :meth:`read`."""
        return self._words[_STATE]

    def record_takeover(self, state: SlotState, now_ms: int) -> None:
        """Record what the supervisor, which holds the block's lock, has done with the job."""
        self._set(state, now_ms)

    def settle(self, now_ms: int) -> None:
        """Record that the job's outcome is being written; its lock is still needed."""
        self._set(SlotState.SETTLING, now_ms)

    def free(self, now_ms: int) -> None:
        """Record that the token locks no job."""
        self._words[_OUTCOME_LENGTH] = 0
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
                cancel = cancel_reason, acknowledged, words[_HOLDS_LOOP] == attempt
                return SlotView(SlotState(state), self.token, queue, job_id, since, attempt, deadlines, *cancel)
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
