"""The metrics for Prometheus.

Imported only if metrics are enabled, because it loads ``prometheus_client``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bulltask.observe.counters import BUCKETS, Histogram, MetricsMemory, QueueTotals

__all__ = ["MetricsCollector", "QueueLengths"]

QueueLengths = Callable[[], Mapping[str, Mapping[str, int]]]
"""Reads from Redis how many jobs each queue has in each state (``wait``, ``active``, …)."""

_BOUNDS = (*map(floatToGoString, BUCKETS), "+Inf")


class MetricsCollector(Collector):
    """Collects the metrics of one scrape.

    Args:
        memory: The counters of this worker's processes.
        worker_id: The label of ``bullmq_active_workers``.
        queue_lengths: Called once per scrape, never by two threads at a time. If it raises, the scrape has no lengths
            and reports the connection as lost.
    """

    def __init__(self, memory: MetricsMemory, worker_id: str, queue_lengths: QueueLengths) -> None:
        self._memory = memory
        self._worker_id = worker_id
        self._queue_lengths = queue_lengths
        self._one_scrape = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics; every queue and status is present from the start, with the value 0."""
        with self._one_scrape:
            return [*self._jobs(self._memory.totals()), *self._connections()]

    def _jobs(self, totals: Mapping[str, QueueTotals]) -> Iterator[Metric]:
        processed = CounterMetricFamily(
            "bullmq_jobs_processed_total", "Attempts by outcome", labels=("queue", "status")
        )
        failed = CounterMetricFamily("bullmq_jobs_failed_total", "Failed jobs, by reason", labels=("queue", "reason"))
        for queue, total in totals.items():
            processed.add_metric((queue, "completed"), total.completed)
            processed.add_metric((queue, "failed"), total.failed)
            processed.add_metric((queue, "retried"), total.retried)
            for reason, count in total.failed_by.items():
                failed.add_metric((queue, reason), count)
        yield processed
        yield failed
        for name, help_text, part in (
            ("bullmq_job_duration_seconds", "Duration of attempts, for every outcome", attrgetter("durations")),
            (
                "bullmq_lock_extend_duration_seconds",
                "Duration of the calls that renew locks",
                attrgetter("lock_renewals"),
            ),
        ):
            yield _histograms(name, help_text, {queue: part(total) for queue, total in totals.items()})
        for name, help_text, value in (
            ("bullmq_stalled_jobs_total", "Jobs that were recovered after their process died", attrgetter("stalled")),
            ("bullmq_heartbeat_success_total", "Locks renewed", attrgetter("heartbeats")),
            ("bullmq_heartbeat_failure_total", "Locks that could not be renewed", attrgetter("heartbeat_failures")),
            (
                "bullmq_stalled_checker_skipped_total",
                "Stalled checks skipped because the previous one was still running",
                attrgetter("skipped"),
            ),
        ):
            family = CounterMetricFamily(name, help_text, labels=("queue",))
            for queue, total in totals.items():
                family.add_metric((queue,), value(total))
            yield family

    def _connections(self) -> Iterator[Metric]:
        lengths = GaugeMetricFamily("bullmq_queue_length", "Jobs in each state", labels=("queue", "state"))
        connected = self._memory.connected()
        try:
            for queue, states in self._queue_lengths().items():
                for state, length in states.items():
                    lengths.add_metric((queue, state), length)
        except Exception:  # noqa: BLE001 - without Redis the counters and the connection status are still reported
            connected = False
        yield lengths
        workers = GaugeMetricFamily(
            "bullmq_active_workers",
            "Running child processes, which serve all queues of the worker",
            labels=("queue", "worker_id"),
        )
        children = self._memory.live_children()
        for queue in self._memory.queues:
            workers.add_metric((queue, self._worker_id), children)
        yield workers
        replaced = CounterMetricFamily(
            "bullmq_children_replaced_total", "Child processes that were replaced, by reason", labels=("reason",)
        )
        for reason, count in self._memory.exits().items():
            replaced.add_metric((reason,), count)
        yield replaced
        status = GaugeMetricFamily(
            "bullmq_redis_connection_status", "1 for the current status, 0 for the other one", labels=("status",)
        )
        status.add_metric(("connected",), connected)
        status.add_metric(("disconnected",), not connected)
        yield status
        yield CounterMetricFamily(
            "bullmq_redis_reconnect_attempts_total", "Attempts to reconnect to Redis", value=self._memory.reconnects()
        )


def _histograms(name: str, help_text: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=("queue",))
    for queue, histogram in histograms.items():
        family.add_metric((queue,), list(zip(_BOUNDS, histogram.buckets, strict=True)), histogram.seconds)
    return family
