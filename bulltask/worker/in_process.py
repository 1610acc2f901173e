"""Runs jobs in the calling process, with the code of a child: for :mod:`bulltask.testing` and for eager mode.

Begin with :class:`InProcessRunner`. :class:`EagerBroker` runs jobs when they are sent, without Redis.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, TypeVar

from bulltask.app import App
from bulltask.config.urls import SecretUrl
from bulltask.jobs import codec
from bulltask.jobs.clock import mono_ms, wall_ms
from bulltask.jobs.errors import BulltaskError, JobNotFoundError, TaskError
from bulltask.jobs.job import JobOptions, JobRef, NewJob, PlannedJob, RunningJob, StoredOptions, in_order, new_job_id
from bulltask.jobs.names import JobState, Revocation
from bulltask.jobs.payloads import PayloadCodec
from bulltask.jobs.stored_job import FailedJob, Finished, StoredCall, StoredSnapshot
from bulltask.observe.bus import Bus, Event
from bulltask.registry.canvas import Canvas
from bulltask.registry.canvas_plan import plan_replacement
from bulltask.registry.context import JobClient, JobCommand
from bulltask.registry.request import ancestry, origin_of_replacement
from bulltask.transport.broker import Broker
from bulltask.transport.operation import arun_generator, run_generator
from bulltask.transport.produce import Producer
from bulltask.worker.attempt import Attempt, AttemptRunner, BatchRunner
from bulltask.worker.broker_backoff import called_errbacks, errback_data, errback_queue
from bulltask.worker.cancellation import Cancellation, TaskThreads
from bulltask.worker.finish import Finisher, options_after_retry
from bulltask.worker.outcomes import (
    AcquiredJob,
    CompletedOutcome,
    FailedOutcome,
    Outcome,
    RetriedOutcome,
    WorkerOutcome,
)
from bulltask.worker.slots import ChildLimits, Slots
from bulltask.worker.spark_tasks import SparkTaskRunner

__all__ = ["EagerBroker", "EagerRunner", "InProcessRunner", "Runnable", "TaskLoop"]


T = TypeVar("T")

Runnable = list[Attempt] | Coroutine[Any, Any, None]
"""What the steps of a run yield to be executed: one attempt, a batch's attempts, or the hooks after an attempt."""
_WORKER_ID: Final = "in-process"


