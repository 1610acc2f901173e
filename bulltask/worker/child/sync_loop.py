"""A child's main thread: acquires jobs, runs sync tasks one at a time, and passes async ones to the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from bulltask.clock import mono_s
from bulltask.worker.child.async_bulk_fetch import AsyncBulkFetcher
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.batch_collector import BatchCollector
from bulltask.worker.child.batch_runner import BatchRunner
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.job_starter import JobStarter
from bulltask.worker.child.outcomes import AcquiredJob, Outcome
from bulltask.worker.child.prefetch_loop import PrefetchLoop
from bulltask.worker.child.process_signals import LoopHooks
from bulltask.worker.child.retirement import Retirement
from bulltask.worker.child.sync_writer import OutcomeWriter

__all__ = ["SyncLoop"]


class SyncLoop:
    """The main thread of a child.

    Sync tasks run only on it (except with ``-P threads``), because Python runs signal handlers (time limits, stack
    dumps) on the main thread.

    Args:
        fetcher: Acquires jobs.
        starter: Starts them.
        runner: Runs attempts.
        writer: Writes their outcomes.
        async_loop: Runs async tasks on another thread, and manages the free slots.
        retirement: Announces that this child has reached a limit.
        collector: Collects the jobs of batches.
        prefetch: Runs jobs while they are short.
        bulk_fetcher: Starts the async jobs that follow another one.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        fetcher: JobFetcher,
        starter: JobStarter,
        runner: AttemptRunner,
        writer: OutcomeWriter,
        async_loop: AsyncLoop,
        retirement: Retirement,
        collector: BatchCollector,
        prefetch: PrefetchLoop,
        bulk_fetcher: AsyncBulkFetcher,
    ) -> None:
        self._fetcher, self._starter, self._runner, self._writer = fetcher, starter, runner, writer
        self._async, self._retirement = async_loop, retirement
        self._collector, self._batches = collector, collector.batches
        self._prefetch, self._bulk_fetcher = prefetch, bulk_fetcher

    def open(self, hooks: LoopHooks) -> None:
        """Run what comes before the first job on the event loop; raises what prevents the child from starting."""
        self._async.open(hooks)

    def run(self) -> None:
        """Work until the fetcher closes and every acquired job is settled."""
        self._fetcher.may_wait = self._async.keeps_up
        while (slot := self._async.wait_for_slot(lambda: self._fetcher.closing)) is not None:
            acquired = self._fetcher.acquire(slot)
            while acquired is not None:
                if self._prefetch.is_useful and (acquired := self._prefetch.run(acquired)) is None:
                    break
                slot = acquired.slot
                acquired = self._work(acquired)
            self._prefetch.record_idle()
            self._async.free_slot(slot)
        self._retirement.announce(self._async.running)
        self._async.drain()
        self._runner.close()

    def _work(self, acquired: AcquiredJob) -> AcquiredJob | None:
        """Run one job; return the next job if the call that settled this one has fetched it."""
        if acquired.job.name in self._batches:
            self._prefetch.count.record_long_job()
            self._work_batch(acquired)
            return None
        attempt = self._starter.begin(acquired)
        if attempt is None:
            return None
        if not isinstance(attempt, Attempt):
            return self._writer.write(acquired, attempt, 0.0)
        if self._runner.runs_off_main_thread(attempt, acquired.slot):
            self._prefetch.count.record_long_job()
            self._async.start(acquired, attempt)
            self._bulk_fetcher.start(acquired)
            return None
        self._bulk_fetcher.record_sync_job()
        started = mono_s()
        outcome = self._runner.call(attempt, acquired.slot)
        duration_ms = (mono_s() - started) * 1000
        self._prefetch.count.record(duration_ms)
        return self._writer.write(acquired, outcome, duration_ms)

    def _work_batch(self, first: AcquiredJob) -> None:
        """Collect a batch and run it."""
        members: list[tuple[AcquiredJob, Attempt]] = []
        not_started: list[tuple[AcquiredJob, Outcome]] = []
        for acquired in self._collector.collect(first):
            attempt = self._starter.begin(acquired)
            if attempt is None:
                self._return_slot(acquired, first)
            elif isinstance(attempt, Attempt):
                members.append((acquired, attempt))
            else:
                not_started.append((acquired, attempt))
        self._write_batch(not_started, 0.0, first)
        if not members:
            return
        acquired, attempt = members[0]
        if self._runner.runs_off_main_thread(attempt, acquired.slot):
            self._async.start_batch(members, first.slot)
            return
        started = mono_s()
        outcomes = BatchRunner(self._runner).call([(attempt, acquired.slot) for acquired, attempt in members])
        ended = [(acquired, outcome) for (acquired, _), outcome in zip(members, outcomes, strict=True)]
        self._write_batch(ended, (mono_s() - started) * 1000, first)

    def _write_batch(
        self, ended: Sequence[tuple[AcquiredJob, Outcome]], duration_ms: float, first: AcquiredJob
    ) -> None:
        self._writer.write_many(ended, duration_ms)
        for acquired, _ in ended:
            self._return_slot(acquired, first)

    def _return_slot(self, acquired: AcquiredJob, first: AcquiredJob) -> None:
        """Return the slot of a batch's job to the async loop, except for the first job's: the main thread uses that."""
        if acquired is not first:
            self._async.return_slot(acquired.slot)
