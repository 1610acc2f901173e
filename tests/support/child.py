"""A worker's child without a process: it takes and runs jobs when it is told to, in the test's own thread."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Any, cast

from bulltask import App
from bulltask.clock import mono_ms
from bulltask.events import Bus
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.attempt import Attempts
from bulltask.worker.child.interruption import Interruption
from bulltask.worker.child.iterations import Iterations
from bulltask.worker.child.settle import Settler
from bulltask.worker.child.source import JobSource
from bulltask.worker.child.spark_tasks import SparkTasks
from bulltask.worker.child.sync_loop import SyncLoop
from bulltask.worker.outage import Outage
from bulltask.worker.slots import Slots
from bulltask.worker.wakeups import Wakeups

__all__ = ["Child"]


class Child:
    """The parts of a child, as ``bulltask.worker.child.main`` puts them together, without its signals.

    Args:
        app: its sync tasks are run.
        queues: where jobs are taken from.
        bus: hears of them.

    Attributes:
        source: takes the jobs.
        slot: the only one.
    """

    def __init__(self, app: App, queues: Sequence[str], bus: Bus) -> None:
        slots, self._wakeups, broker = Slots(1, 1), Wakeups(), app.broker
        block = slots.children[0]
        block.renew()
        (self.slot,) = block.slots()
        self.source = JobSource(broker, queues, bus, "worker", self._wakeups, slots.orders)
        spark = SparkTasks(app, cast("Any", None), lambda _job, _token: True, self.source.close)
        attempts = Attempts(app, cast("Any", None), spark, Interruption(block, spark.interrupt, lambda: None))
        settler = Settler(app.config, broker.clock, bus, "worker", self.source.rotation.limited)
        outage = Outage(bus, app.config)
        async_loop = AsyncLoop(block, attempts, settler, broker.async_client, outage, self._wakeups)
        iterations = Iterations(self.source, broker.clock, UTC)
        self._loop = SyncLoop(self.source, attempts, settler, iterations, async_loop, block)

    def run_waiting(self) -> int:
        """Run jobs until none waits; the result is how many there were."""
        done = 0
        self.source.rotation.open_all()
        self.source.client.connect()
        self.slot.reserve(mono_ms())
        picked = self.source._ask(self.slot)
        while picked is not None:
            done += 1
            picked = self._loop._work(picked)
            if picked is None:
                self.slot.reserve(mono_ms())
                picked = self.source._ask(self.slot)
        return done

    def close(self) -> None:
        """End its connections."""
        self.source.client.close()
        self._wakeups.close()
