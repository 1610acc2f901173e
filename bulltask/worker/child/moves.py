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
from bulltask.worker.child.work import AwaitsChildren, Delayed, Failed, GivenBack, Limited, Moved, Picked

__all__ = ["move_call", "moved", "why"]


def moved(exc: BaseException) -> Moved | Failed | None:
    """Where the job goes after ``exc``; ``None`` for an exception that is none of those."""
    match exc:
        case DelayJob():
            try:
                return Delayed(to_ms(exc.delay, "the delay of DelayJob"))
            except ConfigError as fault:
                return Failed(str(fault), "", "permanent")
        case WaitJob():
            return GivenBack()
        case RateLimitQueue():
            return _limited(exc)
        case WaitForChildren():
            return AwaitsChildren()
        case _:
            return None


def move_call(picked: Picked, outcome: Moved, now_ms: int) -> Call[Any]:
    """The call that moves the job."""
    keys, job_id, token = picked.keys, picked.job.id, picked.slot.token
    match outcome:
        case Delayed():
            return move_to_delayed(keys, job_id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
        case GivenBack() | Limited():
            return move_from_active_to_wait(keys, job_id, token)
        case AwaitsChildren():
            return move_to_waiting_children(keys, job_id, token, now_ms)


def why(outcome: Moved) -> str:
    """What is told of the move."""
    match outcome:
        case Delayed():
            return f"its task asked to be run again in {outcome.delay_ms / 1000:g} s"
        case GivenBack():
            return "its task gave it back"
        case Limited():
            return f"its task rate-limited the queue for {outcome.limit_ms / 1000:g} s"
        case AwaitsChildren():
            return "it waits for its children"


def _limited(exc: RateLimitQueue) -> Limited | Failed:
    try:
        limit_ms = to_ms(exc.duration, "the duration of RateLimitQueue")
    except ConfigError as fault:
        return Failed(str(fault), "", "permanent")
    return Limited(limit_ms) if limit_ms else Failed("a rate limit must last for 0.001 s or more", "", "permanent")
