"""A child process, from the fork to its exit."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bulltask.app import App
from bulltask.clock import zone_of
from bulltask.events import Bus, ChildClosing, ChildReady
from bulltask.jobs.job import RunningJob
from bulltask.lua import loader
from bulltask.observe.counters import MetricsListener, MetricsMemory
from bulltask.observe.listener_errors import listener_errors
from bulltask.observe.log_listener import LogListener
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.process import die_with_parent, exit_child, unblock_signals
from bulltask.registry.current_job import current_job, share_with_threads
from bulltask.registry.job_client import JobClient
from bulltask.task_waits import warn_in_tasks
from bulltask.transport.scripts.move import renew_lock
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child.async_bulk_fetch import AsyncBulkFetcher
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import AttemptRunner
from bulltask.worker.child.batch_collector import BatchCollector
from bulltask.worker.child.cancellation import Cancellation, uninterrupted
from bulltask.worker.child.capacity import batches_of, concurrency_of, loop_tasks, unprefetched_tasks
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.forks import isolate_forks
from bulltask.worker.child.inherited import run_exit_handlers
from bulltask.worker.child.job_client import RedisJobClient
from bulltask.worker.child.job_starter import IterationAdder, JobStarter
from bulltask.worker.child.next_job import NextJobs
from bulltask.worker.child.output import redirect_output
from bulltask.worker.child.prefetch_loop import PrefetchLoop
from bulltask.worker.child.process_signals import LoopHooks, attach_process_signals
from bulltask.worker.child.retirement import Retirement
from bulltask.worker.child.settle import Settler
from bulltask.worker.child.spark_tasks import SparkTaskRunner
from bulltask.worker.child.stacks import StackDumper
from bulltask.worker.child.sync_loop import SyncLoop
from bulltask.worker.child.sync_writer import OutcomeWriter
from bulltask.worker.child.thread_tasks import TaskThreads
from bulltask.worker.control_page import ControlPage
from bulltask.worker.descendants import lead_group, mark_programs
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.slots import ChildBlock
from bulltask.worker.states import ProcessState
from bulltask.worker.wakeup_pipe import WakeupPipe

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["ChildPlan", "child_bus", "run_child"]


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """The objects that a child receives from the supervisor.

    Attributes:
        app: The app, with its tasks loaded.
        queues: The names of the worker's queues in the app.
        worker_id: The worker's id.
        index: The child's index in the pool.
        block: The child's part of the shared memory.
        control: The supervisor's instructions for all children.
        bus: Creates the child's bus with its listeners; called after the fork.
        close_inherited: Closes the supervisor's connections and pipes, which the child has inherited.
    """

    app: App
    queues: Sequence[str]
    worker_id: str
    index: int
    block: ChildBlock
    control: ControlPage
    bus: Callable[[], Bus]
    close_inherited: Callable[[], None]


def run_child(plan: ChildPlan, parent_pid: int) -> None:
    """Run jobs until the child is stopped, then exit; never returns."""
    code: int = ExitCode.BOOT_FAILED
    try:
        _reset_signals(parent_pid)
        lead_group()
        mark_programs(plan.worker_id)
        plan.close_inherited()
        loader.all_scripts()  # a spawned child reads the files; a fork has inherited the scripts
        warn_in_tasks(_running_task)
        bus = plan.bus()
        if plan.app.config.redirect_stdouts:
            redirect_output(plan.app.config.redirect_stdouts_level, bus)
        loop = _assemble(plan, bus, parent_pid)
        unblock_signals()
        loop.open(LoopHooks(plan.app.lifespans))
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


def child_bus(
    logger: FilteringBoundLogger, memory: MetricsMemory | None, index: int, queues: Sequence[str], app: App
) -> Bus:
    """Return a child's bus with the log, the metrics and the app's listeners; call it in the child."""
    bus = Bus(on_error=listener_errors(logger))
    LogListener(logger, PayloadCodec(app.config).encrypts).attach(bus)
    if memory is not None:
        MetricsListener(memory.block(index + 1), queues).attach(bus)
    attach_process_signals(bus)
    app.listeners.attach(bus)  # last, so that a job's log line comes before the output of the app's listeners
    return bus


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


def _assemble(plan: ChildPlan, bus: Bus, parent_pid: int) -> SyncLoop:
    app, config = plan.app, plan.app.config
    broker = app.broker  # App creates a new broker after a fork
    if broker.endpoint.primary is not None:
        broker.endpoint.primary.follow(plan.control.primary)
    wakeup_pipe = WakeupPipe()

    def job_client(job: RunningJob) -> JobClient:
        # A function, because the loop's client is created on the loop's thread.
        return RedisJobClient(job, broker, lambda: async_loop.client())  # noqa: PLW0108

    def renew(job: RunningJob, token: str) -> bool:
        return broker.pool.run(renew_lock(broker.keys(job.queue), job.id, token, config.lock_ms))

    retirement = Retirement(config, plan.block, plan.index, bus, parent_pid)
    fetcher = JobFetcher(broker, plan.queues, bus, plan.worker_id, wakeup_pipe, plan.control)
    spark = SparkTaskRunner(app, job_client, renew, fetcher.close)
    threads = TaskThreads(config.threads)
    cancellation = Cancellation(plan.block, spark.interrupt, lambda: async_loop.running_loop())  # noqa: PLW0108 - defined below
    runner = AttemptRunner(app, job_client, spark, cancellation, retirement, threads, worker_id=plan.worker_id)
    share_with_threads(runner.only_context)
    runner.is_stopping = lambda: fetcher.stops_checkpointed_tasks
    settler = Settler(config, broker.clock, bus, plan.worker_id, fetcher.round_robin.rate_limited, runner.hooks)
    backoff, concurrency = ReconnectBackoff(bus, config), concurrency_of(app)
    next_jobs = NextJobs(fetcher, runner, retirement, loop_tasks(app), config)
    async_loop = AsyncLoop(
        plan.block, runner, settler, broker.async_client, backoff, wakeup_pipe, concurrency, next_jobs, broker.pool.run
    )
    _handle_stop_signals(fetcher)
    cancellation.install()
    StackDumper(plan.block, async_loop.running_loop, bus, plan.index).install()
    isolate_forks(fetcher.disconnect, async_loop.running_loop)
    iteration_adder = IterationAdder(fetcher, broker.clock, zone_of(config.timezone))
    collector = BatchCollector(fetcher, plan.control, broker.clock, async_loop, batches_of(app))
    starter = JobStarter(fetcher, runner, iteration_adder, async_loop, retirement)
    writer = OutcomeWriter(fetcher, settler)
    shared, tasks = (plan.block, plan.control), unprefetched_tasks(app)
    prefetch = PrefetchLoop(fetcher, starter, runner, writer, async_loop, *shared, config.prefetch, tasks)
    bulk_fetcher = AsyncBulkFetcher(fetcher, starter, writer, async_loop, next_jobs)
    return SyncLoop(fetcher, starter, runner, writer, async_loop, retirement, collector, prefetch, bulk_fetcher)


def _handle_stop_signals(fetcher: JobFetcher) -> None:
    signal.signal(signal.SIGTERM, uninterrupted(fetcher.close))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the worker continues when its terminal closes
        signal.signal(signal.SIGHUP, uninterrupted(fetcher.close))
    for number in (signal.SIGTSTP, signal.SIGCONT):
        signal.signal(number, uninterrupted(fetcher.interrupt_wait))
