"""Settle a job: write the outcome of its attempt to Redis with one script call, and emit the event."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from bulltask.clock import ServerClock
from bulltask.config.config import Config
from bulltask.errors import (
    RECOVERABLE,
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
from bulltask.events import (
    Bus,
    EventLoopStopped,
    JobCompleted,
    JobFailed,
    JobReleased,
    JobRetried,
    LockLost,
    SchedulingFailed,
    UnknownTaskSeen,
)
from bulltask.jobs.job import RunningJob
from bulltask.jobs.numbers import MAX_NUMBER, counter
from bulltask.jobs.states import REVOKED
from bulltask.process import exit_if_forked
from bulltask.transport.call import Call, command
from bulltask.transport.scripts.add import add_kept_job
from bulltask.transport.scripts.job import add_log, finish_revoked
from bulltask.transport.scripts.move import (
    FinishOptions,
    move_from_active_to_wait,
    move_to_delayed,
    move_to_finished,
    move_to_waiting_children,
    quarantine,
    renew_lock,
    retry_job,
    wake_next,
)
from bulltask.transport.scripts.queue import limit_now
from bulltask.worker.child.fetcher import FetchOptionsCache
from bulltask.worker.child.outcomes import (
    AcquiredJob,
    CompletedOutcome,
    FailedOutcome,
    Outcome,
    RateLimited,
    Released,
    RequestedOutcome,
    RescheduledByTask,
    RescheduledByWorker,
    Retried,
    WaitingForChildren,
    release_reason,
)

__all__ = ["BackoffStep", "Settlement", "Settler", "WriteStep"]

_UNSTORABLE: Final = (BrokerError, PendingChildrenError, FailedChildrenError, NoPendingChildrenError)
"""Errors, apart from ``RECOVERABLE`` ones, that need another outcome: see :meth:`Settler.fallback`."""

_LONG_S: Final = 3_600
"""Longer than any call is repeated."""

_UNKNOWN_TASK: Final = (
    "no bulltask worker that acquired this job has the task {!r}; it is retried until one has "
    "(or set task_unknown='fail')"
)


@dataclass(frozen=True, slots=True)
class BackoffStep:
    """A step of a settlement: wait, because Redis is unavailable."""

    error: BrokerError


@dataclass(frozen=True, slots=True)
class WriteStep:
    """A step of a settlement: write the outcome again. The result is the next job, if one came with the reply.

    Attributes:
        uncertain: The reply to an earlier write was lost, so Redis may have carried it out.
    """

    outcome: Outcome
    uncertain: bool


Settlement = Generator[
    BackoffStep | WriteStep | Call[bool], Any, tuple[Outcome | None, AcquiredJob | None, BrokerError | None]
]
"""Sans-I/O steps, which both loops of a child execute. A :class:`Call` is repeated until Redis answers."""


class Settler:
    """Makes the script call for an outcome, and emits its event.

    It does no I/O: the sync loop and the async loop each have their own client.

    Args:
        config: Lock duration, and the settings for retention and metrics.
        clock: The server's time.
        bus: Receives the event of each outcome.
        worker_id: Stored in the next job as the worker that processes it.
        rate_limited: Called with a queue's index and a time in milliseconds when a task rate-limits its queue.
    """

    def __init__(
        self,
        config: Config,
        clock: ServerClock,
        bus: Bus,
        worker_id: str,
        rate_limited: Callable[[int, int], None] = lambda _index, _limit_ms: None,
    ) -> None:
        self._config, self._clock, self._bus, self._rate_limited = config, clock, bus, rate_limited
        self._fetch_options, self._pid = FetchOptionsCache(config, worker_id), os.getpid()

    def call(self, acquired: AcquiredJob, outcome: Outcome, *, fetch_next: bool) -> Call[Any]:
        """Return the call that writes ``outcome``; only ``moveToFinished`` can fetch the next job in the same step."""
        exit_if_forked(self._pid)  # a process that user code has forked must not settle its parent's job
        call = self._call(acquired, outcome, fetch_next)
        takes_next = fetch_next and call.script is not None and call.script.name == "moveToFinished"
        return call if takes_next else wake_next(acquired.keys, call)

    def _call(self, acquired: AcquiredJob, outcome: Outcome, fetch_next: bool) -> Call[Any]:
        keys, job, token, now_ms = acquired.keys, acquired.job, acquired.slot.token, self._clock.now_ms()
        match outcome:
            case CompletedOutcome():
                keep = job.keep("removeOnComplete", self._config.keep_completed)
                finish = FinishOptions(True, outcome.value, keep, job.attempts)
                options = self._fetch_options.get(keys, token)
                return move_to_finished(keys, job.id, options, finish, fetch_next=fetch_next, now_ms=now_ms)
            case FailedOutcome():
                return self._failed_call(acquired, outcome, fetch_next, now_ms)
            case Retried(delay_ms=0):
                fields = job.failure_fields(outcome.reason, outcome.trace)
                return retry_job(keys, job.id, token, lifo=job.lifo, fields=fields, now_ms=now_ms)
            case Retried():
                fields = job.failure_fields(outcome.reason, outcome.trace)
                return move_to_delayed(keys, job.id, token, outcome.delay_ms, failure=fields, now_ms=now_ms)
            case RescheduledByWorker():
                return move_to_delayed(keys, job.id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
            case _:
                return _requested_call(acquired, outcome, now_ms)

    def _failed_call(self, acquired: AcquiredJob, outcome: FailedOutcome, fetch_next: bool, now_ms: int) -> Call[Any]:
        keys, job, token, revoked = acquired.keys, acquired.job, acquired.slot.token, outcome.category == REVOKED
        fields = job.failure_fields(outcome.reason, outcome.trace)
        keep = job.keep("removeOnFail", self._config.keep_failed)
        finish = FinishOptions(False, fields[1].encode(), keep, job.attempts, fields)
        fetch = fetch_next and not (revoked or outcome.malformed)  # their scripts fetch no job
        options = self._fetch_options.get(keys, token)
        call = move_to_finished(keys, job.id, options, finish, fetch_next=fetch, now_ms=now_ms)
        if outcome.malformed:
            return quarantine(keys, call, token)
        return finish_revoked(keys, call) if revoked else call

    def limit_call(self, acquired: AcquiredJob, outcome: RateLimited) -> Call[None]:
        """Return the call that rate-limits the job's queue; make it before the job is released.

        Redis applies such a limit only if the queue or its workers have one. This child applies it in any case, as
        Node.js workers do.
        """
        self._rate_limited(acquired.queue_index, outcome.limit_ms)
        return limit_now(acquired.keys, outcome.limit_ms)

    # ---- when the write fails ----

    def settle_again(self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError) -> Settlement:
        """Return the steps that follow after writing ``outcome`` failed with ``exc``.

        While Redis is unavailable the outcome is kept and written again; the supervisor renews the job's lock.

        Returns:
            A generator. It returns the outcome that Redis has stored (``None`` if the lock was lost), the next job,
            and the error of the fetch that followed the write, if the script stopped there.
        """
        uncertain = False
        while True:
            if isinstance(exc, RECOVERABLE):
                uncertain = uncertain or isinstance(exc, BrokerUnavailableError)
                yield BackoffStep(exc)
            else:
                again, stored = yield from self._after_error(acquired, outcome, exc, uncertain)
                if again is None:
                    fetch_error = exc if stored and isinstance(exc, BrokerError) else None
                    return (outcome if stored else None), None, fetch_error
                outcome = again
            try:
                following = yield WriteStep(outcome, uncertain)
            except (BrokerError, JobError) as fault:
                exc = fault
            else:
                return outcome, following, None

    def _after_error(
        self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError, uncertain: bool
    ) -> Generator[Call[bool], bool, tuple[Outcome | None, bool]]:
        """Return the outcome to write next, or ``None`` and whether Redis has stored ``outcome`` already."""
        # A script that stores the outcome may stop later: mostly at the next job.
        if isinstance(exc, BrokerError) and (yield self.already_applied(acquired)):
            return None, True
        if isinstance(exc, _UNSTORABLE):
            return self.fallback(acquired, outcome, exc), False
        if uncertain and (yield self.already_applied(acquired)):
            return None, True
        renewed = isinstance(exc, LockMissingError) and (yield self.reacquire_lock(acquired))
        return (outcome if renewed else None), False

    def fallback(self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError) -> Outcome | None:
        """Return the outcome to write instead when Redis refuses ``outcome`` and waiting would not help.

        A malformed hash makes BullMQ's scripts fail, and a flow's parent cannot complete while children are pending
        or failed. Such a job fails with that reason; for a malformed one bulltask's own script is used, which does not
        read the malformed fields. A parent with pending children is retried first, as in Node.js.

        ``None`` means that nothing can be written: the job is left to the stalled check, so that one malformed job
        does not block a child forever.

        A job that would wait for children, but has none left, is released: it runs again at once, as if its last
        child had ended a moment later.
        """
        if isinstance(exc, NoPendingChildrenError):
            return Released()
        by_script = isinstance(exc, BrokerError)
        if isinstance(outcome, FailedOutcome):
            return replace(outcome, malformed=True) if by_script and not outcome.malformed else None
        reason = f"the outcome of the job could not be stored: {exc}"
        attempts_made = acquired.job.attempts_made + 1
        if isinstance(exc, PendingChildrenError) and attempts_made < acquired.job.attempts:
            with suppress(DecodeError):  # a malformed backoff: the job fails
                return Retried(acquired.job.retry_delay_ms(attempts_made), reason, "", "transient")
        return FailedOutcome(reason, "", "permanent", malformed=by_script)

    def already_applied(self, acquired: AcquiredJob) -> Call[bool]:
        """Return the call that checks whether Redis carried out a write whose reply was lost.

        It did if the attempt was counted, or if the job is gone and its retention says so. Otherwise the lock ran out
        and another worker has the job, or Redis has lost its data.
        """
        wanted, may_be_gone = min(acquired.job.attempts_made + 1, MAX_NUMBER), self._is_removed_soon(acquired.job)

        def parse_reply(reply: Any) -> bool:
            name, attempts_made = reply
            try:
                return may_be_gone if name is None else counter(attempts_made or b"0") >= wanted
            except ValueError:
                return False

        return command("HMGET", acquired.keys.job(acquired.job.id), "name", "atm", parse_reply=parse_reply)

    def reacquire_lock(self, acquired: AcquiredJob) -> Call[bool]:
        """Return the call that takes an expired lock again; its result says whether the job is still ours.

        Redis was unavailable, or the supervisor stood still, for longer than the lock lasts. The outcome is valid as
        long as no other worker has acquired the job.
        """
        return renew_lock(acquired.keys, acquired.job.id, acquired.slot.token, self._config.lock_ms)

    def _is_removed_soon(self, job: RunningJob) -> bool:
        """Whether retention may remove the job before a write with a lost reply is repeated."""
        options = (("removeOnComplete", self._config.keep_completed), ("removeOnFail", self._config.keep_failed))
        kept = [job.keep(*option) for option in options]
        return any(keep.get("count", -1) >= 0 or keep.get("age", _LONG_S) < _LONG_S for keep in kept)

    # ---- after the write ----

    def after_settle(self, acquired: AcquiredJob, outcome: Outcome | None) -> Call[Any] | None:
        """Return the call to make after ``outcome`` was written, if any; its result is not used.

        * BullMQ 5.72 and newer hold a job back while another one with its deduplication id runs
          (``keepLastIfActive``). 5.62's script does not add it afterwards, so this call does.
        * A job whose task is unknown gets a line in its log, once. Boards show the job as delayed, without an error.
        """
        job = acquired.job
        if isinstance(outcome, RescheduledByWorker):
            if outcome.reason or job.attempts_started > 1:
                return None
            line = _UNKNOWN_TASK.format(job.name)
            return add_log(acquired.keys, job.id, line, job.opts.get("kl"), self._config.max_logs)
        if not job.deduplication_id or not isinstance(outcome, CompletedOutcome | FailedOutcome):
            return None
        return add_kept_job(acquired.keys, job.deduplication_id, job.id, self._clock.now_ms())

    def emit(self, acquired: AcquiredJob, outcome: Outcome | None, duration_ms: float) -> None:
        """Emit the event of a written outcome; ``None``: it was discarded because the lock was lost."""
        job = acquired.job
        match outcome:
            case CompletedOutcome():
                if self._bus.wants(JobCompleted):
                    self._bus.emit(JobCompleted(job.id, job.queue, job.name, duration_ms, outcome.result))
            case FailedOutcome():
                self._bus.emit(_failed_event(job, outcome, duration_ms))
            case Retried():
                self._bus.emit(_retried_event(job, outcome, duration_ms))
            case RescheduledByWorker() if outcome.reason:
                self._bus.emit(SchedulingFailed(job.id, job.queue, job.scheduler_id, outcome.reason, outcome.delay_ms))
            case RescheduledByWorker():
                self._bus.emit(UnknownTaskSeen(job.id, job.queue, job.name, outcome.delay_ms))
            case None:
                self._bus.emit(LockLost(job.id, job.queue, job.name))
            case _:
                self._bus.emit(JobReleased(job.id, job.queue, job.name, release_reason(outcome)))

    def emit_loop_stopped(self, jobs: Sequence[str], raised: BaseException | None) -> None:
        """Emit that the event loop has ended while these jobs ran. A process that a task has forked ends here."""
        exit_if_forked(self._pid, raised)
        error = "" if raised is None else "".join(traceback.format_exception_only(raised)).strip()
        self._bus.emit(EventLoopStopped(self._pid, tuple(jobs), error))


def _requested_call(acquired: AcquiredJob, outcome: RequestedOutcome, now_ms: int) -> Call[Any]:
    keys, job_id, token = acquired.keys, acquired.job.id, acquired.slot.token
    match outcome:
        case RescheduledByTask():
            return move_to_delayed(keys, job_id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
        case Released() | RateLimited():
            return move_from_active_to_wait(keys, job_id, token)
        case WaitingForChildren():
            return move_to_waiting_children(keys, job_id, token, now_ms)


def _failed_event(job: RunningJob, outcome: FailedOutcome, duration_ms: float) -> JobFailed:
    attempts_made, raised = job.attempts_made + 1, outcome.exception
    error, category, trace = outcome.reason, outcome.category, outcome.trace
    return JobFailed(job.id, job.queue, job.name, duration_ms, error, category, attempts_made, trace, raised)


def _retried_event(job: RunningJob, outcome: Retried, duration_ms: float) -> JobRetried:
    attempts_made, raised = job.attempts_made + 1, outcome.exception
    error, category, delay_ms = outcome.reason, outcome.category, outcome.delay_ms
    return JobRetried(job.id, job.queue, job.name, duration_ms, error, category, attempts_made, delay_ms, raised)
