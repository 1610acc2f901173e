"""A child's event loop: runs async tasks on a separate thread, and settles the jobs that run in threads."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, NoReturn

from bulltask import loop_timers
from bulltask.clock import mono_ms, mono_s
from bulltask.errors import BrokerError, JobError
from bulltask.hooks.lifespan import Lifespan
from bulltask.jobs.job import RunningJob
from bulltask.process import exit_child
from bulltask.registry.current_job import current_job
from bulltask.transport.call import Call
from bulltask.transport.client_types import AnyAsyncClient
from bulltask.transport.replies import Fetched
from bulltask.transport.scripts.move import find_by_token, release_unstarted
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child.async_writer import AsyncOutcomeWriter
from bulltask.worker.child.asyncio_tasks import OWN_TASK, JobTask, OwnTask, made_task, origin_of, place_of
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.batch_runner import BatchRunner
from bulltask.worker.child.loop_watch import LoopWatch
from bulltask.worker.child.next_job import NextJobs
from bulltask.worker.child.outcomes import AcquiredJob, Outcome, RetriedOutcome
from bulltask.worker.child.process_signals import LoopHooks
from bulltask.worker.child.settle import Settler
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.slot import Slot
from bulltask.worker.slots import ChildBlock
from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["AsyncLoop"]

_WAIT_MS: Final = 60_000
_MAX_IDLE: Final = 16
_STUCK_MS: Final = 250
"""An event loop that has not started a job after this time is blocked."""
_BLOCKED: Final = "the event loop of its child is blocked"
_LEFT_TASKS_S: Final = 2.0
"""How long the asyncio tasks that jobs have left running may take to end when they are cancelled."""

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
        run: Makes a call on any thread, to release jobs while the loop is blocked; ``None`` if it never is.
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
        run: Callable[[Call[Any]], Any] | None = None,
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
        self._run, self._hooks = run, LoopHooks(Lifespan())
        self._reported: tuple[RunningJob | None, str] | None = None
        # By id: jobs that have not started yet, and those whose last call fetches the next job. Who removes one, the
        # event loop or a thread that releases them while the loop is blocked, decides what becomes of it.
        self._unstarted_jobs: dict[int, AcquiredJob] = {}
        self._fetching: dict[int, AcquiredJob] = {}
        self._handed: deque[tuple[AcquiredJob, int]] = deque()  # by the main thread, with the time
        self._offering = threading.Lock()
        self._is_stuck = False
        self._handed_off = self._closing = False
        self._max_concurrent: dict[Slot, int] = {}
        self._writer, self._next_jobs = AsyncOutcomeWriter(settler, self.client, backoff), next_jobs
        self._unstarted: list[AcquiredJob] = []
        self._is_awaited = False

    def open(self, hooks: LoopHooks) -> None:
        """Run what comes before the first job on the event loop.

        Raises:
            Exception: The lifespan's exception, so that the child does not start.
        """
        if not hooks.exist:
            return
        self._hooks, opened = hooks, Future[None]()

        def record(raised: BaseException | None) -> None:
            if raised is None:
                opened.set_result(None)
            else:
                opened.set_exception(raised)

        self._start_thread().call_soon_threadsafe(self._do, hooks.open, record)
        opened.result()

    def wait_for_slot(self, closing: Callable[[], bool]) -> Slot | None:
        """Wait for a free slot; return ``None`` once the child is closing."""
        while not closing():
            if self._is_stuck:
                self._wakeup_pipe.wait(_WAIT_MS)
            elif not self.keeps_up(wait=False):
                continue
            elif self.room:
                return self._free.popleft()
            else:
                self._wakeup_pipe.wait(_WAIT_MS)
        return None

    def keeps_up(self, *, wait: bool = True) -> bool:
        """Return whether the event loop starts the main thread's jobs; if one is not started yet, wait for a moment.

        A loop that has not started a job in time is blocked: the jobs are released, and the main thread acquires no
        others until the loop turns.
        """
        handed = self._handed
        while handed:
            acquired, since_ms = handed[0]
            if id(acquired) not in self._unstarted_jobs:
                handed.popleft()
            elif mono_ms() - since_ms < _STUCK_MS:
                if not wait:
                    return True
                threading.Event().wait(0.001)
            elif not self._is_stuck and self._loop is not None:
                self._is_stuck = True
                self._loop.call_soon_threadsafe(self._turned)
                self.offer_unstarted()
        return not self._is_stuck

    def _turned(self) -> None:
        self._is_stuck = False
        self._wakeup_pipe.wake()

    def offer_unstarted(self) -> None:
        """Release the jobs that the event loop cannot start, because it is blocked; any thread may call it."""
        run = self._run
        if run is None:
            return
        with self._offering:
            for key, acquired in tuple(self._unstarted_jobs.items()):
                if self._unstarted_jobs.pop(key, None) is not None:
                    self._settler.emit_released(acquired.job, _BLOCKED)
                    self._runner.free_thread(acquired.slot)
                    with suppress(BrokerError, JobError):  # its lock expires
                        run(release_unstarted(acquired.keys, acquired.job.id, acquired.slot.token))
                    self._free_slots([acquired])
            for key, acquired in tuple(self._fetching.items()):
                if self._fetching.pop(key, None) is not None:
                    with suppress(BrokerError, JobError):
                        for _, job_id in run(find_by_token(acquired.keys, [acquired.slot.token])):
                            if job_id != acquired.job.id:
                                run(release_unstarted(acquired.keys, job_id, acquired.slot.token))

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
            self._unstarted_jobs[id(acquired)] = acquired
        self._handed.append((jobs[0], mono_ms()))
        loop = self._loop or self._start_thread()
        loop.call_soon_threadsafe(self._spawn, work, name, jobs)

    def drain(self) -> None:
        """Wait until every job is settled, end what they have left running, then stop the thread."""
        self.wait_until_running(at_most=0)
        if self._loop is not None and self._thread is not None:
            with suppress(RuntimeError):  # code that a task has left running may have closed the loop
                self._loop.call_soon_threadsafe(self._do, self._end_loop)
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
        loop.stop = self._refuse_to_stop  # type: ignore[method-assign]
        loop.set_task_factory(made_task)  # type: ignore[arg-type]
        self._context = contextvars.copy_context()

        def run() -> None:
            asyncio.set_event_loop(loop)
            LoopWatch(loop, threading.get_ident(), self._runner.cancellation, self.offer_unstarted, self._report_block)
            while not self._closing:
                raised: BaseException | None = None
                try:
                    loop.run_forever()
                except BaseException as exc:  # noqa: BLE001 - a user's asyncio task may raise SystemExit
                    raised = exc
                if loop.is_closed():
                    self._exit_child(self._running_jobs(), raised)
                if not self._closing:
                    job, where = origin_of(raised)
                    self.report(job, f"raised {raised!r} in an asyncio task or a callback", where, raised)

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
        task.jobs, task.owner, task.code_ended = jobs, self, False
        self._tasks[jobs[0].slot] = task

    def end_cancelled(self, task: asyncio.Task[None]) -> None:
        """Release the jobs of an asyncio task that was cancelled before it could start."""
        if isinstance(task, JobTask) and self._tasks.get(slot := task.jobs[0].slot) is task:  # not the slot's next job
            del self._tasks[slot]
            for acquired in task.jobs:
                if self._unstarted_jobs.pop(id(acquired), None) is not None:
                    self._runner.free_thread(acquired.slot)
                    self._release(acquired)

    def report(
        self, job: RunningJob | None, problem: str, where: str = "", raised: BaseException | None = None
    ) -> None:
        """Report what a job's code did to the event loop, once if it does the same several times in a row."""
        if (job, problem) != self._reported:
            self._reported = job, problem
            self._settler.emit_loop_misused(job, problem, where, raised)

    def _report_block(self, job: RunningJob | None, where: str) -> None:
        others = self.running() - 1
        self.report(job, f"blocks the event loop for more than 1 s, so {others} other jobs of its child wait", where)

    def _refuse_to_stop(self) -> None:
        problem = "called loop.stop(), which would stop all async jobs of the child; it was ignored"
        self.report(current_job(), problem, place_of(sys._getframe()))  # noqa: SLF001 - the documented way

    def _do(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Call a coroutine function in an asyncio task of bulltask's, which jobs cannot cancel."""
        if self._idle:
            self._idle.pop().set_result((function, args))
            return
        task = OwnTask(self._do_all((function, args)), loop=self._loop, name=OWN_TASK, context=self._context.copy())
        task.owner = self
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
        if self._unstarted_jobs.pop(id(acquired), None) is None:
            return  # released, and its slot may have another job
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
        if fetch_next := self._may_fetch_after(acquired):
            self._fetching[id(acquired)] = acquired
        fetched = await self._writer.write(acquired, outcome, duration_ms, fetch_next=fetch_next)
        was_offered = fetch_next and self._fetching.pop(id(acquired), None) is None
        if was_offered:  # wait until the other thread no longer looks for a job with this token
            await asyncio.to_thread(self._offering.acquire)
            self._offering.release()
        if fetched is None:
            self._free_slots([acquired])
        else:
            await self._start_next(acquired, fetched, settling_ms, was_offered=was_offered)

    def _may_fetch_after(self, acquired: AcquiredJob) -> bool:
        return not self._is_blocked and self._next_jobs is not None and self._next_jobs.may_follow(acquired)

    @property
    def _is_blocked(self) -> bool:
        """Whether a job in crash quarantine is running, or the main thread waits until fewer jobs are running."""
        return bool(self._max_concurrent) or self._is_awaited

    async def _start_next(
        self, previous: AcquiredJob, fetched: Fetched, fetching_since_ms: int, *, was_offered: bool
    ) -> None:
        """Start the job that was fetched into the slot of the previous job, or release it."""
        next_jobs = self._next_jobs
        assert next_jobs is not None
        acquired = next_jobs.acquired(previous, fetched)
        is_late = mono_ms() - fetching_since_ms > next_jobs.lock_ms // 2  # as after a fetch of the main thread
        if (is_late or was_offered) and not await self._writer.renew_lock(acquired, next_jobs.lock_ms):
            self._free_slots([acquired])
        elif self._is_blocked or not next_jobs.may_start(acquired):
            next_jobs.pause()
            self._release(acquired)
        else:
            attempt = next_jobs.begin(acquired)
            if isinstance(attempt, Attempt):
                self._unstarted_jobs[id(acquired)] = acquired
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
        slot = members[0][0].slot
        members = [member for member in members if self._unstarted_jobs.pop(id(member[0]), None) is not None]
        if not members:
            return  # released
        batch, started = [acquired for acquired, _ in members], mono_s()
        try:
            outcomes = await BatchRunner(self._runner).acall([(attempt, each.slot) for each, attempt in members])
        except BaseException as exc:  # noqa: BLE001 - as in _work()
            self._exit_child([acquired.job.id for acquired in batch], exc)
        del self._tasks[slot]
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

    async def _end_loop(self) -> None:
        """End what jobs have left running, and stop the loop."""
        loop = asyncio.get_running_loop()
        await self._hooks.close()
        left = {task for task in asyncio.all_tasks() if not isinstance(task, JobTask | OwnTask)}
        left = {task for task in left if not task.get_name().startswith("bulltask-")}
        made_by: dict[tuple[str, str], list[asyncio.Task[Any]]] = {}
        for task in left:
            job = getattr(task, "made_by", None)
            made_by.setdefault(("" if job is None else job.name, _coroutine_name(task)), []).append(task)
            task.cancel()
        if left:
            with suppress(TimeoutError):
                async with loop_timers.timeout(_LEFT_TASKS_S):
                    await asyncio.wait(left)
        for (_, name), tasks in made_by.items():
            running = sum(not task.done() for task in tasks)
            ended = f"{running} of them did not end when they were cancelled" if running else "they were cancelled"
            problem = f"left {len(tasks)} asyncio tasks running until its child ended: {name}; {ended}"
            self.report(getattr(tasks[0], "made_by", None), problem)
        with suppress(Exception):
            async with loop_timers.timeout(_LEFT_TASKS_S):
                await loop.shutdown_asyncgens()
        if self._client is not None:
            await self._client.close()
        self._closing = True
        type(loop).stop(loop)


def _coroutine_name(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return f"{getattr(coroutine, '__qualname__', coroutine)}()"
