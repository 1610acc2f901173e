"""A child's main thread: acquires jobs, runs sync tasks one at a time, and passes async ones to the event loop.

Begin with :class:`SyncLoop`. :class:`BatchCollector` and :class:`AsyncBulkFetcher` acquire several jobs at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import thread_time
from typing import Final

from bulltask.jobs.clock import ServerClock, mono_ms, mono_s
from bulltask.jobs.errors import BrokerError, JobError
from bulltask.transport.call import Fetched, NoJob
from bulltask.transport.scripts.move import release_unstarted
from bulltask.worker.async_loop import AsyncLoop, NextJobs
from bulltask.worker.attempt import THROTTLED, Attempt, AttemptRunner, BatchRunner, JobStarter
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.finish import OutcomeWriter
from bulltask.worker.outcomes import AcquiredJob, Outcome, released_last
from bulltask.worker.prefetch import PrefetchLoop
from bulltask.worker.run_hooks import LoopHooks
from bulltask.worker.slots import ChildLimits, ControlPage, Slot

__all__ = ["AsyncBulkFetcher", "BatchCollector", "SyncLoop"]


_MAX_BATCH_PER_CALL: Final = 50
"""Maximum number of jobs that one call acquires, because Redis runs nothing else during the call."""
_POLL_MS: Final = 10
"""Interval at which a child checks for a free slot while its other jobs use all slots."""
_FOREVER_MS: Final = 2**52


class BatchCollector:
    """Collects the jobs of a batch.

    Collecting ends when the batch is full, when its time is up, or when the next job in the queue belongs to another
    task, so no job waits for a batch of another task. While collecting, the child acquires no other jobs.
    """

    def __init__(
        self,
        fetcher: JobFetcher,
        control: ControlPage,
        clock: ServerClock,
        batches: Mapping[str, tuple[int, int]],
    ) -> None:
        self._fetcher = fetcher
        self._control = control
        self._clock = clock
        self._pool = fetcher.pool
        self.batches = batches

    def collect(self, first: AcquiredJob) -> list[AcquiredJob]:
        """Return a batch: ``first``, which the child has already acquired, and further jobs of its task."""
        size, wait_ms = self.batches[first.job.name]
        batch, limit = [first], min(size, first.max_concurrent or size)
        end_ms, has_marker = mono_ms() + wait_ms, False
        with suppress(BrokerError):  # the batch runs as it is; the next fetch handles the error
            while len(batch) < limit and self._fetcher.may_collect:
                before = len(batch)
                limit, pause_ms = self._fetch(batch, limit)
                has_marker &= len(batch) == before  # acquiring a job adds the marker again
                left_ms = end_ms - mono_ms()
                if pause_ms == 0:
                    continue
                if pause_ms < 0 or left_ms <= 0 or len(batch) >= limit:
                    break
                has_marker |= self._fetcher.wait_for_queue(first.queue_index, min(pause_ms, left_ms))
        if has_marker:  # another worker may need it while this child runs the batch
            self._fetcher.restore_markers()
        return batch

    def _fetch(self, batch: list[AcquiredJob], limit: int) -> tuple[int, int]:
        """Add the jobs that are waiting.

        Returns the batch's maximum number of jobs, which a job in crash quarantine lowers; and the maximum time in
        milliseconds until there are more jobs: 0 if there may be more now, -1 if no more can be added.
        """
        first = batch[0]
        slots = self._take_slots(min(limit - len(batch), _MAX_BATCH_PER_CALL))
        if not slots:
            return limit, _POLL_MS
        replies = self._collect(first, slots)
        has_released = False
        for slot, fetched in zip(slots, replies, strict=False):
            acquired = self._fetcher.adopt(first.queue_index, slot, fetched)
            if acquired is None:
                self._give_back(slot)
            elif self._fits(acquired, batch, limit):
                limit = min(limit, acquired.max_concurrent or limit)
                batch.append(acquired)
                self._record_permit(used=True)
            else:
                self._release(acquired)
                has_released = True
        self._give_back(*slots[len(replies) :])
        return limit, -1 if has_released else self._pause_ms(replies, len(slots))

    @staticmethod
    def _fits(acquired: AcquiredJob, batch: Sequence[AcquiredJob], limit: int) -> bool:
        return acquired.job.name == batch[0].job.name and len(batch) < min(limit, acquired.max_concurrent or limit)

    def _collect(self, first: AcquiredJob, slots: Sequence[Slot]) -> list[Fetched]:
        try:
            return self._fetcher.fetch_many(first.queue_index, slots, first.job.name)
        except BrokerError:
            self._give_back(*slots)
            raise

    def _pause_ms(self, replies: Sequence[Fetched], wanted: int) -> int:
        last = replies[-1] if replies else None
        if not isinstance(last, NoJob):
            return 0 if len(replies) == wanted else -1  # the next job belongs to another task
        if last.limited_ms:
            return -1  # the queue is rate-limited
        return max(1, last.due_ms - self._clock.now_ms()) if last.due_ms else _FOREVER_MS

    def _take_slots(self, count: int) -> list[Slot]:
        slots: list[Slot] = []
        while len(slots) < count and (not self._control.has_permits or self._control.take_permit()):
            taken = self._pool.take_reserved(1)
            if not taken:
                self._record_permit(used=False)
                break
            slots += taken
        return slots

    def _release(self, acquired: AcquiredJob) -> None:
        try:
            with suppress(JobError):
                self._fetcher.client.run(release_unstarted(acquired.keys, acquired.job.id, acquired.slot.token))
        except BrokerError as exc:
            self._fetcher.record_failed_release(exc, acquired.slot, acquired.queue_index)
        self._give_back(acquired.slot)

    def _give_back(self, *slots: Slot) -> None:
        for _ in slots:
            self._record_permit(used=False)
        self._pool.give_back(*slots)

    def _record_permit(self, *, used: bool) -> None:
        if self._control.has_permits:
            self._control.record_permit(used=used)


_MAX_ASYNC_PER_CALL: Final = 16


class AsyncBulkFetcher:
    """Starts the async jobs that follow the one that the main thread has just started.

    The script ``collectBatch`` acquires them: it stops as soon as the next job belongs to another task. The first round
    trip acquires one job, and each further one twice as many, so that few jobs are spread over all idle children.

    Attributes:
        previous: The task of the previous job, ``""`` if the main thread has run it.
    """

    def __init__(
        self,
        fetcher: JobFetcher,
        starter: JobStarter,
        writer: OutcomeWriter,
        async_loop: AsyncLoop,
        next_jobs: NextJobs,
    ) -> None:
        self._fetcher = fetcher
        self._starter = starter
        self._writer = writer
        self._async = async_loop
        self._next_jobs = next_jobs
        self.previous = ""

    def start(self, first: AcquiredJob) -> None:
        """Start the jobs that follow ``first``, as long as the child has room for them.

        This does nothing if the previous job belonged to another task: in a queue in which tasks alternate, it would be
        a wasted round trip for each job.
        """
        previous = self.previous
        self.previous = first.job.name
        if previous != first.job.name:
            return
        count = 1
        while self._may_follow(first):
            wanted = min(count, self._async.room)
            if wanted <= 0 or self._start(first, wanted) < wanted:
                break
            count = min(count * 2, _MAX_ASYNC_PER_CALL)

    def _may_follow(self, first: AcquiredJob) -> bool:
        if not self._async.keeps_up(wait=False):
            return False
        return self._fetcher.may_collect and not first.max_concurrent and self._next_jobs.may_follow(first)

    def _start(self, first: AcquiredJob, count: int) -> int:
        """Acquire and start up to this many jobs; return how many were started."""
        jobs = self._fetcher.acquire_many(first.queue_index, count, first.job.name)
        for position, acquired in enumerate(jobs):
            # In crash quarantine, only the main thread waits for other jobs. A job of another task is acquired if it
            # has just become due.
            if acquired.max_concurrent or acquired.job.name != first.job.name:
                self._fetcher.release_unstarted(jobs[position:])
                self._fetcher.pool.give_back(*(each.slot for each in jobs[position:]))
                return position
            attempt = self._starter.begin(acquired)
            if isinstance(attempt, Attempt):
                self._async.start(acquired, attempt)
            elif attempt is not THROTTLED:
                self._writer.write_many([(acquired, attempt)], 0.0)
        return len(jobs)


class SyncLoop:
    """The main thread of a child.

    Sync tasks run only on it (except with ``-P threads``), because Python runs signal handlers (time limits, stack
    dumps) on the main thread.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        fetcher: JobFetcher,
        starter: JobStarter,
        runner: AttemptRunner,
        writer: OutcomeWriter,
        async_loop: AsyncLoop,
        child_limits: ChildLimits,
        collector: BatchCollector,
        prefetch: PrefetchLoop,
        bulk_fetcher: AsyncBulkFetcher,
    ) -> None:
        self._fetcher = fetcher
        self._starter = starter
        self._runner = runner
        self._call = runner.counting_cpu(writer.counts)
        self._writer = writer
        self._async = async_loop
        self._child_limits = child_limits
        self._collector = collector
        self._batches = collector.batches
        self._prefetch = prefetch
        self._bulk_fetcher = bulk_fetcher

    def open(self, hooks: LoopHooks) -> None:
        """Run what comes before the first job on the event loop; raises what prevents the child from starting."""
        self._async.open(hooks)

    def run(self) -> None:
        """Work until the fetcher closes and every acquired job is finished."""
        self._fetcher.may_wait = self._async.keeps_up
        while (slot := self._async.wait_for_slot(lambda: self._fetcher.closing)) is not None:
            acquired = self._fetcher.acquire(slot)
            while acquired is not None:
                if self._prefetch.is_useful and (acquired := self._prefetch.run(acquired)) is None:
                    break
                acquired = self._work(acquired)
            self._prefetch.record_idle()
        self._child_limits.announce(self._async.running)
        self._async.drain()
        self._runner.close()

    def _work(self, acquired: AcquiredJob) -> AcquiredJob | None:
        """Run one job; return the next job if the call that finished this one has fetched it.

        Otherwise, the job's slot has been given back, or belongs to the event loop.
        """
        if acquired.job.name in self._batches:
            self._prefetch.count.record_long_job()
            self._work_batch(acquired)
            return None
        attempt = self._starter.begin(acquired)
        if attempt is THROTTLED:
            return None
        if not isinstance(attempt, Attempt):
            return self._writer.write(acquired, attempt, 0.0)
        if attempt.plan.off_main_thread:
            self._runner.reserve_thread(attempt, acquired.slot)
            self._prefetch.count.record_long_job()
            self._async.start(acquired, attempt)
            self._bulk_fetcher.start(acquired)
            return None
        self._bulk_fetcher.previous = ""
        started = mono_s()
        outcome = self._call(attempt, acquired.slot)
        duration_ms = (mono_s() - started) * 1000
        self._prefetch.count.record(duration_ms)
        return self._writer.write(acquired, outcome, duration_ms)

    def _work_batch(self, first: AcquiredJob) -> None:
        """Collect a batch and run it."""
        members: list[tuple[AcquiredJob, Attempt]] = []
        not_started: list[tuple[AcquiredJob, Outcome]] = []
        for acquired in self._collector.collect(first):
            attempt = self._starter.begin(acquired)
            if isinstance(attempt, Attempt):
                members.append((acquired, attempt))
            elif attempt is not THROTTLED:
                not_started.append((acquired, attempt))
        self._writer.write_many(not_started, 0.0)
        if not members:
            return
        acquired, attempt = members[0]
        if attempt.plan.off_main_thread:
            self._runner.reserve_thread(attempt, acquired.slot)
            self._async.start_batch(members)
            return
        started, started_cpu_s = mono_s(), thread_time()
        outcomes = BatchRunner(self._runner).call([(attempt, acquired.slot) for acquired, attempt in members])
        if self._writer.counts is not None:
            self._writer.counts.used_cpu(acquired.job.queue, acquired.job.name, thread_time() - started_cpu_s)
        ended = [(acquired, outcome) for (acquired, _), outcome in zip(members, outcomes, strict=True)]
        self._writer.write_many(released_last(ended), (mono_s() - started) * 1000)
