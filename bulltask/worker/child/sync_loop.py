"""A child's main thread: takes jobs, runs sync tasks one at a time, hands async ones to the event loop."""

from __future__ import annotations

import time
from typing import TypeVar

from bulltask.clock import mono_ms
from bulltask.errors import RECOVERABLE, BrokerError, BrokerUnavailableError, BulltaskError, JobError, LockMissingError
from bulltask.transport.call import Call
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempt, Attempts
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.iterations import Iterations
from bulltask.worker.child.outcomes import AcquiredJob, Limited, Outcome
from bulltask.worker.child.settle import UNSTORABLE, Settler
from bulltask.worker.slots import ChildBlock, Slot

__all__ = ["SyncLoop"]

R = TypeVar("R")


class SyncLoop:
    """Responsible for the main thread of a child.

    Sync tasks run here and nowhere else, so that signals (time limits, stack dumps) reach them.

    Args:
        fetcher: takes jobs.
        attempts: runs them.
        settler: writes their outcome.
        iterations: keeps job schedulers going.
        async_loop: runs async tasks on a thread of its own; it also owns the free slots.
        block: counts the child's jobs.
    """

    def __init__(
        self,
        fetcher: JobFetcher,
        attempts: Attempts,
        settler: Settler,
        iterations: Iterations,
        async_loop: AsyncLoop,
        block: ChildBlock,
    ) -> None:
        self._fetcher, self._attempts, self._settler, self._iterations = fetcher, attempts, settler, iterations
        self._async, self._block = async_loop, block

    def run(self) -> None:
        """Work until the source closes and every job in hand is settled."""
        while (slot := self._async.free_slot(lambda: self._fetcher.closing)) is not None:
            acquired = self._fetcher.acquire(slot)
            while acquired is not None:
                acquired = self._work(acquired)
            self._async.done_with(slot)
        self._async.drain()
        self._attempts.close()

    def _work(self, acquired: AcquiredJob) -> AcquiredJob | None:
        """TaskRun one job; return the next one if it came with the settling of this one."""
        if acquired.max_concurrent:
            # Before anything looks at the job: data that kills whoever decodes it must find its child empty, too.
            self._async.wait_for_others(acquired.max_concurrent)
        if acquired.job.is_repeated and (postponed := self._iterations.add_next(acquired)) is not None:
            return self._settle(acquired, postponed, 0.0)
        begun = self._attempts.begin(acquired.job)
        if not isinstance(begun, Attempt):
            return self._settle(acquired, begun, 0.0)
        if begun.task.is_async:
            self._async.start(acquired, begun)
            return None
        started = time.monotonic()
        outcome = self._attempts.call(begun, acquired.slot)
        return self._settle(acquired, outcome, (time.monotonic() - started) * 1000)

    def _settle(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> AcquiredJob | None:
        slot, uncertain = acquired.slot, False
        slot.settle(mono_ms())
        while True:
            try:
                following = self._exchange(acquired, outcome, slot, fetch=self._fetcher.may_acquire and not uncertain)
            except RECOVERABLE as exc:
                # The outcome is kept and written when Redis is back; the supervisor goes on renewing the lock.
                uncertain = uncertain or isinstance(exc, BrokerUnavailableError)
                self._fetcher.record_lost_call(exc, slot)
                self._fetcher.back_off(exc)
                continue
            except (BrokerError, JobError) as exc:
                again, written = self._refused(acquired, outcome, exc, uncertain)
                if again is not None:
                    outcome = again
                    continue
                following = None
            else:
                written = True
            if following is None:
                self._fetcher.release(slot)
            self._finish(acquired, outcome if written else None, duration_ms)
            return following

    def _refused(
        self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError, uncertain: bool
    ) -> tuple[Outcome | None, bool]:
        """What to write next, after Redis refused ``outcome``; or ``None``, and whether an earlier try wrote it."""
        if isinstance(exc, BrokerError) and self._run_until_answered(self._settler.already_applied(acquired), False):
            # The script stopped at what comes behind the outcome: at the next job, most of all.
            self._fetcher.fail_malformed(acquired.queue_index, acquired.slot, exc)
            return None, True
        if isinstance(exc, UNSTORABLE):
            return self._settler.fallback(acquired, outcome, exc), False
        if uncertain and self._run_until_answered(self._settler.already_applied(acquired), False):
            return None, True
        retaken = isinstance(exc, LockMissingError) and self._run_until_answered(
            self._settler.renew_lock(acquired), False
        )
        return (outcome if retaken else None), False

    def _finish(self, acquired: AcquiredJob, written: Outcome | None, duration_ms: float) -> None:
        self._fetcher.backoff.reset()
        self._block.count_job()
        if written is None:
            self._settler.emit_lock_lost(acquired)
            return
        if (call := self._settler.after_settle(acquired, written)) is not None:
            self._run_until_answered(call, "")
        self._settler.emit(acquired, written, duration_ms)

    def _exchange(self, acquired: AcquiredJob, outcome: Outcome, slot: Slot, *, fetch: bool) -> AcquiredJob | None:
        """Write the outcome and take the next job, in one round trip whichever queue it comes from."""
        fetcher = self._fetcher
        if isinstance(outcome, Limited):
            fetcher.client.run(self._settler.limit_call(acquired, outcome))
        index = fetcher.round_robin.after(acquired.queue_index)
        same = index == acquired.queue_index
        call = self._settler.call(acquired, outcome, fetch_next=fetch and same)
        if not fetch or (same and call.script is not None and call.script.name != "moveToFinished"):
            fetcher.client.run(call)
            return None
        if same:
            return fetcher.acquired(index, slot, fetcher.client.run(call))
        done, fetched = fetcher.client.try_many([call, fetcher.fetch_call(index, slot)])
        if isinstance(done, BulltaskError):
            fetcher.release_fetched(index, slot, fetched)
            raise done
        if isinstance(fetched, BulltaskError):
            # The outcome is written; whoever asks next meets the same fault where it is dealt with.
            if isinstance(fetched, BrokerError):
                fetcher.fail_malformed(index, slot, fetched)
            return None
        return fetcher.acquired(index, slot, fetched)

    def _run_until_answered(self, call: Call[R], otherwise: R) -> R:
        """Make a call until Redis answers; ``otherwise`` where it refuses."""
        while True:
            try:
                return self._fetcher.client.run(call)
            except RECOVERABLE as exc:
                self._fetcher.back_off(exc)
            except (BrokerError, JobError):
                return otherwise
