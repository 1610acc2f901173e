"""Every attempt that has ended is counted once, whenever its child is killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import urllib.request
from collections import Counter
from itertools import cycle

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bulltask.jobs.backoff import Backoff
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.testing.worker import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio, time
from bulltask.errors import TransientError

@app.task(bind=True, name="sync")
def sync(self, number):
    time.sleep(number % 5 / 5000)
    if number % 10 == 0 and self.request.retries == 0:
        raise TransientError("once")
    if number % 17 == 0:
        raise ValueError("always")

@app.task(bind=True, name="async")
async def async_(self, number):
    await asyncio.sleep(number % 5 / 5000)
    if number % 10 == 0 and self.request.retries == 0:
        raise TransientError("once")

@app.task(name="batch", batch=5, batch_wait=0.01)
def batch(jobs):
    time.sleep(0.002)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scrape(port: int) -> dict[tuple[str, frozenset[str]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def kill_children_and_compare(harness: WorkerHarness, jobs: int, kills: int) -> None:
    port, dice, killed = free_port(), random.Random(jobs), set[int]()
    settings = {"metrics_port": port, "max_crashes": 1000}
    worker = harness.worker(TASKS, children=4, settings=settings)
    names = ("sync", "sync", "async", "batch")
    options = JobOptions(backoff=Backoff("fixed", 50))
    harness.app.send_many(
        NewJob("default", str(number), name, b"{}" if name == "batch" else b'{"number":%d}' % number, options)
        for number, name in zip(range(1, jobs + 1), cycle(names), strict=False)
    )
    for kill in range(1, kills + 1):
        wait_until(lambda: ended(harness) >= jobs * kill // (kills + 1), 60, "the next kill")  # noqa: B023
        alive = {line["pid"] for line in worker.logged("Child started")} - killed
        killed.add(pid := dice.choice(sorted(alive)))
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ended(harness) == jobs, 60, "the end of all jobs")

    keys, redis = harness.keys, harness.redis
    counts = {"completed": redis.zcard(keys.completed), "failed": redis.zcard(keys.failed)}
    attempts = Counter[str]()
    for state in (keys.completed, keys.failed):
        with redis.pipeline(transaction=False) as calls:
            for job_id in redis.zrange(state, 0, -1):
                calls.hmget(keys.job(str(job_id)), "name", "atm")
            for name, made in calls.execute():
                attempts[name] += int(made)
    counts["retried"] = attempts.total() - counts["completed"] - counts["failed"]
    harness.wait_until_idle(4)
    samples = scrape(port)
    assert counted_attempts(samples) == counts
    assert samples["bullmq_job_duration_seconds_count", frozenset({"default"})] == attempts.total()
    assert len(worker.logged("Child died", exit_reason="SIGKILL")) == kills
    assert worker.stop() == 0


def ended(harness: WorkerHarness) -> int:
    return sum(harness.redis.zcard(key) for key in (harness.keys.completed, harness.keys.failed))


def counted_attempts(samples: dict[tuple[str, frozenset[str]], float]) -> dict[str, float]:
    return {
        status: samples["bullmq_jobs_processed_total", frozenset({"default", status})]
        for status in ("completed", "failed", "retried")
    }


def test_each_attempt_is_counted_once_although_children_are_killed(harness: WorkerHarness) -> None:
    kill_children_and_compare(harness, 2_000, 10)


@pytest.mark.extended
def test_each_of_20000_attempts_is_counted_once_although_50_children_are_killed(harness: WorkerHarness) -> None:
    kill_children_and_compare(harness, 20_000, 50)
