"""Acquires several async jobs in one round trip while a child has room for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError
from bulltask.transport.replies import Fetched
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempt
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.job_starter import JobStarter
from bulltask.worker.child.next_job import NextJobs
from bulltask.worker.child.outcomes import AcquiredJob
from bulltask.worker.child.sync_writer import OutcomeWriter
from bulltask.worker.slot import Slot

__all__ = ["AsyncBulkFetcher"]

_MAX_PER_CALL: Final = 16


class AsyncBulkFetcher:
    """Starts the async jobs that follow the one that the main thread has just started.

    The script ``collectBatch`` acquires them: it stops as soon as the next job belongs to another task. The first round
    trip acquires one job, and each further one twice as many, so that few jobs are spread over all idle children.

    Args:
        fetcher: Acquires the jobs.
        starter: Starts them.
        writer: Writes the outcomes of jobs whose task must not be called.
        async_loop: Runs them.
        next_jobs: Decides whether jobs of a task may be acquired in this way; the event loop uses it, too.
    """

    def __init__(
        self,
        fetcher: JobFetcher,
        starter: JobStarter,
        writer: OutcomeWriter,
        async_loop: AsyncLoop,
        next_jobs: NextJobs,
    ) -> None:
        self._fetcher, self._starter, self._writer = fetcher, starter, writer
        self._async, self._next_jobs = async_loop, next_jobs
        self._previous = ""

    def start(self, first: AcquiredJob) -> None:
        """Start the jobs that follow ``first``, as long as the child has room for them.

        This does nothing if the previous job belonged to another task: in a queue in which tasks alternate, it would be
        a wasted round trip for each job.
        """
        previous, self._previous = self._previous, first.job.name
        if previous != first.job.name:
            return
        count = 1
        while self._may_follow(first):
            slots = self._take_slots(min(count, self._async.room))
            if not slots or self._start(first, slots) < len(slots):
                break
            count = min(count * 2, _MAX_PER_CALL)

    def record_sync_job(self) -> None:
        """Record that the main thread runs a sync job itself."""
        self._previous = ""

    def _may_follow(self, first: AcquiredJob) -> bool:
        if not self._async.keeps_up(wait=False):
            return False
        return self._fetcher.may_collect and not first.max_concurrent and self._next_jobs.may_follow(first)

    def _start(self, first: AcquiredJob, slots: Sequence[Slot]) -> int:
        """Acquire and start up to one job for each slot; return how many were started."""
        jobs: list[AcquiredJob] = []
        replies: Sequence[Fetched] = ()
        with suppress(BrokerError):  # the next fetch handles the error
            replies = self._fetcher.fetch_many(first.queue_index, slots, first.job.name)
        for slot, fetched in zip(slots, replies, strict=False):
            acquired = self._fetcher.acquired(first.queue_index, slot, fetched)
            if acquired is None:
                self._return_slot(slot)
            else:
                jobs.append(acquired)
        for slot in slots[len(replies) :]:
            self._return_slot(slot)
        for position, acquired in enumerate(jobs):
            # In crash quarantine, only the main thread waits for other jobs. A job of another task is acquired if it
            # has just become due.
            if acquired.max_concurrent or acquired.job.name != first.job.name:
                self._fetcher.release_unstarted(jobs[position:])
                for each in jobs[position:]:
                    self._async.return_slot(each.slot)
                return position
            self._start_job(acquired)
        return len(jobs)

    def _start_job(self, acquired: AcquiredJob) -> None:
        attempt = self._starter.begin(acquired)
        if isinstance(attempt, Attempt):
            self._async.start(acquired, attempt)
            return
        if attempt is not None:
            self._writer.write_many([(acquired, attempt)], 0.0)
        self._async.return_slot(acquired.slot)

    def _take_slots(self, count: int) -> list[Slot]:
        slots: list[Slot] = []
        while len(slots) < count and (slot := self._async.take_slot()) is not None:
            slot.reserve(mono_ms())
            slots.append(slot)
        return slots

    def _return_slot(self, slot: Slot) -> None:
        self._fetcher.free_slot(slot)
        self._async.return_slot(slot)
