"""Writing an attempt's outcome to Redis: at most one script for each, and the events that tell of it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from bulltask.clock import ServerClock
from bulltask.config.config import Config
from bulltask.errors import (
    BrokerError,
    BulltaskError,
    DecodeError,
    FailedChildrenError,
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
from bulltask.jobs.numbers import MOST, counter
from bulltask.jobs.states import REVOKED
from bulltask.process import end_if_forked
from bulltask.transport.call import Call, command
from bulltask.transport.scripts.add import add_kept_job
from bulltask.transport.scripts.job import add_log, end_revoked
from bulltask.transport.scripts.move import (
    FinishOptions,
    keep_lock,
    move_to_delayed,
    move_to_finished,
    quarantine,
    retry_job,
    wake_next,
)
from bulltask.transport.scripts.queue import limit_now
from bulltask.worker.child.claims import Claims
from bulltask.worker.child.moves import move_call, reason_of_release
from bulltask.worker.child.outcomes import (
    AcquiredJob,
    Completed,
    Failed,
    Limited,
    Outcome,
    Postponed,
    Released,
    Retried,
)

__all__ = ["UNSTORABLE", "Settler"]

UNSTORABLE: Final = (BrokerError, PendingChildrenError, FailedChildrenError, NoPendingChildrenError)
"""What says, after ``RECOVERABLE``, that waiting will not help: see :meth:`Settler.instead`."""

_LONG_S: Final = 3_600
"""No call is repeated for so long."""

_NOBODY_KNOWS: Final = (
    "no worker of bulltask that has taken this job knows the task {!r}; it is tried again until one does "
    "(or set task_unknown='fail')"
)


class Settler:
    """Responsible for turning an outcome into its script call, and for telling of it.

    It carries nothing itself: the sync loop and the async loop each have a client.

    Args:
        config: lock duration, and what else a worker's options say of jobs that end.
        clock: the server's time.
        bus: hears how the attempt ended.
        worker_id: written into the next job as who processes it.
        limited: is told when a task wants the queue of an index to be left alone for so many milliseconds.
    """

    def __init__(
        self,
        config: Config,
        clock: ServerClock,
        bus: Bus,
        worker_id: str,
        limited: Callable[[int, int], None] = lambda _index, _limit_ms: None,
    ) -> None:
        self._config, self._clock, self._bus, self._limited = config, clock, bus, limited
        self._claims, self._pid = Claims(config, worker_id), os.getpid()

    def call(self, acquired: AcquiredJob, outcome: Outcome, *, fetch_next: bool) -> Call[Any]:
        """The call that writes ``outcome``; only ``moveToFinished`` can take the next job in the same step."""
        end_if_forked(self._pid)  # whatever code of users has forked unseen, a copy settles nothing
        call = self._call(acquired, outcome, fetch_next)
        takes_next = fetch_next and call.script is not None and call.script.name == "moveToFinished"
        return call if takes_next else wake_next(acquired.keys, call)

    def _call(self, acquired: AcquiredJob, outcome: Outcome, fetch_next: bool) -> Call[Any]:
        job, token, now_ms = acquired.job, acquired.slot.token, self._clock.now_ms()
        match outcome:
            case Completed():
                keep = job.keep("removeOnComplete", self._config.keep_completed)
                ending = FinishOptions(True, outcome.value, keep, job.attempts)
                claim = self._claims.of(acquired.keys, token)
                return move_to_finished(acquired.keys, job.id, claim, ending, fetch_next=fetch_next, now_ms=now_ms)
            case Failed():
                return self._failing(acquired, outcome, fetch_next, now_ms)
            case Retried(delay_ms=0):
                fields = job.failure_fields(outcome.reason, outcome.trace)
                return retry_job(acquired.keys, job.id, token, lifo=job.lifo, fields=fields, now_ms=now_ms)
            case Retried():
                fields = job.failure_fields(outcome.reason, outcome.trace)
                return move_to_delayed(acquired.keys, job.id, token, outcome.delay_ms, failure=fields, now_ms=now_ms)
            case Postponed():
                return move_to_delayed(acquired.keys, job.id, token, outcome.delay_ms, failure=None, now_ms=now_ms)
            case _:
                return move_call(acquired, outcome, now_ms)

    def after_settle(self, acquired: AcquiredJob, outcome: Outcome) -> Call[Any] | None:
        """The call to make after ``outcome`` was written, if any; its result is of no interest.

        A job that has ended may have kept another one from being added: BullMQ 5.72 and newer put such a job aside
        (``keepLastIfActive``), and 5.62's script does not look for it. A job that goes back because nobody here knows
        its task says so in its log, once: boards show it as delayed, with no error that would tell why.
        """
        job = acquired.job
        if isinstance(outcome, Postponed):
            if outcome.reason or job.attempts_started > 1:
                return None
            line = _NOBODY_KNOWS.format(job.name)
            return add_log(acquired.keys, job.id, line, job.opts.get("kl"), self._config.max_logs)
        if not job.deduplication_id or not isinstance(outcome, Completed | Failed):
            return None
        return add_kept_job(acquired.keys, job.deduplication_id, job.id, self._clock.now_ms())

    def limit_call(self, acquired: AcquiredJob, outcome: Limited) -> Call[None]:
        """The call that rate-limits the job's queue, to be made before the job goes back.

        Redis honours such a limit only where some maximum is set. This child does in any case, as Node's worker does.
        """
        self._limited(acquired.queue_index, outcome.limit_ms)
        return limit_now(acquired.keys, outcome.limit_ms)

    def fallback(self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError) -> Outcome | None:
        """What to write when Redis refuses to store ``outcome`` for a reason that waiting does not cure.

        A job whose hash is broken makes the scripts themselves fail, and a parent of a flow cannot complete while it
        has children that are pending or have failed. Such a job is failed with that reason (the former by our own
        script, which such a hash does not stop); a parent whose children are only pending is tried again first, as
        often as it may be, and both as Node does. If not even that can be written the job is left to the stalled check
        (``None``), so that one broken job does not hold a child for ever.

        A job that would wait for children of which none is left is run again at once, as if the last one had ended
        a moment later.
        """
        if isinstance(exc, NoPendingChildrenError):
            return Released()
        by_script = isinstance(exc, BrokerError)
        if isinstance(outcome, Failed):
            return replace(outcome, malformed=True) if by_script and not outcome.malformed else None
        reason = f"the outcome of the job could not be stored: {exc}"
        made = acquired.job.attempts_made + 1
        if isinstance(exc, PendingChildrenError) and made < acquired.job.attempts:
            with suppress(DecodeError):  # a malformed backoff: then it fails
                return Retried(acquired.job.retry_delay_ms(made), reason, "", "transient")
        return Failed(reason, "", "permanent", malformed=by_script)

    def already_applied(self, acquired: AcquiredJob) -> Call[bool]:
        """After a call whose reply was lost and which is now refused: did the first one do it?

        It did if the attempt was counted, or if the job is gone because it was not to be kept. Otherwise the lock
        was lost in the meantime and another worker has the job, or Redis has forgotten everything.
        """
        wanted, may_be_gone = min(acquired.job.attempts_made + 1, MOST), self._is_removed_soon(acquired.job)

        def parse_reply(reply: Any) -> bool:
            name, made = reply
            try:
                return may_be_gone if name is None else counter(made or b"0") >= wanted
            except ValueError:
                return False

        return command("HMGET", acquired.keys.job(acquired.job.id), "name", "atm", parse_reply=parse_reply)

    def renew_lock(self, acquired: AcquiredJob) -> Call[bool]:
        """After a call that Redis refuses because the job has no lock: take it again, and say whether that was done.

        Redis was away, or the supervisor stood still, for longer than the lock lasts. As long as no other worker has
        the job, the outcome is as good as before.
        """
        return keep_lock(acquired.keys, acquired.job.id, acquired.slot.token, self._config.lock_ms)

    def emit(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> None:
        """Emit the event of a written outcome."""
        job = acquired.job
        match outcome:
            case Completed():
                if self._bus.wants(JobCompleted):
                    self._bus.emit(JobCompleted(job.id, job.queue, job.name, duration_ms, outcome.result))
            case Failed():
                self._bus.emit(_failure(job, outcome, duration_ms))
            case Retried():
                self._bus.emit(_retry(job, outcome, duration_ms))
            case Postponed() if outcome.reason:
                self._bus.emit(SchedulingFailed(job.id, job.queue, job.scheduler_id, outcome.reason, outcome.delay_ms))
            case Postponed():
                self._bus.emit(UnknownTaskSeen(job.id, job.queue, job.name, outcome.delay_ms))
            case _:
                self._bus.emit(JobReleased(job.id, job.queue, job.name, reason_of_release(outcome)))

    def emit_lock_lost(self, acquired: AcquiredJob) -> None:
        """Emit that the outcome was discarded because the lock is no longer this worker's."""
        self._bus.emit(LockLost(acquired.job.id, acquired.job.queue, acquired.job.name))

    def emit_loop_stopped(self, jobs: Sequence[str], raised: BaseException | None) -> None:
        """Emit that the event loop has ended under these jobs; of a copy that a task has forked nobody hears."""
        end_if_forked(self._pid, raised)
        error = "" if raised is None else "".join(traceback.format_exception_only(raised)).strip()
        self._bus.emit(EventLoopStopped(self._pid, tuple(jobs), error))

    def _failing(self, acquired: AcquiredJob, outcome: Failed, fetch_next: bool, now_ms: int) -> Call[Any]:
        keys, job, token, revoked = acquired.keys, acquired.job, acquired.slot.token, outcome.category == REVOKED
        claim, ending = self._claims.of(keys, token), self._failed(job, outcome)
        fetch = fetch_next and not (revoked or outcome.malformed)  # their scripts take none
        call = move_to_finished(keys, job.id, claim, ending, fetch_next=fetch, now_ms=now_ms)
        if outcome.malformed:
            return quarantine(keys, call, token)
        return end_revoked(keys, call) if revoked else call

    def _failed(self, job: RunningJob, outcome: Failed) -> FinishOptions:
        fields = job.failure_fields(outcome.reason, outcome.trace)
        keep = job.keep("removeOnFail", self._config.keep_failed)
        return FinishOptions(False, fields[1].encode(), keep, job.attempts, fields)

    def _is_removed_soon(self, job: RunningJob) -> bool:
        """True when the job may be gone by the time that a call with a lost reply is made again."""
        options = (("removeOnComplete", self._config.keep_completed), ("removeOnFail", self._config.keep_failed))
        kept = [job.keep(*option) for option in options]
        return any(keep.get("count", -1) >= 0 or keep.get("age", _LONG_S) < _LONG_S for keep in kept)


def _failure(job: RunningJob, outcome: Failed, duration_ms: float) -> JobFailed:
    made, raised = job.attempts_made + 1, outcome.exception
    error, category, trace = outcome.reason, outcome.category, outcome.trace
    return JobFailed(job.id, job.queue, job.name, duration_ms, error, category, made, trace, raised)


def _retry(job: RunningJob, outcome: Retried, duration_ms: float) -> JobRetried:
    made, raised = job.attempts_made + 1, outcome.exception
    error, category, delay_ms = outcome.reason, outcome.category, outcome.delay_ms
    return JobRetried(job.id, job.queue, job.name, duration_ms, error, category, made, delay_ms, raised)
