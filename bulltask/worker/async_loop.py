"""A child's event loop, on a thread of its own: it runs async tasks, and finishes jobs that run in threads.

Begin with :class:`AsyncLoop`. :class:`NextJobs` and :class:`AsyncOutcomeWriter` write an outcome and fetch the next job
in one round trip; :class:`LoopWatch` finds the job that blocks the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType
from typing import Any, Final, NoReturn

from bulltask.app import App
from bulltask.config.config import Config
from bulltask.config.process import exit_child
from bulltask.jobs import clock as loop_timers
from bulltask.jobs.clock import mono_ms, mono_s, to_ms
from bulltask.jobs.errors import RECOVERABLE, BrokerError, BulltaskError, JobError
from bulltask.jobs.job import RunningJob
from bulltask.observe.counters import MetricsBlock
from bulltask.observe.events import JobStarted
from bulltask.observe.hooks import Lifespan
from bulltask.registry.request import current_job, job_in
from bulltask.transport.call import AnyAsyncClient, Call, FetchedJob
from bulltask.transport.scripts.move import find_by_token, release_unstarted, renew_lock
from bulltask.worker.attempt import Attempt, AttemptRunner, BatchRunner
from bulltask.worker.broker_backoff import ReconnectBackoff, max_concurrent
from bulltask.worker.cancellation import Cancellation, JobTask, OwnTask, made_task, origin_of, place_of
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.finish import Finisher
from bulltask.worker.outcomes import AcquiredJob, Outcome, RateLimitedOutcome, RetriedOutcome, released_last
from bulltask.worker.run_hooks import LoopHooks
from bulltask.worker.slots import ChildLimits, ExitCode, Slot, SlotPool, SlotState, WakeupPipe

__all__ = [
    "AsyncLoop",
    "AsyncOutcomeWriter",
    "NextJobs",
    "batches_of",
    "concurrency_of",
    "jobs_per_child",
    "loop_tasks",
    "slots_per_child",
    "unprefetched_tasks",
]


_INTERVAL_S: Final = 0.1
_REPORT_MS: Final = 1_000
"""How long the loop must be blocked until a warning names the job."""


class LoopWatch:
    """A thread that looks, while async jobs are running, whether the event loop still turns.

    It needs the GIL, so it does not notice C code that holds it; for that case, the supervisor reads when the loop has
    last turned.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread_id: int,
        cancellation: Cancellation,
        blocked: Callable[[], None],
        report: Callable[[RunningJob | None, str], None],
    ) -> None:
        self._loop = loop
        self._thread_id = thread_id
        self._cancellation = cancellation
        self._blocked = blocked
        self._report = report
        self._seen: FrameType | None = None
        self._seen_ms = 0
        self._reported = False
        threading.Thread(target=self._watch, name="bulltask-loop-watch", daemon=True).start()

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            self._cancellation.polling.wait()
            pause.wait(_INTERVAL_S)
            late_ms = self._cancellation.late_ms()
            if late_ms <= 0:
                self._seen = None
                self._reported = False
                continue
            self._look(late_ms)
            self._blocked()

    def _look(self, late_ms: int) -> None:
        innermost = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the documented way
        running = innermost
        while running is not None and running.f_code is not asyncio.Handle._run.__code__:  # noqa: SLF001
            running = running.f_back
        if running is None or running is not self._seen:  # a loop that is only busy runs another callback each time
            self._seen = running
            self._reported = False
            self._seen_ms = late_ms
            return
        job, task = self._job_of(running)
        self._cancellation.hold(job, task)
        if late_ms - self._seen_ms >= _REPORT_MS and not self._reported:
            self._reported = True
            self._report(job, place_of(innermost, running))

    def _job_of(self, running: FrameType) -> tuple[RunningJob | None, asyncio.Task[Any] | None]:
        task = asyncio.current_task(self._loop)
        if isinstance(task, JobTask):
            return task.jobs[0].job, task
        return job_in(running.f_locals["self"]._context), None  # noqa: SLF001 - Handle has no public name for it


def concurrency_of(app: App) -> int:
    """Return how many jobs a child may run concurrently. It acquires no more jobs while it runs that many."""
    has_async = any(task._is_async for task in app.tasks.values())
    return max(app._config.async_concurrency if has_async else 1, app._config.threads)


def jobs_per_child(app: App) -> int:
    """Return how many jobs a child can run at a time, including those of a batch."""
    return max([concurrency_of(app), *(task._options.batch or 1 for task in app.tasks.values())])


def slots_per_child(app: App) -> int:
    """Return how many slots a child needs: for its jobs, and for those that it prefetches."""
    return jobs_per_child(app) + max(0, app._config.prefetch - 1)


