"""Jobs whose task ended its run by itself: where they go instead of being completed, failed or retried.

No attempt is counted. These are Node's ``DelayedError``, ``WaitingError``, ``RateLimitError`` and
``WaitingChildrenError``.
"""

from __future__ import annotations

from typing import Any

from bulltask.clock import to_ms
from bulltask.errors import ConfigError, DelayJob, RateLimitQueue, WaitForChildren, WaitJob
from bulltask.transport.call import Call
from bulltask.transport.scripts.move import move_from_active_to_wait, move_to_delayed, move_to_waiting_children
from bulltask.worker.child.outcomes import (
    AcquiredJob,
    Failed,
    Limited,
    Released,
    RequestedOutcome,
    Rescheduled,
    WaitingForChildren,
)

__all__ = ["move_call", "reason_of_release", "requested_outcome"]


def requested_outcome(exc: BaseException) -> RequestedOutcome | Failed | None:
    """Where the job goes after ``exc``; ``None`` for an exception that is none of those."""
    match exc:
        case DelayJob():
            try:
                return Rescheduled(to_ms(exc.delay, "the delay of DelayJob"))
            except ConfigError as fault:
                return Failed(str(fault), "", "permanent")
        case WaitJob():
            return Released()
        case RateLimitQueue():
            return _limited(exc)
        case WaitForChildren():
            return WaitingForChildren()
        case _:
            return None


def move_call(acquired: AcquiredJob, outcome: RequestedOutcome, now_ms: int) -> Call[Any]:
    """The call that moves the job."""
    keys, job_id, token = acquired.keys, acquired.job.id, acquired.slot.token
    match outcome:
        case Rescheduled():
            return move_to_delayed(keys, job_id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
        case Released() | Limited():
            return move_from_active_to_wait(keys, job_id, token)
        case WaitingForChildren():
            return move_to_waiting_children(keys, job_id, token, now_ms)


def reason_of_release(outcome: RequestedOutcome) -> str:
    """What is told of the move."""
    match outcome:
        case Rescheduled():
            return f"its task asked to be run again in {outcome.delay_ms / 1000:g} s"
        case Released():
            return "its task gave it back"
        case Limited():
            return f"its task rate-limited the queue for {outcome.limit_ms / 1000:g} s"
        case WaitingForChildren():
            return "it waits for its children"


def _limited(exc: RateLimitQueue) -> Limited | Failed:
    try:
        limit_ms = to_ms(exc.duration, "the duration of RateLimitQueue")
    except ConfigError as fault:
        return Failed(str(fault), "", "permanent")
    return Limited(limit_ms) if limit_ms else Failed("a rate limit must last for 0.001 s or more", "", "permanent")
