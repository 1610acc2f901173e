"""A child's main thread: acquires jobs, runs sync tasks one at a time, and passes async ones to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import tzinfo
from typing import Any, Final

from bulltask.clock import ServerClock, mono_ms
from bulltask.errors import RECOVERABLE, BrokerError, BulltaskError, JobError
from bulltask.queue.next_iteration import add_next_iteration, scheduling_retry_delay_ms
from bulltask.transport.call import Call
from bulltask.transport.operation import run_sync
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.batch_collector import BatchCollector
from bulltask.worker.child.batch_runner import BatchRunner
from bulltask.worker.child.failed_writes import BackoffStep, Settlement, WriteStep
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.outcomes import AcquiredJob, Outcome, RateLimitedOutcome, RescheduledByWorkerOutcome
from bulltask.worker.child.retirement import Retirement
from bulltask.worker.child.settle import Settler

__all__ = ["IterationAdder", "SyncLoop"]

_ITERATION_LOCK_LOST_MS: Final = 1_000
"""Delay of a job whose lock was lost while its next iteration was being added."""


class IterationAdder:
    """Adds the next iteration of a job scheduler when a child acquires the current one.

    The next iteration is added before the current job runs, so the scheduler continues even if that job fails.

    Args:
        fetcher: The fetcher, whose client makes the calls.
        clock: The server's time.
        zone: The time zone of cron patterns without one.
    """

    def __init__(self, fetcher: JobFetcher, clock: ServerClock, zone: tzinfo) -> None:
        self._fetcher, self._clock, self._zone = fetcher, clock, zone

    def add_next(self, acquired: AcquiredJob) -> RescheduledByWorkerOutcome | None:
        """Add the next iteration; return the current job's outcome if that is not possible.

        While Redis is unavailable, the call is retried, and the supervisor renews the job's lock. After an error
        reply, or if the schedule is malformed, the job is rescheduled
        (:func:`~bulltask.queue.next_iteration.scheduling_retry_delay_ms`).
        """
        interrupted = False
        while True:
            try:
                self._add(acquired)
                # Redis may have been unavailable for longer than the lock lasts, so another worker may have the job.
                lost = interrupted and not self._fetcher.renew_lock(acquired)
            except RECOVERABLE as exc:
                interrupted = True
                self._fetcher.back_off(exc)
            except Exception as exc:  # noqa: BLE001 - a malformed schedule must not stop the child
                return RescheduledByWorkerOutcome(
                    scheduling_retry_delay_ms(acquired.job.attempts_started), str(exc) or type(exc).__name__
                )
            else:
                self._fetcher.backoff.reset()
                return RescheduledByWorkerOutcome(_ITERATION_LOCK_LOST_MS, "its lock was lost") if lost else None

    def _add(self, acquired: AcquiredJob) -> None:
        run_sync(
            self._fetcher.client, add_next_iteration(acquired.keys, acquired.job, self._clock.now_ms(), self._zone)
        )


class SyncLoop:
    """The main thread of a child.

    Sync tasks run only on it, because Python runs signal handlers (time limits, stack dumps) on the main thread.

    Args:
        fetcher: Acquires jobs.
        runner: Runs attempts.
        settler: Builds the calls that write their outcomes.
        iteration_adder: Adds the next iterations of job schedulers.
        async_loop: Runs async tasks on another thread, and manages the free slots.
        retirement: Counts the jobs, and lets the supervisor replace this child when it has reached a limit.
        collector: Collects the jobs of batches.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        fetcher: JobFetcher,
        runner: AttemptRunner,
        settler: Settler,
        iteration_adder: IterationAdder,
        async_loop: AsyncLoop,
        retirement: Retirement,
        collector: BatchCollector,
    ) -> None:
        self._fetcher, self._runner, self._settler = fetcher, runner, settler
        self._collector, self._batches = collector, collector.batches
        self._iteration_adder, self._async, self._retirement = iteration_adder, async_loop, retirement

    def run(self) -> None:
        """Work until the fetcher closes and every acquired job is settled."""
        while (slot := self._async.wait_for_slot(lambda: self._fetcher.closing)) is not None:
            acquired = self._fetcher.acquire(slot)
            while acquired is not None:
                acquired = self._work(acquired)
            self._async.free_slot(slot)
        self._retirement.announce(self._async.running)
        self._async.drain()
        self._runner.close()

    def _work(self, acquired: AcquiredJob) -> AcquiredJob | None:
        """Run one job; return the next job if the call that settled this one has fetched it."""
        if acquired.job.name in self._batches:
            self._work_batch(acquired)
            return None
        attempt = self._begin(acquired)
        if attempt is None:
            return None
        if not isinstance(attempt, Attempt):
            return self._settle(acquired, attempt, 0.0)
        if self._runner.runs_off_main_thread(attempt, acquired.slot):
            self._async.start(acquired, attempt)
            return None
        started = time.monotonic()
        outcome = self._runner.call(attempt, acquired.slot)
        return self._settle(acquired, outcome, (time.monotonic() - started) * 1000)

    def _begin(self, acquired: AcquiredJob) -> Attempt | Outcome | None:
        """Return the attempt or its outcome; ``None`` if the job is held because of its task's rate limit."""
        attempt = self._prepare(acquired)
        if (
            isinstance(attempt, Attempt)
            and attempt.rate is not None
            and self._fetcher.hold_if_limited(acquired, attempt.rate)
        ):
            return None
        self._fetcher.emit_started(acquired.job)
        if self._retirement.count_job():
            self._fetcher.closing = True  # this is the last job
        return attempt

    def _prepare(self, acquired: AcquiredJob) -> Attempt | Outcome:
        if acquired.max_concurrent:
            # Before the job's data is decoded, because decoding may crash the child.
            self._async.wait_until_running(at_most=acquired.max_concurrent)
        if acquired.job.is_repeated and (rescheduled := self._iteration_adder.add_next(acquired)) is not None:
            return rescheduled
        return self._runner.begin(acquired.job)

    def _work_batch(self, first: AcquiredJob) -> None:
        """Collect a batch and run it."""
        members: list[tuple[AcquiredJob, Attempt]] = []
        not_started: list[tuple[AcquiredJob, Outcome]] = []
        for acquired in self._collector.collect(first):
            attempt = self._begin(acquired)
            if attempt is None:
                self._return_slot(acquired, first)
            elif isinstance(attempt, Attempt):
                members.append((acquired, attempt))
            else:
                not_started.append((acquired, attempt))
        self._settle_batch(not_started, 0.0, first)
        if not members:
            return
        acquired, attempt = members[0]
        if self._runner.runs_off_main_thread(attempt, acquired.slot):
            self._async.start_batch(members, first.slot)
            return
        started = time.monotonic()
        outcomes = BatchRunner(self._runner).call([(attempt, acquired.slot) for acquired, attempt in members])
        ended = [(acquired, outcome) for (acquired, _), outcome in zip(members, outcomes, strict=True)]
        self._settle_batch(ended, (time.monotonic() - started) * 1000, first)

    def _settle_batch(
        self, ended: Sequence[tuple[AcquiredJob, Outcome]], duration_ms: float, first: AcquiredJob
    ) -> None:
        """Write the outcomes in one round trip. Each job has its own call, so an error affects only one job."""
        for acquired, _ in ended:
            acquired.slot.settle(mono_ms())
        for (acquired, outcome), error in zip(ended, self._write_batch(ended), strict=True):
            written: Outcome | None = outcome
            if isinstance(error, BrokerError | JobError):
                steps = self._settler.failed_writes.steps(acquired, outcome, error)
                written, _, _ = self._execute(steps, acquired, fetch=False)
            self._after_write(acquired, written, duration_ms)
            self._fetcher.free_slot(acquired.slot)
            self._return_slot(acquired, first)

    def _return_slot(self, acquired: AcquiredJob, first: AcquiredJob) -> None:
        """Return the slot of a batch's job to the async loop, except for the first job's: the main thread uses that."""
        if acquired is not first:
            self._async.return_slot(acquired.slot)

    def _write_batch(self, ended: Sequence[tuple[AcquiredJob, Outcome]]) -> Sequence[object]:
        """Return the reply to each call, or its error."""
        try:
            limits = [
                self._settler.limit_call(acquired, outcome)
                for acquired, outcome in ended
                if isinstance(outcome, RateLimitedOutcome)
            ]
            calls = [self._settler.call(acquired, outcome, fetch_next=False) for acquired, outcome in ended]
            return self._fetcher.client.try_many([*limits, *calls])[len(limits) :]
        except BrokerError as exc:
            return [exc] * len(ended)

    def _settle(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> AcquiredJob | None:
        fetcher, written, fetch_error = self._fetcher, outcome, None
        acquired.slot.settle(mono_ms())
        try:
            next_job = self._exchange(acquired, outcome, fetch=fetcher.may_fetch_next)
        except (BrokerError, JobError) as exc:
            steps = self._settler.failed_writes.steps(acquired, outcome, exc)
            written, next_job, fetch_error = self._execute(steps, acquired, fetch=True)
        if fetch_error is not None:
            fetcher.fail_malformed(acquired.queue_index, acquired.slot, fetch_error)
        if next_job is None:
            fetcher.free_slot(acquired.slot)
        self._after_write(acquired, written, duration_ms)
        return next_job

    def _after_write(self, acquired: AcquiredJob, written: Outcome | None, duration_ms: float) -> None:
        self._fetcher.backoff.reset()
        if (call := self._settler.after_settle(acquired, written)) is not None:
            self._run_until_reply(call)
        if (hooks := self._settler.emit(acquired, written, duration_ms)) is not None:
            asyncio.run(hooks)  # of an async task that was not called

    def _exchange(self, acquired: AcquiredJob, outcome: Outcome, *, fetch: bool) -> AcquiredJob | None:
        """Write the outcome and fetch the next job, from the same or another queue, in one round trip."""
        fetcher, slot = self._fetcher, acquired.slot
        if isinstance(outcome, RateLimitedOutcome):
            fetcher.client.run(self._settler.limit_call(acquired, outcome))
        index = fetcher.round_robin.after(acquired.queue_index)
        same = index == acquired.queue_index
        call = self._settler.call(acquired, outcome, fetch_next=fetch and same)
        if not fetch or (same and call.script is not None and call.script.name != "moveToFinished"):
            fetcher.client.run(call)
            return None
        if same:
            return fetcher.acquired(index, slot, fetcher.client.run(call))
        settled, fetched = fetcher.client.try_many([call, fetcher.fetch_call(index, slot)])
        if isinstance(settled, BulltaskError):
            fetcher.release_fetched(index, slot, fetched)
            raise settled
        if isinstance(fetched, BulltaskError):
            # The outcome is stored. The next fetch raises the same error and handles it.
            if isinstance(fetched, BrokerError):
                fetcher.fail_malformed(index, slot, fetched)
            return None
        return fetcher.acquired(index, slot, fetched)

    def _execute(self, steps: Settlement, acquired: AcquiredJob, *, fetch: bool) -> Any:
        try:
            step = next(steps)
            while True:
                try:
                    result = self._step(step, acquired, fetch=fetch)
                except (BrokerError, JobError) as exc:
                    step = steps.throw(exc)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value

    def _step(self, step: BackoffStep | WriteStep | Call[bool], acquired: AcquiredJob, *, fetch: bool) -> Any:
        match step:
            case BackoffStep():
                self._fetcher.record_lost_call(step.error, acquired.slot)
                self._fetcher.back_off(step.error)
            case WriteStep():
                fetch = fetch and self._fetcher.may_fetch_next and not step.uncertain
                return self._exchange(acquired, step.outcome, fetch=fetch)
            case _:
                return self._run_until_reply(step)
        return None

    def _run_until_reply(self, call: Call[Any]) -> Any:
        """Retry a call until there is a reply; return ``False`` after an error reply."""
        while True:
            try:
                return self._fetcher.client.run(call)
            except RECOVERABLE as exc:
                self._fetcher.back_off(exc)
            except (BrokerError, JobError):
                return False
