"""Starts acquired jobs: adds the next iteration of a job scheduler, finds the task, and applies its rate limit."""

from __future__ import annotations

from datetime import tzinfo
from typing import Final

from bulltask.clock import ServerClock
from bulltask.errors import RECOVERABLE
from bulltask.queue.next_iteration import add_next_iteration, scheduling_retry_delay_ms
from bulltask.transport.operation import run_sync
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.outcomes import AcquiredJob, IncompatibleOutcome, Outcome, RescheduledByWorkerOutcome
from bulltask.worker.child.retirement import Retirement

__all__ = ["IterationAdder", "JobStarter"]

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


class JobStarter:
    """Starts acquired jobs.

    Args:
        fetcher: Throttles the jobs of tasks that have reached their rate limit.
        runner: Finds the tasks, and checks the jobs.
        iteration_adder: Adds the next iterations of job schedulers.
        async_loop: Counts the running jobs, for a job in crash quarantine.
        retirement: Counts the jobs, and lets the supervisor replace this child when it has reached a limit.
    """

    def __init__(
        self,
        fetcher: JobFetcher,
        runner: AttemptRunner,
        iteration_adder: IterationAdder,
        async_loop: AsyncLoop,
        retirement: Retirement,
    ) -> None:
        self._fetcher, self._runner, self._iteration_adder = fetcher, runner, iteration_adder
        self._async, self._retirement = async_loop, retirement

    def begin(self, acquired: AcquiredJob) -> Attempt | Outcome | None:
        """Return the attempt or its outcome; ``None`` if the job is throttled because of its task's rate limit."""
        attempt = self._prepare(acquired)
        if (
            isinstance(attempt, Attempt)
            and attempt.rate is not None
            and self._fetcher.throttle_if_limited(acquired, attempt.rate)
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
        attempt = self._runner.begin(acquired.job)
        # If no worker can run the job, it waits, and its schedule with it: otherwise, one job a period would wait.
        if acquired.job.is_repeated and not isinstance(attempt, IncompatibleOutcome):
            return self._iteration_adder.add_next(acquired) or attempt
        return attempt
