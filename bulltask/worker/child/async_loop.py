"""A child's event loop: runs async tasks on a separate thread, and settles the jobs that run in threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

from bulltask.clock import mono_ms, mono_s
from bulltask.process import exit_child
from bulltask.transport.client_types import AnyAsyncClient
from bulltask.transport.replies import Fetched
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child.async_writer import AsyncOutcomeWriter
from bulltask.worker.child.asyncio_tasks import OWN_TASK, JobTask, OwnTask
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.batch_runner import BatchRunner
from bulltask.worker.child.next_job import NextJobs
from bulltask.worker.child.outcomes import AcquiredJob, Outcome, RetriedOutcome
from bulltask.worker.child.settle import Settler
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.slot import Slot
from bulltask.worker.slots import ChildBlock
from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["AsyncLoop"]

_WAIT_MS: Final = 60_000
_MAX_IDLE: Final = 16

_Work = tuple[Callable[..., Coroutine[Any, Any, None]], tuple[Any, ...]]
"""A coroutine function and its arguments."""


class AsyncLoop:
    """Runs async tasks, and manages the child's free slots.

    The thread starts with the first async job, so a child without async jobs has no such thread. The main thread
    acquires jobs while a slot is free; a sync task that it runs shares the GIL with this loop.

    Args:
        block: The child's slots.
        runner: Runs attempts.
        settler: Builds the calls that write their outcomes.
        client: Creates the loop's client.
        backoff: The backoff of this loop while Redis is unavailable; the main thread has its own.
        wakeup_pipe: Wakes the main thread when a slot is free again.
        concurrency: How many jobs may run concurrently; further slots are for batches. Default: the number of slots.
        next_jobs: The jobs that the loop fetches and starts itself; ``None`` for none.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        block: ChildBlock,
        runner: AttemptRunner,
        settler: Settler,
        client: Callable[[], AnyAsyncClient],
        backoff: ReconnectBackoff,
        wakeup_pipe: WakeupPipe,
        concurrency: int | None = None,
        next_jobs: NextJobs | None = None,
    ) -> None:
        self._free = deque(block.slots())
        self._count = len(self._free)
        self._concurrency = concurrency or self._count
        self._runner, self._settler, self._make_client = runner, settler, client
        self._wakeup_pipe = wakeup_pipe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._context = contextvars.Context()
        self._client: AnyAsyncClient | None = None
        self._tasks: dict[Slot, JobTask] = {}  # asyncio keeps only weak references to tasks; by their first slot
        self._own_tasks: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks
        self._idle: list[asyncio.Future[_Work]] = []
        self._handed_off = self._closing = False
        self._max_concurrent: dict[Slot, int] = {}
        self._writer, self._next_jobs = AsyncOutcomeWriter(settler, self.client, backoff), next_jobs
        self._unstarted: list[AcquiredJob] = []
        self._is_awaited = False

    def wait_for_slot(self, closing: Callable[[], bool]) -> Slot | None:
        """Wait for a free slot; return ``None`` once the child is closing."""
        while not closing():
            if self.room:
                return self._free.popleft()
            self._wakeup_pipe.wait(_WAIT_MS)
        return None

    def take_slot(self) -> Slot | None:
        """Return another free slot for the main thread's jobs, or ``None``."""
        if self._free:
            return self._free.popleft()
        if self._next_jobs is not None:
            self._next_jobs.pause()
        return None

    def return_slot(self, slot: Slot) -> None:
        """Take back a slot of the main thread's batch."""
        self._free.append(slot)

    def free_slot(self, slot: Slot) -> None:
        """Free a slot of the main thread, unless its job was handed off to the event loop, which will free the slot."""
        if not self._handed_off:
            self._free.append(slot)
        self._handed_off = False

    def start(self, acquired: AcquiredJob, attempt: Attempt) -> None:
        """Start an async attempt; its slot is free again when the job is settled."""
        self._hand_off((acquired,), self._work(acquired, attempt), f"job {acquired.job.id}")
        self._handed_off = True  # only the main thread reads and writes it

    def start_batch(self, members: Sequence[tuple[AcquiredJob, Attempt]], slot: Slot) -> None:
        """Start an async batch; ``slot`` is the slot that the main thread used to acquire its first job."""
        batch = [acquired for acquired, _ in members]
        self._hand_off(batch, self._work_batch(members), f"batch of {len(batch)} jobs, first job {batch[0].job.id}")
        self._handed_off = any(acquired.slot is slot for acquired in batch)

    def _hand_off(self, jobs: Sequence[AcquiredJob], work: Coroutine[Any, Any, None], name: str) -> None:
        for acquired in jobs:
            if acquired.max_concurrent:
                self._max_concurrent[acquired.slot] = acquired.max_concurrent
        loop = self._loop or self._start_thread()
        loop.call_soon_threadsafe(self._spawn, work, name, jobs)

    def drain(self) -> None:
        """Wait until every job is settled, then stop the thread."""
        self.wait_until_running(at_most=0)
        if self._loop is not None and self._thread is not None:
            self._closing = True
            with suppress(RuntimeError):  # code that a task has left running may have stopped or closed the loop
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def wait_until_running(self, at_most: int) -> None:
        """Wait until at most this many jobs are running, including the main thread's."""
        self._is_awaited = True
        while self.running() > at_most:
            self._wakeup_pipe.wait(_WAIT_MS)
        self._is_awaited = False

    def running(self) -> int:
        """Return how many jobs are running, including the main thread's."""
        return self._count - len(self._free)

    def client(self) -> AnyAsyncClient:
        """Return the loop's client; call it only on the loop."""
        if self._client is None:
            self._client = self._make_client()
        return self._client

    @property
    def room(self) -> int:
        """How many more jobs may start now."""
        limit = min(self._max_concurrent.values(), default=self._concurrency)
        return max(0, limit - self.running()) if self._runner.may_start else 0

    def running_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop; ``None`` before the first async job."""
        return self._loop

    def _start_thread(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()
        self._context = contextvars.copy_context()

        def run() -> None:
            asyncio.set_event_loop(loop)
            raised: BaseException | None = None
            try:
                loop.run_forever()
            except BaseException as exc:  # noqa: BLE001 - a user's asyncio task may raise SystemExit
                raised = exc
            if not self._closing:
                self._exit_child(self._running_jobs(), raised)
            with suppress(RuntimeError):  # as in drain()
                loop.run_until_complete(self._close_client())

        self._thread = threading.Thread(target=run, name="bulltask-async", daemon=True)
        self._thread.start()
        return loop

    def _exit_child(self, jobs: Sequence[str], raised: BaseException | None) -> NoReturn:
        """Exit the process, because its async jobs cannot continue; the supervisor recovers them."""
        self._settler.emit_loop_stopped(jobs, raised)
        exit_child(ExitCode.FAILED)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str, jobs: Sequence[AcquiredJob]) -> None:
        """Run the code of jobs in an asyncio task of their own, in which bulltask awaits nothing.

        The code may cancel that task at any time, even just before it returns.
        """
        # Not the current context, in which an earlier job may have set variables.
        context = self._context.copy()
        task = JobTask(work, loop=self._loop, name=name, context=context)
        task.context = context
        task.jobs, task.ended, task.code_ended = jobs, self._cancelled, False
        self._tasks[jobs[0].slot] = task

    def _cancelled(self, task: JobTask) -> None:
        """Release the jobs of an asyncio task that was cancelled before it could start."""
        if self._tasks.pop(task.jobs[0].slot, None) is not None:
            for acquired in task.jobs:
                self._release(acquired)

    def _do(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Call a coroutine function in an asyncio task of bulltask's, which jobs cannot cancel."""
        if self._idle:
            self._idle.pop().set_result((function, args))
            return
        task = OwnTask(self._do_all((function, args)), loop=self._loop, name=OWN_TASK, context=self._context.copy())
        self._own_tasks.add(task)
        task.add_done_callback(self._own_task_done)

    async def _do_all(self, work: _Work) -> None:
        loop, idle = asyncio.get_running_loop(), self._idle
        while True:
            function, args = work
            await function(*args)
            if len(idle) >= _MAX_IDLE:
                return
            waiter: asyncio.Future[_Work] = loop.create_future()
            idle.append(waiter)
            work = await waiter

    def _own_task_done(self, task: asyncio.Task[None]) -> None:
        self._own_tasks.discard(task)
        if not self._closing and (task.cancelled() or task.exception() is not None):  # a bug in bulltask
            raised = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._exit_child(self._running_jobs(), raised)

    def _running_jobs(self) -> list[str]:
        return [acquired.job.id for task in self._tasks.values() for acquired in task.jobs]

    async def _work(self, acquired: AcquiredJob, attempt: Attempt) -> None:
        started = mono_s()
        try:
            outcome = await self._runner.acall(attempt, acquired.slot)
        except BaseException as exc:  # noqa: BLE001 - a bug in bulltask
            self._exit_child([acquired.job.id], exc)
        # Without an await, which a job that has cancelled its asyncio task would interrupt.
        del self._tasks[acquired.slot]
        self._do(self._settle, acquired, outcome, (mono_s() - started) * 1000, attempt)

    async def _settle(
        self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float, attempt: Attempt | None = None
    ) -> None:
        """Write an outcome; then start the job that the same call has fetched, or free the slot."""
        settling_ms = mono_ms()
        if attempt is not None and type(outcome) is RetriedOutcome:
            outcome = await self._runner.amove(attempt, outcome)
        fetched = await self._writer.write(acquired, outcome, duration_ms, fetch_next=self._may_fetch_after(acquired))
        if fetched is None:
            self._free_slots([acquired])
        else:
            await self._start_next(acquired, fetched, settling_ms)

    def _may_fetch_after(self, acquired: AcquiredJob) -> bool:
        return not self._is_blocked and self._next_jobs is not None and self._next_jobs.may_follow(acquired)

    @property
    def _is_blocked(self) -> bool:
        """Whether a job in crash quarantine is running, or the main thread waits until fewer jobs are running."""
        return bool(self._max_concurrent) or self._is_awaited

    async def _start_next(self, previous: AcquiredJob, fetched: Fetched, fetching_since_ms: int) -> None:
        """Start the job that was fetched into the slot of the previous job, or release it."""
        next_jobs = self._next_jobs
        assert next_jobs is not None
        acquired = next_jobs.acquired(previous, fetched)
        is_late = mono_ms() - fetching_since_ms > next_jobs.lock_ms // 2  # as after a fetch of the main thread
        if is_late and not await self._writer.renew_lock(acquired, next_jobs.lock_ms):
            self._free_slots([acquired])
        elif self._is_blocked or not next_jobs.may_start(acquired):
            next_jobs.pause()
            self._release(acquired)
        else:
            attempt = next_jobs.begin(acquired)
            if isinstance(attempt, Attempt):
                self._spawn(self._work(acquired, attempt), f"job {acquired.job.id}", (acquired,))
            else:
                self._do(self._settle, acquired, attempt, 0.0)

    def _release(self, acquired: AcquiredJob) -> None:
        """Release a job, together with the others that are released at the same time, so that they keep their order."""
        self._unstarted.append(acquired)
        if len(self._unstarted) == 1:
            self._do(self._release_unstarted)

    async def _release_unstarted(self) -> None:
        jobs, self._unstarted = self._unstarted, []
        await self._writer.release(jobs)
        self._free_slots(jobs)

    async def _work_batch(self, members: Sequence[tuple[AcquiredJob, Attempt]]) -> None:
        batch, started = [acquired for acquired, _ in members], mono_s()
        try:
            outcomes = await BatchRunner(self._runner).acall([(attempt, each.slot) for each, attempt in members])
        except BaseException as exc:  # noqa: BLE001 - as in _work()
            self._exit_child([acquired.job.id for acquired in batch], exc)
        del self._tasks[batch[0].slot]
        self._do(self._settle_batch, batch, outcomes, (mono_s() - started) * 1000)

    async def _settle_batch(
        self, batch: Sequence[AcquiredJob], outcomes: Sequence[Outcome], duration_ms: float
    ) -> None:
        ended = zip(batch, outcomes, strict=True)
        # The client sends concurrent calls without waiting for the replies to earlier ones.
        await asyncio.gather(*(self._writer.write(acquired, outcome, duration_ms) for acquired, outcome in ended))
        self._free_slots(batch)

    def _free_slots(self, jobs: Sequence[AcquiredJob]) -> None:
        for acquired in jobs:
            acquired.slot.free(mono_ms())
            self._max_concurrent.pop(acquired.slot, None)
        self._free.extend(acquired.slot for acquired in jobs)
        self._wakeup_pipe.wake()

    async def _close_client(self) -> None:
        if self._client is not None:
            await self._client.close()
