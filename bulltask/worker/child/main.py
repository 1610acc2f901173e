"""A child from the fork to its exit."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bulltask.app import App
from bulltask.clock import zone_of
from bulltask.events import Bus, ChildClosing, ChildReady
from bulltask.jobs.job import RunningJob
from bulltask.lua import loader
from bulltask.process import die_with_parent, leave, release_signals
from bulltask.registry.context import Reporter
from bulltask.transport.scripts.move import keep_lock
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempts
from bulltask.worker.child.cancellation import Cancellation, uninterrupted
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.forks import isolate_forks
from bulltask.worker.child.iterations import Iterations
from bulltask.worker.child.reporter import JobReporter
from bulltask.worker.child.settle import Settler
from bulltask.worker.child.spark_tasks import SparkTasks
from bulltask.worker.child.stacks import StackDumper
from bulltask.worker.child.sync_loop import SyncLoop
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.slots import ChildBlock, ControlPage
from bulltask.worker.states import ProcessState
from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["ChildPlan", "run_child"]


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """Everything a child needs from the supervisor.

    Attributes:
        app: the application, tasks loaded.
        queues: the worker's queues as the user spells them.
        worker_id: of the whole worker.
        index: the child's place in the fleet.
        block: the child's part of the shared memory.
        control: what the supervisor wants of all children.
        bus: makes the child's bus, listeners attached; called after the fork.
        close_inherited: closes what the child inherited and must not touch (the supervisor's connections and pipes).
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
    """Work until told to close, then end the process; never returns."""
    code: int = ExitCode.BOOT_FAILED
    try:
        _own_process(parent_pid)
        plan.close_inherited()
        loader.every()  # a fork has what its supervisor has read; a new interpreter reads the files as they are now
        bus = plan.bus()
        loop = _assemble(plan, bus)
        release_signals()
        bus.emit(ChildReady(plan.index, os.getpid()))
        plan.block.run_state = ProcessState.RUN
        loop.run()
        bus.emit(ChildClosing(plan.index, os.getpid()))
        plan.block.run_state = ProcessState.CLOSED
        code = ExitCode.OK
    except BaseException:  # noqa: BLE001 - the fork's caller is the supervisor's code: nothing may return to it
        traceback.print_exc()
        code = ExitCode.BOOT_FAILED if plan.block.run_state is ProcessState.INIT else ExitCode.FAILED
    finally:
        leave(code)


def _own_process(parent_pid: int) -> None:
    """Become a process of one's own: nothing of the supervisor's signal handling stays."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # Ctrl-C in a terminal reaches every process of the group; only the supervisor decides what it means. A handler
    # instead of SIG_IGN, because programs that a task starts would inherit the latter.
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    # But these two are what the kernel sends to the whole group when a task of a worker in the background reads the
    # terminal, again at each try, unless they are ignored: then the task gets an error, and the supervisor nothing.
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    # A child whose supervisor is gone has nobody who renews its locks: another worker will run its job. It must be
    # gone by then, and the kernel sees to it whatever the child is doing.
    die_with_parent(signal.SIGKILL, parent_pid)
    gc.enable()


def _assemble(plan: ChildPlan, bus: Bus) -> SyncLoop:
    app, config = plan.app, plan.app.config
    broker = app.broker  # the child's own: App makes a new one after a fork
    wakeup_pipe = WakeupPipe()

    def reporter(job: RunningJob) -> Reporter:
        # Asked for late: the loop's client is made by the loop's own thread.
        keys = broker.keys(job.queue)
        return JobReporter(job, keys, broker.pool, lambda: async_loop.client(), config)  # noqa: PLW0108

    def is_locked(job: RunningJob, token: str) -> bool:
        return broker.pool.run(keep_lock(broker.keys(job.queue), job.id, token, config.lock_ms))

    fetcher = JobFetcher(broker, plan.queues, bus, plan.worker_id, wakeup_pipe, plan.control)
    spark = SparkTasks(app, reporter, is_locked, fetcher.close)
    cancellation = Cancellation(plan.block, spark.interrupt, lambda: async_loop.running_loop())  # noqa: PLW0108 - late
    attempts = Attempts(app, reporter, spark, cancellation)
    settler = Settler(config, broker.clock, bus, plan.worker_id, fetcher.round_robin.limited)
    async_loop = AsyncLoop(
        plan.block, attempts, settler, broker.async_client, ReconnectBackoff(bus, config), wakeup_pipe
    )
    _listen(fetcher)
    cancellation.install()
    StackDumper(plan.block, async_loop.running_loop, bus, plan.index).install()
    isolate_forks(fetcher.disconnect, async_loop.running_loop)
    iterations = Iterations(fetcher, broker.clock, zone_of(config.timezone))
    return SyncLoop(fetcher, attempts, settler, iterations, async_loop, plan.block)


def _listen(fetcher: JobFetcher) -> None:
    signal.signal(signal.SIGTERM, uninterrupted(fetcher.close))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # with nohup everybody goes on when a terminal closes
        signal.signal(signal.SIGHUP, uninterrupted(fetcher.close))
    for number in (signal.SIGTSTP, signal.SIGCONT):
        signal.signal(number, uninterrupted(fetcher.interrupt_wait))
