"""How an attempt can end: the outcomes, the decision whether to retry, and the events.

Begin with :data:`Outcome` and :func:`decide_retry`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Final

import bulltask
from bulltask.app import App
from bulltask.jobs.categories import ErrorCategory, explicit_category, retry_after_ms
from bulltask.jobs.clock import to_ms, value_class
from bulltask.jobs.errors import (
    ConfigError,
    DecodeError,
    Interrupt,
    InvalidJobError,
    PermanentError,
    RateLimitQueue,
    Reject,
    ReleaseJob,
    RescheduleJob,
    Retry,
    TaskCancelled,
    WaitForChildren,
    WorkerShutdown,
    incompatible,
)
from bulltask.jobs.fields import CHECKPOINT_FIELD, reason_of, trace_text, truncate_reason
from bulltask.jobs.job import RELEASES_FIELD, RunningJob
from bulltask.jobs.names import REVOKED
from bulltask.jobs.stored_job import FailedJob
from bulltask.observe.counters import failure_counter
from bulltask.observe.events import JobFailed, JobReleased, JobRescheduled, JobRetried, JobWaitsForChildren
from bulltask.registry.context import Checkpoints, no_retries_left
from bulltask.registry.task import AnyTask
from bulltask.transport.call import QueueKeys
from bulltask.worker.slots import Slot

__all__ = [
    "AcquiredJob",
    "CompletedOutcome",
    "FailedOutcome",
    "IncompatibleOutcome",
    "Outcome",
    "RateLimitedOutcome",
    "ReleasedOutcome",
    "RequestedOutcome",
    "RescheduledByTaskOutcome",
    "RescheduledByWorkerOutcome",
    "RetriedOutcome",
    "WaitingForChildrenOutcome",
    "WorkerOutcome",
    "as_permanent",
    "checkpoint_fields",
    "counter_of",
    "decide_retry",
    "failed_event",
    "interrupt_in",
    "is_retried",
    "released_last",
    "request_fields",
    "requested_event",
    "requested_outcome",
    "retried_event",
    "trace_of",
    "with_checkpoint",
]


_BY_TASK: Final = "its task released it"

_IMMEDIATE_MS: Final = 100
"""A job that a task reschedules by less runs again immediately, for ``max_releases``."""


@value_class
class AcquiredJob:
    """A job whose lock this child holds.

    Attributes:
        max_concurrent: How many jobs the child may run at the same time as this job, this job included; 0 for no limit.
            Set for a job in crash quarantine (:mod:`bulltask.worker.broker_backoff`).
    """

    slot: Slot
    queue_index: int
    keys: QueueKeys
    job: RunningJob
    max_concurrent: int


@value_class
class CompletedOutcome:
    """The task returned, or ended with ``Ignore``; ``value`` is the return value as JSON."""

    value: bytes
    result: object
    ignored: bool = False
    checkpoint: str | None = None


@value_class
class _WithCheckpoint:
    """An outcome that can be stored with a checkpoint in its stored form; ``None`` if that does not change."""

    checkpoint: str | None = field(default=None, kw_only=True)


@value_class
class FailedOutcome(_WithCheckpoint):
    """The attempt failed and the job is not retried.

    Attributes:
        malformed: BullMQ's script may fail with an error on this job, so bulltask's script fails it.
        failed_job: The canvas job whose failure caused this one to fail, if it is a different job.
        expected: The exception is one of the task's ``throws``.
        error: The stored form of the exception, ``""`` if only its message is stored.
        exhausted: The job was retried after such errors, and no attempt is left.
    """

    reason: str
    trace: str
    category: str

    exception: BaseException | None = field(default=None, compare=False, repr=False)
    malformed: bool = False
    failed_job: FailedJob | None = None
    expected: bool = False
    error: str = ""
    exhausted: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", truncate_reason(self.reason))


@value_class
class RetriedOutcome(_WithCheckpoint):
    """The attempt failed, and the job is retried after ``delay_ms`` (0: immediately).

    Attributes:
        expires_ms: The job's new expiry in epoch milliseconds, ``None`` if it does not change.
        requested: What the task has requested with ``self.retry()``, ``None`` after any other exception.
    """

    delay_ms: int
    reason: str
    trace: str
    category: str

    exception: BaseException | None = field(default=None, compare=False, repr=False)
    expires_ms: int | None = None
    requested: Retry | None = field(default=None, compare=False, repr=False)

    @property
    def data(self) -> bytes | None:
        """The job's new data, ``None`` if it does not change."""
        return None if self.requested is None else self.requested.data

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", truncate_reason(self.reason))


