"""Eager mode: jobs run in the process that sends them, when they are sent, without Redis.

A job is built as for Redis, and its result is stored as JSON, so what cannot be stored in Redis fails here, too. Its
attempts follow each other immediately: nothing waits for a delay.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import uuid_utils

from bulltask.app import App
from bulltask.clock import mono_ms
from bulltask.config.urls import SecretUrl
from bulltask.errors import BulltaskError, TaskError
from bulltask.jobs import codec
from bulltask.jobs.flow import PlannedJob, in_order
from bulltask.jobs.job import JobOptions, JobRef, NewJob, RunningJob
from bulltask.jobs.stored_options import StoredOptions
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.registry.ancestry import ancestry, origin_of_replacement
from bulltask.registry.canvas import Canvas
from bulltask.registry.canvas_plan import plan_replacement
from bulltask.registry.job_client import JobCommand
from bulltask.transport.broker import Broker
from bulltask.transport.produce import Producer
from bulltask.transport.steps import adrive, drive
from bulltask.worker.child.attempt import Attempt
from bulltask.worker.child.outcomes import (
    AcquiredJob,
    CompletedOutcome,
    FailedOutcome,
    Outcome,
    RetriedOutcome,
    WorkerOutcome,
)
from bulltask.worker.child.settle import options_after_retry
from bulltask.worker.eager_results import EagerResults
from bulltask.worker.errback_jobs import called_errbacks, errback_data, errback_queue
from bulltask.worker.in_process import InProcessRunner, Runnable, TaskLoop

__all__ = ["EagerBroker", "EagerRunner"]

_MAX_ATTEMPTS: Final = 1_000
_KEPT_RESULTS: Final = 10_000

_Steps = Generator[tuple[InProcessRunner, Runnable], Any, None]


class EagerBroker(Broker):
    """The connections of an app with ``task_always_eager``: a job runs when it is sent.

    Queues are read from Redis as usual.

    Args:
        app: The app.
        url: The broker's URL; the server need not be running.
    """

    def __init__(self, app: App, url: SecretUrl) -> None:
        super().__init__(app.config, url)
        runner = EagerRunner(app, EagerResults(self.payloads, _KEPT_RESULTS))
        self.eager, self.results, self.producer = runner, runner.results, _EagerProducer(runner)


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

    Args:
        app: The app.
        results: Stores the outcomes.
        propagate: Raise the exception of a job that fails; ``None``: the setting ``task_eager_propagates``.
    """

    def __init__(self, app: App, results: EagerResults | None = None, propagate: bool | None = None) -> None:
        self._app, self.results = app, EagerResults(PayloadCodec(app.config)) if results is None else results
        self._propagate = app.config.eager_propagates if propagate is None else propagate

    def run(self, roots: Sequence[PlannedJob]) -> None:
        """Run trees of jobs, children first.

        Raises:
            Exception: A task's exception, if exceptions are propagated. The jobs after that task's job have not run.
            BulltaskError: A job has not finished after a thousand attempts.
        """
        loop = TaskLoop()
        try:
            drive(self._steps(roots), lambda step: step[0].call(step[1], loop), ())
        finally:
            loop.close()

    async def arun(self, roots: Sequence[PlannedJob]) -> None:
        """:meth:`run` for asyncio: async tasks run on the running loop."""
        await adrive(self._steps(roots), lambda step: step[0].acall(step[1]), ())

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
    """Runs the attempts of one job.

    Attributes:
        outcome: The outcome of the last attempt.
    """

    def __init__(self, app: App, results: EagerResults, new: NewJob, before: Sequence[JobRef]) -> None:
        self._app, self._results, self._before, self._keys = app, results, before, app.broker.keys(new.queue)
        self._runner = InProcessRunner(app, lambda _job: self, is_eager=True)
        self.outcome: Outcome | None = None
        now_ms, retries = app.now_ms(), new.options.retries
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
        if (hooks := self._runner.settler.emit(acquired, outcome, duration_ms)) is not None:
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
        config, job = self._app.config, self._job
        root_id = ancestry(job)["root_id"]
        for errback, failed in called_errbacks(job, outcome.failed_job):
            data = errback_data(errback, failed, outcome.reason, outcome.trace, config)
            options = JobOptions(more=errback.opts_of(failed, root_id, self._app.now_ms()))
            new = NewJob(errback_queue(errback, config), str(uuid_utils.uuid7()), errback.task, data, options)
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
            canvas, self._app.config, JobRef(job.queue, job.id), origin_of_replacement(job), retries=retries
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
        return self._app.broker.keys(ref.queue).job(ref.id)


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
