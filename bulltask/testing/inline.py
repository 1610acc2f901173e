"""A worker in the test's process and thread: it runs jobs when the test asks it to.

Begin with :class:`InlineWorker`. Each of its runs acquires and finishes jobs as a child process does; the app's results
run jobs instead of waiting for a worker. :class:`FakeClock` is the app's clock, which tests advance.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Self

from bulltask.app import App
from bulltask.jobs.clock import Duration, ServerClock, mono_ms, to_ms, wall_ms, zone_of
from bulltask.jobs.errors import (
    BrokerError,
    BulltaskError,
    FailedChildrenError,
    NoPendingChildrenError,
    PendingChildrenError,
    ResultTimeoutError,
    TaskError,
)
from bulltask.jobs.job import JobRef, RunningJob
from bulltask.jobs.names import JobState, name_in_app
from bulltask.jobs.stored_job import Finished, StoredSnapshot
from bulltask.observe.events import ChildEvent, JobCompleted, JobFailed, JobStarted, JobThrottled
from bulltask.queue.schedulers import add_next_iteration
from bulltask.transport.broker import scan_all
from bulltask.transport.call import Call, FetchedJob, QueueKeys, SyncClient, command, text
from bulltask.transport.client import ClientPool
from bulltask.transport.operation import arun_generator, run_generator, run_sync
from bulltask.transport.results import Results
from bulltask.transport.scripts.move import (
    FetchOptions,
    collect_batch,
    move_to_active,
    release_unstarted,
    start_or_throttle,
)
from bulltask.transport.scripts.queue import scan_queues
from bulltask.worker.async_loop import batches_of
from bulltask.worker.attempt import Attempt, RedisJobClient
from bulltask.worker.beat import read_entries, reconcile
from bulltask.worker.in_process import InProcessRunner, Runnable, TaskLoop
from bulltask.worker.outcomes import AcquiredJob, Outcome, RateLimitedOutcome
from bulltask.worker.slots import Slot

__all__ = ["MAX_ATTEMPTS", "FakeClock", "InlineWorker", "UnattendedResults", "queues_in_redis"]

_FOREVER_MS: Final = 2**52

# A thread in which the worker runs async tasks has a copy of its caller's context; the test's own threads have none.
_running_worker: ContextVar[InlineWorker | None] = ContextVar("bulltask.testing.inline", default=None)


class InlineWorker:
    """Runs jobs in the thread that calls its methods, one after another.

    Everything else is as in production: the jobs are in Redis, their arguments and results are JSON, and BullMQ's
    scripts move them. Patches, database transactions and breakpoints of the test apply to the tasks, too.

    While the worker is open, ``result.get()`` and ``await result`` run the jobs that are due until the awaited job has
    finished. If that job is delayed, they advance the clock instead of waiting.

    The worker does not enforce time limits, and does not try again if Redis is unavailable.

    Args:
        app: An app inside :func:`bulltask.testing.use_server`.

    Attributes:
        clock: The app's clock.
    """

    def __init__(self, app: App) -> None:
        if app._config.always_eager:
            raise BulltaskError(f"{app!r} is in eager mode: its jobs run when they are sent, and need no worker")
        clock, results = app._broker.clock, app._broker.results
        if not isinstance(clock, FakeClock):
            raise BulltaskError(f"{app!r} uses its own server: create the worker inside use_server(app, url)")
        if not isinstance(results, Results) or isinstance(results, _InlineResults):
            raise BulltaskError(f"{app!r} already has an InlineWorker")
        self.clock = clock
        self._results = results
        self._app = app
        self._broker = app._broker
        self._lock = threading.RLock()
        self._loop = TaskLoop()
        self._running: set[JobRef] = set()
        self._last: _Run | None = None
        app._broker.results = _InlineResults(self._results, self)

    def run_jobs(self, *, propagate: bool = True) -> list[ChildEvent]:
        """Run all jobs that are ready, including jobs that they send, until none is left.

        Jobs that are delayed, because of ``countdown``, ``eta`` or a retry's backoff, stay delayed until the clock is
        advanced: see :meth:`run_for`.

        Args:
            propagate: Raise the exception of the first job that fails without a further retry. If this is false, the
                exception is only stored in the job.

        Returns:
            An event for each attempt, in order: ``JobCompleted``, ``JobRetried``, ``JobFailed`` …
            (:mod:`bulltask.events`).

        Raises:
            Exception: The task's exception, if ``propagate`` is true. The jobs after it have not run.
            BulltaskError: 10,000 attempts were not enough, probably because a task sends itself again and again.
        """
        return self._run(self.clock.now_ms(), propagate=propagate)

    async def arun_jobs(self, *, propagate: bool = True) -> list[ChildEvent]:
        """:meth:`run_jobs` for asyncio: async tasks run on the test's event loop."""
        return await self._arun(self.clock.now_ms(), propagate=propagate)

    def run_for(self, duration: Duration, *, propagate: bool = True) -> list[ChildEvent]:
        """Advance the clock without waiting, and run each job when it is due.

        This includes retries, iterations of job schedulers, and ``beat_schedule``, which is stored first, as when a
        worker starts.

        Args:
            duration: Seconds or ``timedelta`` by which the clock is advanced.
            propagate: As for :meth:`run_jobs`, which also documents the return value and the exceptions.
        """
        return self._run(self._end_ms(duration), propagate=propagate)

    async def arun_for(self, duration: Duration, *, propagate: bool = True) -> list[ChildEvent]:
        """:meth:`run_for` for asyncio."""
        return await self._arun(self._end_ms(duration), propagate=propagate)

    def run_until_finished(self, ref: JobRef, timeout_ms: int | None) -> None:
        """Run jobs until ``ref`` has finished, for at most ``timeout_ms`` on the clock; ``result.get()`` calls this."""
        self._run(self._deadline_ms(timeout_ms), propagate=False, awaited=ref)

    async def arun_until_finished(self, ref: JobRef, timeout_ms: int | None) -> None:
        """:meth:`run_until_finished` for asyncio."""
        await self._arun(self._deadline_ms(timeout_ms), propagate=False, awaited=ref)

    def is_running(self, ref: JobRef) -> bool:
        """Return whether this job is running. If so, its task is the caller, which would wait for itself forever."""
        return ref in self._running and _running_worker.get() is self

    def unregistered_task(self, queue: str) -> str:
        """Return the name of a task that the last run did not find in the app; ``""`` if all were registered.

        If the next job of a queue has such a task, the worker does not run the queue's jobs.
        """
        return "" if self._last is None else self._last.unregistered.get(queue, "")

    def close(self) -> None:
        """Close the event loop of async tasks. ``result.get()`` waits for other workers again."""
        self._broker.results = self._results
        self._loop.close(self._broker.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, end_ms: int, *, propagate: bool, awaited: JobRef | None = None) -> list[ChildEvent]:
        # A thread of the test may wait for a result, too.
        with self._lock, self._inline_run(propagate=propagate) as run:
            run_generator(self._attempts(run, end_ms, awaited), lambda ready: ready[0].call(ready[1], self._loop), ())
        return run.result()

    async def _arun(self, end_ms: int, *, propagate: bool, awaited: JobRef | None = None) -> list[ChildEvent]:
        with self._inline_run(propagate=propagate) as run:
            await arun_generator(self._attempts(run, end_ms, awaited), lambda ready: ready[0].acall(ready[1]), ())
        return run.result()

    @contextmanager
    def _inline_run(self, *, propagate: bool) -> Iterator[_Run]:
        token = _running_worker.set(self)
        try:
            with self._broker.pool.client() as client:
                self._last = _Run(self._app, client, self._running, propagate=propagate)
                yield self._last
        finally:
            _running_worker.reset(token)

    def _attempts(self, run: _Run, end_ms: int, awaited: JobRef | None) -> Attempts:
        yield from run.run_ready(awaited)
        while not run.ended and run.next_ms is not None and run.next_ms <= end_ms:
            self.clock.advance_ms(max(0, run.next_ms - self.clock.now_ms()))
            yield from run.run_ready(awaited)
        if awaited is None:
            self.clock.advance_ms(max(0, end_ms - self.clock.now_ms()))

    def _end_ms(self, duration: Duration) -> int:
        duration_ms = to_ms(duration, "duration")
        entries = read_entries(self._app) or ()
        with self._broker.pool.client() as client:
            for queue in {entry.job.queue for entry in entries}:
                of_queue = [entry for entry in entries if entry.job.queue == queue]
                keys = self._broker.keys(queue)
                run_sync(client, reconcile(keys, of_queue, self._app.name, self.clock.now_ms()))
        return self.clock.now_ms() + duration_ms

    def _deadline_ms(self, timeout_ms: int | None) -> int:
        return _FOREVER_MS if timeout_ms is None else self.clock.now_ms() + timeout_ms


