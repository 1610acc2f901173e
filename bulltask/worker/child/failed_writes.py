"""What a child does after a failed write of an outcome: it waits and repeats the write, or writes another outcome."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from bulltask.config.config import Config
from bulltask.errors import (
    RECOVERABLE,
    BrokerAuthError,
    BrokerError,
    BrokerUnavailableError,
    BulltaskError,
    DecodeError,
    FailedChildrenError,
    JobError,
    LockMissingError,
    NoPendingChildrenError,
    PendingChildrenError,
)
from bulltask.jobs.job import RunningJob
from bulltask.jobs.numbers import counter
from bulltask.transport.call import Call, command
from bulltask.transport.scripts.move import renew_lock
from bulltask.worker.child.outcomes import (
    AcquiredJob,
    FailedOutcome,
    Outcome,
    ReleasedOutcome,
    RetriedOutcome,
    WaitingForChildrenOutcome,
)
from bulltask.worker.malformed import parent_waits, with_parent_waits

__all__ = ["BackoffStep", "FailedWriteHandler", "OutcomeWriteSteps", "WriteStep"]

_NEED_FALLBACK: Final = (BrokerError, PendingChildrenError, FailedChildrenError, NoPendingChildrenError)
"""Errors, apart from ``RECOVERABLE`` ones, that require another outcome: see :meth:`FailedWriteHandler.fallback`."""

_FAST_RETRIES: Final = 10
_SLOW_RETRY_MS: Final = 1_000
"""The shortest delay of a parent with pending child jobs after ``_FAST_RETRIES`` retries, so that it does not spin."""

_MAX_RETRY_S: Final = 3_600
"""A call is assumed to be retried for at most this long."""

_MAX_FINISHED: Final = 100_000
"""Fewer other jobs of the queue than this are assumed to finish in the same way meanwhile."""


@dataclass(frozen=True, slots=True)
class BackoffStep:
    """A step after a failed write: wait before the next one, because of ``error``."""

    error: BrokerError


@dataclass(frozen=True, slots=True)
class WriteStep:
    """A step after a failed write: write the outcome again. Its result is the next job, if the reply contains one.

    Attributes:
        uncertain: The reply to an earlier write was lost, so Redis may have executed that write.
    """

    outcome: Outcome
    uncertain: bool


OutcomeWriteSteps = Generator[
    BackoffStep | WriteStep | Call[bool], Any, tuple[Outcome | None, AcquiredJob | None, BrokerError | None]
]
"""Sans-I/O steps for the loops of a child. A loop repeats a :class:`Call` until it receives a reply."""


def _reason(job_id: str, outcome: Outcome, exc: BulltaskError) -> str:
    """Return the reason why a job fails whose outcome cannot be stored: Node's, if its child jobs are the reason."""
    script = "moveToWaitingChildren" if isinstance(outcome, WaitingForChildrenOutcome) else "moveToFinished"
    if isinstance(exc, FailedChildrenError):
        return f"Cannot complete job {job_id} because it has at least one failed child. {script}"
    if isinstance(exc, PendingChildrenError):
        return f"Job {job_id} has pending dependencies. {script}"
    return f"the job's outcome could not be stored: {exc}"


def _is_parent_forbidden(acquired: AcquiredJob, exc: BulltaskError) -> bool:
    """Whether the ACL has stopped a script, which then cannot inform the job's parent, probably in another queue.

    The keys of the job's own queue are checked before the script starts.
    """
    return isinstance(exc, BrokerAuthError) and exc.in_script and bool(acquired.job.parent_key)