def batches_of(app: App) -> dict[str, tuple[int, int]]:
    """Return each batch task's maximum number of jobs, and how many milliseconds to wait for further jobs."""
    by_name = {task.name: task._options for task in app.tasks.values()}
    return {
        name: (options.batch, to_ms(options.batch_wait, "batch_wait"))
        for name, options in by_name.items()
        if options.batch is not None
    }


def unprefetched_tasks(app: App) -> frozenset[str]:
    """Return the tasks whose jobs are not prefetched: they run alongside others, in batches or in Spark."""
    config, tasks = app._config, app.tasks.values()
    return frozenset(
        task.name for task in tasks if task._is_async or task._is_batch or config.threads or task._options.spark
    )


def loop_tasks(app: App) -> frozenset[str]:
    """Return the tasks whose jobs the event loop starts without the main thread: async ones without batch or limit."""
    config, tasks = app._config, app.tasks.values()
    return frozenset(
        task.name for task in tasks if task._is_async and not task._is_batch and task._options.rate(config) is None
    )


_PAUSE_MS: Final = 100
"""How long the event loop fetches no jobs after it has fetched one for the main thread."""


class NextJobs:
    """The jobs that the event loop fetches when it writes an outcome, and starts itself: only plain async ones.

    Every other job is released, so that the main thread, or another worker, acquires it. All methods are called on the
    event loop, except :meth:`pause`.

    Attributes:
        tasks: Those that :func:`loop_tasks` returns.
    """

    def __init__(
        self,
        fetcher: JobFetcher,
        runner: AttemptRunner,
        child_limits: ChildLimits,
        tasks: Collection[str],
        config: Config,
        counts: MetricsBlock | None = None,
    ) -> None:
        self._counts = counts
        self._fetcher = fetcher
        self._runner = runner
        self._child_limits = child_limits
        self.tasks = tasks
        self._max_crashes = config.max_crashes
        self.lock_ms = config.lock_ms
        self._paused_until_ms = 0

    def may_follow(self, acquired: AcquiredJob) -> bool:
        """Whether the call that writes the outcome of this job may fetch the next one."""
        return (
            acquired.job.name in self.tasks
            and self._fetcher.may_fetch_next
            and not self._child_limits.limits_jobs
            and self._fetcher.round_robin.may_stay(acquired.queue_index)
            and mono_ms() >= self._paused_until_ms
        )

    def pause(self) -> None:
        """Fetch no jobs for a while, because the main thread needs free slots; any thread may call it."""
        self._paused_until_ms = mono_ms() + _PAUSE_MS

    def acquired(self, previous: AcquiredJob, fetched: FetchedJob) -> AcquiredJob:
        """Return the job that was fetched into the slot of the previous job."""
        job = RunningJob.read(previous.keys.queue, fetched.job_id, fetched.fields)
        limit = max_concurrent(fetched.fields, self._max_crashes)
        return AcquiredJob(previous.slot, previous.queue_index, previous.keys, job, limit)

    def may_start(self, acquired: AcquiredJob) -> bool:
        """Whether the event loop may start the job: only if it needs no further call to Redis, which would block."""
        job = acquired.job
        needs_call = job.is_repeated or job.canvas or job.replacement or job.deferred_failure
        is_plain = job.name in self.tasks and not (acquired.max_concurrent or needs_call)
        return is_plain and self._fetcher.may_fetch_next

    def begin(self, acquired: AcquiredJob) -> Attempt | Outcome:
        """Start a job for which :meth:`may_start` is true; return its attempt, or its outcome without a call."""
        acquired.slot.activate(acquired.queue_index, acquired.job.id, mono_ms())
        attempt = self._runner.begin(acquired.job)
        job, bus = acquired.job, self._fetcher.bus
        if bus.listeners[JobStarted]:
            bus.emit(JobStarted(job.id, job.queue, job.name, job.attempts_started))
        if self._counts is not None and job.attempts_started <= 1:
            self._counts.waited(job.queue, job.name, job.waited_ms)
        self._child_limits.count_job()
        return attempt


_SHORT_MS: Final = 5
_MAX_CALLS: Final = 4
"""How many outcomes of jobs that are not short may wait for their replies. If a hundred jobs end at the same time and
are written together, Redis sends the hundred replies together, so the next hundred jobs start, and end, together, too.
Then this loop is idle while they run, and each of them waits until all the others are written. Small groups spread over
time. Short jobs gain more from sharing a round trip."""