@value_class
class RescheduledByWorkerOutcome:
    """The worker cannot add the job's next iteration; the job is due again later. The attempt does not count."""

    delay_ms: int
    reason: str


@value_class
class IncompatibleOutcome:
    """The worker cannot run the job, but another may; it is due again after ``delay_ms``. The attempt does not count.

    The job stores ``since`` when no worker could run it.
    """

    delay_ms: int
    reason: str
    since: str
    is_first: bool

    def __post_init__(self) -> None:
        reason = truncate_reason(self.reason).encode("utf-8", "replace").decode()
        object.__setattr__(self, "reason", reason)


@value_class
class RescheduledByTaskOutcome(_WithCheckpoint):
    """The task rescheduled its job by ``delay_ms`` (``RescheduleJob``). The attempt does not count."""

    delay_ms: int


@value_class
class ReleasedOutcome(_WithCheckpoint):
    """The task released its job (``ReleaseJob``): it is next in its queue. The attempt does not count.

    ``max_releases`` limits the releases by tasks.
    """

    reason: str = _BY_TASK
    by_task: bool = True


@value_class
class RateLimitedOutcome(_WithCheckpoint):
    """The task released its job and rate-limits the queue for ``limit_ms`` (``RateLimitQueue``)."""

    limit_ms: int


@value_class
class WaitingForChildrenOutcome(_WithCheckpoint):
    """The job waits for its child jobs and then runs again (``WaitForChildren``). The attempt does not count.

    If it was ``replaced`` with a canvas, it does not run again.
    """

    replaced: bool = False


RequestedOutcome = RescheduledByTaskOutcome | ReleasedOutcome | RateLimitedOutcome | WaitingForChildrenOutcome
WorkerOutcome = RescheduledByWorkerOutcome | IncompatibleOutcome
"""Outcomes of jobs that have not run."""
Outcome = CompletedOutcome | FailedOutcome | RetriedOutcome | WorkerOutcome | RequestedOutcome


def requested_outcome(  # noqa: C901, PLR0911 - a branch for each request
    exc: BaseException,
) -> RequestedOutcome | FailedOutcome | None:
    """Return the outcome that a task requested by raising ``exc``; ``None`` if ``exc`` is any other exception.

    For ``Ignore``, see :mod:`bulltask.worker.attempt`.
    """
    try:
        match exc:
            case RescheduleJob():
                return RescheduledByTaskOutcome(to_ms(exc.delay, "RescheduleJob's delay"))
            case WorkerShutdown():
                return ReleasedOutcome(exc.reason, by_task=False)
            case ReleaseJob():
                return ReleasedOutcome(exc.reason)
            case Reject(requeue=True):
                return ReleasedOutcome()
            case RateLimitQueue():
                if limit_ms := to_ms(exc.duration, "RateLimitQueue's duration"):
                    return RateLimitedOutcome(limit_ms)
                return FailedOutcome("RateLimitQueue's duration must be at least 0.001 s", "", "permanent")
            case WaitForChildren():
                return WaitingForChildrenOutcome(exc.replaced)
            case _:
                return None
    except ConfigError as error:
        return FailedOutcome(str(error), "", "permanent")


