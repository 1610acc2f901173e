"""A child's event loop: many async tasks at once, on a thread beside the main one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

from bulltask.clock import mono_ms
from bulltask.errors import RECOVERABLE, BrokerError, BrokerUnavailableError, BulltaskError, JobError, LockMissingError
from bulltask.process import leave
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import Call
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child.attempt import Attempt, Attempts
from bulltask.worker.child.outcomes import AcquiredJob, Limited, Outcome
from bulltask.worker.child.settle import UNSTORABLE, Settler
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.slots import ChildBlock, Slot
from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["AsyncLoop"]

R = TypeVar("R")

_WAIT_MS = 60_000


class AsyncLoop:
    """Responsible for running async tasks, and for the child's free slots.

    The thread starts with the first async job; a child that only meets sync tasks never has one. The main thread goes
    on taking jobs while a slot is free, and a sync task that it runs meanwhile takes turns with this loop.

    Args:
        block: the child's slots, and the count of its jobs.
        attempts: runs attempts.
        settler: writes outcomes; its bus is this thread's own.
        client: makes the loop's client.
        backoff: this loop's view of an outage.
        wakeup_pipe: wakes the main thread when a slot is free again.
    """

    def __init__(
        self,
        block: ChildBlock,
        attempts: Attempts,
        settler: Settler,
        client: Callable[[], AsyncClient],
        backoff: ReconnectBackoff,
        wakeup_pipe: WakeupPipe,
    ) -> None:
        self._free = deque(block.slots())
        self._count = len(self._free)
        self._attempts, self._settler, self._make_client = attempts, settler, client
        self._backoff, self._block, self._wakeup_pipe = backoff, block, wakeup_pipe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: AsyncClient | None = None
        self._tasks: dict[asyncio.Task[None], str] = {}  # the loop itself keeps only weak references
        self._handed_over = self._closing = False
        self._limits: dict[Slot, int] = {}

    def free_slot(self, closing: Callable[[], bool]) -> Slot | None:
        """Wait for a slot that may be used; ``None`` once the child is closing."""
        while not closing():
            if len(self._free) > self._count - min(self._limits.values(), default=self._count):
                return self._free.popleft()
            self._wakeup_pipe.wait(_WAIT_MS)
        return None

    def done_with(self, slot: Slot) -> None:
        """The main thread gives a slot back, unless its job went to the event loop, which may have freed it by now."""
        if not self._handed_over:
            self._free.append(slot)
        self._handed_over = False

    def start(self, acquired: AcquiredJob, attempt: Attempt) -> None:
        """TaskRun an async attempt; its slot comes back when the job is settled."""
        if acquired.max_concurrent:
            self._limits[acquired.slot] = acquired.max_concurrent
        self._handed_over = True  # only the main thread reads and writes it
        loop = self._loop or self._start_thread()
        loop.call_soon_threadsafe(self._spawn, acquired, attempt)

    def drain(self) -> None:
        """Wait until every job is settled, then end the thread."""
        self.wait_for_others(0)
        if self._loop is not None and self._thread is not None:
            self._closing = True
            with suppress(RuntimeError):  # what a task has left behind may have stopped or closed it by now
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def wait_for_others(self, left: int) -> None:
        """Wait until no more than ``left`` jobs are in hand, the main thread's included."""
        while self._count - len(self._free) > left:
            self._wakeup_pipe.wait(_WAIT_MS)

    def client(self) -> AsyncClient:
        """The loop's client; only for code that runs on the loop."""
        if self._client is None:
            self._client = self._make_client()
        return self._client

    def running_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop, if an async job has started it."""
        return self._loop

    def _start_thread(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()

        def run() -> None:
            asyncio.set_event_loop(loop)
            raised: BaseException | None = None
            try:
                loop.run_forever()
            except BaseException as exc:  # noqa: BLE001 - a task of asyncio that a user's task has started may exit
                raised = exc
            if not self._closing:
                self._give_up(tuple(self._tasks.values()), raised)
            with suppress(RuntimeError):  # as in drain()
                loop.run_until_complete(self._close_client())

        self._thread = threading.Thread(target=run, name="bulltask-async", daemon=True)
        self._thread.start()
        return loop

    def _give_up(self, jobs: Sequence[str], raised: BaseException | None) -> NoReturn:
        """End the child, whose async jobs cannot go on: the supervisor finds them by their slots."""
        self._settler.emit_loop_stopped(jobs, raised)
        leave(ExitCode.FAILED)

    def _spawn(self, acquired: AcquiredJob, attempt: Attempt) -> None:
        task = asyncio.get_running_loop().create_task(self._work(acquired, attempt), name=f"job {acquired.job.id}")
        self._tasks[task] = acquired.job.id
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:  # between the task and its settled job is our code only
            raised = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._give_up([self._tasks[task]], raised)
        del self._tasks[task]

    async def _work(self, acquired: AcquiredJob, attempt: Attempt) -> None:
        started = time.monotonic()
        outcome = await self._attempts.acall(attempt, acquired.slot)
        await self._settle(acquired, outcome, (time.monotonic() - started) * 1000)
        acquired.slot.free(mono_ms())
        self._limits.pop(acquired.slot, None)
        self._free.append(acquired.slot)
        self._wakeup_pipe.wake()

    async def _settle(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> None:
        uncertain = False
        acquired.slot.settle(mono_ms())
        while True:
            try:
                await self._write(acquired, outcome)
            except RECOVERABLE as exc:
                uncertain = uncertain or isinstance(exc, BrokerUnavailableError)
                await asyncio.sleep(self._backoff.record_shared_failure(exc) / 1000)
                continue
            except (BrokerError, JobError) as exc:
                again, written = await self._refused(acquired, outcome, exc, uncertain)
                if again is not None:
                    outcome = again
                    continue
            else:
                written = True
            self._backoff.reset()
            self._block.count_job()
            await self._finish(acquired, outcome if written else None, duration_ms)
            return

    async def _refused(
        self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError, uncertain: bool
    ) -> tuple[Outcome | None, bool]:
        """As :meth:`bulltask.worker.child.sync_loop.SyncLoop._refused`."""
        if isinstance(exc, BrokerError) and await self._run_until_answered(
            self._settler.already_applied(acquired), False
        ):
            return None, True
        if isinstance(exc, UNSTORABLE):
            return self._settler.fallback(acquired, outcome, exc), False
        if uncertain and await self._run_until_answered(self._settler.already_applied(acquired), False):
            return None, True
        retaken = isinstance(exc, LockMissingError) and await self._run_until_answered(
            self._settler.renew_lock(acquired), False
        )
        return (outcome if retaken else None), False

    async def _finish(self, acquired: AcquiredJob, written: Outcome | None, duration_ms: float) -> None:
        if written is None:
            self._settler.emit_lock_lost(acquired)
            return
        if (call := self._settler.after_settle(acquired, written)) is not None:
            await self._run_until_answered(call, "")
        self._settler.emit(acquired, written, duration_ms)

    async def _write(self, acquired: AcquiredJob, outcome: Outcome) -> None:
        client = self.client()
        if isinstance(outcome, Limited):
            await client.run(self._settler.limit_call(acquired, outcome))
        await client.run(self._settler.call(acquired, outcome, fetch_next=False))

    async def _run_until_answered(self, call: Call[R], otherwise: R) -> R:
        """Make a call until Redis answers; ``otherwise`` where it refuses."""
        while True:
            try:
                return await self.client().run(call)
            except RECOVERABLE as exc:
                await asyncio.sleep(self._backoff.record_shared_failure(exc) / 1000)
            except (BrokerError, JobError):
                return otherwise

    async def _close_client(self) -> None:
        if self._client is not None:
            await self._client.close()
