"""A child's main thread: takes jobs, runs sync tasks one at a time, hands async ones to the event loop."""

from __future__ import annotations

import time
from typing import TypeVar

from bulltask.clock import mono_ms
from bulltask.errors import RECOVERABLE, BrokerError, BrokerUnavailableError, BulltaskError, JobError, LockMissingError
from bulltask.transport.call import Call
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempt, Attempts
from bulltask.worker.child.iterations import Iterations
from bulltask.worker.child.settle import UNSTORABLE, Settler
from bulltask.worker.child.source import JobSource
from bulltask.worker.child.work import Limited, Outcome, Picked
from bulltask.worker.slots import ChildBlock, Slot

__all__ = ["SyncLoop"]

R = TypeVar("R")


class SyncLoop:
    """Responsible for the main thread of a child.

    Sync tasks run here and nowhere else, so that signals (time limits, stack dumps) reach them.

    Args:
        source: takes jobs.
        attempts: runs them.
        settler: writes their outcome.
        iterations: keeps job schedulers going.
        async_loop: runs async tasks on a thread of its own; it also owns the free slots.
        block: counts the child's jobs.
    """

    def __init__(
        self,
        source: JobSource,
        attempts: Attempts,
        settler: Settler,
        iterations: Iterations,
        async_loop: AsyncLoop,
        block: ChildBlock,
    ) -> None:
        self._source, self._attempts, self._settler, self._iterations = source, attempts, settler, iterations
        self._async, self._block = async_loop, block

    def run(self) -> None:
        """Work until the source closes and every job in hand is settled."""
        while (slot := self._async.free_slot(lambda: self._source.closing)) is not None:
            picked = self._source.take(slot)
            while picked is not None:
                picked = self._work(picked)
            self._async.done_with(slot)
        self._async.drain()
        self._attempts.close()

    def _work(self, picked: Picked) -> Picked | None:
        """Run one job; return the next one if it came with the settling of this one."""
        if picked.at_once:
            # Before anything looks at the job: data that kills whoever decodes it must find its child empty, too.
            self._async.wait_for_others(picked.at_once)
        if picked.job.is_repeated and (postponed := self._iterations.add_next(picked)) is not None:
            return self._settle(picked, postponed, 0.0)
        begun = self._attempts.begin(picked.job)
        if not isinstance(begun, Attempt):
            return self._settle(picked, begun, 0.0)
        if begun.task.is_async:
            self._async.start(picked, begun)
            return None
        started = time.monotonic()
        outcome = self._attempts.call(begun, picked.slot)
        return self._settle(picked, outcome, (time.monotonic() - started) * 1000)

    def _settle(self, picked: Picked, outcome: Outcome, duration_ms: float) -> Picked | None:
        slot, unsure = picked.slot, False
        slot.settle(mono_ms())
        while True:
            try:
                following = self._exchange(picked, outcome, slot, fetch=self._source.may_take and not unsure)
            except RECOVERABLE as exc:
                # The outcome is kept and written when Redis is back; the supervisor goes on renewing the lock.
                unsure = unsure or isinstance(exc, BrokerUnavailableError)
                self._source.failed(exc, slot)
                self._source.pause(exc)
                continue
            except (BrokerError, JobError) as exc:
                again, written = self._refused(picked, outcome, exc, unsure)
                if again is not None:
                    outcome = again
                    continue
                following = None
            else:
                written = True
            if following is None:
                self._source.release(slot)
            self._tell(picked, outcome if written else None, duration_ms)
            return following

    def _refused(
        self, picked: Picked, outcome: Outcome, exc: BulltaskError, unsure: bool
    ) -> tuple[Outcome | None, bool]:
        """What to write next, after Redis refused ``outcome``; or ``None``, and whether an earlier try wrote it."""
        if isinstance(exc, BrokerError) and self._surely(self._settler.was_ours(picked), False):
            # The script stopped at what comes behind the outcome: at the next job, most of all.
            self._source.set_aside(picked.queue_index, picked.slot, exc)
            return None, True
        if isinstance(exc, UNSTORABLE):
            return self._settler.instead(picked, outcome, exc), False
        if unsure and self._surely(self._settler.was_ours(picked), False):
            return None, True
        retaken = isinstance(exc, LockMissingError) and self._surely(self._settler.retake(picked), False)
        return (outcome if retaken else None), False

    def _tell(self, picked: Picked, written: Outcome | None, duration_ms: float) -> None:
        self._source.outage.over()
        self._block.count_job()
        if written is None:
            self._settler.tell_lost(picked)
            return
        if (call := self._settler.follow_up(picked, written)) is not None:
            self._surely(call, "")
        self._settler.tell(picked, written, duration_ms)

    def _exchange(self, picked: Picked, outcome: Outcome, slot: Slot, *, fetch: bool) -> Picked | None:
        """Write the outcome and take the next job, in one round trip whichever queue it comes from."""
        source = self._source
        if isinstance(outcome, Limited):
            source.client.run(self._settler.limit_call(picked, outcome))
        index = source.rotation.after(picked.queue_index)
        same = index == picked.queue_index
        call = self._settler.call(picked, outcome, fetch_next=fetch and same)
        if not fetch or (same and call.script is not None and call.script.name != "moveToFinished"):
            source.client.run(call)
            return None
        if same:
            return source.picked(index, slot, source.client.run(call))
        done, fetched = source.client.try_many([call, source.fetch_call(index, slot)])
        if isinstance(done, BulltaskError):
            source.give_back(index, slot, fetched)
            raise done
        if isinstance(fetched, BulltaskError):
            # The outcome is written; whoever asks next meets the same fault where it is dealt with.
            if isinstance(fetched, BrokerError):
                source.set_aside(index, slot, fetched)
            return None
        return source.picked(index, slot, fetched)

    def _surely(self, call: Call[R], otherwise: R) -> R:
        """Make a call until Redis answers; ``otherwise`` where it refuses."""
        while True:
            try:
                return self._source.client.run(call)
            except RECOVERABLE as exc:
                self._source.pause(exc)
            except (BrokerError, JobError):
                return otherwise