MAX_ATTEMPTS: Final = 10_000
"""A run of more attempts than this is assumed to never end."""

_NEED_FALLBACK: Final = (BrokerError, PendingChildrenError, FailedChildrenError, NoPendingChildrenError)

Attempts = Generator[tuple[InProcessRunner, Runnable], Any, None]
"""A generator that yields the attempts to run, and receives their outcomes; sync and async callers share it."""


class _Run:
    """One run of an inline worker: acquires jobs and writes their outcomes.

    Attributes:
        ended: Whether a job whose exception must be raised has failed, or the awaited job has finished.
        next_ms: When the next job is due (epoch milliseconds), ``None`` if no job is delayed.
        unregistered: The task names of jobs whose tasks are not registered in the app, by queue. This run acquires no
            further jobs from these queues, because other workers may run them, for example in Node.js.
    """

    def __init__(self, app: App, client: SyncClient, running: set[JobRef], *, propagate: bool) -> None:
        self._app = app
        self._client = client
        self._running = running
        self._propagate = propagate
        self._clock = app._broker.clock
        broker = app._broker
        self.events: list[ChildEvent] = []
        self.ended = False
        self.next_ms: int | None = None
        self.unregistered: dict[str, str] = {}

        def job_client(job: RunningJob) -> RedisJobClient:
            return RedisJobClient(job, broker, broker.shared_async_client)

        def record(event: ChildEvent) -> None:
            if not isinstance(event, JobStarted):
                self.events.append(event)

        self._batches = batches_of(app)
        self._runner = InProcessRunner(app, job_client, max([1, *(size for size, _ in self._batches.values())]))
        self._runner.bus.subscribe(ChildEvent, record)
        self._queues: list[QueueKeys] = []
        self._attempts = 0

    def run_ready(self, awaited: JobRef | None) -> Attempts:
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
            known = self._queues
            self._queues = queues_in_redis(self._app, self._client)  # a task may have added one
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
            if isinstance(fetched, FetchedJob):
                job = RunningJob.read(first.keys.queue, fetched.job_id, fetched.fields)
                if job.name == first.job.name:
                    batch.append(AcquiredJob(slot, first.queue_index, first.keys, job, 0))
                else:  # a delayed job of another task is due
                    self._client.run(release_unstarted(first.keys, job.id, slot.token))
        self._attempts += len(batch) - 1
        return batch

    def _work(self, batch: list[AcquiredJob]) -> Attempts:
        """Run acquired jobs and write their outcomes."""
        started_ms = mono_ms()
        begun_jobs = [(acquired, begun) for acquired in batch if (begun := self._begin(acquired)) is not None]
        attempts = [begun for _, begun in begun_jobs if isinstance(begun, Attempt)]
        ran = iter((yield self._runner, attempts) if attempts else [])
        for acquired, begun in begun_jobs:
            written = self._write(acquired, next(ran) if isinstance(begun, Attempt) else begun)
            if (call := self._runner.finisher.after_finish(acquired, written)) is not None:
                self._client.run(call)
            if (hooks := self._runner.finisher.emit(acquired, written, mono_ms() - started_ms)) is not None:
                yield self._runner, hooks

    def _begin(self, acquired: AcquiredJob) -> Attempt | Outcome | None:
        """Return the attempt, its outcome if the task is not called, or ``None`` if the job is throttled."""
        job = acquired.job
        if job.is_repeated:
            zone = zone_of(self._app._config.timezone)
            run_sync(self._client, add_next_iteration(acquired.keys, job, self._clock.now_ms(), zone))
        attempt = self._runner.begin(job)
        if isinstance(attempt, Attempt) and (rate := attempt.plan.rate) is not None:
            token, now_ms = acquired.slot.token, self._clock.now_ms()
            if delay_ms := self._client.run(start_or_throttle(acquired.keys, job, token, rate, now_ms)):
                self._runner.bus.emit(JobThrottled(job.id, job.queue, job.name, delay_ms))
                return None
        self._runner.bus.emit(JobStarted(job.id, job.queue, job.name, job.attempts_started))
        return attempt

    def _options(self, keys: QueueKeys, slot: Slot) -> FetchOptions:
        return FetchOptions.from_config(self._app._config, keys, slot.token, self._runner.worker_id)

    def _fetch(self) -> AcquiredJob | None:
        due: list[int] = []
        for index, keys in enumerate(self._queues):
            if keys.queue in self.unregistered:
                continue
            options = self._options(keys, self._runner.slots[0])
            now_ms = self._clock.now_ms()
            fetched = self._client.run(move_to_active(keys, options, now_ms))
            if isinstance(fetched, FetchedJob):
                job = RunningJob.read(keys.queue, fetched.job_id, fetched.fields)
                is_registered = job.malformed or self._app.tasks.get(job.name) is not None
                if is_registered or self._app._config.incompatible_timeout_ms == 0:
                    return AcquiredJob(self._runner.slots[0], index, keys, job, 0)
                self._client.run(release_unstarted(keys, job.id, options.token))
                self.unregistered[keys.queue] = job.name
                continue
            due += [fetched.due_ms] if fetched.due_ms else []
            due += [now_ms + fetched.limited_ms] if fetched.limited_ms else []
        self.next_ms = min(due, default=None)
        return None

    def _write(self, acquired: AcquiredJob, outcome: Outcome) -> Outcome:
        finisher = self._runner.finisher
        try:
            if isinstance(outcome, RateLimitedOutcome):
                self._client.run(finisher.limit_call(acquired, outcome))
            self._client.run(finisher.call(acquired, outcome, fetch_next=False)[0])
        except _NEED_FALLBACK as exc:
            fallback = finisher.failed_writes.fallback(acquired, outcome, exc)
            if fallback is None:
                raise
            return self._write(acquired, fallback)
        return outcome


