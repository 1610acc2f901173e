"""A child process, from the fork to its exit. Begin with :func:`run_child`.

The first part removes what a fork inherits and must not use; :class:`StackDumper` answers ``USR1``.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import fcntl
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from bulltask.app import App
from bulltask.config.process import (
    anonymous_file,
    die_with_parent,
    exit_child,
    exit_if_forked,
    name_process,
    unblock_signals,
)
from bulltask.jobs.clock import value_class, zone_of
from bulltask.jobs.job import RunningJob
from bulltask.jobs.payloads import PayloadCodec
from bulltask.lua import loader
from bulltask.observe.bus import Bus
from bulltask.observe.counters import MetricsBlock, MetricsListener, MetricsMemory
from bulltask.observe.events import ChildClosing, ChildReady, StacksDumped
from bulltask.observe.log import LogListener, listener_errors
from bulltask.registry.context import JobClient
from bulltask.registry.protocols import warn_in_tasks
from bulltask.registry.request import current_job, share_with_threads
from bulltask.transport.scripts.move import renew_lock
from bulltask.worker.async_loop import (
    AsyncLoop,
    NextJobs,
    batches_of,
    concurrency_of,
    loop_tasks,
    slots_per_child,
    unprefetched_tasks,
)
from bulltask.worker.attempt import AttemptRunner, IterationAdder, JobStarter, RedisJobClient
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.cancellation import Cancellation, TaskThreads, uninterrupted
from bulltask.worker.child_pool import lead_group, mark_programs
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.finish import Finisher, OutcomeWriter
from bulltask.worker.orders import ChildChanges
from bulltask.worker.prefetch import PrefetchLoop
from bulltask.worker.run_hooks import LoopHooks, attach_process_signals, redirect_output
from bulltask.worker.slots import (
    STACKS_NAME,
    ChildBlock,
    ChildLimit,
    ChildLimits,
    ControlPage,
    ExitCode,
    ProcessState,
    SlotPool,
    WakeupPipe,
)
from bulltask.worker.spark_tasks import SparkTaskRunner
from bulltask.worker.sync_loop import AsyncBulkFetcher, BatchCollector, SyncLoop

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = [
    "ChildPlan",
    "StackDumper",
    "child_bus",
    "find_executors",
    "forget_exit_handlers",
    "metrics_memory",
    "renew_executors",
    "run_child",
    "tasks_text",
]


# What a forked child inherits from the supervisor and must not use: exit handlers, and the pipes of process pools.
#
# A forked child is deep in the supervisor's code, to which it must never return. So it calls the functions that Python
# would call when a program ends: it waits for threads, which also ends executors, and calls what was registered with
# ``atexit``.
#
# A ``ProcessPoolExecutor`` opens its pipes when it is created, but starts its processes when it is used. One that a
# module creates is therefore inherited by all forked children: each would use the same pipes, so the process of one
# child could receive the call of another, and the wrong job its result. A process that is killed while it holds a lock
# of such a pipe would block all later children.


EXIT_TIMEOUT_S: Final = 5.0


def forget_exit_handlers() -> None:
    """Forget the inherited handlers: they belong to the supervisor, as temporary directories do.

    :mod:`multiprocessing` does the same in its own forks.
    """
    finalizers: Any = weakref.finalize
    for finalizer in tuple(finalizers._registry):  # noqa: SLF001 - there is no public list
        finalizer.atexit = False
    finalizers._registered_with_atexit = False  # noqa: SLF001 - the next one registers again
    atexit._clear()  # noqa: SLF001 - as multiprocessing does
    atexit.register(logging.shutdown)
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        atexit.register(util._exit_function)  # noqa: SLF001 - it has registered itself in the supervisor
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process._children = set()  # type: ignore[attr-defined]  # noqa: SLF001 - as in its own forks


def find_executors() -> Sequence[Any]:
    """Return the process pools of this process that have not been used; call this before the first fork."""
    module: Any = sys.modules.get("concurrent.futures.process")  # imported on first use
    if module is None:
        return ()
    pools = [one for one in gc.get_objects() if issubclass(type(one), module.ProcessPoolExecutor)]
    return [pool for pool in pools if vars(pool).get("_executor_manager_thread", False) is None]


def renew_executors(executors: Sequence[Any]) -> None:
    """Give the process pools their own pipes in this fork."""
    for pool in executors:
        base = sys.modules["concurrent.futures.process"].ProcessPoolExecutor
        with suppress(AttributeError, TypeError):  # another Python must not keep a child from starting
            base.__init__(
                pool,
                pool._max_workers,  # noqa: SLF001 - they have no public names
                pool._mp_context,  # noqa: SLF001
                pool._initializer,  # noqa: SLF001
                pool._initargs,  # noqa: SLF001
                max_tasks_per_child=pool._max_tasks_per_child,  # noqa: SLF001
            )


def run_exit_handlers() -> None:
    """Wait for threads and call the handlers; the kernel kills the process if this takes more than 5 s."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, EXIT_TIMEOUT_S)
    for function in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]  # noqa: SLF001
        try:
            function()
        except BaseException:  # noqa: BLE001 - a handler may raise SystemExit
            traceback.print_exc()
    signal.setitimer(signal.ITIMER_REAL, 0)


