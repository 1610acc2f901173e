"""What Prometheus reads from a real worker."""

from __future__ import annotations

import os
import signal
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bulltask.jobs.job import JobOptions, NewJob
from bulltask.observe.metrics import METRICS, OF_EXPORTER
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
from bulltask.errors import TransientError

@app.task(name="flaky")
def flaky():
    raise TransientError("again")

@app.task(name="limited", rate_limit="1/h")
def limited():
    pass
"""

Samples = dict[tuple[str, frozenset[str]], float]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    return {(s.name, frozenset(s.labels.values())): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_exports_its_jobs_slots_and_processes(harness: WorkerHarness, method: str) -> None:
    port = free_port()
    settings = {"metrics_port": port, "metrics_buckets": "0.5,600", "worker_start_method": method}
    worker = harness.worker(TASKS, children=2, settings=settings)
    harness.wait_until_idle(2)
    harness.app.send_task("quick", countdown=0.6).get(timeout=60)
    (flaky,) = harness.app.send_many([NewJob("default", "1", "flaky", b"{}", JobOptions(attempts=2, backoff=None))])
    harness.wait_for_event("failed", flaky)
    harness.app.send_task("limited").get(timeout=60)
    harness.wait_for_event("delayed", harness.app.send_task("limited"))
    held = harness.hold()
    harness.wait_for_start(held)

    samples = scrape(port)

    def value(name: str, *labels: str) -> float:
        return samples[name, frozenset(labels)]

    assert value("bulltask_attempts_total", "default", "quick", "completed") == 1
    assert value("bulltask_attempts_total", "default", "flaky", "retried") == 1
    assert value("bulltask_attempts_total", "default", "flaky", "failed") == 1
    assert value("bullmq_jobs_failed_total", "default", "transient_exhausted") == 1
    assert value("bulltask_task_run_seconds_count", "default", "flaky") == 2
    used = {labels: cpu_s for (name, labels), cpu_s in samples.items() if name == "bulltask_task_cpu_seconds_total"}
    assert 0 < sum(used.values()) < 60, "the first job of each child is always measured"
    assert all(labels & {"quick", "flaky", "limited", "hold"} for labels in used)
    # Counted once, when its first attempt started; the countdown is not a wait.
    assert value("bulltask_queue_wait_seconds_count", "default", "flaky") == 1
    assert value("bulltask_queue_wait_seconds_count", "default", "hold") == 1
    assert value("bulltask_queue_wait_seconds_bucket", "default", "quick", "0.5") == 1
    assert value("bulltask_queue_wait_seconds_bucket", "default", "quick", "+Inf") == 1
    assert value("bulltask_rate_limit_waits_total", "default", "task") == 1
    assert (value("bulltask_slots_busy"), value("bulltask_slots"), value("bulltask_children")) == (1, 2, 2)
    for process in ("supervisor", "0", "1"):
        assert value("bulltask_process_resident_memory_bytes", process) > 1_000_000
        assert value("bulltask_process_cpu_seconds_total", process) >= 0
    assert value("bulltask_queue_jobs", "default", "active") == 1
    assert value("bulltask_queue_workers", "default") == 1
    assert value("bulltask_queue_scheduler_lag_seconds", "default") == 0

    os.kill(int(harness.wait_for_start(held)["pid"]), signal.SIGKILL)
    worker.wait_for_line("Child started", count=3)
    samples = scrape(port)
    assert value("bulltask_child_crashes_total", "SIGKILL") == 1
    assert value("bulltask_children_replaced_total", "crashed") == 1
    exported = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name, _ in samples}
    assert set(METRICS) - set(OF_EXPORTER) <= exported
    harness.open_gate("gate", 2)
    assert worker.stop() == 0
