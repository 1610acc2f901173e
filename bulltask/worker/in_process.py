"""Runs attempts in the calling process: for :mod:`bulltask.testing` and for eager mode."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from bulltask.app import App
from bulltask.events import Bus
from bulltask.events.bus import Event
from bulltask.jobs.job import RunningJob
from bulltask.registry.job_client import JobClient
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.batch_runner import BatchRunner
from bulltask.worker.child.cancellation import Cancellation
from bulltask.worker.child.outcomes import Outcome, RetriedOutcome
from bulltask.worker.child.retirement import Retirement
from bulltask.worker.child.settle import Settler
from bulltask.worker.child.spark_tasks import SparkTaskRunner
from bulltask.worker.child.thread_tasks import TaskThreads
from bulltask.worker.slots import Slots

__all__ = ["InProcessRunner", "Runnable", "TaskLoop"]

T = TypeVar("T")

Runnable = list[Attempt] | Coroutine[Any, Any, None]
"""What the steps of a run yield to be executed: one attempt, a batch's attempts, or the hooks after an attempt."""
_WORKER_ID: Final = "in-process"


class InProcessRunner:
    """Runs attempts one at a time, with the code that a worker's child uses.

    It has no supervisor, so time limits are not enforced, and a running attempt cannot be cancelled.

    Args:
        app: Tasks, settings and listeners.
        job_client: Creates the client of a job, which stores the progress and log lines of a bound task.
        slots: The maximum number of jobs in a batch.
        is_eager: Whether this process has also sent the jobs, for ``request.is_eager``.

    Attributes:
        bus: Passes events to the app's listeners.
        slots: The slots whose tokens lock the jobs.
        settler: Builds the calls that write outcomes, and emits their events.
        worker_id: Stored in each job as the worker that runs it.
    """

    worker_id = _WORKER_ID

    def __init__(
        self, app: App, job_client: Callable[[RunningJob], JobClient], slots: int = 1, *, is_eager: bool = False
    ) -> None:
        block = Slots(1, slots).children[0]
        block.reset()
        self.slots = block.slots()
        self.bus = Bus(on_error=_warn)
        app.listeners.attach(self.bus, is_final=False)
        spark = SparkTaskRunner(app, job_client, lambda _job, _token: True, lambda: None)
        cancellation = Cancellation(block, spark.interrupt, lambda: None)
        no_limits = replace(app.config, max_memory_kib=None, hard_memory_kib=None)  # this process is not a child
        retirement = Retirement(no_limits, block, 0, self.bus, os.getpid())
        threads = TaskThreads(0)
        self._runner = AttemptRunner(app, job_client, spark, cancellation, retirement, threads, worker_id=_WORKER_ID)
        self._runner.is_eager, self._runner.waits_for_other_workers = is_eager, False
        self.settler = Settler(app.config, app.broker.clock, self.bus, _WORKER_ID, hooks=self._runner.hooks)

    def begin(self, job: RunningJob) -> Attempt | Outcome:
        """Return the attempt, or an outcome if the task must not or cannot be called."""
        return self._runner.begin(job)

    def call(self, attempts: Runnable, loop: TaskLoop) -> Any:
        """Run one attempt, or those of a batch; an async task runs on ``loop``, and so do the coroutines of its hooks.

        Returns the outcome of each attempt.
        """
        if not isinstance(attempts, list):
            return loop.run(attempts)
        if attempts[0].task.is_async:
            return loop.run(self._acall(attempts))
        return self._call(attempts)

    async def acall(self, attempts: Runnable) -> Any:
        """:meth:`call` for asyncio: async tasks run on the running loop; sync tasks run directly, and block it."""
        if not isinstance(attempts, list):
            return await attempts
        if not attempts[0].task.is_async:
            return self._call(attempts)
        return await self._acall(attempts)

    def _call(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        if attempts[0].task.is_batch:
            return BatchRunner(self._runner).call(list(zip(attempts, self.slots, strict=False)))
        return [self._runner.call(attempts[0], self.slots[0])]

    async def _acall(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        """Run the attempts in an asyncio task of their own, which their code may cancel even just before it returns."""
        outcomes: list[Outcome] = []

        async def run() -> None:
            if attempts[0].task.is_batch:
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