def released_last(ended: Sequence[tuple[AcquiredJob, Outcome]]) -> list[tuple[AcquiredJob, Outcome]]:
    """Return a batch's outcomes in the order in which to write them: releases at the end, that of the first job last.

    A job that is released becomes the next one of its queue, so the jobs keep their order.
    """
    written: list[tuple[AcquiredJob, Outcome]] = []
    released: list[tuple[AcquiredJob, Outcome]] = []
    for each in ended:
        (released if isinstance(each[1], ReleasedOutcome | RateLimitedOutcome) else written).append(each)
    return written + released[::-1]


def with_checkpoint(outcome: Outcome, checkpoints: Checkpoints) -> Outcome:
    """Return the outcome with the checkpoint that is stored in the same step."""
    if isinstance(outcome, WorkerOutcome):
        return outcome
    last = checkpoints.last(completed=isinstance(outcome, CompletedOutcome))
    return outcome if last is None else replace(outcome, checkpoint=last)


def checkpoint_fields(outcome: CompletedOutcome | FailedOutcome | RetriedOutcome) -> list[str]:
    """Return the field of the job's hash that changes with an outcome of a checkpointed task; usually none."""
    return [] if outcome.checkpoint is None else [CHECKPOINT_FIELD, outcome.checkpoint]


def request_fields(job: RunningJob, outcome: RequestedOutcome) -> list[str]:
    """Return the fields of the job's hash that change with an outcome that its task has requested; usually none.

    They are the checkpoint, and the number of releases in a row without progress, which ``max_releases`` limits.
    """
    match outcome:
        case RescheduledByTaskOutcome():
            is_immediate = outcome.delay_ms < _IMMEDIATE_MS
        case RateLimitedOutcome():
            is_immediate = outcome.limit_ms < _IMMEDIATE_MS
        case _:  # a job that waits for its child jobs, but has no pending ones, is released
            is_immediate = isinstance(outcome, ReleasedOutcome) and outcome.by_task
    fields = [] if outcome.checkpoint is None else [CHECKPOINT_FIELD, outcome.checkpoint]
    releases = job.releases + 1 if is_immediate and not fields else 0
    return fields if releases == job.releases else [*fields, RELEASES_FIELD, str(releases)]


# Decides whether a failed attempt is retried, and when.
#
# Jobs that bulltask has sent follow the task's policy: transient errors are retried; permanent and unknown errors fail
# the job immediately; ``autoretry_for`` adds exceptions and ``dont_autoretry_for`` removes some. Jobs from other
# clients follow BullMQ: every error is retried except ``PermanentError`` and ``dont_autoretry_for``; the other
# permanent errors are retried, too. In both cases the number of attempts is stored in the job.


_PACKAGE: Final = f"{Path(bulltask.__file__).parent}{os.sep}"


