"""A child's event loop: runs async tasks on a separate thread, and settles the jobs that run in threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from bulltask.clock import mono_ms, mono_s
from bulltask.process import exit_child
from bulltask.transport.client_types import AnyAsyncClient
from bulltask.transport.replies import Fetched
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child.async_writer import AsyncOutcomeWriter
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.batch_runner import BatchRunner
from bulltask.worker.child.next_job import NextJobs
from bulltask.worker.child.outcomes import AcquiredJob, Outcome
from bulltask.worker.child.settle import Settler
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.slot import Slot
from bulltask.worker.slots import ChildBlock
from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["AsyncLoop"]

_WAIT_MS = 60_000


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
        self._tasks: dict[asyncio.Task[None], tuple[str, ...]] = {}  # asyncio keeps only weak references to tasks
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
        self._hand_off([acquired], self._work(acquired, attempt), f"job {acquired.job.id}")
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
        loop.call_soon_threadsafe(self._spawn, work, name, tuple(acquired.job.id for acquired in jobs))

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
                self._exit_child([job for jobs in self._tasks.values() for job in jobs], raised)
            with suppress(RuntimeError):  # as in drain()
                loop.run_until_complete(self._close_client())

        self._thread = threading.Thread(target=run, name="bulltask-async", daemon=True)
        self._thread.start()
        return loop

    def _exit_child(self, jobs: Sequence[str], raised: BaseException | None) -> NoReturn:
        """Exit the process, because its async jobs cannot continue; the supervisor recovers them."""
        self._settler.emit_loop_stopped(jobs, raised)
        exit_child(ExitCode.FAILED)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str, jobs: tuple[str, ...]) -> None:
        # Not the current context, in which an earlier job may have set variables.
        task = asyncio.get_running_loop().create_task(work, name=name, context=self._context.copy())
        self._tasks[task] = jobs
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:  # a bug in bulltask
            raised = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._exit_child(self._tasks[task], raised)
        del self._tasks[task]

    async def _work(self, acquired: AcquiredJob, attempt: Attempt) -> None:
        started = mono_s()
        outcome = await self._runner.acall(attempt, acquired.slot)
        await self._settle(acquired, outcome, (mono_s() - started) * 1000)

    async def _settle(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> None:
        """Write an outcome; then start the job that the same call has fetched, or free the slot."""
        settling_ms = mono_ms()
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
            work = (
                self._work(acquired, attempt)
                if isinstance(attempt, Attempt)
                else self._settle(acquired, attempt, duration_ms=0.0)
            )
            self._spawn(work, f"job {acquired.job.id}", (acquired.job.id,))

    def _release(self, acquired: AcquiredJob) -> None:
        """Release a job, together with the others that are released at the same time, so that they keep their order."""
        self._unstarted.append(acquired)
        if len(self._unstarted) == 1:
            self._spawn(self._release_unstarted(), "release of jobs", ())

    async def _release_unstarted(self) -> None:
        jobs, self._unstarted = self._unstarted, []
        await self._writer.release(jobs)
        self._free_slots(jobs)

    async def _work_batch(self, members: Sequence[tuple[AcquiredJob, Attempt]]) -> None:
        started = mono_s()
        outcomes = await BatchRunner(self._runner).acall([(attempt, acquired.slot) for acquired, attempt in members])
        duration_ms = (mono_s() - started) * 1000
        batch = [acquired for acquired, _ in members]
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
