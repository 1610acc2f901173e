"""Finishes jobs: builds the call that writes an attempt's outcome and fetches the next job, and emits the event.

Begin with :class:`Finisher`, which both loops of a child use. :class:`OutcomeWriter` makes the calls of the main
thread; :class:`FailedWriteHandler` repeats a write that has failed, or writes another outcome.
"""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from bulltask.config.config import Config
from bulltask.config.process import exit_if_forked
from bulltask.jobs import codec
from bulltask.jobs.clock import ServerClock, mono_ms
from bulltask.jobs.codec import counter
from bulltask.jobs.errors import (
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
from bulltask.jobs.fields import ERROR_FIELD, KEEP_ALL, NO_RESULTS
from bulltask.jobs.job import BULLTASK_KEY, RELEASES_FIELD, RunningJob, StoredOptions
from bulltask.jobs.names import FAN_OUT, REVOKED
from bulltask.jobs.stored_job import FAILED_JOB_FIELD
from bulltask.observe.bus import Bus
from bulltask.observe.counters import MetricsBlock
from bulltask.observe.events import (
    EventLoopMisused,
    EventLoopStopped,
    JobCompleted,
    JobIncompatible,
    JobReleased,
    LockLost,
    SchedulingFailed,
)
from bulltask.transport.call import Call, command
from bulltask.transport.scripts.add import add_deferred_duplicate
from bulltask.transport.scripts.job import add_log, finish_revoked
from bulltask.transport.scripts.move import (
    FinishOptions,
    delay_incompatible,
    fail_malformed,
    finish_with_errbacks,
    move_from_active_to_wait,
    move_to_delayed,
    move_to_finished,
    move_to_waiting_children,
    move_with_fields,
    renew_lock,
    retry_job,
    wake_next,
    with_dependents,
)
from bulltask.transport.scripts.queue import limit_now
from bulltask.worker.broker_backoff import MalformedJobHandler, errback_jobs, parent_waits, with_parent_waits
from bulltask.worker.fetch import FetchOptionsCache, JobFetcher
from bulltask.worker.outcomes import (
    AcquiredJob,
    CompletedOutcome,
    FailedOutcome,
    IncompatibleOutcome,
    Outcome,
    RateLimitedOutcome,
    ReleasedOutcome,
    RequestedOutcome,
    RescheduledByTaskOutcome,
    RescheduledByWorkerOutcome,
    RetriedOutcome,
    WaitingForChildrenOutcome,
    checkpoint_fields,
    counter_of,
    failed_event,
    request_fields,
    requested_event,
    retried_event,
)
from bulltask.worker.run_hooks import RunHooks
from bulltask.worker.slots import SlotState

__all__ = [
    "Finisher",
    "OutcomeWriter",
    "options_after_retry",
]


_NEED_FALLBACK: Final = (BrokerError, PendingChildrenError, FailedChildrenError, NoPendingChildrenError)
"""Errors, apart from ``RECOVERABLE`` ones, that require another outcome: see :meth:`FailedWriteHandler.fallback`."""

_FAST_RETRIES: Final = 10
_SLOW_RETRY_MS: Final = 1_000
"""The shortest delay of a parent with pending child jobs after ``_FAST_RETRIES`` retries, so that it does not spin."""

_MAX_RETRY_S: Final = 3_600
"""A call is assumed to be retried for at most this long."""

_MAX_FINISHED: Final = 100_000
"""Fewer other jobs of the queue than this are assumed to finish in the same way meanwhile."""


T = TypeVar("T")


def run_at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing on the event loop, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError(f"{coroutine!r} waits")


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
    """Decides what to do after a failed write of an outcome. Both loops of a child use it; it makes no calls itself."""

    def __init__(self, config: Config) -> None:
        self._config = config

    async def write_again(  # noqa: C901 - a branch for each kind of error
        self,
        acquired: AcquiredJob,
        outcome: Outcome,
        exc: BulltaskError,
        *,
        write: Callable[[Outcome, bool], Awaitable[AcquiredJob | None]],
        run: Callable[[Call[bool]], Awaitable[bool]],
        back_off: Callable[[BrokerError], Awaitable[None]],
    ) -> tuple[Outcome | None, AcquiredJob | None, BrokerError | None]:
        """Write an outcome, or another one, until Redis has stored it or the lock is lost.

        While Redis is unavailable, the outcome is kept and written again; the supervisor renews the job's lock.

        Args:
            acquired, outcome, exc: The job, its outcome, and the error of the first write.
            write: Writes an outcome, and returns the next job if the reply contains one. It is also told whether the
                reply to an earlier write was lost, so that Redis may have executed that write.
            run: Makes a call until there is a reply; returns False after an error reply.
            back_off: Waits after an error.

        Returns:
            The outcome that Redis has stored (``None`` if the lock was lost), the next job, and the error of the fetch
            after the write, if the script failed with an error during that fetch.
        """
        lost_reply = False
        renew = renew_lock(acquired.keys, acquired.job.id, acquired.slot.token, self._config.lock_ms)
        while True:
            if isinstance(exc, RECOVERABLE) and not _is_parent_forbidden(acquired, exc):
                lost_reply = lost_reply or isinstance(exc, BrokerUnavailableError)
                await back_off(exc)
            # A script that has stored the outcome may still fail with an error afterwards, usually on the next job.
            elif isinstance(exc, BrokerError) and await run(self.already_applied(acquired)):
                return outcome, None, exc
            elif isinstance(exc, _NEED_FALLBACK):
                if (fallback := self.fallback(acquired, outcome, exc)) is None:
                    return None, None, None
                outcome = fallback
            elif lost_reply and await run(self.already_applied(acquired)):
                return outcome, None, None
            # Redis was unavailable, or the supervisor was suspended, for longer than the lock lasts. The outcome is
            # valid unless another worker has acquired the job.
            elif not (isinstance(exc, LockMissingError) and await run(renew)):
                return None, None, None
            try:
                return outcome, await write(outcome, lost_reply), None
            except (BrokerError, JobError) as error:
                exc = error

    def fallback(self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError) -> Outcome | None:
        """Return the outcome to write instead of ``outcome`` after an error that waiting cannot fix.

        BullMQ's scripts fail with an error on a malformed hash, and a flow's parent cannot complete while child jobs
        are pending or failed; nor can a child job whose parent's keys the ACL forbids. Such a job fails with that error
        as its reason; a malformed job, and such a child job, is failed by bulltask's script, which does not read the
        malformed fields. A parent with pending child jobs is retried first, as in Node.js, but no longer immediately if
        it has been retried many times. A job that requested to wait for child jobs, but has none pending, is released.

        ``None`` means that nothing can be written. The job is then left to the stalled check, so that one malformed job
        does not block a child forever.
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
        2^53-1 cannot be compared, so such a write is assumed not to have been executed.
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

    def _may_be_removed(self, job: RunningJob) -> bool:
        """Whether, after a reply was lost, retention may remove the job before the write is retried."""
        options = (("removeOnComplete", self._config.keep_completed), ("removeOnFail", self._config.keep_failed))
        kept = [job.keep(*option) for option in options]
        return any(
            0 <= keep.get("count", -1) < _MAX_FINISHED or keep.get("age", _MAX_RETRY_S) < _MAX_RETRY_S for keep in kept
        )


_REMOVAL_INTERVAL_MS: Final = 5
"""One call removes up to 100 jobs, so this is at least as many as a child can complete in that time."""


class Finisher:
    """Builds the script call for an outcome, and emits its event.

    It does no I/O: the sync loop and the async loop make the calls with separate clients.

    Attributes:
        counts: Where attempts are counted, if metrics are on.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        config: Config,
        clock: ServerClock,
        bus: Bus,
        worker_id: str,
        rate_limited: Callable[[int, int], None] = lambda _index, _limit_ms: None,
        hooks: RunHooks | None = None,
        counts: MetricsBlock | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._bus = bus
        self.counts = counts
        self._rate_limited = rate_limited
        self._hooks = hooks
        self.failed_writes = FailedWriteHandler(config)
        self.malformed = MalformedJobHandler(clock, config, bus)
        self._next_removals_ms: dict[str, int] = {}
        self._fetch_options = FetchOptionsCache(config, worker_id)
        self._pid = os.getpid()

    def call(self, acquired: AcquiredJob, outcome: Outcome, *, fetch_next: bool) -> tuple[Call[Any], bool]:
        """Return the call that writes ``outcome``, and whether it also fetches the next job.

        With ``fetch_next``, it does if the job completes or fails, with few exceptions.
        """
        if os.getpid() != self._pid:
            exit_if_forked(self._pid)  # a process that user code has forked must not finish its parent's job
        keys, job = acquired.keys, acquired.job
        # The server's time may be milliseconds ahead of this estimate; a job must not finish before it was acquired.
        now_ms = max(self._clock.now_ms(), job.processed_on_ms)
        call: Call[Any]
        if isinstance(outcome, CompletedOutcome):
            keep = job.keep("removeOnComplete", self._config.keep_completed)
            if "age" in keep and "count" not in keep:
                # Otherwise, BullMQ's script would look for old jobs once per job, which takes a tenth of its time.
                if now_ms < self._next_removals_ms.get(job.queue, 0):
                    keep = KEEP_ALL
                else:
                    self._next_removals_ms[job.queue] = now_ms + _REMOVAL_INTERVAL_MS
            fields = [] if outcome.checkpoint is None else checkpoint_fields(outcome)
            finish = FinishOptions(True, outcome.value, keep, job.opts.attempts, fields)
            options, fans_out = self._fetch_options[keys, acquired.slot.token], job.name == FAN_OUT
            fetches = fetch_next and not fans_out
            call = move_to_finished(keys, job.id, options, finish, fetch_next=fetches, now_ms=now_ms)
            if fans_out:
                call = with_dependents(keys, job, call, outcome.value, now_ms)
        elif isinstance(outcome, FailedOutcome):
            call, fetches = self._failed_call(acquired, outcome, fetch_next, now_ms)
        else:
            call, fetches = _move_call(acquired, outcome, now_ms), False
        return (call, True) if fetches else (wake_next(keys, call), False)

    def _failed_call(
        self, acquired: AcquiredJob, outcome: FailedOutcome, fetch_next: bool, now_ms: int
    ) -> tuple[Call[Any], bool]:
        keys, job, token, revoked = acquired.keys, acquired.job, acquired.slot.token, outcome.category == REVOKED
        fields = [*job.failure_fields(outcome.reason, outcome.trace), *checkpoint_fields(outcome)]
        if outcome.failed_job is not None:
            fields += [FAILED_JOB_FIELD, json.dumps(outcome.failed_job.to_dict())]
        if outcome.error:
            fields += [ERROR_FIELD, outcome.error]
        if job.releases:
            fields += [RELEASES_FIELD, "0"]  # for the case that somebody retries the job
        keep = job.keep("removeOnFail", self._config.keep_failed)
        finish = FinishOptions(False, fields[1].encode(), keep, job.attempts_in_queue, fields)
        # In these cases, the script cannot fetch the next job.
        errbacks = []
        if not revoked:
            errbacks = errback_jobs(job, outcome.reason, outcome.trace, self._config, now_ms, outcome.failed_job)
        fetch = fetch_next and not (revoked or outcome.malformed or errbacks or job.name == FAN_OUT)
        options = self._fetch_options[keys, token]
        call = move_to_finished(keys, job.id, options, finish, fetch_next=fetch, now_ms=now_ms)
        call = with_dependents(keys, job, call, None, now_ms)
        failure: Call[Any] = fail_malformed(keys, call, token) if outcome.malformed else call
        if revoked and not outcome.malformed:
            failure = finish_revoked(keys, call)
        elif errbacks:
            failure = finish_with_errbacks(failure, errbacks)
        return failure, fetch

    def limit_call(self, acquired: AcquiredJob, outcome: RateLimitedOutcome) -> Call[None]:
        """Return the call that rate-limits the job's queue; make it before the job is released.

        BullMQ's scripts, and so other workers, apply the limit only if the queue or its workers have a rate limit. This
        child always applies it, as a Node.js worker does that calls `rateLimit()`.
        """
        self._rate_limited(acquired.queue_index, outcome.limit_ms)
        return limit_now(acquired.keys, outcome.limit_ms)

    def after_finish(self, acquired: AcquiredJob, outcome: Outcome | None) -> Call[Any] | None:
        """Return the call to make after ``outcome`` was written, if any; its result is not used.

        * BullMQ 5.72 and newer defer a duplicate while the owner of its deduplication id is running
          (``keepLastIfActive``). BullMQ 5.62's script does not add it afterwards, so this call does.
        * A line is added to the log of a job that this worker cannot run, because dashboards show it only as delayed.
        """
        job = acquired.job
        if isinstance(outcome, IncompatibleOutcome):
            if not outcome.is_first:
                return None
            line = f"{outcome.reason}; the job waits for a worker that can run it"
            return add_log(acquired.keys, job.id, line, job.opts.get("kl"), self._config.max_logs)
        if not job.opts.deduplication_id or not isinstance(outcome, CompletedOutcome | FailedOutcome):
            return None
        return add_deferred_duplicate(acquired.keys, job.deduplication_id, job.id, self._clock.now_ms())

    def ending(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> None:
        """Note how the attempt will be counted, if there are counts; call this before its outcome is written.

        It is called again with each further write, which may be of another outcome.
        """
        if self.counts is not None and (counter := counter_of(outcome)) is not None:
            job, slot = acquired.job, acquired.slot
            made = job.attempts_made + 1 - job.opts.retries_before
            self.counts.ending(slot.index, slot.order, made, job.queue, job.name, counter, duration_ms)

    def ended(self, acquired: AcquiredJob, written: Outcome | None, duration_ms: float) -> None:
        """Count the attempt, if its outcome was written and there are counts, before its slot is given back."""
        if self.counts is None:
            return
        job, index = acquired.job, acquired.slot.index
        if (counter := counter_of(written)) is None:
            self.counts.not_ended(index)
        else:
            self.counts.ended(index, job.queue, job.name, counter, duration_ms)

    def have_hooks(self, outcome: Outcome) -> bool:
        """Return whether hooks are called after an outcome has been written."""
        return self._hooks is not None and self._hooks.follow(outcome)

    def emit(
        self, acquired: AcquiredJob, outcome: Outcome | None, duration_ms: float
    ) -> Coroutine[Any, Any, None] | None:
        """Emit the event of a written outcome, and call the hooks that follow it.

        Each attempt that its child ends passes here once, whichever loop has run it, with or without metrics; but the
        call that wrote its outcome may already have fetched the next job. Without an outcome, it was discarded because
        the lock was lost. If some hooks are coroutine functions, or need a thread, a coroutine that calls them is
        returned.
        """
        job = acquired.job
        if type(outcome) is not CompletedOutcome:
            self._emit_other(job, outcome, duration_ms)
        elif self._bus.listeners[JobCompleted]:
            self._bus.emit(JobCompleted(job.id, job.queue, job.name, duration_ms, outcome.result))
        hooks = self._hooks
        if hooks is not None and (hooks.runs or type(outcome) is not CompletedOutcome) and hooks.follow(outcome):
            return hooks.finished(job, outcome)
        return None

    def _emit_other(self, job: RunningJob, outcome: Outcome | None, duration_ms: float) -> None:
        assert not isinstance(outcome, CompletedOutcome)
        match outcome:
            case FailedOutcome():
                self._bus.emit(failed_event(job, outcome, duration_ms))
            case RetriedOutcome():
                self._bus.emit(retried_event(job, outcome, duration_ms))
            case RescheduledByWorkerOutcome():
                self._bus.emit(SchedulingFailed(job.id, job.queue, job.scheduler_id, outcome.reason, outcome.delay_ms))
            case IncompatibleOutcome():
                self._bus.emit(JobIncompatible(job.id, job.queue, job.name, outcome.reason, outcome.delay_ms))
            case None:
                self._bus.emit(LockLost(job.id, job.queue, job.name))
            case _:
                self._bus.emit(requested_event(job, outcome))

    def emit_loop_misused(self, job: RunningJob | None, problem: str, where: str, raised: BaseException | None) -> None:
        """Emit the event that a job's code affects others on the event loop; a process that it forked exits."""
        exit_if_forked(self._pid, raised)
        names = ("", "", "") if job is None else (job.id, job.queue, job.name)
        self._bus.emit(EventLoopMisused(*names, problem, where))

    def emit_released(self, job: RunningJob, reason: str) -> None:
        """Emit the event of a job that is released although its task has not requested it."""
        self._bus.emit(JobReleased(job.id, job.queue, job.name, reason))

    def emit_loop_stopped(self, jobs: Sequence[str], raised: BaseException | None) -> None:
        """Emit the event that the loop stopped while these jobs were running; a process that a task forked exits."""
        exit_if_forked(self._pid, raised)
        error = "" if raised is None else "".join(traceback.format_exception_only(raised)).strip()
        self._bus.emit(EventLoopStopped(self._pid, tuple(jobs), error))


def _retry_fields(job: RunningJob, outcome: RetriedOutcome) -> list[str]:
    fields = [*job.failure_fields(outcome.reason, outcome.trace), *checkpoint_fields(outcome)]
    if outcome.data is not None:
        fields += ["data", outcome.data.decode()]
    if (opts := options_after_retry(job, outcome)) is not job.opts:
        fields += ["opts", codec.encode(opts, what=f"the options of job {job.id}").decode()]
    return fields


def options_after_retry(job: RunningJob, outcome: RetriedOutcome) -> StoredOptions:
    """Return the options of a job after an attempt: another expiry, or no argument from a previous step."""
    changed: dict[str, Any] = {}
    if outcome.expires_ms is not None:
        changed["expires"] = outcome.expires_ms
    if outcome.data is not None and "shape" in job.canvas:  # the new data contains the result
        changed["canvas"] = {name: value for name, value in job.canvas.items() if name != "shape"} | NO_RESULTS
    if not changed:
        return job.opts
    own = {name: value for name, value in job.opts.bulltask.items() if name != "ttl" or "expires" not in changed}
    return StoredOptions({**job.opts, BULLTASK_KEY: {**own, **changed}})


def _move_call(
    acquired: AcquiredJob,
    outcome: RetriedOutcome | RescheduledByWorkerOutcome | IncompatibleOutcome | RequestedOutcome,
    now_ms: int,
) -> Call[Any]:
    """Return the call that writes the outcome of a job that will run again."""
    keys, job, token = acquired.keys, acquired.job, acquired.slot.token
    call: Call[Any]
    match outcome:
        case RetriedOutcome(delay_ms=0):
            fields = _retry_fields(job, outcome)
            return retry_job(keys, job.id, token, lifo=job.lifo, fields=fields, now_ms=now_ms)
        case RetriedOutcome():
            fields = _retry_fields(job, outcome)
            return move_to_delayed(keys, job.id, token, outcome.delay_ms, failure=fields, now_ms=now_ms)
        case RescheduledByWorkerOutcome():
            return move_to_delayed(keys, job.id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
        case IncompatibleOutcome():
            move = move_to_delayed(keys, job.id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
            return delay_incompatible(keys, job.id, move, outcome.reason, outcome.since)
        case RescheduledByTaskOutcome():
            call = move_to_delayed(keys, job.id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
        case ReleasedOutcome() | RateLimitedOutcome():
            call = move_from_active_to_wait(keys, job.id, token)
        case WaitingForChildrenOutcome():
            call = move_to_waiting_children(keys, job.id, token, now_ms)
    fields = request_fields(job, outcome)
    return move_with_fields(keys, job.id, fields, call) if fields else call


class OutcomeWriter:
    """Writes outcomes; while Redis is unavailable, it repeats the call, and the supervisor renews the job's lock.

    Attributes:
        counts: Where attempts are counted, if metrics are on.
        ending, ended, limit_call: Those of the :class:`Finisher`.
    """

    def __init__(self, fetcher: JobFetcher, finisher: Finisher) -> None:
        self._fetcher = fetcher
        self._finisher = finisher
        self.counts = finisher.counts
        self.ending = finisher.ending
        self.ended = finisher.ended
        self.limit_call = finisher.limit_call

    def write(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> AcquiredJob | None:
        """Write the outcome of one job; return the next job, in the same slot, if the call has fetched it.

        Otherwise, the slot is given back.
        """
        fetcher, fetch_error = self._fetcher, None
        written: Outcome | None = outcome
        if self.counts is not None:
            self._finisher.ending(acquired, outcome, duration_ms)
        acquired.slot.enter(SlotState.FINISHING, mono_ms())
        try:
            next_job = self._exchange(acquired, outcome, fetch=fetcher.may_fetch_next)
        except (BrokerError, JobError) as exc:
            written, next_job, fetch_error = self._write_again(acquired, outcome, exc, duration_ms, fetch=True)
        if self.counts is not None:
            self._finisher.ended(acquired, written, duration_ms)
        if fetch_error is not None:
            fetcher.fail_malformed(acquired.queue_index, acquired.slot, fetch_error)
        if next_job is None:
            fetcher.pool.give_back(acquired.slot)
        self.after_write(acquired, written, duration_ms)
        return next_job

    def call(self, acquired: AcquiredJob, outcome: Outcome, *, fetch_next: bool) -> tuple[Call[Any], bool]:
        """:meth:`Finisher.call`, but fetch the next job only if it would be from the same queue."""
        fetch_next = fetch_next and not self._fetcher.has_several_queues
        return self._finisher.call(acquired, outcome, fetch_next=fetch_next)

    def write_many(self, ended: Sequence[tuple[AcquiredJob, Outcome]], duration_ms: float) -> None:
        """Write the outcomes in one round trip, and give the slots back.

        Each job has its own call, so an error affects only one job.
        """
        for acquired, outcome in ended:
            self._finisher.ending(acquired, outcome, duration_ms)
            acquired.slot.enter(SlotState.FINISHING, mono_ms())
        for (acquired, outcome), error in zip(ended, self._write_batch(ended), strict=True):
            written: Outcome | None = outcome
            if isinstance(error, BrokerError | JobError):
                written = self.recover(acquired, outcome, error, duration_ms)
            self._finisher.ended(acquired, written, duration_ms)
            self.after_write(acquired, written, duration_ms)
            self._fetcher.pool.give_back(acquired.slot)

    def recover(
        self, acquired: AcquiredJob, outcome: Outcome, error: BulltaskError, duration_ms: float
    ) -> Outcome | None:
        """Write an outcome whose first write has failed; return the outcome that Redis has stored, if any.

        If the script stored the outcome and then failed on the next job, that job is failed.
        """
        written, _, fetch_error = self._write_again(acquired, outcome, error, duration_ms, fetch=False)
        if fetch_error is not None:
            self._fetcher.fail_malformed(acquired.queue_index, acquired.slot, fetch_error)
        return written

    def after_write(self, acquired: AcquiredJob, written: Outcome | None, duration_ms: float) -> None:
        """Make the call that follows an outcome, emit its event, and call the hooks."""
        if self._fetcher.backoff.is_active:
            self._fetcher.backoff.reset()
        has_call = acquired.job.opts.deduplication_id or type(written) is IncompatibleOutcome
        if has_call and (call := self._finisher.after_finish(acquired, written)) is not None:
            self._run_until_reply(call)
        if (hooks := self._finisher.emit(acquired, written, duration_ms)) is not None:
            asyncio.run(hooks)  # those of an async task whose function was not called

    def _write_batch(self, ended: Sequence[tuple[AcquiredJob, Outcome]]) -> Sequence[object]:
        """Return the reply to each call, or its error."""
        try:
            limits = [
                self._finisher.limit_call(acquired, outcome)
                for acquired, outcome in ended
                if isinstance(outcome, RateLimitedOutcome)
            ]
            calls = [self._finisher.call(acquired, outcome, fetch_next=False)[0] for acquired, outcome in ended]
            return self._fetcher.client.try_many([*limits, *calls])[len(limits) :]
        except BrokerError as exc:
            return [exc] * len(ended)

    def _exchange(self, acquired: AcquiredJob, outcome: Outcome, *, fetch: bool) -> AcquiredJob | None:
        """Write the outcome and fetch the next job, from the same or another queue, in one round trip."""
        fetcher, slot = self._fetcher, acquired.slot
        if isinstance(outcome, RateLimitedOutcome):
            fetcher.client.run(self._finisher.limit_call(acquired, outcome))
        index = acquired.queue_index
        if fetcher.has_several_queues:
            index = fetcher.round_robin.after(index)
        same = index == acquired.queue_index
        call, fetches = self._finisher.call(acquired, outcome, fetch_next=fetch and same)
        if same or not fetch:
            reply = fetcher.client.run(call)
            return fetcher.adopt(index, slot, reply) if fetches else None
        finished, fetched = fetcher.client.try_many([call, fetcher.fetch_call(index, slot)])
        if isinstance(finished, BulltaskError):
            fetcher.release_fetched(index, slot, fetched)
            raise finished
        if isinstance(fetched, BulltaskError):
            # The outcome is stored. The next fetch raises the same error and handles it.
            if isinstance(fetched, BrokerUnavailableError):  # another node of a cluster
                fetcher.record_lost_call(fetched, slot, index)
            elif isinstance(fetched, BrokerError):
                fetcher.fail_malformed(index, slot, fetched)
            return None
        return fetcher.adopt(index, slot, fetched)

    def _write_again(
        self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError, duration_ms: float, *, fetch: bool
    ) -> tuple[Outcome | None, AcquiredJob | None, BrokerError | None]:
        async def write(outcome: Outcome, lost_reply: bool) -> AcquiredJob | None:
            self._finisher.ending(acquired, outcome, duration_ms)  # it may be another one
            return self._exchange(acquired, outcome, fetch=fetch and self._fetcher.may_fetch_next and not lost_reply)

        async def run(call: Call[bool]) -> bool:
            return bool(self._run_until_reply(call))

        async def back_off(exc: BrokerError) -> None:
            self._fetcher.record_lost_call(exc, acquired.slot, acquired.queue_index)
            self._fetcher.back_off(exc)

        write_again = self._finisher.failed_writes.write_again
        return run_at_once(write_again(acquired, outcome, exc, write=write, run=run, back_off=back_off))

    def _run_until_reply(self, call: Call[Any]) -> Any:
        """Retry a call until there is a reply; return ``False`` after an error reply."""
        while True:
            try:
                return self._fetcher.client.run(call)
            except RECOVERABLE as exc:
                self._fetcher.back_off(exc)
            except (BrokerError, JobError):
                return False
