"""Assembling a worker: with ``app.py`` the only place where objects are built and handed to each other."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bulltask.app import App
from bulltask.errors import BrokerAuthError, BrokerError, BrokerUnavailable
from bulltask.events import Bus, WorkerStarted
from bulltask.observe import log
from bulltask.observe.log_listener import LogListener
from bulltask.transport.broker import Broker
from bulltask.transport.client import Client
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

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from bulltask.observe.counters import MetricsMemory

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


@dataclass(slots=True)
class _Assembly:
    app: App
    queues: tuple[str, ...]
    worker_id: str

    def run(self) -> Exit:
        app, config = self.app, self.app.config
        logger = log.configure(level=config.log_level, worker_id=self.worker_id)
        bus, wakeups, signals = Bus(), Wakeups(), SignalQueue()
        LogListener(logger).attach(bus)
        signals.install()
        broker = app.broker
        keys = [broker.keys(queue) for queue in self.queues]
        client = broker.client(timeout_ms=SUPERVISOR_TIMEOUT_MS)
        outage = Outage(bus, config)
        refusal = self._meet(client, keys, logger, wakeups, outage, signals)
        if refusal is not None:
            return refusal
        memory = self._metrics_memory(bus)
        helpers = self._exporter(memory, broker)
        slots = Slots(config.concurrency, self._slots_per_child())
        presence = Presence(broker, self.queues, self.worker_id, outage)

        def let_go() -> None:
            client.close()
            presence.close()
            wakeups.close()

        def run(index: int, parent_pid: int) -> None:
            bus_of = self._child_bus(logger, memory, index)
            plan = ChildPlan(app, self.queues, self.worker_id, slots.children[index], bus_of, let_go)
            run_child(plan, parent_pid)

        fleet = Fleet(slots, run, bus)
        recovery = Recovery(keys, client, broker.clock, config, bus, outage)
        heartbeat = Heartbeat(keys, fleet.views, client, config, bus, outage)
        stalls = StallCheck(keys, client, broker.clock, config, bus, outage)
        ticker = Ticker([heartbeat, recovery, stalls, presence])
        bus.emit(WorkerStarted(self.worker_id, app.name, self.queues, config.concurrency, broker.endpoint.shown))
        code = Supervisor(fleet, ticker, recovery, signals, wakeups, config, bus, helpers).run()
        let_go()
        return code

    def _slots_per_child(self) -> int:
        has_async = any(task.is_async for task in self.app.tasks.values())
        return self.app.config.async_concurrency if has_async else 1

    def _meet(
        self,
        client: Client,
        keys: Sequence[QueueKeys],
        logger: FilteringBoundLogger,
        wakeups: Wakeups,
        outage: Outage,
        signals: SignalQueue,
    ) -> Exit | None:
        """Wait for Redis to answer, look at it once, and describe the queues; an exit code if that is no use."""
        while True:
            try:
                self._look(client, keys, logger)
                outage.over()
                return None
            except BrokerAuthError as exc:
                logger.error("Redis refused this worker", error=str(exc))
                return Exit.BROKER_REFUSED
            except BrokerError as exc:
                if isinstance(exc, BrokerUnavailable):
                    logger.warning("Waiting for Redis", error=str(exc))
                wakeups.wait(outage.failed(exc))
            if signals.take():
                return Exit.OK

    def _look(self, client: Client, keys: Sequence[QueueKeys], logger: FilteringBoundLogger) -> None:
        facts = server_facts(client)
        if facts.version < OLDEST_REDIS:
            logger.warning("Redis is older than 6.2; upgrade it", version=".".join(map(str, facts.version)))
        if facts.eviction != "noeviction":
            logger.warning(
                "Redis may evict jobs silently when it is full; set maxmemory-policy to noeviction",
                maxmemory_policy=facts.eviction,
            )
        config = self.app.config
        for queue in keys:
            client.run_many(describe_queue(queue, PROTOCOL_VERSION, config.max_events))
            self._look_for_other_spelling(client, queue, logger)

    def _look_for_other_spelling(self, client: Client, keys: QueueKeys, logger: FilteringBoundLogger) -> None:
        """`emails` and `{emails}` are two queues for BullMQ; say so where jobs wait under the one not served."""
        tagged = self.app.config.queue_hash_tag
        if "{" in keys.queue:
            return
        other = QueueKeys(keys.prefix, wire_name(keys.queue, hash_tag=not tagged))
        if found := jobs_under(client, other):
            logger.warning(
                "Jobs wait under the other spelling of this queue, which this worker does not serve; if another client "
                f"spells it that way, set queue_hash_tag={not tagged} (BULLTASK_QUEUE_HASH_TAG)",
                queue=keys.queue,
                served=keys.base,
                other=other.base,
                jobs=found,
            )

    def _metrics_memory(self, bus: Bus) -> MetricsMemory | None:
        """Counters for every process; nothing at all when metrics are off."""
        config = self.app.config
        if config.metrics_port is None:
            return None
        from bulltask.observe.counters import MetricsListener, MetricsMemory

        memory = MetricsMemory(self.queues, config.concurrency + 1)
        MetricsListener(memory.block(0), self.queues).attach(bus)
        return memory

    def _exporter(self, memory: MetricsMemory | None, broker: Broker) -> tuple[int, ...]:
        if memory is None:
            return ()
        from bulltask.observe.exporter import bind, run_exporter
        from bulltask.observe.metrics import MetricsCollector

        config, parent_pid = self.app.config, os.getpid()
        listener = bind(config.metrics_host, config.metrics_port or 0)
        pid = os.fork()
        if pid == 0:
            client = broker.client(timeout_ms=SUPERVISOR_TIMEOUT_MS)
            keys = [broker.keys(queue) for queue in self.queues]
            run_exporter(listener, MetricsCollector(memory, self.worker_id, lambda: queue_lengths(client, keys)), parent_pid)
            os._exit(Exit.FAILED)
        listener.close()
        return (pid,)

    def _child_bus(self, logger: FilteringBoundLogger, memory: MetricsMemory | None, index: int) -> Callable[[], Bus]:
        def make() -> Bus:
            bus = Bus()
            LogListener(logger).attach(bus)
            if memory is not None:
                from bulltask.observe.counters import MetricsListener

                MetricsListener(memory.block(index + 1), self.queues).attach(bus)
            return bus

        return make
