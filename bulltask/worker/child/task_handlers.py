"""Which handlers of a task class follow an outcome: ``on_success``, ``on_failure``, ``on_retry``, ``after_return``."""

from __future__ import annotations

from typing import Any

from bulltask.errors import BulltaskError, JobExpiredError
from bulltask.jobs.states import REVOKED
from bulltask.registry.request import Request
from bulltask.signals.exception_info import ExceptionInfo
from bulltask.worker.child.outcomes import CompletedOutcome, FailedOutcome, Outcome, RetriedOutcome

__all__ = ["HandlerCalls", "exception_info", "handler_calls"]

HandlerCalls = list[tuple[str, tuple[Any, ...]]]


def handler_calls(request: Request, outcome: Outcome | None, *, started: bool) -> HandlerCalls:
    """Return the handlers that follow an outcome, with their arguments, in Celery's order.

    Args:
        request: The job's request.
        outcome: The outcome that Redis has stored; ``None`` if it was discarded.
        started: Whether the task was called; otherwise there is no ``after_return``.
    """
    call = request.id, request.args, request.kwargs
    match outcome:
        case CompletedOutcome(ignored=False):
            result = outcome.result
            return [("on_success", (result, *call)), ("after_return", ("SUCCESS", result, *call, None))]
        case FailedOutcome():
            info = exception_info(outcome)
            revoked = outcome.category == REVOKED or isinstance(outcome.exception, JobExpiredError)
            calls: HandlerCalls = [] if revoked else [("on_failure", (info.exception, *call, info))]
            state = "REVOKED" if revoked else "FAILURE"
            return [*calls, ("after_return", (state, info.exception, *call, info))] if started else calls
        case RetriedOutcome():
            info = exception_info(outcome)
            return [("on_retry", (info.exception, *call, info))]
        case _:
            return []


def exception_info(outcome: FailedOutcome | RetriedOutcome) -> ExceptionInfo:
    """Return the exception of an attempt, and its traceback."""
    return ExceptionInfo(outcome.exception or BulltaskError(outcome.reason), outcome.trace)
