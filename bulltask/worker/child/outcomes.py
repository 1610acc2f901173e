"""An acquired job, and the outcomes of its attempt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from bulltask.clock import to_ms
from bulltask.errors import (
    ConfigError,
    RateLimitQueue,
    Reject,
    ReleaseJob,
    RescheduleJob,
    Retry,
    WaitForChildren,
    WorkerShutdown,
)
from bulltask.jobs.checkpoint import CHECKPOINT_FIELD
from bulltask.jobs.errbacks import FailedJob
from bulltask.jobs.failures import truncate_reason
from bulltask.jobs.job import RELEASES_FIELD, RunningJob
from bulltask.registry.checkpoints import Checkpoints
from bulltask.transport.keys import QueueKeys
from bulltask.value_class import value_class
from bulltask.worker.slot import Slot

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
    "checkpoint_fields",
    "release_reason",
    "request_fields",
    "requested_outcome",
    "with_checkpoint",
]

_BY_TASK: Final = "its task released it"

_IMMEDIATE_MS: Final = 100
"""A job that a task reschedules by less runs again immediately, for ``max_releases``."""


@value_class
class AcquiredJob:
    """A job whose lock this child holds.

    Attributes:
        slot: The slot whose token locks the job.
        queue_index: Index of its queue in the worker's list.
        keys: The queue's keys.
        max_concurrent: How many jobs the child may run at the same time as this job, this job included; 0 for no limit.
            Set for a job in crash quarantine (:mod:`bulltask.worker.quarantine`).
    """

    slot: Slot
    queue_index: int
    keys: QueueKeys
    job: RunningJob
    max_concurrent: int


@value_class
class CompletedOutcome:
    """The task returned; ``value`` is the return value as JSON.

    Attributes:
        ignored: The task ended with ``Ignore``.
        checkpoint: As in the other outcomes.
    """

    value: bytes
    result: object
    ignored: bool = False
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True)
class _WithCheckpoint:
    """An outcome that can be stored with a checkpoint.

    Attributes:
        checkpoint: The job's new :class:`bulltask.jobs.checkpoint.Checkpoint`, as it is stored; ``None`` if it does not
            change.
    """

    checkpoint: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class FailedOutcome(_WithCheckpoint):
    """The attempt failed and the job is not retried.

    Attributes:
        reason: The error message.
        trace: The attempt's traceback.
        malformed: BullMQ's script may fail with an error on this job, so bulltask's script fails it.
        failed_job: The canvas job whose failure caused this one to fail, if it is a different job.
        expected: The exception is one of the task's ``throws``.
        error: The stored form of the exception, ``""`` if only its message is stored.
    """

    reason: str
    trace: str
    category: str

    exception: BaseException | None = field(default=None, compare=False, repr=False)
    malformed: bool = False
    failed_job: FailedJob | None = None
    expected: bool = False
    error: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", truncate_reason(self.reason))


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class RescheduledByWorkerOutcome:
    """The worker cannot run the job right now; it is due again after ``delay_ms``. The attempt does not count.

    Attributes:
        reason: Why the next iteration of its job scheduler could not be added.
    """

    delay_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class IncompatibleOutcome:
    """The worker cannot run the job, but another may; it is due again after ``delay_ms``. The attempt does not count.

    Attributes:
        reason: Why the worker cannot run it.
        since: What is stored in the job: since when no worker could run it.
        is_first: Whether this is the first such worker.
    """

    delay_ms: int
    reason: str
    since: str
    is_first: bool

    def __post_init__(self) -> None:
        reason = truncate_reason(self.reason).encode("utf-8", "replace").decode()
        object.__setattr__(self, "reason", reason)


@dataclass(frozen=True, slots=True)
class RescheduledByTaskOutcome(_WithCheckpoint):
    """The task rescheduled its job by ``delay_ms`` (``RescheduleJob``). The attempt does not count."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class ReleasedOutcome(_WithCheckpoint):
    """The task released its job (``ReleaseJob``): it is next in its queue. The attempt does not count.

    Attributes:
        reason: Why, for the log.
        by_task: Whether ``max_releases`` limits this release.
    """

    reason: str = _BY_TASK
    by_task: bool = True


@dataclass(frozen=True, slots=True)
class RateLimitedOutcome(_WithCheckpoint):
    """The task released its job and rate-limits the queue for ``limit_ms`` (``RateLimitQueue``)."""

    limit_ms: int


@dataclass(frozen=True, slots=True)
class WaitingForChildrenOutcome(_WithCheckpoint):
    """The job waits for its child jobs and then runs again (``WaitForChildren``). The attempt does not count.

    Attributes:
        replaced: The job's task has replaced itself with a canvas, and does not run again.
    """

    replaced: bool = False


RequestedOutcome = RescheduledByTaskOutcome | ReleasedOutcome | RateLimitedOutcome | WaitingForChildrenOutcome
WorkerOutcome = RescheduledByWorkerOutcome | IncompatibleOutcome
"""Outcomes of jobs that have not run."""
Outcome = CompletedOutcome | FailedOutcome | RetriedOutcome | WorkerOutcome | RequestedOutcome


def requested_outcome(exc: BaseException) -> RequestedOutcome | FailedOutcome | None:
    """Return the outcome that a task requested by raising ``exc``; ``None`` if ``exc`` is any other exception.

    For ``Ignore``, see :mod:`bulltask.worker.child.ignored`.
    """
    match exc:
        case RescheduleJob():
            try:
                return RescheduledByTaskOutcome(to_ms(exc.delay, "RescheduleJob's delay"))
            except ConfigError as error:
                return FailedOutcome(str(error), "", "permanent")
        case WorkerShutdown():
            return ReleasedOutcome(exc.reason, by_task=False)
        case ReleaseJob() | Reject(requeue=True):
            return ReleasedOutcome(exc.reason if isinstance(exc, ReleaseJob) else _BY_TASK)
        case RateLimitQueue():
            return _rate_limited(exc)
        case _:
            return WaitingForChildrenOutcome(exc.replaced) if isinstance(exc, WaitForChildren) else None


def release_reason(outcome: ReleasedOutcome | RateLimitedOutcome) -> str:
    """Return the reason in the log line of a released job."""
    match outcome:
        case ReleasedOutcome():
            return outcome.reason
        case RateLimitedOutcome():
            return f"its task rate-limited the queue for {outcome.limit_ms / 1000:g} s"


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


def _rate_limited(exc: RateLimitQueue) -> RateLimitedOutcome | FailedOutcome:
    try:
        limit_ms = to_ms(exc.duration, "RateLimitQueue's duration")
    except ConfigError as error:
        return FailedOutcome(str(error), "", "permanent")
    if not limit_ms:
        return FailedOutcome("RateLimitQueue's duration must be at least 0.001 s", "", "permanent")
    return RateLimitedOutcome(limit_ms)