def queues_in_redis(app: App, client: SyncClient) -> list[QueueKeys]:
    """Return the keys of all queues that an app's workers can process, ordered by name.

    A queue whose name in Redis has no braces belongs to another app if ``queue_hash_tag`` is true.
    """
    names = scan_all(client, lambda cursor: scan_queues(app._config.prefix, cursor))
    hash_tag = app._config.queue_hash_tag
    own = {name_in_app(name, hash_tag=hash_tag) for name in names if "{" in name or not hash_tag}
    return [app._broker.keys(name) for name in sorted(own)]


_FIRST_MS = 0
"""A start position before all events, so that the outcome of a removed job is always found in the event stream."""


class UnattendedResults(Results):
    """The results of an app in a test that has no worker: waiting for a job would never end."""

    def __init__(self, results: Results) -> None:
        vars(self).update(vars(results))

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """Return the outcome of a job that has finished; ``ResultTimeoutError``: it has not."""
        _check_finished(ref, self.snapshot(ref))
        return super().wait(ref, timeout_ms, sent_ms)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio."""
        _check_finished(ref, await self.asnapshot(ref))
        return await super().await_finished(ref, timeout_ms, sent_ms)


class _InlineResults(Results):
    """The results of an app whose jobs an :class:`InlineWorker` runs."""

    def __init__(self, results: Results, worker: InlineWorker) -> None:
        vars(self).update(vars(results))
        self._worker = worker

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:  # noqa: ARG002
        """Run jobs until ``ref`` has finished, and return its outcome; ``ResultTimeoutError``: it was not run."""
        if _may_run(self.snapshot(ref).state):
            self._worker.run_until_finished(ref, timeout_ms)
            snapshot = self.snapshot(ref)
            self._check(ref, snapshot, timeout_ms)
            if snapshot.state.finished:
                return _outcome(snapshot)
        elif self._worker.is_running(ref):
            raise ResultTimeoutError(f"job {ref.id} in queue {ref.queue} waits for its own result")
        return super().wait(ref, timeout_ms, _FIRST_MS)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:  # noqa: ARG002
        """:meth:`wait` for asyncio."""
        if _may_run((await self.asnapshot(ref)).state):
            await self._worker.arun_until_finished(ref, timeout_ms)
            snapshot = await self.asnapshot(ref)
            self._check(ref, snapshot, timeout_ms)
            if snapshot.state.finished:
                return _outcome(snapshot)
        return await super().await_finished(ref, timeout_ms, _FIRST_MS)

    def _check(self, ref: JobRef, snapshot: StoredSnapshot, timeout_ms: int | None) -> None:
        if not _may_run(snapshot.state):
            return
        within = "" if timeout_ms is None else f" within {timeout_ms / 1000:g} s of the test's clock"
        reason = f" (its last attempt failed: {snapshot.failed_reason})" if snapshot.failed_reason else ""
        if task := self._worker.unregistered_task(ref.queue):
            reason = f"; task {task!r}, which is next in its queue, is not registered in the app: import its module"
        raise ResultTimeoutError(
            f"job {ref.id} in queue {ref.queue} is still {snapshot.state}, and no job is due{within}{reason}"
        )


def _check_finished(ref: JobRef, snapshot: StoredSnapshot) -> None:
    if not snapshot.state.finished and snapshot.state is not JobState.UNKNOWN:
        raise ResultTimeoutError(
            f"job {ref.id} in queue {ref.queue} is {snapshot.state}, and this test has no worker that could run it: "
            "derive the test case from bulltask.contrib.django.test.JobsMixin, or use the pytest fixture "
            "bulltask_worker"
        )


def _may_run(state: JobState) -> bool:
    """Return whether a worker has not acquired the job yet; an active one may be running in another process."""
    return not state.finished and state not in {JobState.ACTIVE, JobState.UNKNOWN}


def _outcome(snapshot: StoredSnapshot) -> Finished:
    if snapshot.state is JobState.COMPLETED:
        return Finished(True, snapshot.returnvalue or "null")
    return Finished(False, snapshot.failed_reason)


_LOCK: Final = ":lock"
_PAGE_SIZE: Final = 1_000


class FakeClock(ServerClock):
    """An app's clock in a test: this machine's time, plus the durations passed to :meth:`advance`.

    Delays, retries, schedules and ``expires`` follow this clock, because BullMQ's scripts receive the current time as
    an argument. The clock also follows libraries that replace Python's clock, such as time-machine and freezegun.

    Rate limits and deduplication end when keys in Redis expire. Therefore, :meth:`advance` makes these keys expire
    earlier. It does not change the locks of running jobs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ms = 0
        self._pool: ClientPool | None = None

    def connect(self, pool: ClientPool) -> None:
        """Make the keys in this server expire with the clock."""
        self._pool = pool

    @property
    def due(self) -> bool:
        """False, because the clock does not follow the server."""
        return False

    def now_ms(self) -> int:
        """Return the time in epoch milliseconds."""
        return wall_ms() + self._ahead_ms

    def now(self) -> datetime:
        """Return the time as an aware ``datetime`` in UTC, for example for ``eta=clock.now() + timedelta(hours=1)``."""
        return datetime.fromtimestamp(self.now_ms() / 1000, UTC)

    def advance(self, duration: Duration) -> None:
        """Move the clock forward. This runs no jobs.

        Args:
            duration: Seconds or ``timedelta``.

        Raises:
            ConfigError: ``duration`` is invalid or negative.
        """
        self.advance_ms(to_ms(duration, "duration"))

    def advance_ms(self, ms: int) -> None:
        """Like :meth:`advance`, in milliseconds."""
        self._ahead_ms += ms
        if self._pool is not None and ms > 0:
            with self._pool.client() as client:
                _expire_earlier(client, ms)


def _expire_earlier(client: SyncClient, ms: int) -> None:
    keys = sorted(key for key in scan_all(client, _scan) if not key.endswith(_LOCK))
    for start in range(0, len(keys), _PAGE_SIZE):
        page = keys[start : start + _PAGE_SIZE]
        left = client.run_many([command("PTTL", key) for key in page])
        client.run_many([command("PEXPIRE", key, ttl - ms) for key, ttl in zip(page, left, strict=True) if ttl > 0])


def _scan(cursor: str) -> Call[tuple[str, list[str]]]:
    def parse_reply(reply: Any) -> tuple[str, list[str]]:
        return text(reply[0]), [text(key) for key in reply[1]]

    return command("SCAN", cursor, "COUNT", _PAGE_SIZE, "TYPE", "string", parse_reply=parse_reply)
