"""Assembling a worker: with ``app.py`` the only place where objects are built and handed to each other."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from bulltask.app import App
from bulltask.errors import BrokerAuthError, BrokerError, BrokerUnavailable
from bulltask.events import Bus, WorkerStarted
from bulltask.observe import log
from bulltask.observe.counters import MetricsListener, MetricsMemory
from bulltask.observe.log_listener import LogListener
from bulltask.transport.inspect import jobs_under, queue_lengths, server_facts
from bulltask.transport.keys import QueueKeys, wire_name
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts_add import describe_queue
from bulltask.worker.child.main import ChildPlan, run_child
from bulltask.worker.exits import Exit
from bulltask.worker.outage import Outage
from bulltask.worker.slots import Slots
from bulltask.worker.supervisor.fleet import Fleet
from bulltask.worker.supervisor.heartbeat import Heartbeat
from bulltask.worker.supervisor.loop import Supervisor
from bulltask.worker.supervisor.presence import SUPERVISOR_TIMEOUT_MS, Presence
from bulltask.worker.supervisor.recovery import Recovery
from bulltask.worker.supervisor.services import Ticker
from bulltask.worker.supervisor.signals import SignalQueue
from bulltask.worker.supervisor.stall_check import StallCheck
from bulltask.worker.wakeups import Wakeups

__all__ = ["run_worker", "worker_id"]

OLDEST_REDIS: Final = (6, 2)


def run_worker(app: App, queues: Sequence[str] = ()) -> Exit:
    """Run a worker in this process until it is stopped; what ``bulltask worker`` does after reading its flags.

    Args:
        app: the application; its settings are frozen now and its tasks imported.
        queues: the queues as the user spells them; the default queue and those that tasks name, if empty.

    Returns:
        The exit code.

    Raises:
        ConfigError: a setting is wrong.
    """
    app.load_tasks()
    names = tuple(dict.fromkeys(queues)) or default_queues(app)
    return _Assembly(app, names, worker_id(app.config.worker_name)).run()


def default_queues(app: App) -> tuple[str, ...]:
    """The default queue and every queue that a task of the app names."""
    named = (task.options.queue for task in app.tasks.values())
    return tuple(dict.fromkeys([app.config.default_queue, *(queue for queue in named if queue)]))


def worker_id(name: str = "") -> str:
    """``host-pid-random6`` (seed 002 §7), or the given name followed by it, so that two never share one."""
    identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return f"{name}@{identity}" if name else identity


class _Assembly:
    def __init__(self, app: App, queues: tuple[str, ...], worker_id: str) -> None:
        self.app, self.queues, self.worker_id = app, queues, worker_id
        self.logger = log.configure(level=app.config.log_level, worker_id=worker_id)
        self.bus, self.wakeups = Bus(), Wakeups()
        LogListener(self.logger).attach(self.bus)
        self.signals = SignalQueue(self.wakeups)
        self.outage = Outage(self.bus, app.config)
        self.broker = app.broker
        self.keys = [self.broker.keys(queue) for queue in queues]
        self.client = self.broker.client(timeout_ms=SUPERVISOR_TIMEOUT_MS)

    def run(self) -> Exit:
        self.signals.install()
        refusal = self._meet()
        return self._supervise() if refusal is None else refusal

    def _supervise(self) -> Exit:
        app, config, bus, outage = self.app, self.app.config, self.bus, self.outage
        keys, client, clock = self.keys, self.client, self.broker.clock
        memory = self._metrics_memory()
        exporter = None if memory is None else self._fork_exporter(memory)
        slots = Slots(config.concurrency, self._slots_per_child())
        presence = Presence(self.broker, self.queues, self.worker_id, outage)

        def let_go() -> None:
            client.close()
            presence.close()
            self.wakeups.close()

        def run(index: int, parent_pid: int) -> None:
            plan = ChildPlan(
                app, self.queues, self.worker_id, slots.children[index], self._child_bus(memory, index), let_go
            )
            run_child(plan, parent_pid)

        fleet = Fleet(slots, run, bus)
        recovery = Recovery(keys, client, clock, config, bus, outage)
        heartbeat = Heartbeat(keys, fleet.views, client, config, bus, outage)
        stalls = StallCheck(keys, client, clock, config, bus, outage)
        ticker = Ticker([heartbeat, recovery, stalls, presence])
        bus.emit(WorkerStarted(self.worker_id, app.name, self.queues, config.concurrency, self.broker.endpoint.shown))
        code = Supervisor(fleet, ticker, recovery, self.signals, config, bus).run()
        if exporter is not None:
            _end(exporter)
        let_go()
        return code

    def _slots_per_child(self) -> int:
        has_async = any(task.is_async for task in self.app.tasks.values())
        return self.app.config.async_concurrency if has_async else 1

    def _meet(self) -> Exit | None:
        """Wait for Redis to answer, look at it once, and describe the queues; an exit code if that is no use."""
        while True:
            try:
                self._look()
            except BrokerAuthError as exc:
                # One line for the operator; the way through bulltask's code says nothing more.
                self.logger.error("Redis refused this worker", error=str(exc))  # noqa: TRY400
                return Exit.BROKER_REFUSED
            except BrokerError as exc:
                if isinstance(exc, BrokerUnavailable):
                    self.logger.warning("Waiting for Redis", error=str(exc))
                self.signals.wait(self.outage.failed(exc))
            else:
                self.outage.over()
                return None
            if self.signals.take():
                return Exit.OK

    def _look(self) -> None:
        logger = self.logger
        facts = server_facts(self.client)
        if facts.version < OLDEST_REDIS:
            logger.warning("Redis is older than 6.2; upgrade it", version=".".join(map(str, facts.version)))
        if facts.eviction != "noeviction":
            logger.warning(
                "Redis may evict jobs silently when it is full; set maxmemory-policy to noeviction",
                maxmemory_policy=facts.eviction,
            )
        for queue in self.keys:
            self.client.run_many(describe_queue(queue, PROTOCOL_VERSION, self.app.config.max_events))
            self._look_for_other_spelling(queue)

    def _look_for_other_spelling(self, keys: QueueKeys) -> None:
        """`emails` and `{emails}` are two queues for BullMQ; say so where jobs wait under the one not served."""
        tagged = self.app.config.queue_hash_tag
        if "{" in keys.queue:
            return
        other = QueueKeys(keys.prefix, wire_name(keys.queue, hash_tag=not tagged))
        if found := jobs_under(self.client, other):
            self.logger.warning(
                "Jobs wait under the other spelling of this queue, which this worker does not serve; if another client "
                f"spells it that way, set queue_hash_tag={not tagged} (BULLTASK_QUEUE_HASH_TAG)",
                queue=keys.queue,
                served=keys.base,
                other=other.base,
                jobs=found,
            )

    def _metrics_memory(self) -> MetricsMemory | None:
        """Counters for every process; nothing at all when metrics are off."""
        config = self.app.config
        if config.metrics_port is None:
            return None
        memory = MetricsMemory(self.queues, config.concurrency + 1)
        MetricsListener(memory.block(0), self.queues).attach(self.bus)
        return memory

    def _fork_exporter(self, memory: MetricsMemory) -> int:
        """Serve the metrics from a process of their own; return its pid."""
        # Slow to import (prometheus_client), and metrics are off by default.
        from bulltask.observe.exporter import bind, run_exporter  # noqa: PLC0415
        from bulltask.observe.metrics import MetricsCollector  # noqa: PLC0415

        config, parent_pid = self.app.config, os.getpid()
        listener = bind(config.metrics_host, config.metrics_port or 0)
        pid = os.fork()
        if pid == 0:
            client = self.broker.client(timeout_ms=SUPERVISOR_TIMEOUT_MS)
            collector = MetricsCollector(memory, self.worker_id, lambda: queue_lengths(client, self.keys))
            run_exporter(listener, collector, parent_pid)
            os._exit(Exit.FAILED)
        listener.close()
        return pid

    def _child_bus(self, memory: MetricsMemory | None, index: int) -> Callable[[], Bus]:
        def make() -> Bus:
            bus = Bus()
            LogListener(self.logger).attach(bus)
            if memory is not None:
                MetricsListener(memory.block(index + 1), self.queues).attach(bus)
            return bus

        return make


def _end(pid: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