_IGNORED_SIGNALS: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGCONT,
)
"""Signals that the supervisor sends to a child, or that a terminal sends to the process group; a fork ignores them."""

_TERM: Final = (signal.SIGTERM,)


def isolate_forks(close_inherited: Callable[[], None], loop: Callable[[], asyncio.AbstractEventLoop | None]) -> None:
    """Make every process that this process forks drop the child's signal handlers and connections.

    A fork that returns to the child's code exits (:func:`bulltask.config.process.exit_if_forked`). Until then it runs
    user code, possibly for a long time: ``TERM`` must end it (``multiprocessing.Process.terminate``), and it must not
    keep the child's connections open.
    """
    pid = os.getpid()

    def hold() -> None:  # a TERM that arrives before SIG_DFL is set would be lost
        signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM)

    def isolate() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in _IGNORED_SIGNALS:
            # Not SIG_IGN, which programs that the fork starts would inherit. An existing SIG_IGN (nohup) is kept.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        release()
        close_inherited()
        if (running := loop()) is not None:
            # If an async task has forked, the child's other tasks would continue in the fork whenever that task waits.
            with suppress(RuntimeError):  # the loop is closed, or belongs to another thread (asyncio's debug mode)
                running.call_soon(exit_if_forked, pid)

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=isolate)


_MAX_TASKS: Final = 200


class StackDumper:
    """Dumps this child's stacks after ``USR1``.

    ``faulthandler`` writes the threads' stacks in its C handler, so this works even in a child that is stuck in C code.
    The asyncio tasks are added when the main thread runs Python code again; a blocked event loop does not delay that.
    The supervisor reads the file, whose descriptor is in the block; a dump that it has not requested is an event.
    """

    def __init__(
        self, block: ChildBlock, loop: Callable[[], asyncio.AbstractEventLoop | None], bus: Bus, index: int
    ) -> None:
        self._block = block
        self._loop = loop
        self._bus = bus
        self._index = index
        self._fd = anonymous_file(STACKS_NAME)

    def install(self) -> None:
        """Handle ``USR1`` from now on."""
        # Unregister the handler that a fork inherits, because faulthandler does not replace it.
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, uninterrupted(self._dump))
        if self._fd is not None:
            # O_APPEND: the supervisor truncates the file, and the next dump must not start at the old offset.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
            self._block.stacks_fd = self._fd
            faulthandler.register(signal.SIGUSR1, self._fd, all_threads=True, chain=True)

    def _dump(self) -> None:
        if self._fd is None:
            return
        os.write(self._fd, tasks_text(self._loop()).encode(errors="backslashreplace"))
        if self._block.stacks_pending:
            self._block.complete_stacks()
            return
        text = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace")
        os.ftruncate(self._fd, 0)
        self._bus.emit(StacksDumped(self._index, os.getpid(), text))


def tasks_text(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return the stack of each task in a loop, outermost frame first; ``""`` without a loop. Callable from any thread.

    asyncio's ``Task.print_stack`` shows only the outermost coroutine, but a task may be waiting deep in a library.
    """
    if loop is None:
        return ""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    parts = [f"\n{len(tasks)} asyncio tasks\n"]
    for task in tasks[:_MAX_TASKS]:
        coroutine = task.get_coro()
        lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in _frames(coroutine)).format()
        # The frames of the task that is running now are only in its thread's stack.
        order = "running: see its thread" if getattr(coroutine, "cr_running", False) else "outermost call first"
        parts.append(f"Task {task.get_name()!r} ({order}):\n{''.join(lines)}")
    return "".join(parts)


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames from a task's coroutine to the innermost awaitable, including generators."""
    while awaited is not None:
        if type(awaited).__name__ == "coroutine_wrapper":
            # The result of coroutine.__await__(); only the garbage collector can find its coroutine.
            awaited = next(iter(gc.get_referents(awaited)), None)
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            return
        yield frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)


