"""Attempts that were cancelled by killing their child, and how they fail."""

from __future__ import annotations

from dataclasses import dataclass

from bulltask.clock import ServerClock, mono_ms
from bulltask.config.config import Config
from bulltask.errors import BrokerAuthError, DecodeError, EventLoopBlockedError, TaskCancelled
from bulltask.events import Bus, JobFailed, JobRetried
from bulltask.jobs.job import RunningJob
from bulltask.jobs.states import REVOKED
from bulltask.jobs.time_limits import TimeLimits
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched
from bulltask.transport.scripts.add import add_deferred_duplicate
from bulltask.transport.scripts.canvas import finish_with_errbacks, with_dependents
from bulltask.transport.scripts.fetch import FetchOptions
from bulltask.transport.scripts.job import finish_revoked
from bulltask.transport.scripts.move import (
    FinishOptions,
    fail_malformed,
    move_to_delayed,
    move_to_finished,
    retry_job,
)
from bulltask.worker.errback_jobs import errback_jobs
from bulltask.worker.malformed import parent_waits, with_parent_waits
from bulltask.worker.slot import UNKNOWN_ATTEMPT, SlotView
from bulltask.worker.states import CancelReason

__all__ = ["FailureRecorder", "KilledAttempt"]


@dataclass(frozen=True, slots=True)
class KilledAttempt:
    """An attempt that was cancelled by killing its child.

    Attributes:
        token, attempt, job_id: Identify the attempt; the job id is ``""`` if it is too long for a slot.
        reason: Why the attempt was cancelled.
        hard_ms: Its hard limit.
        will_retry: Whether the job is retried, if it has attempts left.
        since_ms: When the attempt started (monotonic time).
        blocked_ms: How long it had blocked the event loop, so that others could not be cancelled; 0 if it had not.
    """

    token: str
    attempt: int
    job_id: str
    reason: CancelReason
    hard_ms: int
    will_retry: bool
    since_ms: int
    blocked_ms: int = 0

    @classmethod
    def of(cls, view: SlotView, blocked_ms: int = 0) -> KilledAttempt:
        """Return the slot's current attempt."""
        deadlines = view.deadlines
        reason, ids = view.cancel_reason, (view.token, view.attempt, view.job_id)
        will_retry = deadlines.will_retry and reason is CancelReason.HARD_LIMIT and not blocked_ms
        return cls(*ids, reason, deadlines.hard_ms, will_retry, view.since_ms, blocked_ms)

    def may_match(self, view: SlotView) -> bool:
        """Whether the dead child's slot may still contain this attempt, which may have ended just before the kill."""
        return view.attempt in {self.attempt, UNKNOWN_ATTEMPT}

    def matches(self, job_id: str) -> bool:
        """Whether this may be an attempt of the job."""
        return self.job_id in {job_id, ""}