class AsyncOutcomeWriter:
    """Writes outcomes; while Redis is unavailable, it repeats the call, and the supervisor renews the job's lock."""

    def __init__(self, finisher: Finisher, client: Callable[[], AnyAsyncClient], backoff: ReconnectBackoff) -> None:
        self._finisher = finisher
        self._client = client
        self._backoff = backoff
        self._calls = asyncio.Semaphore(_MAX_CALLS)

    async def write(
        self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float, *, fetch_next: bool = False
    ) -> FetchedJob | None:
        """Write the outcome of one job; return the next job, which is locked with the same slot's token, if any."""
        fetched: FetchedJob | None = None
        written: Outcome | None = outcome
        # The next job would have to wait until the hooks of this one have run.
        fetch_next = fetch_next and not self._finisher.have_hooks(outcome)
        if self._finisher.counts is not None:
            self._finisher.ending(acquired, outcome, duration_ms)
        acquired.slot.enter(SlotState.FINISHING, mono_ms())
        try:
            if duration_ms < _SHORT_MS:
                fetched = await self._write(acquired, outcome, fetch_next=fetch_next)
            else:
                async with self._calls:
                    fetched = await self._write(acquired, outcome, fetch_next=fetch_next)
        except (BrokerError, JobError) as exc:
            written = await self._write_again(acquired, outcome, exc, duration_ms)
            if fetch_next and isinstance(exc, BrokerError):
                await self._release_unknown(acquired, exc)
        if self._finisher.counts is not None:
            self._finisher.ended(acquired, written, duration_ms)
        self._backoff.reset()
        if (call := self._finisher.after_finish(acquired, written)) is not None:
            await self._run_until_reply(call)
        if (hooks := self._finisher.emit(acquired, written, duration_ms)) is not None:
            await hooks
        return fetched

    async def release(self, jobs: Sequence[AcquiredJob]) -> None:
        """Release jobs that have not started, the last one first, so that they keep their order."""
        calls = [release_unstarted(each.keys, each.job.id, each.slot.token) for each in reversed(jobs)]
        # The client sends concurrent calls in order, without waiting for the replies to earlier ones.
        await asyncio.gather(*map(self._run_until_reply, calls))

    async def renew_lock(self, acquired: AcquiredJob, lock_ms: int) -> bool:
        """Renew or reacquire the lock of a job that has not started; return False if the lock is lost."""
        call = renew_lock(acquired.keys, acquired.job.id, acquired.slot.token, lock_ms)
        return await self._run_until_reply(call) is True

    async def _release_unknown(self, acquired: AcquiredJob, exc: BrokerError) -> None:
        """Release the job that a call may have fetched, although its reply was lost or was an error.

        A malformed job cannot be released. It fails, because the supervisor would renew its lock forever.
        """
        keys, token = acquired.keys, acquired.slot.token
        for _, job_id in await self._run_until_reply(find_by_token(keys, [token])) or ():
            if not await self._run_until_reply(self._finisher.malformed.call(keys, token, job_id, exc)):
                await self._run_until_reply(release_unstarted(keys, job_id, token))

    async def _write(self, acquired: AcquiredJob, outcome: Outcome, *, fetch_next: bool) -> FetchedJob | None:
        client = self._client()
        if isinstance(outcome, RateLimitedOutcome):
            await client.run(self._finisher.limit_call(acquired, outcome))
        call, fetches = self._finisher.call(acquired, outcome, fetch_next=fetch_next)
        reply: Any = await client.run(call)
        return reply if fetches and isinstance(reply, FetchedJob) else None

    async def _write_again(
        self, acquired: AcquiredJob, outcome: Outcome, exc: BulltaskError, duration_ms: float
    ) -> Outcome | None:
        async def write(outcome: Outcome, _lost_reply: bool) -> None:
            self._finisher.ending(acquired, outcome, duration_ms)  # it may be another one
            await self._write(acquired, outcome, fetch_next=False)

        write_again = self._finisher.failed_writes.write_again
        ended = await write_again(
            acquired, outcome, exc, write=write, run=self._run_until_reply, back_off=self._back_off
        )
        return ended[0]

    async def _run_until_reply(self, call: Call[Any]) -> Any:
        """Retry a call until there is a reply; return ``False`` after an error reply."""
        while True:
            try:
                return await self._client().run(call)
            except RECOVERABLE as exc:
                await self._back_off(exc)
            except (BrokerError, JobError):
                return False

    async def _back_off(self, exc: BrokerError) -> None:
        await loop_timers.sleep(self._backoff.record_shared_failure(exc) / 1000)


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
    """Runs async tasks.

    The thread starts with the first async job, so a child without async jobs has no such thread. The main thread
    acquires jobs while a slot is free; a sync task that it runs shares the GIL with this loop.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        pool: SlotPool,
        runner: AttemptRunner,
        finisher: Finisher,
        client: Callable[[], AnyAsyncClient],
        backoff: ReconnectBackoff,
        wakeup_pipe: WakeupPipe,
        concurrency: int | None = None,
        next_jobs: NextJobs | None = None,
        run: Callable[[Call[Any]], Any] | None = None,
    ) -> None:
        self._pool = pool
        self._concurrency = concurrency or pool.count
        self._runner = runner
        self._finisher = finisher
        self._make_client = client
        self._wakeup_pipe = wakeup_pipe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._context = contextvars.Context()
        self._client: AnyAsyncClient | None = None
        self._tasks: dict[Slot, JobTask] = {}  # asyncio keeps only weak references to tasks; by their first slot
        self._own_tasks: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks
        self._idle: list[asyncio.Future[_Work]] = []
        self._run = run
        self._hooks = LoopHooks(Lifespan())
        self._reported: tuple[RunningJob | None, str] | None = None
        # By id: jobs that have not started yet, and those whose last call fetches the next job. Who removes one, the
        # event loop or a thread that releases them while the loop is blocked, decides what becomes of it.
        self._unstarted_jobs: dict[int, AcquiredJob] = {}
        self._fetching: dict[int, AcquiredJob] = {}
        self._handed: deque[tuple[AcquiredJob, int]] = deque()  # by the main thread, with the time
        self._offering = threading.Lock()
        self._is_stuck = False
        self._closing = False
        self._max_concurrent: dict[Slot, int] = {}
        self._writer = AsyncOutcomeWriter(finisher, self.client, backoff)
        self._next_jobs = next_jobs
        self._unstarted: list[AcquiredJob] = []
        self._is_awaited = False

    def open(self, hooks: LoopHooks) -> None:
        """Run what comes before the first job on the event loop; its exception prevents the child from starting."""
        if not hooks.exist:
            return
        self._hooks = hooks
        opened = Future[None]()

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
                return self._pool.take()
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
                    self._finisher.emit_released(acquired.job, _BLOCKED)
                    self._runner.threads.free(acquired.slot)
                    with suppress(BrokerError, JobError):  # its lock expires
                        run(release_unstarted(acquired.keys, acquired.job.id, acquired.slot.token))
                    self._give_back([acquired])
            for key, acquired in tuple(self._fetching.items()):
                if self._fetching.pop(key, None) is not None:
                    keys, token = acquired.keys, acquired.slot.token
                    with suppress(BrokerError, JobError):
                        for _, job_id in run(find_by_token(keys, [token])):
                            if job_id != acquired.job.id:
                                release = release_unstarted(keys, job_id, token)
                                self._finisher.malformed.release(run, keys, token, job_id, release)

    def start(self, acquired: AcquiredJob, attempt: Attempt) -> None:
        """Start an async attempt; the loop gives its slot back when the job has finished."""
        self._hand_off((acquired,), self._work(acquired, attempt), f"job {acquired.job.id}")

    def start_batch(self, members: Sequence[tuple[AcquiredJob, Attempt]]) -> None:
        """Start an async batch; as :meth:`start`."""
        batch = [acquired for acquired, _ in members]
        self._hand_off(batch, self._work_batch(members), f"batch of {len(batch)} jobs, first job {batch[0].job.id}")

    def _hand_off(self, jobs: Sequence[AcquiredJob], work: Coroutine[Any, Any, None], name: str) -> None:
        for acquired in jobs:
            if acquired.max_concurrent:
                self._max_concurrent[acquired.slot] = acquired.max_concurrent
            self._unstarted_jobs[id(acquired)] = acquired
        self._handed.append((jobs[0], mono_ms()))
        loop = self._loop or self._start_thread()
        loop.call_soon_threadsafe(self._spawn, work, name, jobs)

    def drain(self) -> None:
        """Wait until every job is finished, end what they have left running, then stop the thread."""
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
        return self._pool.taken

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
        self._finisher.emit_loop_stopped(jobs, raised)
        exit_child(ExitCode.FAILED)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str, jobs: Sequence[AcquiredJob]) -> None:
        """Run the code of jobs in an asyncio task of their own, in which bulltask awaits nothing.

        The code may cancel that task at any time, even just before it returns.
        """
        # Not the current context, in which an earlier job may have set variables.
        context = self._context.copy()
        task = JobTask(work, loop=self._loop, name=name, context=context)
        task.context = context
        task.jobs = jobs
        task.owner = self
        task.code_ended = False
        self._tasks[jobs[0].slot] = task

    def end_cancelled(self, task: asyncio.Task[None]) -> None:
        """Release the jobs of an asyncio task that was cancelled before it could start."""
        if isinstance(task, JobTask) and self._tasks.get(slot := task.jobs[0].slot) is task:  # not the slot's next job
            del self._tasks[slot]
            for acquired in task.jobs:
                if self._unstarted_jobs.pop(id(acquired), None) is not None:
                    self._runner.threads.free(acquired.slot)
                    self._release(acquired)

    def report(
        self, job: RunningJob | None, problem: str, where: str = "", raised: BaseException | None = None
    ) -> None:
        """Report what a job's code did to the event loop, once if it does the same several times in a row."""
        if (job, problem) != self._reported:
            self._reported = job, problem
            self._finisher.emit_loop_misused(job, problem, where, raised)

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
        work, context = self._do_all((function, args)), self._context.copy()
        task = OwnTask(work, loop=self._loop, name="bulltask-finishing", context=context)
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
        self._do(self._finish, acquired, outcome, (mono_s() - started) * 1000, attempt)

    async def _finish(
        self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float, attempt: Attempt | None = None
    ) -> None:
        """Write an outcome; then start the job that the same call has fetched, or free the slot."""
        finishing_ms = mono_ms()
        if attempt is not None and type(outcome) is RetriedOutcome:
            outcome = await self._runner.amove(attempt, outcome)
        next_jobs = self._next_jobs
        if fetch_next := not self._is_blocked and next_jobs is not None and next_jobs.may_follow(acquired):
            self._fetching[id(acquired)] = acquired
        fetched = await self._writer.write(acquired, outcome, duration_ms, fetch_next=fetch_next)
        was_offered = fetch_next and self._fetching.pop(id(acquired), None) is None
        if was_offered:  # wait until the other thread no longer looks for a job with this token
            await asyncio.to_thread(self._offering.acquire)
            self._offering.release()
        if fetched is None:
            self._give_back([acquired])
        else:
            await self._start_next(acquired, fetched, finishing_ms, was_offered=was_offered)

    @property
    def _is_blocked(self) -> bool:
        """Whether a job in crash quarantine is running, or the main thread waits until fewer jobs are running."""
        return bool(self._max_concurrent) or self._is_awaited

    async def _start_next(
        self, previous: AcquiredJob, fetched: FetchedJob, fetching_since_ms: int, *, was_offered: bool
    ) -> None:
        """Start the job that was fetched into the slot of the previous job, or release it."""
        next_jobs = self._next_jobs
        assert next_jobs is not None
        acquired = next_jobs.acquired(previous, fetched)
        is_late = mono_ms() - fetching_since_ms > next_jobs.lock_ms // 2  # as after a fetch of the main thread
        if (is_late or was_offered) and not await self._writer.renew_lock(acquired, next_jobs.lock_ms):
            self._give_back([acquired])
        elif self._is_blocked or not next_jobs.may_start(acquired):
            next_jobs.pause()
            self._release(acquired)
        else:
            attempt = next_jobs.begin(acquired)
            if isinstance(attempt, Attempt):
                self._unstarted_jobs[id(acquired)] = acquired
                self._spawn(self._work(acquired, attempt), f"job {acquired.job.id}", (acquired,))
            else:
                self._do(self._finish, acquired, attempt, 0.0)

    def _release(self, acquired: AcquiredJob) -> None:
        """Release a job, together with the others that are released at the same time, so that they keep their order."""
        self._unstarted.append(acquired)
        if len(self._unstarted) == 1:
            self._do(self._release_unstarted)

    async def _release_unstarted(self) -> None:
        jobs = self._unstarted
        self._unstarted = []
        await self._writer.release(jobs)
        self._give_back(jobs)

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
        self._do(self._finish_batch, batch, outcomes, (mono_s() - started) * 1000)

    async def _finish_batch(
        self, batch: Sequence[AcquiredJob], outcomes: Sequence[Outcome], duration_ms: float
    ) -> None:
        ended = released_last(list(zip(batch, outcomes, strict=True)))
        # The client sends concurrent calls without waiting for the replies to earlier ones.
        await asyncio.gather(*(self._writer.write(acquired, outcome, duration_ms) for acquired, outcome in ended))
        self._give_back(batch)

    def _give_back(self, jobs: Sequence[AcquiredJob]) -> None:
        for acquired in jobs:
            self._max_concurrent.pop(acquired.slot, None)
        self._pool.give_back(*(acquired.slot for acquired in jobs))
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