@value_class
class ChildPlan:
    """The objects that a child receives from the supervisor.

    Attributes:
        bus: Creates the child's bus with its listeners, including one for the metrics, and returns it with that of the
            log; called after the fork.
        close_inherited: Closes the supervisor's connections and pipes, which the child has inherited.
    """

    app: App
    queues: Sequence[str]
    worker_id: str
    index: int
    block: ChildBlock
    control: ControlPage
    memory: MetricsMemory | None
    bus: Callable[[MetricsBlock | None], tuple[Bus, LogListener]]
    close_inherited: Callable[[], None]


def run_child(plan: ChildPlan, parent_pid: int) -> None:
    """Run jobs until the child is stopped, then exit; never returns."""
    code: int = ExitCode.BOOT_FAILED
    try:
        _reset_signals(parent_pid)
        name_process("child")
        lead_group()
        mark_programs(plan.worker_id)
        plan.close_inherited()
        loader.all_scripts()  # a spawned child reads the files; a fork has inherited the scripts
        warn_in_tasks(_running_task)
        sys.breakpointhook = _debug
        counts = None if plan.memory is None else plan.memory.block(plan.index + 1)
        bus, log = plan.bus(counts)
        if plan.app._config.redirect_stdouts:
            redirect_output(plan.app._config.redirect_stdouts_level, bus)
        loop = _assemble(plan, bus, log, counts, parent_pid)
        unblock_signals()
        loop.open(LoopHooks(plan.app._lifespans))
        bus.emit(ChildReady(plan.index, os.getpid()))
        plan.block.run_state = ProcessState.RUN
        loop.run()
        bus.emit(ChildClosing(plan.index, os.getpid()))
        plan.block.run_state = ProcessState.CLOSED
        run_exit_handlers()
        code = ExitCode.OK
    except BaseException:  # noqa: BLE001 - a fork must never return into the supervisor's code
        traceback.print_exc()
        code = ExitCode.BOOT_FAILED if plan.block.run_state is ProcessState.INIT else ExitCode.FAILED
    finally:
        exit_child(code)


def metrics_memory(app: App, queues: Sequence[str], children: int, fd: int | None) -> MetricsMemory:
    """Return the counters of all processes of a worker; each process calls this with the same arguments."""
    by_name = {task.name: task._options.queue for task in app.tasks.values()}
    # If there are too many tasks, those of other queues are counted together.
    tasks = sorted(by_name, key=lambda name: (by_name[name] not in {None, *queues}, name))
    slots, buckets = slots_per_child(app), app._config.metrics_buckets
    return MetricsMemory(queues, children + 1, ChildLimit, fd, tasks=tasks, slots=slots, buckets=buckets)


def child_bus(
    logger: FilteringBoundLogger, counts: MetricsBlock | None, queues: Sequence[str], app: App
) -> tuple[Bus, LogListener]:
    """Return a child's bus with the log, the metrics and the app's listeners; call it in the child."""
    bus = Bus(on_error=listener_errors(logger))
    encrypts = PayloadCodec(app._config).encrypts if app._config.encryption_keys else None
    log = LogListener(logger, encrypts)
    log.attach(bus)
    if counts is not None:
        MetricsListener(counts, queues).attach(bus)
    attach_process_signals(bus)
    app._listeners.attach(bus)  # last, so that a job's log line comes before the output of the app's listeners
    return bus, log


def _debug(*args: Any, header: str | None = None, **kwargs: Any) -> object:
    """``breakpoint()`` in a task. Unlike ``pdb.set_trace()``, it leaves Ctrl-C to the supervisor.

    pdb handles SIGINT from its command ``continue`` on. When Ctrl-C stopped the worker, it would open in the idle child
    and wait for a command until the worker kills the child.
    """
    if args or kwargs or "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*args, **kwargs, **({} if header is None else {"header": header}))
    import pdb  # noqa: PLC0415 - only for a breakpoint

    debugger = pdb.Pdb(nosigint=True)
    if header is not None:
        debugger.message(header)
    caller = inspect.currentframe()
    debugger.set_trace(caller and caller.f_back)
    return None


def _running_task() -> str:
    job = current_job()
    return "" if job is None else job.name