def decide_retry(
    exc: BaseException, job: RunningJob, task: AnyTask[..., object] | None, app: App
) -> FailedOutcome | RetriedOutcome:
    """Return the outcome of an attempt that raised ``exc``; ``job.attempts_made`` does not include this attempt.

    It has no task if the attempt failed before the task was found.
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
    reason = no_retries_left(job, cause.max_retries) if isinstance(cause, Retry) else reason_of(cause)
    trace = trace_of(cause)
    attempts_made = job.attempts_made + 1
    maximum = _maximum(cause, job, task, requested)
    is_retryable = _is_retryable(cause, category, job, task, requested, app)
    if attempts_made >= maximum or not is_retryable:
        exhausted = is_retryable and maximum > 1
        if exhausted and category is ErrorCategory.PERMANENT:
            category = ErrorCategory.TRANSIENT  # as when it was retried, see below
        throws = () if task is None else task._options.throws
        expected = isinstance(cause, throws) or all(isinstance(each, throws) for each in leaves_of(cause))
        return FailedOutcome(reason, trace, category.value, cause, expected=expected, exhausted=exhausted)
    try:
        delay_ms = _delay_ms(cause, job, task, attempts_made, requested, app)
    except Exception as error:  # noqa: BLE001 - a malformed backoff, or any exception of a user's backoff function
        reason = f"{reason} (and it cannot be retried: {type(error).__name__}: {error})"
        return FailedOutcome(reason, trace, category.value, cause)
    if category is ErrorCategory.PERMANENT:
        category = ErrorCategory.TRANSIENT  # for this job: a request, autoretry_for, or another client's job
    if requested is None:
        return RetriedOutcome(delay_ms, reason, trace, category.value, cause)
    expires_ms = requested.expires_at(app._now_ms())
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
    frames = exc.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frames = frames.tb_next
    text = trace_text(exc, frames)
    if frames is None and exc.__cause__ is None and exc.__context__ is None:
        # There is no frame of user code. The header still shows that this is a Python traceback.
        text = f"Traceback (most recent call last):\n{text}"
    return text


def _maximum(cause: BaseException, job: RunningJob, task: AnyTask[..., object] | None, requested: Retry | None) -> int:
    """Return the maximum number of attempts of a job that has failed with ``cause``.

    ``task_max_retries=0`` means that nothing is retried unless the task requests it. ``autoretry_for`` is a request.
    """
    if requested is not None:
        return job.max_attempts(requested.max_retries)
    if task is not None and _any_is(cause, task._options.autoretry_for):
        return max(job.attempts, job.max_attempts())
    return job.attempts


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
    if task is not None and _any_is(cause, task._options.dont_autoretry_for):
        return False
    if task is not None and _any_is(cause, kinds := task._options.autoretry_for):
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
        return max(0, requested.eta_ms - app._now_ms())
    custom = None if task is None else task._options.custom_backoff
    if custom is not None:
        return to_ms(custom(attempts_made, cause), f"the retry_backoff of task {job.name}")
    return max(job.retry_delay_ms(attempts_made), retry_after_ms(cause, now=app._now_ms()) or 0)


def requested_event(job: RunningJob, outcome: RequestedOutcome) -> JobReleased | JobRescheduled | JobWaitsForChildren:
    """Return the event of an outcome that its task has requested."""
    match outcome:
        case RescheduledByTaskOutcome():
            return JobRescheduled(job.id, job.queue, job.name, outcome.delay_ms)
        case WaitingForChildrenOutcome():
            return JobWaitsForChildren(job.id, job.queue, job.name)
        case ReleasedOutcome():
            return JobReleased(job.id, job.queue, job.name, outcome.reason)
        case RateLimitedOutcome():
            reason = f"its task rate-limited the queue for {outcome.limit_ms / 1000:g} s"
            return JobReleased(job.id, job.queue, job.name, reason)


def counter_of(outcome: Outcome | None) -> str | None:
    """Return the counter of an attempt with this outcome; ``None`` if the attempt does not count."""
    if type(outcome) is CompletedOutcome:
        return "completed"
    if type(outcome) is RetriedOutcome:
        return "retried"
    if isinstance(outcome, FailedOutcome):
        return failure_counter(outcome.category, exhausted=outcome.exhausted)
    return None


def failed_event(job: RunningJob, outcome: FailedOutcome, duration_ms: float) -> JobFailed:
    """Return the event of a failed job."""
    attempts_made, raised = job.attempts_made + 1, outcome.exception
    error, category, trace = outcome.reason, outcome.category, outcome.trace
    names = job.id, job.queue, job.name
    return JobFailed(*names, duration_ms, error, category, attempts_made, trace, raised, outcome.expected)


def retried_event(job: RunningJob, outcome: RetriedOutcome, duration_ms: float) -> JobRetried:
    """Return the event of a failed attempt after which the job is retried."""
    attempts_made, raised = job.attempts_made + 1, outcome.exception
    error, category, delay_ms = outcome.reason, outcome.category, outcome.delay_ms
    return JobRetried(job.id, job.queue, job.name, duration_ms, error, category, attempts_made, delay_ms, raised)
