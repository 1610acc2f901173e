"""A pipeline's metrics for Prometheus: lag, losses, batch durations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bulltask.jobs.errors import ConfigError
from bulltask.lake.ledger import BatchRecord, last_record
from bulltask.lake.status import PipelineStatus
from bulltask.lake.storage import Lake


class PipelineMetrics(Collector):
    """Collects the metrics for a scrape."""

    def __init__(self, lake: Lake, status: Callable[[], PipelineStatus]) -> None:
        self._lake = lake
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics; if Redis is unavailable, lag metrics are missing."""
        status = self._status()
        yield from _queue_metrics(status)
        yield _gauge("redis_up", "1 if Redis is available, else 0", float(status.redis_error is None))
        yield _gauge("queues_skipped", "Queues that cannot be recorded", len(status.skipped))
        if (head := last_record(self._lake)) is not None:
            yield from _batch_metrics(head)


def serve(collector: Collector, host: str, port: int) -> Callable[[], None]:
    """Serve ``/metrics`` in a thread of this process, and return a function that stops serving.

    It raises ``ConfigError`` if the port is in use or not allowed, or the address does not belong to this machine.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server, _ = start_http_server(port, host, registry)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"metrics cannot be served on {host}, port {port}: {exc}. Choose another port") from exc

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end


def _queue_metrics(status: PipelineStatus) -> Iterator[Metric]:
    lost = CounterMetricFamily(
        "bulltask_pipeline_events_lost_total", "Events that were lost before they were read", labels=("queue",)
    )
    gaps = CounterMetricFamily(
        "bulltask_pipeline_gaps_total", "Gaps, some with an unknown number of lost events", labels=("queue",)
    )
    gauges = {
        "lag_events": _gauge("lag_events", "Events in Redis that are not in the lake"),
        "lag_s": _gauge("lag_seconds", "Time between the lake's last event and the last event in Redis"),
        "headroom_s": _gauge(
            "headroom_seconds", "Time until a stream trims unread events, at the highest observed rate"
        ),
    }
    for queue in status.queues:
        lost.add_metric((queue.queue,), queue.lost)
        gaps.add_metric((queue.queue,), queue.gaps)
        for name, gauge in gauges.items():
            if (value := getattr(queue, name)) is not None:
                gauge.add_metric((queue.queue,), value)
    yield lost
    yield gaps
    yield from gauges.values()


def _batch_metrics(head: BatchRecord) -> Iterator[Metric]:
    batches = CounterMetricFamily("bulltask_pipeline_batches_total", "Batches that were written")
    batches.add_metric((), head.number)
    yield batches
    steps = GaugeMetricFamily(
        "bulltask_pipeline_last_batch_seconds", "Duration of the steps of the last batch", labels=("step",)
    )
    for step, ms in head.steps_ms.items():
        steps.add_metric((step,), ms / 1000)
    yield steps
    events = sum(queue.events for queue in head.queues.values())
    yield _gauge("last_batch_events", "Events that the last batch read", events)
    yield _gauge("open_job_events", "Events of open jobs, which the next batch reads again", head.open_job_events)
    yield _gauge("last_batch_timestamp_seconds", "Time at which the last batch was written", head.written_ms / 1000)


def _gauge(name: str, text: str, value: float | None = None) -> GaugeMetricFamily:
    """Return a gauge of the pipeline, with one value or with a value for each queue."""
    if value is not None:
        return GaugeMetricFamily(f"bulltask_pipeline_{name}", text, value)
    return GaugeMetricFamily(f"bulltask_pipeline_{name}", text, labels=("queue",))
