"""A pipeline's metrics for Prometheus: lag, losses, batch durations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

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
        yield _metric("redis_up", "1 if Redis is available, else 0", float(status.redis_error is None))
        yield _metric("queues_skipped", "Queues that cannot be recorded", len(status.skipped))
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
    def known(field: str) -> dict[str, float]:
        values = {queue.queue: getattr(queue, field) for queue in status.queues}
        return {queue: value for queue, value in values.items() if value is not None}

    yield _metric("events_lost_total", "Events that were lost before they were read", known("lost"))
    yield _metric("gaps_total", "Gaps, some with an unknown number of lost events", known("gaps"))
    yield _metric("lag_events", "Events in Redis that are not in the lake", known("lag_events"))
    lag = "Time between the lake's last event and the last event in Redis"
    yield _metric("lag_seconds", lag, known("lag_s"))
    headroom = "Time until a stream trims unread events, at the highest observed rate"
    yield _metric("headroom_seconds", headroom, known("headroom_s"))


def _batch_metrics(head: BatchRecord) -> Iterator[Metric]:
    yield _metric("batches_total", "Batches that were written", head.number)
    steps = {step: ms / 1000 for step, ms in head.steps_ms.items()}
    yield _metric("last_batch_seconds", "Duration of the steps of the last batch", steps, "step")
    events = sum(queue.events for queue in head.queues.values())
    yield _metric("last_batch_events", "Events that the last batch read", events)
    yield _metric("open_job_events", "Events of open jobs, which the next batch reads again", head.open_job_events)
    yield _metric("last_batch_timestamp_seconds", "Time at which the last batch was written", head.written_ms / 1000)


def _metric(name: str, text: str, value: float | Mapping[str, float], label: str = "queue") -> Metric:
    """Return a metric with one value, or with one for each queue or step. The names of counters end in ``_total``."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    if not isinstance(value, Mapping):
        return kind(f"bulltask_pipeline_{name}", text, value)
    metric = kind(f"bulltask_pipeline_{name}", text, labels=(label,))
    for key, number in value.items():
        metric.add_metric((key,), number)
    return metric
