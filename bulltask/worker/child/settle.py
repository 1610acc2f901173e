"""Settles jobs: builds the call that writes the outcome of an attempt to Redis, and emits its event."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from bulltask.clock import ServerClock
from bulltask.config.config import Config
from bulltask.events import (
    Bus,
    EventLoopMisused,
    EventLoopStopped,
    JobCompleted,
    JobIncompatible,
    JobReleased,
    LockLost,
    SchedulingFailed,
)
from bulltask.jobs import codec
from bulltask.jobs.child_results import NO_RESULTS
from bulltask.jobs.errbacks import FAILED_JOB_FIELD
from bulltask.jobs.failures import ERROR_FIELD
from bulltask.jobs.job import RELEASES_FIELD, RunningJob
from bulltask.jobs.names import FAN_OUT
from bulltask.jobs.retention import KEEP_ALL
from bulltask.jobs.states import REVOKED
from bulltask.jobs.stored_options import BULLTASK_KEY, StoredOptions
from bulltask.process import exit_if_forked
from bulltask.transport.call import Call
from bulltask.transport.scripts.add import add_deferred_duplicate
from bulltask.transport.scripts.canvas import finish_with_errbacks, with_dependents
from bulltask.transport.scripts.checkpoint import move_with_fields
from bulltask.transport.scripts.incompatible import delay_incompatible
from bulltask.transport.scripts.job import add_log, finish_revoked
from bulltask.transport.scripts.move import (
    FinishOptions,
    fail_malformed,
    move_from_active_to_wait,
    move_to_delayed,
    move_to_finished,
    move_to_waiting_children,
    retry_job,
    wake_next,
)
from bulltask.transport.scripts.queue import limit_now
from bulltask.worker.child.failed_writes import FailedWriteHandler
from bulltask.worker.child.fetch_options import FetchOptionsCache
from bulltask.worker.child.outcome_events import failed_event, requested_event, retried_event
from bulltask.worker.child.outcomes import (
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
    request_fields,
)
from bulltask.worker.child.run_hooks import RunHooks
from bulltask.worker.errback_jobs import errback_jobs

__all__ = ["Settler", "options_after_retry"]

_REMOVAL_INTERVAL_MS: Final = 5
"""One call removes up to 100 jobs, so this is at least as many as a child can complete in that time."""


class Settler:
    """Builds the script call for an outcome, and emits its event.

    It does no I/O: the sync loop and the async loop make the calls with separate clients.

    Args:
        config: Lock duration, and the settings for retention and metrics.
        clock: The server's time.
        bus: Receives the event of each outcome.
        worker_id: Stored in the next job as the worker that runs it.
        rate_limited: Called with a queue's index and a time in milliseconds when a task rate-limits its queue.
        hooks: The hooks of the app.

    Attributes:
        failed_writes: Decides what to do after a failed write of an outcome.
    """

    def __init__(
        self,
        config: Config,
        clock: ServerClock,
        bus: Bus,
        worker_id: str,
        rate_limited: Callable[[int, int], None] = lambda _index, _limit_ms: None,
        hooks: RunHooks | None = None,
    ) -> None:
        self._config, self._clock, self._bus, self._rate_limited = config, clock, bus, rate_limited
        self._hooks, self.failed_writes = hooks, FailedWriteHandler(config)
        self._next_removals_ms: dict[str, int] = {}
        self._fetch_options, self._pid = FetchOptionsCache(config, worker_id), os.getpid()

    def call(self, acquired: AcquiredJob, outcome: Outcome, *, fetch_next: bool) -> Call[Any]:
        """Return the call that writes ``outcome``; only ``moveToFinished`` can fetch the next job in the same step."""
        exit_if_forked(self._pid)  # a process that user code has forked must not settle its parent's job
        call = self._call(acquired, outcome, fetch_next)
        fetches = fetch_next and call.script is not None and call.script.name == "moveToFinished"
        return call if fetches else wake_next(acquired.keys, call)

    def _call(self, acquired: AcquiredJob, outcome: Outcome, fetch_next: bool) -> Call[Any]:
        keys, job, token = acquired.keys, acquired.job, acquired.slot.token
        # The server's time may be milliseconds ahead of this estimate; a job must not finish before it was acquired.
        now_ms = max(self._clock.now_ms(), job.processed_on_ms)
        match outcome:
            case CompletedOutcome():
                keep = self._keep_completed(job, now_ms)
                finish = FinishOptions(True, outcome.value, keep, job.opts.attempts, checkpoint_fields(outcome))
                options, fetch = self._fetch_options.get(keys, token), fetch_next and job.name != FAN_OUT
                call = move_to_finished(keys, job.id, options, finish, fetch_next=fetch, now_ms=now_ms)
                return with_dependents(keys, job, call, outcome.value, now_ms)
            case FailedOutcome():
                return self._failed_call(acquired, outcome, fetch_next, now_ms)
            case RetriedOutcome(delay_ms=0):
                fields = _retry_fields(job, outcome)
                return retry_job(keys, job.id, token, lifo=job.lifo, fields=fields, now_ms=now_ms)
            case RetriedOutcome():
                fields = _retry_fields(job, outcome)
                return move_to_delayed(keys, job.id, token, outcome.delay_ms, failure=fields, now_ms=now_ms)
            case RescheduledByWorkerOutcome() | IncompatibleOutcome():
                move = move_to_delayed(keys, job.id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
                if isinstance(outcome, IncompatibleOutcome):
                    move = delay_incompatible(keys, job.id, move, outcome.reason, outcome.since)
                return move
            case _:
                return _requested_call(acquired, outcome, now_ms)

    def _keep_completed(self, job: RunningJob, now_ms: int) -> Mapping[str, int]:
        """Return which completed jobs are kept; an age is applied only every few milliseconds.

        Otherwise, BullMQ's script would look for old jobs once per job, which takes a tenth of its time.
        """
        keep = job.keep("removeOnComplete", self._config.keep_completed)
        if "age" not in keep or "count" in keep:
            return keep
        if now_ms < self._next_removals_ms.get(job.queue, 0):
            return KEEP_ALL
        self._next_removals_ms[job.queue] = now_ms + _REMOVAL_INTERVAL_MS
        return keep

    def _failed_call(self, acquired: AcquiredJob, outcome: FailedOutcome, fetch_next: bool, now_ms: int) -> Call[Any]:
        keys, job, token, revoked = acquired.keys, acquired.job, acquired.slot.token, outcome.category == REVOKED
        fields = [*job.failure_fields(outcome.reason, outcome.trace), *checkpoint_fields(outcome)]
        if outcome.failed_job is not None:
            fields += [FAILED_JOB_FIELD, json.dumps(outcome.failed_job.to_dict())]
        if outcome.error:
            fields += [ERROR_FIELD, outcome.error]
        if job.releases:
            fields += [RELEASES_FIELD, "0"]  # for the case that somebody retries the job
        keep = job.keep("removeOnFail", self._config.keep_failed)
        finish = FinishOptions(False, fields[1].encode(), keep, job.attempts - job.opts.retries_before, fields)
        # In these cases, the script cannot fetch the next job.
        errbacks = []
        if not revoked:
            errbacks = errback_jobs(job, outcome.reason, outcome.trace, self._config, now_ms, outcome.failed_job)
        fetch = fetch_next and not (revoked or outcome.malformed or errbacks or job.name == FAN_OUT)
        options = self._fetch_options.get(keys, token)
        call = move_to_finished(keys, job.id, options, finish, fetch_next=fetch, now_ms=now_ms)
        call = with_dependents(keys, job, call, None, now_ms)
        failure: Call[Any] = fail_malformed(keys, call, token) if outcome.malformed else call
        if revoked and not outcome.malformed:
            return finish_revoked(keys, call)
        return finish_with_errbacks(failure, errbacks) if errbacks else failure

    def limit_call(self, acquired: AcquiredJob, outcome: RateLimitedOutcome) -> Call[None]:
        """Return the call that rate-limits the job's queue; make it before the job is released.

        BullMQ's scripts, and so other workers, apply the limit only if the queue or its workers have a rate limit. This
        child always applies it, as a Node.js worker does that calls `rateLimit()`.
        """
        self._rate_limited(acquired.queue_index, outcome.limit_ms)
        return limit_now(acquired.keys, outcome.limit_ms)

    def after_settle(self, acquired: AcquiredJob, outcome: Outcome | None) -> Call[Any] | None:
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

    def have_hooks(self, outcome: Outcome) -> bool:
        """Return whether hooks are called after an outcome has been written."""
        return self._hooks is not None and self._hooks.follow(outcome)

    def emit(
        self, acquired: AcquiredJob, outcome: Outcome | None, duration_ms: float
    ) -> Coroutine[Any, Any, None] | None:
        """Emit the event of a written outcome, and call the hooks that follow it.

        ``None`` means that the outcome was discarded because the lock was lost.

        Returns:
            A coroutine that calls the hooks, if some of them are coroutine functions, or need a thread.
        """
        self._emit(acquired.job, outcome, duration_ms)
        if self._hooks is not None and self._hooks.follow(outcome):
            return self._hooks.settled(acquired.job, outcome)
        return None

    def _emit(self, job: RunningJob, outcome: Outcome | None, duration_ms: float) -> None:
        match outcome:
            case CompletedOutcome():
                if self._bus.wants(JobCompleted):
                    self._bus.emit(JobCompleted(job.id, job.queue, job.name, duration_ms, outcome.result))
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


def _requested_call(acquired: AcquiredJob, outcome: RequestedOutcome, now_ms: int) -> Call[Any]:
    call, fields = _move_call(acquired, outcome, now_ms), request_fields(acquired.job, outcome)
    return move_with_fields(acquired.keys, acquired.job.id, fields, call) if fields else call


def _move_call(acquired: AcquiredJob, outcome: RequestedOutcome, now_ms: int) -> Call[Any]:
    keys, job_id, token = acquired.keys, acquired.job.id, acquired.slot.token
    match outcome:
        case RescheduledByTaskOutcome():
            return move_to_delayed(keys, job_id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
        case ReleasedOutcome() | RateLimitedOutcome():
            return move_from_active_to_wait(keys, job_id, token)
        case WaitingForChildrenOutcome():
            return move_to_waiting_children(keys, job_id, token, now_ms)