class InProcessRunner:
    """Runs attempts one at a time, with the code that a worker's child uses.

    It has no supervisor, so time limits are not enforced, and a running attempt cannot be cancelled. A batch has at
    most as many jobs as there are slots, whose tokens lock the jobs.
    """

    worker_id = _WORKER_ID

    def __init__(
        self, app: App, job_client: Callable[[RunningJob], JobClient], slots: int = 1, *, is_eager: bool = False
    ) -> None:
        block = Slots(1, slots).children[0]
        block.reset()
        self.slots = block.slots()
        self.bus = Bus(on_error=_warn)
        app._listeners.attach(self.bus, is_final=False)
        spark = SparkTaskRunner(app, job_client, lambda _job, _token: True, lambda: None)
        cancellation = Cancellation(block, spark.interrupt, lambda: None)
        no_limits = replace(app._config, max_memory_kib=None, hard_memory_kib=None)  # this process is not a child
        child_limits = ChildLimits(no_limits, block, 0, self.bus, os.getpid())
        threads = TaskThreads(0)
        self._runner = AttemptRunner(app, job_client, spark, cancellation, child_limits, threads, worker_id=_WORKER_ID)
        self._runner.is_eager = is_eager
        self._runner.keeps_plans = False  # a task may be defined again
        self._runner.waits_for_other_workers = False
        self.finisher = Finisher(app._config, app._broker.clock, self.bus, _WORKER_ID, hooks=self._runner.hooks)

    def begin(self, job: RunningJob) -> Attempt | Outcome:
        """Return the attempt, or an outcome if the task must not or cannot be called."""
        return self._runner.begin(job)

    def call(self, attempts: Runnable, loop: TaskLoop) -> Any:
        """Run one attempt, or those of a batch; an async task and the coroutines of its hooks run on ``loop``."""
        if not isinstance(attempts, list):
            return loop.run(attempts)
        if attempts[0].task._is_async:
            return loop.run(self._acall(attempts))
        return self._call(attempts)

    async def acall(self, attempts: Runnable) -> Any:
        """:meth:`call` for asyncio: async tasks run on the running loop; sync tasks run directly, and block it."""
        if not isinstance(attempts, list):
            return await attempts
        if not attempts[0].task._is_async:
            return self._call(attempts)
        return await self._acall(attempts)

    def _call(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        if attempts[0].task._is_batch:
            return BatchRunner(self._runner).call(list(zip(attempts, self.slots, strict=False)))
        return [self._runner.call(attempts[0], self.slots[0])]

    async def _acall(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        """Run the attempts in an asyncio task of their own, which their code may cancel even just before it returns."""
        outcomes: list[Outcome] = []

        async def run() -> None:
            if attempts[0].task._is_batch:
                outcomes.extend(await BatchRunner(self._runner).acall(list(zip(attempts, self.slots, strict=False))))
            else:
                outcomes.append(await self._runner.acall(attempts[0], self.slots[0]))

        task = asyncio.create_task(run())
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        if not outcomes:
            await task
        return [
            await self._runner.amove(attempt, outcome) if type(outcome) is RetriedOutcome else outcome
            for attempt, outcome in zip(attempts, outcomes, strict=True)
        ]


class TaskLoop:
    """An event loop for the async tasks that sync code runs.

    The loop is the same for all of them, as in a child, because connections of a task's libraries belong to a loop. If
    the calling thread is running another loop, this one runs on a separate thread.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result."""
        runner = self._runner = self._runner or asyncio.Runner(loop_factory=asyncio.new_event_loop)
        return _outside_of_loops(lambda: runner.run(coroutine))

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run ``last`` and close the loop, if it was used."""
        if self._runner is not None:
            if last is not None:
                self.run(last())
            _outside_of_loops(self._runner.close)
            self._runner = None


def _outside_of_loops(function: Callable[[], T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as exc:  # noqa: BLE001 - raised in the calling thread
            errors.append(exc)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="bulltask-in-process")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _warn(listener: str, event: Event, exc: Exception) -> None:
    warnings.warn(f"listener {listener} raised {exc!r} for {type(event).__name__}", RuntimeWarning, stacklevel=2)


@dataclass(frozen=True, slots=True)
class _Entry:
    snapshot: StoredSnapshot
    call: StoredCall
    failed_job: FailedJob | None = None


_UNKNOWN = StoredSnapshot(JobState.UNKNOWN, None, "", (), None, 0)


class EagerResults:
    """Stores the newest outcomes as JSON; a ``ResultReader`` like :class:`bulltask.transport.results.Results`."""

    def __init__(self, payloads: PayloadCodec, limit: int | None = None) -> None:
        self.payloads = payloads
        self._entries: dict[JobRef, _Entry] = {}
        self._groups: dict[str, str] = {}
        self._limit = limit
        self._lock = threading.Lock()

    # ---- written while jobs run ----

    def complete(self, job: RunningJob, value: bytes) -> None:
        """Store a return value."""
        self._store(job, JobState.COMPLETED, returnvalue=value.decode(), attempts_made=job.attempts_made + 1)

    def fail(self, job: RunningJob, reason: str, traces: tuple[str, ...], outcome: FailedOutcome) -> None:
        """Store a failure."""
        made = job.attempts_made + 1
        self._store(
            job,
            JobState.FAILED,
            outcome.failed_job,
            error=outcome.error,
            failed_reason=reason,
            stacktrace=traces,
            attempts_made=made,
            returnvalue=None,
        )

    def set_progress(self, job: RunningJob, progress: Any) -> None:
        """Store the job's progress."""
        self._store(job, JobState.ACTIVE, progress=progress)

    # ---- read by the jobs that follow ----

    def has(self, ref: JobRef) -> bool:
        """Return whether a job has run."""
        return ref in self._entries

    def completed(self, ref: JobRef) -> bool:
        """Return whether a job has completed."""
        return self.snapshot(ref).state is JobState.COMPLETED

    def value(self, ref: JobRef) -> Any:
        """Return the return value of a completed job."""
        return codec.decode(self.snapshot(ref).returnvalue)

    def failure(self, ref: JobRef) -> tuple[str, str, FailedJob, str]:
        """Return the reason and traceback of a failed job, the job that failed first, and the stored exception."""
        entry = self._entries[ref]
        traces = entry.snapshot.stacktrace
        return (
            entry.snapshot.failed_reason,
            traces[-1] if traces else "",
            entry.failed_job or FailedJob(ref.id, "", ref.queue),
            entry.snapshot.error,
        )

    # ---- ResultReader ----

    def snapshot(self, ref: JobRef) -> StoredSnapshot:
        """Return the job's state and outcome."""
        entry = self._entries.get(ref)
        return _UNKNOWN if entry is None else entry.snapshot

    async def asnapshot(self, ref: JobRef) -> StoredSnapshot:
        """:meth:`snapshot` for asyncio."""
        return self.snapshot(ref)

    def call(self, ref: JobRef) -> StoredCall | None:
        """Return the job's name and arguments, and when it finished."""
        entry = self._entries.get(ref)
        return None if entry is None else entry.call

    def finished_states(self, refs: Sequence[JobRef]) -> list[JobState | None]:
        """Return the state of each job."""
        return [self.snapshot(ref).state for ref in refs]

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:  # noqa: ARG002 - nothing to wait for
        """Return the outcome of a job that has run here, else raise ``JobNotFoundError``."""
        snapshot = self.snapshot(ref)
        if not snapshot.state.finished:
            _not_found(ref)
        completed = snapshot.state is JobState.COMPLETED
        return Finished(completed, (snapshot.returnvalue or "null") if completed else snapshot.failed_reason)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio."""
        return self.wait(ref, timeout_ms, sent_ms)

    def revoke(self, ref: JobRef, *, terminate: bool) -> Revocation:  # noqa: ARG002 - it has already run
        """Return ``FINISHED``, or ``UNKNOWN`` for a job that has not run here."""
        return Revocation.FINISHED if self.has(ref) else Revocation.UNKNOWN

    async def arevoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        """:meth:`revoke` for asyncio."""
        return self.revoke(ref, terminate=terminate)

    def queue_of(self, job_id: str, queues: Sequence[str]) -> str | None:
        """Return the first of the queues in which a job with this id has run."""
        return next((queue for queue in queues if self.has(JobRef(queue, job_id))), None)

    def forget(self, ref: JobRef) -> None:
        """Remove the outcome of a job."""
        self._entries.pop(ref, None)

    async def aforget(self, ref: JobRef) -> None:
        """:meth:`forget` for asyncio."""
        self.forget(ref)

    def save_group(self, queue: str, group_id: str, members: str, keep_ms: int | None) -> None:  # noqa: ARG002
        """Store the addresses of a group's members, in this process."""
        self._groups[group_id] = members

    def load_group(self, queue: str, group_id: str) -> str | None:  # noqa: ARG002
        """Return what :meth:`save_group` stored."""
        return self._groups.get(group_id)

    def forget_group(self, queue: str, group_id: str) -> None:  # noqa: ARG002
        """Remove what :meth:`save_group` stored."""
        self._groups.pop(group_id, None)

    def _store(self, job: RunningJob, state: JobState, failed_job: FailedJob | None = None, **fields: Any) -> None:
        ref = JobRef(job.queue, job.id)
        call = StoredCall(job.name, job.data, wall_ms() if state.finished else None)
        with self._lock:  # a web server runs jobs in several threads
            self._entries[ref] = _Entry(replace(self.snapshot(ref), state=state, **fields), call, failed_job)
            if self._limit is not None and len(self._entries) > self._limit:
                del self._entries[next(iter(self._entries))]


def _not_found(ref: JobRef) -> NoReturn:
    raise JobNotFoundError(f"job {ref.id} of queue {ref.queue} has not run in this process (eager mode)")


# Eager mode: jobs run in the process that sends them, when they are sent, without Redis.
#
# A job is built as for Redis, and its result is stored as JSON, so what cannot be stored in Redis fails here, too. Its
# attempts follow each other immediately: nothing waits for a delay.


_MAX_ATTEMPTS: Final = 1_000
_KEPT_RESULTS: Final = 10_000

_Steps = Generator[tuple[InProcessRunner, Runnable], Any, None]


class EagerBroker(Broker):
    """The connections of an app with ``task_always_eager``: a job runs when it is sent.

    Queues are read from Redis as usual, whose server need not be running.
    """

    def __init__(self, app: App, url: SecretUrl) -> None:
        super().__init__(app._config, url)
        runner = EagerRunner(app, EagerResults(self.payloads, _KEPT_RESULTS))
        self.eager = runner
        self.results = runner.results
        self.producer = _EagerProducer(runner)


class _EagerProducer(Producer):
    """Runs jobs instead of sending them."""

    def __init__(self, runner: EagerRunner) -> None:
        self._runner = runner

    def send(self, jobs: Sequence[NewJob]) -> list[str]:
        """Run the jobs, and return their ids."""
        self._runner.run([PlannedJob(job, has_custom_id=job.has_custom_id) for job in jobs])
        return [job.id for job in jobs]

    async def asend(self, jobs: Sequence[NewJob]) -> list[str]:
        """:meth:`send` for asyncio."""
        await self._runner.arun([PlannedJob(job, has_custom_id=job.has_custom_id) for job in jobs])
        return [job.id for job in jobs]


class EagerRunner:
    """Runs jobs in this process, with the code that a worker's child uses.

    ``propagate``: raise the exception of a job that fails; ``None``: the setting ``task_eager_propagates``.
    """

    def __init__(self, app: App, results: EagerResults | None = None, propagate: bool | None = None) -> None:
        self._app = app
        self.results = EagerResults(PayloadCodec(app._config)) if results is None else results
        self._propagate = app._config.eager_propagates if propagate is None else propagate

    def run(self, roots: Sequence[PlannedJob]) -> None:
        """Run trees of jobs, children first.

        If exceptions are propagated, a task's exception is raised, and the jobs after its job do not run; as is a
        ``BulltaskError`` if a job has not finished after a thousand attempts.
        """
        loop = TaskLoop()
        try:
            run_generator(self._steps(roots), lambda step: step[0].call(step[1], loop), ())
        finally:
            loop.close()

    async def arun(self, roots: Sequence[PlannedJob]) -> None:
        """:meth:`run` for asyncio: async tasks run on the running loop."""
        await arun_generator(self._steps(roots), lambda step: step[0].acall(step[1]), ())

    def _steps(self, roots: Sequence[PlannedJob]) -> _Steps:
        before: dict[str, list[JobRef]] = {}
        for planned in in_order(roots):
            before.setdefault(planned.job.id, []).extend(child.job.ref for child in planned.children)
            for dependent in planned.dependents:
                before.setdefault(dependent.job.id, []).append(planned.job.ref)
        for planned in _dependencies_first(roots):
            if not (planned.has_custom_id and self.results.has(planned.job.ref)):
                attempts = _JobRun(self._app, self.results, planned.job, before[planned.job.id])
                yield from attempts.steps()
                if self._propagate and isinstance(failed := attempts.outcome, FailedOutcome):
                    job_id = planned.job.id
                    raise failed.exception or TaskError(failed.reason, job_id=job_id, remote_traceback=failed.trace)


class _JobRun:
    """Runs the attempts of one job; ``outcome`` is that of the last one."""

    def __init__(self, app: App, results: EagerResults, new: NewJob, before: Sequence[JobRef]) -> None:
        self._app = app
        self._results = results
        self._before = before
        self._keys = app._broker.keys(new.queue)
        self._runner = InProcessRunner(app, lambda _job: self, is_eager=True)
        self.outcome: Outcome | None = None
        now_ms, retries = app._now_ms(), new.options.retries
        self._job = RunningJob(
            queue=new.queue,
            id=new.id,
            name=new.name,
            data=new.data,
            opts=StoredOptions(codec.decode(codec.encode(new.opts(now_ms), what="options"))),
            timestamp_ms=now_ms if new.timestamp_ms is None else new.timestamp_ms,
            priority=new.options.priority,
            attempts_made=retries,
            attempts_started=retries + 1,
            deferred_failure=self._failed_child(),
            scheduler_id="",
            stacktrace=None,
        )

    def steps(self) -> _Steps:
        """Run attempts until the job has finished."""
        for _ in range(_MAX_ATTEMPTS):
            started_ms = mono_ms()
            attempt = self._runner.begin(self._job)
            outcome = (yield self._runner, [attempt])[0] if isinstance(attempt, Attempt) else attempt
            self.outcome = outcome
            acquired = AcquiredJob(self._runner.slots[0], 0, self._keys, self._job, 0)
            if self._finish(outcome):
                yield from self._emit(acquired, outcome, mono_ms() - started_ms)
                yield from self._error_callbacks(outcome)
                return
            yield from self._emit(acquired, outcome, mono_ms() - started_ms)
        raise BulltaskError(
            f"job {self._job.id} of task {self._job.name} has not finished after {_MAX_ATTEMPTS:,} attempts; "
            "eager mode does not wait between attempts"
        )

    def _emit(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> _Steps:
        if (hooks := self._runner.finisher.emit(acquired, outcome, duration_ms)) is not None:
            yield self._runner, hooks

    def _finish(self, outcome: Outcome) -> bool:
        """Store the outcome and return true, or prepare the next attempt."""
        job = self._job
        if not isinstance(outcome, WorkerOutcome) and outcome.checkpoint is not None:
            job = replace(job, checkpoint=outcome.checkpoint)
        match outcome:
            case CompletedOutcome():
                self._results.complete(job, outcome.value)
                return True
            case FailedOutcome():
                self._results.fail(job, *self._failure(outcome), outcome)
                return True
            case RetriedOutcome():
                _, traces = self._failure(outcome)
                made, started = job.attempts_made + 1, job.attempts_started + 1
                stacktrace = codec.encode(list(traces), what="stacktrace")
                data = job.data if outcome.data is None else outcome.data
                opts = options_after_retry(job, outcome)
                self._job = replace(
                    job, attempts_made=made, attempts_started=started, stacktrace=stacktrace, data=data, opts=opts
                )
            case _:
                self._job = replace(job, attempts_started=job.attempts_started + 1)
        return False

    def _failure(self, outcome: FailedOutcome | RetriedOutcome) -> tuple[str, tuple[str, ...]]:
        _, reason, _, traces = self._job.failure_fields(outcome.reason, outcome.trace)
        return reason, tuple(codec.decode(traces.encode()))

    def _error_callbacks(self, outcome: Outcome) -> _Steps:
        if not isinstance(outcome, FailedOutcome):
            return
        config, job = self._app._config, self._job
        root_id = ancestry(job)["root_id"]
        for errback, failed in called_errbacks(job, outcome.failed_job):
            data = errback_data(errback, failed, outcome.reason, outcome.trace, config)
            options = JobOptions(more=errback.opts_of(failed, root_id, self._app._now_ms()))
            new = NewJob(errback_queue(errback, config), new_job_id(), errback.task, data, options)
            yield from _JobRun(self._app, self._results, new, ()).steps()

    # ---- the job client of a bound task ----

    def send(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command on the running job."""
        match command:
            case "progress":
                self._results.set_progress(self._job, codec.decode(value))
            case "data":
                self._job = replace(self._job, data=value if isinstance(value, bytes) else value.encode())
            case "children_values":
                return {self._key(ref): self._results.value(ref) for ref in self._before}
            case "pending_children":
                return 0
            case "child_failure":
                failed = next(ref for ref in self._before if self._key(ref) == value)
                return self._results.failure(failed)
            case "log":
                pass  # no dashboard can show it
            case "incompatible_since":
                pass  # no other worker can run it
        return None

    async def asend(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """:meth:`send` for asyncio."""
        return self.send(command, value)

    def store_checkpoint(self, _token: str, checkpoint: str, progress: bytes | None) -> bool:
        """Store the running job's checkpoint and progress."""
        self._job = replace(self._job, checkpoint=checkpoint)
        if progress is not None:
            self.send("progress", progress)
        return True

    async def astore_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """:meth:`store_checkpoint` for asyncio."""
        return self.store_checkpoint(token, checkpoint, progress)

    def replace(self, canvas: Canvas[Any, Any], *, retries: int = 0) -> None:
        """Run a canvas whose result becomes that of the running job."""
        roots = self._replacement(canvas, retries)
        EagerRunner(self._app, self._results, propagate=False).run(roots)
        self._wait_for(roots)

    async def areplace(self, canvas: Canvas[Any, Any], *, retries: int = 0) -> None:
        """:meth:`replace` for asyncio."""
        roots = self._replacement(canvas, retries)
        await EagerRunner(self._app, self._results, propagate=False).arun(roots)
        self._wait_for(roots)

    def _replacement(self, canvas: Canvas[Any, Any], retries: int) -> list[PlannedJob]:
        job = self._job
        roots, replacement = plan_replacement(
            canvas, self._app._config, JobRef(job.queue, job.id), origin_of_replacement(job), retries=retries
        )
        self._job = replace(job, replacement=replacement.to_json())
        return roots

    def _wait_for(self, roots: Sequence[PlannedJob]) -> None:
        self._before = [*self._before, *(root.job.ref for root in roots)]
        self._job = replace(self._job, deferred_failure=self._failed_child())

    def _failed_child(self) -> str:
        """Return BullMQ's reason for a parent that fails because of a child, ``""`` if no child has failed."""
        failed = next((ref for ref in self._before if not self._results.completed(ref)), None)
        return "" if failed is None else f"child {self._key(failed)} failed"

    def _key(self, ref: JobRef) -> str:
        return self._app._broker.keys(ref.queue).job(ref.id)


def _dependencies_first(roots: Sequence[PlannedJob]) -> Iterator[PlannedJob]:
    """Iterate over all jobs so that each comes after its children, and after the fan-out job that it follows."""
    every = list(in_order(roots))
    waiting_for: dict[str, set[str]] = {planned.job.id: set() for planned in every}
    for planned in every:
        waiting_for[planned.job.id] |= {child.job.id for child in planned.children}
        for dependent in planned.dependents:
            waiting_for[dependent.job.id].add(planned.job.id)
    done: set[str] = set()
    while every:
        ready = [planned for planned in every if waiting_for[planned.job.id] <= done]
        yield from ready
        done |= {planned.job.id for planned in ready}
        every = [planned for planned in every if planned.job.id not in done]
