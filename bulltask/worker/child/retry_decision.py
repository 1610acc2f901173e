"""Decides whether a failed attempt is retried, and when.

Jobs that bulltask has sent follow the task's policy: transient errors are retried; permanent and unknown errors fail
the job immediately; ``autoretry_for`` adds exceptions and ``dont_autoretry_for`` removes some. Jobs from other clients
follow BullMQ: every error is retried except ``PermanentError`` and ``dont_autoretry_for``; the other permanent errors
are retried, too. In both cases the number of attempts is stored in the job.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Final

import bulltask
from bulltask.app import App
from bulltask.categories import ErrorCategory, explicit_category, retry_after_ms
from bulltask.clock import to_ms
from bulltask.errors import (
    DecodeError,
    Interrupt,
    InvalidJobError,
    PermanentError,
    Reject,
    Retry,
    TaskCancelled,
    incompatible,
)
from bulltask.jobs.failures import reason_of, trace_text
from bulltask.jobs.job import RunningJob
from bulltask.jobs.states import REVOKED
from bulltask.registry.explicit_retries import max_attempts, no_retries_left
from bulltask.registry.task import AnyTask
from bulltask.worker.child.outcomes import FailedOutcome, RetriedOutcome

__all__ = ["as_permanent", "decide_retry", "interrupt_in", "is_retried", "leaves_of", "trace_of"]

_PACKAGE: Final = f"{Path(bulltask.__file__).parent}{os.sep}"


def decide_retry(
    exc: BaseException, job: RunningJob, task: AnyTask[..., object] | None, app: App
) -> FailedOutcome | RetriedOutcome:
    """Return the outcome of an attempt that raised ``exc``.

    Args:
        exc: The task's exception.
        job: The job; its ``attempts_made`` does not include this attempt.
        task: The job's task, ``None`` if the attempt failed before it was found.
        app: The app, with its error categories and the server's time.
    """
    exc = interrupt_in(exc) or exc
    if isinstance(exc, TaskCancelled):
        return FailedOutcome(REVOKED, trace_of(exc), REVOKED, exc)
    if isinstance(exc, Reject):
        rejected = exc.reason if isinstance(exc.reason, Exception) else None  # raise Reject(error)
        shown = rejected or exc
        return FailedOutcome(reason_of(shown), trace_of(shown), ErrorCategory.PERMANENT.value, shown)
    requested = exc if isinstance(exc, Retry) else None
    cause = exc if requested is None else (requested.exc or exc)
    category = app.categorizer.categorize(cause)
    reason, trace = _reason(cause, job), trace_of(cause)
    attempts_made = job.attempts_made + 1
    maximum = _maximum(cause, job, task, requested)
    if attempts_made >= maximum or not _is_retryable(cause, category, job, task, requested, app):
        throws = () if task is None else task.options.throws
        expected = isinstance(cause, throws) or all(isinstance(each, throws) for each in leaves_of(cause))
        return FailedOutcome(reason, trace, category.value, cause, expected=expected)
    try:
        delay_ms = _delay_ms(cause, job, task, attempts_made, requested, app)
    except Exception as error:  # noqa: BLE001 - a malformed backoff, or any exception of a user's backoff function
        reason = f"{reason} (and it cannot be retried: {type(error).__name__}: {error})"
        return FailedOutcome(reason, trace, category.value, cause)
    if category is ErrorCategory.PERMANENT:
        category = ErrorCategory.TRANSIENT  # for this job: a request, autoretry_for, or another client's job
    if requested is None:
        return RetriedOutcome(delay_ms, reason, trace, category.value, cause)
    expires_ms = requested.expires_at(app.now_ms())
    return RetriedOutcome(delay_ms, reason, trace, category.value, cause, expires_ms, requested)


def is_retried(exc: BaseException, job: RunningJob, task: AnyTask[..., object], app: App) -> bool:
    """Return whether ``job`` is retried if this attempt raises ``exc``."""
    has_attempts_left = job.attempts_made + 1 < _maximum(exc, job, task, None)
    return has_attempts_left and _is_retryable(exc, app.categorizer.categorize(exc), job, task, None, app)


def as_permanent(exc: Exception) -> PermanentError:
    """Return the permanent error for a job that cannot be started, because a retry would not help."""
    if isinstance(exc, DecodeError):
        error = InvalidJobError(str(exc))
        return incompatible(error) if exc.is_incompatible else error
    return exc if isinstance(exc, PermanentError) else InvalidJobError(f"{type(exc).__name__}: {exc}")


def trace_of(exc: BaseException) -> str:
    """Return the traceback as text, from the first frame of user code on."""
    frames = _user_frames(exc.__traceback__)
    text = trace_text(exc, frames)
    if frames is None and exc.__cause__ is None and exc.__context__ is None:
        # There is no frame of user code. The header still shows that this is a Python traceback.
        text = f"Traceback (most recent call last):\n{text}"
    return text


def _user_frames(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        tb = tb.tb_next
    return tb


def _maximum(cause: BaseException, job: RunningJob, task: AnyTask[..., object] | None, requested: Retry | None) -> int:
    """Return the maximum number of attempts of a job that has failed with ``cause``.

    ``task_max_retries=0`` means that nothing is retried unless the task requests it. ``autoretry_for`` is a request.
    """
    if requested is not None:
        return max_attempts(job, requested.max_retries)
    if task is not None and _any_is(cause, task.options.autoretry_for):
        return max(job.attempts, max_attempts(job, None))
    return job.attempts


def _reason(cause: BaseException, job: RunningJob) -> str:
    return no_retries_left(job, cause.max_retries) if isinstance(cause, Retry) else reason_of(cause)


def _is_retryable(
    cause: BaseException,
    category: ErrorCategory,
    job: RunningJob,
    task: AnyTask[..., object] | None,
    requested: Retry | None,
    app: App,
) -> bool:
    if requested is not None:
        return True
    leaves = leaves_of(cause)
    if any(explicit_category(each) is ErrorCategory.PERMANENT for each in (cause, *leaves)):
        return False  # the task raised it on purpose, so autoretry_for=(Exception,) does not apply
    if task is not None and _any_is(cause, task.options.dont_autoretry_for):
        return False
    if task is not None and _any_is(cause, kinds := task.options.autoretry_for):
        # As for the category of a group: only if each of its exceptions is retried.
        others = [] if isinstance(cause, kinds) else [each for each in leaves if not isinstance(each, kinds)]
        if all(app.categorizer.categorize(each) is ErrorCategory.TRANSIENT for each in others):
            return True
    return category is ErrorCategory.TRANSIENT if job.sent_by_bulltask else True


def leaves_of(exc: BaseException) -> list[BaseException]:
    """Return the exceptions in an exception group and in the groups within it; for any other exception, itself."""
    if not isinstance(exc, BaseExceptionGroup):
        return [exc]
    return [leaf for each in exc.exceptions for leaf in leaves_of(each)]


def interrupt_in(exc: BaseException) -> Interrupt | None:
    """Return the first interrupt in an exception group, such as ``self.retry()`` in an ``asyncio.TaskGroup``."""
    if not isinstance(exc, BaseExceptionGroup):
        return None
    return next((each for each in leaves_of(exc) if isinstance(each, Interrupt)), None)


def _any_is(cause: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether an exception, or one in a group, has one of these classes."""
    return isinstance(cause, kinds) or (kinds != () and any(isinstance(each, kinds) for each in leaves_of(cause)))


def _delay_ms(
    cause: BaseException,
    job: RunningJob,
    task: AnyTask[..., object] | None,
    attempts_made: int,
    requested: Retry | None,
    app: App,
) -> int:
    if requested is not None and requested.delay_ms is not None:
        return requested.delay_ms
    if requested is not None and requested.eta_ms is not None:
        return max(0, requested.eta_ms - app.now_ms())
    custom = None if task is None else task.options.custom_backoff
    if custom is not None:
        return to_ms(custom(attempts_made, cause), f"the retry_backoff of task {job.name}")
    return max(job.retry_delay_ms(attempts_made), retry_after_ms(cause, now=app.now_ms()) or 0)
