"""The steps of an inline worker: acquires jobs that are ready, and writes the outcomes of their attempts."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from bulltask.app import App
from bulltask.clock import mono_ms, zone_of
from bulltask.errors import (
    BrokerError,
    BulltaskError,
    FailedChildrenError,
    NoPendingChildrenError,
    PendingChildrenError,
    TaskError,
)
from bulltask.events import ChildEvent, JobCompleted, JobFailed, JobStarted, JobThrottled
from bulltask.jobs.job import JobRef, RunningJob
from bulltask.queue.next_iteration import add_next_iteration
from bulltask.testing.queues import queues_in_redis
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.fetch import FetchOptions, collect_batch, move_to_active
from bulltask.transport.scripts.move import move_from_active_to_wait
from bulltask.transport.scripts.start import start_or_throttle
from bulltask.worker.child.attempt import Attempt
from bulltask.worker.child.capacity import batches_of
from bulltask.worker.child.job_client import RedisJobClient
from bulltask.worker.child.outcomes import AcquiredJob, Outcome, RateLimitedOutcome
from bulltask.worker.in_process import InProcessRunner, Runnable
from bulltask.worker.slot import Slot

__all__ = ["MAX_ATTEMPTS", "InlineRun", "Steps"]

MAX_ATTEMPTS: Final = 10_000
"""A run of more attempts than this is assumed to never end."""

_NEED_FALLBACK: Final = (BrokerError, PendingChildrenError, FailedChildrenError, NoPendingChildrenError)

Steps = Generator[tuple[InProcessRunner, Runnable], Any, None]
"""A generator that yields the attempts to run, and receives their outcomes; sync and async callers share it."""


class InlineRun:
    """One run of an inline worker: acquires jobs and writes their outcomes.

    Args:
        app: The app.
        client: A client of the app's server.
        running: The worker's running jobs, which this run adds to.

    Attributes:
        events: The events of the attempts.
        ended: Whether a job whose exception must be raised has failed, or the awaited job has finished.
        next_ms: When the next job is due (epoch milliseconds), ``None`` if no job is delayed.
        unregistered: The task names of jobs whose tasks are not registered in the app, by queue. This run acquires no
            further jobs from these queues, because other workers may run them, for example in Node.js.
    """

    def __init__(self, app: App, client: SyncClient, running: set[JobRef], *, propagate: bool) -> None:
        self._app, self._client, self._running, self._propagate = app, client, running, propagate
        self._clock, broker = app.broker.clock, app.broker
        self.events: list[ChildEvent] = []
        self.ended = False
        self.next_ms: int | None = None
        self.unregistered: dict[str, str] = {}

        def job_client(job: RunningJob) -> RedisJobClient:
            return RedisJobClient(job, broker, broker.shared_async_client)

        self._batches = batches_of(app)
        self._runner = InProcessRunner(app, job_client, max([1, *(size for size, _ in self._batches.values())]))
        self._runner.bus.subscribe(ChildEvent, self._record)
        self._queues: list[QueueKeys] = []
        self._attempts = 0

    def run_ready(self, awaited: JobRef | None) -> Steps:
        """Run the jobs that are ready, and those that they send, or until ``awaited`` has finished."""
        while not self.ended and (acquired := self._acquire()) is not None:
            batch, first_event = self._batch(acquired), len(self.events)
            refs = {JobRef(each.job.queue, each.job.id) for each in batch}
            self._running |= refs
            try:
                yield from self._work(batch)
            finally:
                self._running -= refs
            for event in self.events[first_event:]:
                if isinstance(event, JobCompleted | JobFailed):
                    self.ended |= JobRef(event.queue, event.job_id) == awaited
                    self.ended |= isinstance(event, JobFailed) and self._propagate

    def result(self) -> list[ChildEvent]:
        """Return the events, or raise the exception of the job that failed."""
        failed = next((event for event in self.events if isinstance(event, JobFailed)), None)
        if self._propagate and failed is not None:
            raise failed.exception or TaskError(failed.error, job_id=failed.job_id, remote_traceback=failed.traceback)
        return self.events

    def _acquire(self) -> AcquiredJob | None:
        """Acquire the next job that is ready, from any queue; return ``None`` if there is none."""
        acquired = self._fetch()
        if acquired is None:
            known, self._queues = self._queues, queues_in_redis(self._app, self._client)  # a task may have added one
            acquired = self._fetch() if self._queues != known else None
        self._attempts += acquired is not None
        if self._attempts > MAX_ATTEMPTS:
            raise BulltaskError(
                f"the worker has run {MAX_ATTEMPTS:,} attempts and jobs are still due; does a task send itself again?"
            )
        return acquired

    def _batch(self, first: AcquiredJob) -> list[AcquiredJob]:
        """Return a batch: ``first`` and further waiting jobs, or ``first`` alone if its task is not a batch task."""
        size, _ = self._batches.get(first.job.name, (1, 0))
        if size == 1:
            return [first]
        slots = self._runner.slots[1:size]
        options = [self._options(first.keys, slot) for slot in slots]
        replies = self._client.run(collect_batch(first.keys, options, first.job.name, self._clock.now_ms()))
        batch = [first]
        for slot, fetched in zip(slots, replies, strict=False):
            if fetched.job_id:
                job = RunningJob.read(first.keys.queue, fetched.job_id, fetched.fields)
                if job.name == first.job.name:
                    batch.append(AcquiredJob(slot, first.queue_index, first.keys, job, 0))
                else:  # a delayed job of another task is due
                    self._client.run(move_from_active_to_wait(first.keys, job.id, slot.token))
        self._attempts += len(batch) - 1
        return batch

    def _work(self, batch: list[AcquiredJob]) -> Steps:
        """Run acquired jobs and write their outcomes."""
        started_ms = mono_ms()
        begun_jobs = [(acquired, begun) for acquired in batch if (begun := self._begin(acquired)) is not None]
        attempts = [begun for _, begun in begun_jobs if isinstance(begun, Attempt)]
        ran = iter((yield self._runner, attempts) if attempts else [])
        for acquired, begun in begun_jobs:
            written = self._write(acquired, next(ran) if isinstance(begun, Attempt) else begun)
            if (call := self._runner.settler.after_settle(acquired, written)) is not None:
                self._client.run(call)
            if (hooks := self._runner.settler.emit(acquired, written, mono_ms() - started_ms)) is not None:
                yield self._runner, hooks

    def _begin(self, acquired: AcquiredJob) -> Attempt | Outcome | None:
        """Return the attempt, its outcome if the task is not called, or ``None`` if the job is throttled."""
        job = acquired.job
        if job.is_repeated:
            zone = zone_of(self._app.config.timezone)
            run_sync(self._client, add_next_iteration(acquired.keys, job, self._clock.now_ms(), zone))
        attempt = self._runner.begin(job)
        if isinstance(attempt, Attempt) and attempt.rate is not None:
            token, now_ms = acquired.slot.token, self._clock.now_ms()
            if delay_ms := self._client.run(start_or_throttle(acquired.keys, job, token, attempt.rate, now_ms)):
                self._runner.bus.emit(JobThrottled(job.id, job.queue, job.name, delay_ms))
                return None
        self._runner.bus.emit(JobStarted(job.id, job.queue, job.name, job.attempts_started))
        return attempt

    def _options(self, keys: QueueKeys, slot: Slot) -> FetchOptions:
        return FetchOptions.from_config(self._app.config, keys, slot.token, self._runner.worker_id)

    def _record(self, event: ChildEvent) -> None:
        if not isinstance(event, JobStarted):
            self.events.append(event)

    def _fetch(self) -> AcquiredJob | None:
        due: list[int] = []
        for index, keys in enumerate(self._queues):
            if keys.queue in self.unregistered:
                continue
            options = self._options(keys, self._runner.slots[0])
            now_ms = self._clock.now_ms()
            fetched = self._client.run(move_to_active(keys, options, now_ms))
            if fetched.job_id:
                job = RunningJob.read(keys.queue, fetched.job_id, fetched.fields)
                if not self._is_unregistered(job):
                    return AcquiredJob(self._runner.slots[0], index, keys, job, 0)
                self._client.run(move_from_active_to_wait(keys, job.id, options.token))
                self.unregistered[keys.queue] = job.name
            due += [fetched.due_ms] if fetched.due_ms else []
            due += [now_ms + fetched.limited_ms] if fetched.limited_ms else []
        self.next_ms = min(due, default=None)
        return None

    def _is_unregistered(self, job: RunningJob) -> bool:
        unknown = self._app.tasks.get(job.name) is None and not job.malformed
        return unknown and self._app.config.incompatible_timeout_ms != 0

    def _write(self, acquired: AcquiredJob, outcome: Outcome) -> Outcome:
        settler = self._runner.settler
        try:
            if isinstance(outcome, RateLimitedOutcome):
                self._client.run(settler.limit_call(acquired, outcome))
            self._client.run(settler.call(acquired, outcome, fetch_next=False))
        except _NEED_FALLBACK as exc:
            fallback = settler.failed_writes.fallback(acquired, outcome, exc)
            if fallback is None:
                raise
            return self._write(acquired, fallback)
        return outcome