def _reset_signals(parent_pid: int) -> None:
    """Replace the supervisor's signal handling, which a fork inherits."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # Ctrl-C in a terminal sends SIGINT to the whole process group, but only the supervisor handles it. Not SIG_IGN,
    # which programs that a task starts would inherit.
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    # The kernel sends these two to the process group when a background process uses the terminal. If they are ignored,
    # a task that reads from the terminal receives an error instead, and the supervisor does not change its number of
    # children.
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    # Without a supervisor the locks would not be renewed, and another worker would run the jobs. Therefore, the kernel
    # kills the child when the supervisor dies.
    die_with_parent(signal.SIGKILL, parent_pid)


def _assemble(plan: ChildPlan, bus: Bus, log: LogListener, counts: MetricsBlock | None, parent_pid: int) -> SyncLoop:
    app, config = plan.app, plan.app._config
    broker = app._broker  # App creates a new broker after a fork
    if broker.endpoint.primary is not None:
        broker.endpoint.primary.follow(plan.control.primary)
    wakeup_pipe = WakeupPipe()

    def job_client(job: RunningJob) -> JobClient:
        # A function, because the loop's client is created on the loop's thread.
        return RedisJobClient(job, broker, lambda: async_loop.client())  # noqa: PLW0108

    def renew(job: RunningJob, token: str) -> bool:
        return broker.pool.run(renew_lock(broker.keys(job.queue), job.id, token, config.lock_ms))

    def wake_supervisor() -> None:
        with suppress(OSError):  # it has died, which will kill this child
            os.kill(parent_pid, signal.SIGCHLD)  # it only ends a wait

    pool = SlotPool(plan.block.slots())
    child_limits = ChildLimits(config, plan.block, plan.index, bus, parent_pid)
    fetcher = JobFetcher(broker, plan.queues, bus, plan.worker_id, wakeup_pipe, plan.control, pool)
    fetcher.counts = counts
    spark = SparkTaskRunner(app, job_client, renew, fetcher.close)
    threads = TaskThreads(config.threads)
    cancellation = Cancellation(plan.block, spark.interrupt, lambda: async_loop.running_loop())  # noqa: PLW0108 - defined below
    runner = AttemptRunner(app, job_client, spark, cancellation, child_limits, threads, worker_id=plan.worker_id)
    share_with_threads(runner.only_context)
    runner.is_stopping = lambda: fetcher.stops_checkpointed_tasks
    rate_limited = fetcher.round_robin.rate_limited
    finisher = Finisher(config, broker.clock, bus, plan.worker_id, rate_limited, runner.hooks, counts)
    backoff, concurrency = ReconnectBackoff(bus, config), concurrency_of(app)
    next_jobs = NextJobs(fetcher, runner, child_limits, loop_tasks(app), config, counts)
    async_loop = AsyncLoop(
        pool, runner, finisher, broker.async_client, backoff, wakeup_pipe, concurrency, next_jobs, broker.pool.run
    )
    _handle_stop_signals(fetcher)
    cancellation.install()
    cancellation.wake_supervisor = wake_supervisor

    def change_tasks() -> None:
        runner.forget_plans()
        next_jobs.tasks = loop_tasks(app)

    def set_log_level(level: str) -> None:
        log.set_level(level, bus)

    changes = ChildChanges(plan.control, app, fetcher.cancel_queues, change_tasks, set_log_level)
    cancellation.on_signal = changes.apply
    changes.apply()
    StackDumper(plan.block, async_loop.running_loop, bus, plan.index).install()
    isolate_forks(fetcher.disconnect, async_loop.running_loop)
    iteration_adder = IterationAdder(fetcher, broker.clock, zone_of(config.timezone))
    pool.ran_out = next_jobs.pause
    collector = BatchCollector(fetcher, plan.control, broker.clock, batches_of(app))
    starter = JobStarter(fetcher, runner, iteration_adder, async_loop.wait_until_running, child_limits, counts)
    writer = OutcomeWriter(fetcher, finisher)
    shared, tasks = (plan.block, plan.control), unprefetched_tasks(app)
    prefetch = PrefetchLoop(fetcher, starter, runner, writer, *shared, config.prefetch, tasks, wake_supervisor)
    bulk_fetcher = AsyncBulkFetcher(fetcher, starter, writer, async_loop, next_jobs)
    return SyncLoop(fetcher, starter, runner, writer, async_loop, child_limits, collector, prefetch, bulk_fetcher)


def _handle_stop_signals(fetcher: JobFetcher) -> None:
    signal.signal(signal.SIGTERM, uninterrupted(fetcher.close))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the worker continues when its terminal closes
        signal.signal(signal.SIGHUP, uninterrupted(fetcher.close))
    for number in (signal.SIGTSTP, signal.SIGCONT):
        signal.signal(number, uninterrupted(fetcher.interrupt_wait))
