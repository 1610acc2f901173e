"""A worker's child without a process: it acquires and runs jobs in the test's thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC
from types import SimpleNamespace
from typing import Any, cast

from bulltask import App
from bulltask.events import Bus
from bulltask.jobs.clock import mono_ms
from bulltask.worker.async_loop import AsyncLoop, IterationAdder, JobStarter
from bulltask.worker.attempt import AttemptRunner
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.cancellation import Cancellation, TaskThreads
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.finish import Finisher, OutcomeWriter
from bulltask.worker.prefetch import PrefetchLoop
from bulltask.worker.slots import ChildLimits, Slots, WakeupPipe
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
        slot: The only slot.
    """

    def __init__(self, app: App, queues: Sequence[str], bus: Bus) -> None:
        slots, self._wakeup_pipe, broker = Slots(1, 1), WakeupPipe(), app._broker
        block = slots.children[0]
        block.reset()
        (self.slot,) = block.slots()
        self.fetcher = JobFetcher(broker, queues, bus, "worker", self._wakeup_pipe, slots.control)
        spark = SparkTaskRunner(app, cast("Any", None), lambda _job, _token: True, self.fetcher.close)
        child_limits = ChildLimits(app._config, block, 0, bus, os.getpid())
        cancellation = Cancellation(block, spark.interrupt, lambda: None)
        runner = AttemptRunner(app, cast("Any", None), spark, cancellation, child_limits, TaskThreads(0))
        finisher = Finisher(app._config, broker.clock, bus, "worker", self.fetcher.round_robin.rate_limited)
        backoff = ReconnectBackoff(bus, app._config)
        async_loop = AsyncLoop(block, runner, finisher, broker.async_client, backoff, self._wakeup_pipe)
        iterations = IterationAdder(self.fetcher, broker.clock, UTC)
        collector = BatchCollector(self.fetcher, slots.control, broker.clock, async_loop, {})
        starter = JobStarter(self.fetcher, runner, iterations, async_loop, child_limits)
        writer = OutcomeWriter(self.fetcher, finisher)
        prefetch = PrefetchLoop(self.fetcher, starter, runner, writer, async_loop, block, slots.control, 0, ())
        no_further: Any = SimpleNamespace(start=lambda _: None, record_sync_job=lambda: None)  # its only slot is in use
        self._loop = SyncLoop(
            self.fetcher, starter, runner, writer, async_loop, child_limits, collector, prefetch, no_further
        )

    def run_waiting(self) -> int:
        """Run jobs until none are waiting; return the number of jobs."""
        done = 0
        self.fetcher.round_robin.reopen()
        self.fetcher.client.connect()
        self.slot.reserve(mono_ms())
        acquired = self.fetcher._poll(self.slot)
        while acquired is not None:
            done += 1
            acquired = self._loop._work(acquired)
            if acquired is None:
                self.slot.reserve(mono_ms())
                acquired = self.fetcher._poll(self.slot)
        return done

    def close(self) -> None:
        """Close the connections."""
        self.fetcher.client.close()
        self._wakeup_pipe.close()
