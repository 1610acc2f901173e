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
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempts
from bulltask.worker.child.copies import tame_copies
from bulltask.worker.child.interruption import Interruption, quietly
from bulltask.worker.child.iterations import Iterations
from bulltask.worker.child.reporter import JobReporter
from bulltask.worker.child.settle import Settler
from bulltask.worker.child.source import JobSource
from bulltask.worker.child.spark_tasks import SparkTasks
from bulltask.worker.child.stacks import StackDump
from bulltask.worker.child.sync_loop import SyncLoop
from bulltask.worker.exits import Exit
from bulltask.worker.outage import Outage
from bulltask.worker.slots import ChildBlock, Orders
from bulltask.worker.states import RunState
from bulltask.worker.wakeups import Wakeups

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
        orders: what the supervisor wants of all children.
        bus: makes the child's bus, listeners attached; called after the fork.
        let_go: closes what the child inherited and must not touch (the supervisor's connections and pipes).
    """

    app: App
    queues: Sequence[str]
    worker_id: str
    index: int
    block: ChildBlock
    orders: Orders
    bus: Callable[[], Bus]
    let_go: Callable[[], None]


def run_child(plan: ChildPlan, parent_pid: int) -> None:
    """Work until told to close, then end the process; never returns."""
    code: int = Exit.BOOT_FAILED
    try:
        _own_process(parent_pid)
        plan.let_go()
        loader.every()  # a fork has what its supervisor has read; a new interpreter reads the files as they are now
        bus = plan.bus()
        loop = _assemble(plan, bus)
        release_signals()
        bus.emit(ChildReady(plan.index, os.getpid()))
        plan.block.run_state = RunState.RUN
        loop.run()
        bus.emit(ChildClosing(plan.index, os.getpid()))
        plan.block.run_state = RunState.CLOSED
        code = Exit.OK
    except BaseException:  # noqa: BLE001 - the fork's caller is the supervisor's code: nothing may return to it
        traceback.print_exc()
        code = Exit.BOOT_FAILED if plan.block.run_state is RunState.INIT else Exit.FAILED
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
    wakeups = Wakeups()

    def reporter(job: RunningJob) -> Reporter:
        # Asked for late: the loop's client is made by the loop's own thread.
        keys = broker.keys(job.queue)
        return JobReporter(job, keys, broker.pool, lambda: async_loop.client(), config)  # noqa: PLW0108

    def is_locked(job: RunningJob, token: str) -> bool:
        return broker.pool.run(keep_lock(broker.keys(job.queue), job.id, token, config.lock_ms))

    source = JobSource(broker, plan.queues, bus, plan.worker_id, wakeups, plan.orders)
    spark = SparkTasks(app, reporter, is_locked, source.close)
    interruption = Interruption(plan.block, spark.interrupt, lambda: async_loop.running_loop())  # noqa: PLW0108 - late
    attempts = Attempts(app, reporter, spark, interruption)
    settler = Settler(config, broker.clock, bus, plan.worker_id, source.rotation.limited)
    async_loop = AsyncLoop(plan.block, attempts, settler, broker.async_client, Outage(bus, config), wakeups)
    _listen(source)
    interruption.install()
    StackDump(plan.block, async_loop.running_loop, bus, plan.index).install()
    tame_copies(source.disconnect, async_loop.running_loop)
    iterations = Iterations(source, broker.clock, zone_of(config.timezone))
    return SyncLoop(source, attempts, settler, iterations, async_loop, plan.block)


def _listen(source: JobSource) -> None:
    signal.signal(signal.SIGTERM, quietly(source.close))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # with nohup everybody goes on when a terminal closes
        signal.signal(signal.SIGHUP, quietly(source.close))
    for number in (signal.SIGTSTP, signal.SIGCONT):
        signal.signal(number, quietly(source.look))
