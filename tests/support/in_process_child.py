"""A worker's child without a process: it acquires and runs jobs in the test's thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC
from types import SimpleNamespace
from typing import Any, cast

from bulltask import App
from bulltask.events import Bus
from bulltask.worker.async_loop import AsyncLoop
from bulltask.worker.attempt import AttemptRunner, IterationAdder, JobStarter
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.cancellation import Cancellation, TaskThreads
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.finish import Finisher, OutcomeWriter
from bulltask.worker.outcomes import AcquiredJob
from bulltask.worker.prefetch import PrefetchLoop
from bulltask.worker.slots import ChildLimits, SlotPool, Slots, WakeupPipe
from bulltask.worker.spark_tasks import SparkTaskRunner
from bulltask.worker.sync_loop import BatchCollector, SyncLoop

__all__ = ["Child"]


class Child:
    """The parts of a child, as ``bulltask.worker.child`` assembles them, without signal handlers.

    Args:
        app: The app whose sync tasks are run.
        queues: The names of the queues.
        bus: Receives the events.

    Attributes:
        fetcher: Acquires the jobs.
        pool: The only slot.
    """

    def __init__(self, app: App, queues: Sequence[str], bus: Bus) -> None:
        slots, self._wakeup_pipe, broker = Slots(1, 1), WakeupPipe(), app._broker
        block = slots.children[0]
        block.reset()
        self.pool = SlotPool(block.slots())
        self.fetcher = JobFetcher(broker, queues, bus, "worker", self._wakeup_pipe, slots.control, self.pool)
        spark = SparkTaskRunner(app, cast("Any", None), lambda _job, _token: True, self.fetcher.close)
        child_limits = ChildLimits(app._config, block, 0, bus, os.getpid())
        cancellation = Cancellation(block, spark.interrupt, lambda: None)
        runner = AttemptRunner(app, cast("Any", None), spark, cancellation, child_limits, TaskThreads(0))
        finisher = Finisher(app._config, broker.clock, bus, "worker", self.fetcher.round_robin.rate_limited)
        backoff = ReconnectBackoff(bus, app._config)
        async_loop = AsyncLoop(self.pool, runner, finisher, broker.async_client, backoff, self._wakeup_pipe)
        iterations = IterationAdder(self.fetcher, broker.clock, UTC)
        collector = BatchCollector(self.fetcher, slots.control, broker.clock, {})
        starter = JobStarter(self.fetcher, runner, iterations, async_loop.wait_until_running, child_limits)
        writer = OutcomeWriter(self.fetcher, finisher)
        prefetch = PrefetchLoop(self.fetcher, starter, runner, writer, block, slots.control, 0, ())
        no_further: Any = SimpleNamespace(start=lambda _: None)  # its only slot is in use
        self._loop = SyncLoop(
            self.fetcher, starter, runner, writer, async_loop, child_limits, collector, prefetch, no_further
        )

    def run_waiting(self) -> int:
        """Run jobs until none are waiting; return the number of jobs."""
        done = 0
        self.fetcher.round_robin.reopen()
        self.fetcher.client.connect()
        acquired = self._poll()
        while acquired is not None:
            done += 1
            acquired = self._loop._work(acquired) or self._poll()
        return done

    def _poll(self) -> AcquiredJob | None:
        (slot,) = self.pool.take_reserved(1)
        if (acquired := self.fetcher._poll(slot)) is None:
            self.pool.give_back(slot)
        return acquired

    def close(self) -> None:
        """Close the connections."""
        self.fetcher.client.close()
        self._wakeup_pipe.close()
