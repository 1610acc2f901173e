"""A worker in the test's process and thread: it runs jobs when the test asks it to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Self

from bulltask.app import App
from bulltask.clock import Duration, to_ms
from bulltask.errors import BulltaskError
from bulltask.events import ChildEvent
from bulltask.jobs.job import JobRef
from bulltask.testing.clock import FakeClock
from bulltask.testing.inline_results import InlineResults
from bulltask.testing.inline_run import InlineRun, Steps
from bulltask.transport.operation import run_sync
from bulltask.transport.results import Results
from bulltask.transport.steps import adrive, drive
from bulltask.worker.beat import reconcile
from bulltask.worker.beat_entries import read_entries
from bulltask.worker.in_process import TaskLoop

__all__ = ["InlineWorker"]

_FOREVER_MS: Final = 2**52

# A thread in which the worker runs async tasks has a copy of its caller's context; the test's own threads have none.
_running_worker: ContextVar[InlineWorker | None] = ContextVar("bulltask.testing.inline_worker", default=None)


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
        if app.config.always_eager:
            raise BulltaskError(f"{app!r} is in eager mode: its jobs run when they are sent, and need no worker")
        clock, results = app.broker.clock, app.broker.results
        if not isinstance(clock, FakeClock):
            raise BulltaskError(f"{app!r} uses its own server: create the worker inside use_server(app, url)")
        if not isinstance(results, Results) or isinstance(results, InlineResults):
            raise BulltaskError(f"{app!r} already has an InlineWorker")
        self.clock, self._results = clock, results
        self._app, self._broker, self._lock = app, app.broker, threading.RLock()
        self._loop = TaskLoop()
        self._running: set[JobRef] = set()
        self._last: InlineRun | None = None
        app.broker.results = InlineResults(self._results, self)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, end_ms: int, *, propagate: bool, awaited: JobRef | None = None) -> list[ChildEvent]:
        # A thread of the test may wait for a result, too.
        with self._lock, self._inline_run(propagate=propagate) as run:
            drive(self._steps(run, end_ms, awaited), lambda step: step[0].call(step[1], self._loop), ())
        return run.result()

    async def _arun(self, end_ms: int, *, propagate: bool, awaited: JobRef | None = None) -> list[ChildEvent]:
        with self._inline_run(propagate=propagate) as run:
            await adrive(self._steps(run, end_ms, awaited), lambda step: step[0].acall(step[1]), ())
        return run.result()

    @contextmanager
    def _inline_run(self, *, propagate: bool) -> Iterator[InlineRun]:
        token = _running_worker.set(self)
        try:
            with self._broker.pool.client() as client:
                self._last = InlineRun(self._app, client, self._running, propagate=propagate)
                yield self._last
        finally:
            _running_worker.reset(token)

    def _steps(self, run: InlineRun, end_ms: int, awaited: JobRef | None) -> Steps:
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
