"""Decides which jobs the event loop starts without the main thread (docs/adr/0040-next-async-job-on-the-loop.md)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from bulltask.clock import mono_ms
from bulltask.config.config import Config
from bulltask.jobs.job import RunningJob
from bulltask.transport.replies import Fetched
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.outcomes import AcquiredJob, Outcome
from bulltask.worker.child.retirement import Retirement
from bulltask.worker.quarantine import max_concurrent

__all__ = ["NextJobs"]

_PAUSE_MS: Final = 100
"""How long the event loop fetches no jobs after it has fetched one for the main thread."""


class NextJobs:
    """The jobs that the event loop fetches when it writes an outcome, and starts itself: only plain async ones.

    Every other job is released, so that the main thread, or another worker, acquires it. All methods are called on the
    event loop, except :meth:`pause`.

    Args:
        fetcher: The main thread's fetcher. Only its thread-safe methods and attributes are used.
        runner: Checks the jobs.
        retirement: Counts the jobs.
        tasks: The tasks whose jobs the event loop may start (:func:`bulltask.worker.child.capacity.loop_tasks`).
        config: Lock duration, and the number of crashes after which a job runs alone.
    """

    def __init__(
        self,
        fetcher: JobFetcher,
        runner: AttemptRunner,
        retirement: Retirement,
        tasks: Collection[str],
        config: Config,
    ) -> None:
        self._fetcher, self._runner, self._retirement = fetcher, runner, retirement
        self._tasks, self._max_crashes, self.lock_ms = tasks, config.max_crashes, config.lock_ms
        self._paused_until_ms = 0

    def may_follow(self, acquired: AcquiredJob) -> bool:
        """Whether the call that writes the outcome of this job may fetch the next one."""
        return (
            acquired.job.name in self._tasks
            and self._fetcher.may_fetch_next
            and not self._retirement.limits_jobs
            and self._fetcher.round_robin.may_stay(acquired.queue_index)
            and mono_ms() >= self._paused_until_ms
        )

    def pause(self) -> None:
        """Fetch no jobs for a while, because the main thread needs free slots; any thread may call it."""
        self._paused_until_ms = mono_ms() + _PAUSE_MS

    def acquired(self, previous: AcquiredJob, fetched: Fetched) -> AcquiredJob:
        """Return the job that was fetched into the slot of the previous job."""
        job = RunningJob.read(previous.keys.queue, fetched.job_id, fetched.fields)
        limit = max_concurrent(fetched.fields, self._max_crashes)
        return AcquiredJob(previous.slot, previous.queue_index, previous.keys, job, limit)

    def may_start(self, acquired: AcquiredJob) -> bool:
        """Whether the event loop may start the job: only if it needs no further call to Redis, which would block."""
        job = acquired.job
        needs_call = job.is_repeated or job.canvas or job.replacement or job.deferred_failure
        is_plain = job.name in self._tasks and not (acquired.max_concurrent or needs_call)
        return is_plain and self._fetcher.may_fetch_next

    def begin(self, acquired: AcquiredJob) -> Attempt | Outcome:
        """Start a job for which :meth:`may_start` is true.

        Returns:
            Its attempt, or its outcome if the task must not be called.
        """
        acquired.slot.activate(acquired.queue_index, acquired.job.id, mono_ms())
        attempt = self._runner.begin(acquired.job)
        self._fetcher.emit_started(acquired.job)
        self._retirement.count_job()
        return attempt
