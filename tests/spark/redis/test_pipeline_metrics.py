"""A pipeline's Prometheus metrics, from its last batch and from Redis."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest

from bulltask.errors import ConfigError
from bulltask.lake.ledger import BatchRecord, QueueRecord
from bulltask.lake.storage import Lake
from bulltask.lake.tables import OPEN_EVENTS
from bulltask.spark.pipeline_metrics import PipelineMetrics, serve
from bulltask.spark.source.streams import pipeline_status
from tests.support.event_writing import write_events
from tests.support.job_histories import histories

pytestmark = pytest.mark.redis

EVENTS = [event for event in histories(3, 10) if event.queue == "queue-0"]


@pytest.fixture
def metrics(broker_url: str, redis_client: redis.Redis, tmp_path: Path) -> PipelineMetrics:
    """The metrics of a lake that lacks a queue's last ten events and has lost seven."""
    write_events(redis_client, EVENTS)
    lake, queue = Lake(tmp_path), EVENTS[0].queue
    read = {queue: QueueRecord(events=40, first=EVENTS[0].event_id, last=EVENTS[-11].event_id, lost=7, gaps=1)}
    last_ids, steps = {queue: EVENTS[-11].event_id}, {"read": 1500, "derive": 250}
    record = BatchRecord(
        number=3, written_ms=1_760_000_000_500, queues=read, last_ids=last_ids, lost={queue: 7}, steps_ms=steps
    )
    lake.commit(OPEN_EVENTS, [], batch=3, metadata=record.to_json())
    source = {"url": broker_url, "queue": "*"}
    return PipelineMetrics(lake, lambda: pipeline_status(lake, source))


def lines_of(metrics: PipelineMetrics) -> set[str]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return {line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")}


def test_metrics_show_lag_loss_and_the_last_batch(metrics: PipelineMetrics) -> None:
    lag_s = (EVENTS[-1].event_ms - EVENTS[-11].event_ms) / 1000
    assert lines_of(metrics) >= {
        f'bulltask_pipeline_lag_events{{queue="{EVENTS[0].queue}"}} 10.0',
        f'bulltask_pipeline_lag_seconds{{queue="{EVENTS[0].queue}"}} {lag_s}',
        f'bulltask_pipeline_events_lost_total{{queue="{EVENTS[0].queue}"}} 7.0',
        "bulltask_pipeline_batches_total 3.0",
        "bulltask_pipeline_last_batch_events 40.0",
        'bulltask_pipeline_last_batch_seconds{step="read"} 1.5',
        'bulltask_pipeline_last_batch_seconds{step="derive"} 0.25',
        "bulltask_pipeline_last_batch_timestamp_seconds 1.7600000005e+09",
        "bulltask_pipeline_redis_up 1.0",
    }


def test_metrics_without_redis_contain_the_values_of_the_last_batch(
    metrics: PipelineMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BULLTASK_RECONNECT_DELAY_MAX", "0.01")
    unreachable = {"url": "redis://127.0.0.1:1", "queue": "*"}
    lake = Lake(tmp_path)
    lines = lines_of(PipelineMetrics(lake, lambda: pipeline_status(lake, unreachable)))
    assert "bulltask_pipeline_redis_up 0.0" in lines
    assert f'bulltask_pipeline_events_lost_total{{queue="{EVENTS[0].queue}"}} 7.0' in lines
    assert not any("lag" in line for line in lines)


def test_metrics_are_served_until_stopped_and_need_a_free_port(metrics: PipelineMetrics) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            serve(metrics, "127.0.0.1", port)
    stop = serve(metrics, "127.0.0.1", port)
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            assert b"bulltask_pipeline_batches_total 3.0" in response.read()
    finally:
        stop()
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)