class FailureRecorder:
    """Records that an attempt failed because its child was killed.

    The job is retried according to the attempts and backoff in its options. A custom backoff function is not called,
    because the supervisor runs no user code; the job's options contain an exponential backoff for this case.

    Args:
        client, clock, config, bus: As in :class:`~bulltask.worker.supervisor.recovery.Recovery`.
    """

    def __init__(self, client: SyncClient, clock: ServerClock, config: Config, bus: Bus) -> None:
        self._client, self._clock, self._config, self._bus = client, clock, config, bus

    def record_killed(self, keys: QueueKeys, job_id: str, killed_attempt: KilledAttempt) -> None:
        """Fail the killed attempt of a job that is still locked with its token, and emit the event.

        Raises:
            JobError: The job is no longer locked with that token.
        """
        job = self._read(keys, job_id)
        exc: BaseException = TaskCancelled("revoked")
        category = reason = REVOKED
        if killed_attempt.blocked_ms:
            seconds = killed_attempt.blocked_ms / 1000
            exc = EventLoopBlockedError(
                f"task {job.name or '?'} blocked the event loop of its child for {seconds:.1f} s, so that other jobs "
                "could not be cancelled, and its child was killed"
            )
            category, reason = "permanent", str(exc)
        elif killed_attempt.reason is not CancelReason.REVOKED:
            exc = TimeLimits(hard_ms=killed_attempt.hard_ms).hard_exceeded(job.name or "?", killed=True)
            category, reason = "transient", str(exc)
        # In the format of a Python traceback, from which a client can rebuild the exception.
        trace = f"Traceback (most recent call last):\n{type(exc).__module__}.{type(exc).__qualname__}: {exc}\n"
        attempts_made, duration_ms = job.attempts_made + 1, float(mono_ms() - killed_attempt.since_ms)
        delay_ms = _delay_ms(job, attempts_made) if killed_attempt.will_retry else None
        if delay_ms is None:
            self.fail(keys, killed_attempt.token, job, reason, trace)
            self._bus.emit(
                JobFailed(job_id, keys.queue, job.name, duration_ms, reason, category, attempts_made, trace, exc)
            )
            return
        fields, now_ms, token = job.failure_fields(reason, trace), self._clock.now_ms(), killed_attempt.token
        if delay_ms:
            self._client.run(move_to_delayed(keys, job_id, token, delay_ms, failure=fields, now_ms=now_ms))
        else:
            self._client.run(retry_job(keys, job_id, token, lifo=job.lifo, fields=fields, now_ms=now_ms))
        self._bus.emit(
            JobRetried(job_id, keys.queue, job.name, duration_ms, reason, category, attempts_made, delay_ms, exc)
        )

    def fail(self, keys: QueueKeys, token: str, job: RunningJob | str, reason: str, trace: str = "") -> None:
        """Fail a job, given as an object or by its id, that is locked with ``token``."""
        if isinstance(job, str):
            job = self._read(keys, job)
        now_ms, revoked = self._clock.now_ms(), reason == REVOKED
        call = self._failure(keys, token, job, reason, trace, now_ms)
        errbacks = [] if revoked or job.malformed else errback_jobs(job, reason, trace, self._config, now_ms)
        try:
            if job.malformed:
                self._client.run(fail_malformed(keys, call, token))
            elif revoked:
                self._client.run(finish_revoked(keys, call))
            else:
                self._client.run(finish_with_errbacks(call, errbacks) if errbacks else call)
        except BrokerAuthError as exc:
            if not exc.in_script or not job.parent_key:
                raise
            reason, trace = with_parent_waits(reason, trace, parent_waits(job, exc))
            failure = fail_malformed(keys, self._failure(keys, token, job, reason, trace, now_ms), token)
            self._client.run(finish_with_errbacks(failure, errbacks) if errbacks else failure)
        if job.deduplication_id:  # BullMQ 5.72 and newer may defer a duplicate until this job has finished
            self._client.run(add_deferred_duplicate(keys, job.deduplication_id, job.id, now_ms))

    def _failure(
        self, keys: QueueKeys, token: str, job: RunningJob, reason: str, trace: str, now_ms: int
    ) -> Call[Fetched]:
        keep = job.keep("removeOnFail", self._config.keep_failed)
        fields = job.failure_fields(reason, trace)
        if not trace:
            del fields[2:]  # keep the tracebacks of earlier attempts
        finish = FinishOptions(False, fields[1].encode(), keep, job.attempts, fields)
        options = FetchOptions.from_config(self._config, keys, token, "")
        call = move_to_finished(keys, job.id, options, finish, fetch_next=False, now_ms=now_ms)
        return with_dependents(keys, job, call, None, now_ms)

    def _read(self, keys: QueueKeys, job_id: str) -> RunningJob:
        call: Call[list[bytes]] = command("HGETALL", keys.job(job_id))
        fields = self._client.run(call)
        return RunningJob.read(keys.queue, job_id, fields)


def _delay_ms(job: RunningJob, attempts_made: int) -> int | None:
    """Return the delay of a retry; ``None`` if no attempt is left or the backoff is malformed."""
    if attempts_made >= job.attempts:
        return None
    try:
        return job.retry_delay_ms(attempts_made)
    except DecodeError:
        return None
