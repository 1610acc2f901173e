"""A worker with many queues takes few connections and sends few commands."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.machine_load import scale_to_load
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.slow]

QUEUES = 2_000
TASKS = f"""
from bulltask.worker import beat, fleet

# Those services that look at a hundred queues a second until all were checked do it ten times as often.
beat.Beat.interval_ms = fleet.IncompatibleJobs.interval_ms = 100

app.conf.task_queues = [f"q{{number}}" for number in range({QUEUES})]
"""


def commands(harness: WorkerHarness) -> int:
    return int(harness.redis.info("stats")["total_commands_processed"])


def connections(harness: WorkerHarness) -> int:
    return int(harness.redis.info("clients")["connected_clients"])


def opened(harness: WorkerHarness) -> int:
    """Return how many connections the server has accepted so far, including those that were closed again."""
    return int(harness.redis.info("stats")["total_connections_received"])


def seconds_of_a_job(harness: WorkerHarness, queue: str) -> float:
    started = time.monotonic()
    harness.app.send_task("quick", queue=queue).get(timeout=60)
    return time.monotonic() - started


def commands_per_second(harness: WorkerHarness) -> float:
    """Return the rate of an idle worker; its checks of all queues at the start take a few seconds."""
    rates: list[float] = []
    while not rates or (rates[-1] > 1_000 and len(rates) < 15):
        used, started = commands(harness), time.monotonic()
        threading.Event().wait(1)  # the time that is measured
        rates.append((commands(harness) - used) / (time.monotonic() - started))
    return rates[-1]


@pytest.mark.one_server
def test_a_worker_with_2000_idle_queues_keeps_its_bounds_and_starts_jobs_at_once(harness: WorkerHarness) -> None:
    first = harness.app.send_task("quick", queue=f"q{QUEUES - 1}")
    before, opened_before, peak, done = connections(harness), opened(harness), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, connections(harness))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        started = time.monotonic()
        worker = harness.worker(TASKS, children=2, settings={"drain_delay": 1})
        first.get(timeout=60)
        first_job_s = time.monotonic() - started
        worker.wait_for_line(
            "Not all queues have a connection: Node.js's getWorkers() does not list this worker for the others",
            queues=QUEUES,
            connections=64,
        )
        opened_at_start = opened(harness) - opened_before
        for number in (0, 1_000):
            assert seconds_of_a_job(harness, f"q{number}") <= scale_to_load(1)
    finally:
        done.set()
        watcher.join()
    harness.wait_until_idle(2, queue="q0")  # each child has polled its first queues
    per_second = commands_per_second(harness)
    harness.report(first_job_s=round(first_job_s, 2), connections=peak - before, commands_per_second=round(per_second))
    assert first_job_s <= scale_to_load(2)
    assert peak - before <= 100
    assert opened_at_start <= 100, "the start takes no more connections than the worker keeps, not even for a moment"
    assert per_second <= 1_000
    assert worker.stop() == 0