class FailedWriteHandler:
    """Decides what to do after a failed write of an outcome. It does no I/O, so both loops of a child can use it.

    Args:
        config: Lock duration, and the settings for retention.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    def steps(self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError) -> OutcomeWriteSteps:
        """Return the steps to take after writing ``outcome`` has failed with ``exc``.

        While Redis is unavailable, the outcome is kept and written again; the supervisor renews the job's lock.

        Returns:
            A generator. It returns the outcome that Redis has stored (``None`` if the lock was lost), the next job,
            and the error of the fetch after the write, if the script failed with an error during that fetch.
        """
        uncertain = False
        while True:
            if isinstance(exc, RECOVERABLE) and not _is_parent_forbidden(acquired, exc):
                uncertain = uncertain or isinstance(exc, BrokerUnavailableError)
                yield BackoffStep(exc)
            else:
                next_outcome, stored = yield from self._handle_error(acquired, outcome, exc, uncertain)
                if next_outcome is None:
                    fetch_error = exc if stored and isinstance(exc, BrokerError) else None
                    return (outcome if stored else None), None, fetch_error
                outcome = next_outcome
            try:
                next_job = yield WriteStep(outcome, uncertain)
            except (BrokerError, JobError) as error:
                exc = error
            else:
                return outcome, next_job, None

    def _handle_error(
        self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError, uncertain: bool
    ) -> Generator[Call[bool], bool, tuple[Outcome | None, bool]]:
        """Return the outcome to write next, or ``None`` and whether Redis has stored ``outcome`` already."""
        # A script that has stored the outcome may still fail with an error afterwards, usually on the next job.
        if isinstance(exc, BrokerError) and (yield self.already_applied(acquired)):
            return None, True
        if isinstance(exc, _NEED_FALLBACK):
            return self.fallback(acquired, outcome, exc), False
        if uncertain and (yield self.already_applied(acquired)):
            return None, True
        reacquired = isinstance(exc, LockMissingError) and (yield self.reacquire_lock(acquired))
        return (outcome if reacquired else None), False

    def fallback(self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError) -> Outcome | None:
        """Return the outcome to write instead of ``outcome`` after an error that waiting cannot fix.

        BullMQ's scripts fail with an error on a malformed hash, and a flow's parent cannot complete while child jobs
        are pending or failed; nor can a child job whose parent's keys the ACL forbids. Such a job fails with that error
        as its reason; a malformed job, and such a child job, is failed by bulltask's script, which does not read the
        malformed fields. A parent with pending child jobs is retried first, as in
        Node.js, but no longer immediately if it has been retried many times.

        ``None`` means that nothing can be written. The job is then left to the stalled check, so that one malformed job
        does not block a child forever.

        A job that requested to wait for its child jobs, but has no pending child job, is released: it runs again
        immediately.
        """
        if isinstance(exc, NoPendingChildrenError) and isinstance(outcome, WaitingForChildrenOutcome):
            return ReleasedOutcome(checkpoint=outcome.checkpoint)
        if isinstance(exc, FailedChildrenError) and isinstance(outcome, WaitingForChildrenOutcome) and outcome.replaced:
            return ReleasedOutcome()  # the canvas has failed: the job fails with the same error when it is acquired
        script_stopped = isinstance(exc, BrokerError)
        forbidden = parent_waits(acquired.job, exc) if _is_parent_forbidden(acquired, exc) else ""
        if isinstance(outcome, FailedOutcome):
            if not script_stopped or outcome.malformed:
                return None
            reason, trace = with_parent_waits(outcome.reason, outcome.trace, forbidden)
            return replace(outcome, reason=reason, trace=trace, malformed=True)
        reason = _reason(acquired.job.id, outcome, exc)
        if forbidden:
            reason = f"the job's outcome could not be stored, and {forbidden}"
        attempts_made = acquired.job.attempts_made + 1
        if isinstance(exc, PendingChildrenError) and attempts_made < acquired.job.attempts:
            with suppress(DecodeError):  # a malformed backoff: the job fails
                delay_ms = acquired.job.retry_delay_ms(attempts_made)
                if attempts_made > _FAST_RETRIES:
                    delay_ms = max(delay_ms, _SLOW_RETRY_MS)
                return RetriedOutcome(delay_ms, reason, "", "transient")
        return FailedOutcome(reason, "", "permanent", malformed=script_stopped)

    def already_applied(self, acquired: AcquiredJob) -> Call[bool]:
        """Return the call that checks whether Redis executed a write whose reply was lost.

        Redis executed it if the attempt was counted, or if the job no longer exists and its retention permits removal.
        Otherwise the lock has expired and another worker has the job, or Redis has lost its data. Counts above
        ``MAX_NUMBER`` cannot be compared, so such a write is assumed not to have been executed.
        """
        job, may_be_removed = acquired.job, self._may_be_removed(acquired.job)
        expected = job.attempts_made + 1 - job.opts.retries_before

        def parse_reply(reply: Any) -> bool:
            name, attempts_made = reply
            try:
                return may_be_removed if name is None else counter(attempts_made or b"0") >= expected
            except ValueError:
                return False

        return command("HMGET", acquired.keys.job(acquired.job.id), "name", "atm", parse_reply=parse_reply)

    def reacquire_lock(self, acquired: AcquiredJob) -> Call[bool]:
        """Return the call that reacquires an expired lock; its result is False if the lock is lost.

        Redis was unavailable, or the supervisor was suspended, for longer than the lock lasts. The outcome is valid
        unless another worker has acquired the job.
        """
        return renew_lock(acquired.keys, acquired.job.id, acquired.slot.token, self._config.lock_ms)

    def _may_be_removed(self, job: RunningJob) -> bool:
        """Whether, after a reply was lost, retention may remove the job before the write is retried."""
        options = (("removeOnComplete", self._config.keep_completed), ("removeOnFail", self._config.keep_failed))
        kept = [job.keep(*option) for option in options]
        return any(
            0 <= keep.get("count", -1) < _MAX_FINISHED or keep.get("age", _MAX_RETRY_S) < _MAX_RETRY_S for keep in kept
        )
