"""Connections break repeatedly under load, and every job runs exactly once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bulltask import AsyncResult
from tests.support.flaky_proxy import FlakyProxy
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio

@app.task(bind=True, name="short")
def short(self, number):
    record("start", job=self.request.id)
    return sum(range(number))

@app.task(bind=True, name="short_async")
async def short_async(self, number):
    record("start", job=self.request.id)
    await asyncio.sleep(number / 1_000_000)
    return number
"""
SETTINGS = {"lock_duration": 30, "broker_reconnect_delay": 0.01, "drain_delay": 1}


def start_worker(harness: WorkerHarness, proxy: FlakyProxy) -> Worker:
    worker = harness.worker(TASKS, via=proxy, children=2, options=["-Q", "default,other"], settings=SETTINGS)
    harness.app.send_task("quick").get(timeout=60)
    return worker


def send_some(harness: WorkerHarness, rng: random.Random, count: int) -> list[AsyncResult[int]]:
    return [
        harness.app.send_task(
            rng.choice(["short", "short_async"]),
            kwargs={"number": rng.randrange(5_000)},
            queue=rng.choice(["default", "other"]),
        )
        for _ in range(count)
    ]


def assert_each_ran_once(harness: WorkerHarness, worker: Worker, jobs: list[AsyncResult[int]]) -> None:
    for job in jobs:
        job.get(timeout=60)
    starts = Counter(entry["job"] for entry in harness.journal.all(what="start"))
    assert {job.id: starts[job.id] for job in jobs if starts[job.id] != 1} == {}
    for queue in ("default", "other"):
        assert harness.redis.llen(harness.keys_of(queue).active) == 0
    assert worker.logged("Child died") == []
    assert worker.logged("Lock lost") == []
    assert worker.stop() == 0


def test_jobs_run_once_even_if_all_connections_are_reset_a_hundred_times(
    harness: WorkerHarness, rng: random.Random
) -> None:
    proxy = harness.proxy()
    worker = start_worker(harness, proxy)
    jobs: list[AsyncResult[int]] = []
    for _ in range(100):
        jobs += send_some(harness, rng, 10)
        harness.journal.wait_for(len(jobs) - rng.randrange(10), what="start")
        proxy.reset()
    harness.report(jobs=len(jobs), connections=proxy.connections)
    assert_each_ran_once(harness, worker, jobs)


def test_jobs_run_once_even_if_every_twentieth_script_reply_is_lost(harness: WorkerHarness, rng: random.Random) -> None:
    proxy = harness.proxy()
    worker = start_worker(harness, proxy)
    proxy.drop_replies(every=20, match="evalsha")
    jobs = send_some(harness, rng, 1000)
    for job in jobs:
        job.get(timeout=60)
    proxy.pass_all()
    harness.report(jobs=len(jobs), lost_replies=proxy.dropped)
    assert proxy.dropped >= 20
    assert_each_ran_once(harness, worker, jobs)


def test_jobs_run_once_even_if_every_tenth_script_reply_is_truncated(
    harness: WorkerHarness, rng: random.Random
) -> None:
    proxy = harness.proxy()
    worker = start_worker(harness, proxy)
    jobs: list[AsyncResult[int]] = []
    for _ in range(30):
        proxy.partial_reply(3, match="evalsha")
        jobs += send_some(harness, rng, 10)
        harness.journal.wait_for(len(jobs) - 5, what="start")
    proxy.pass_all()
    harness.report(jobs=len(jobs), connections=proxy.connections)
    assert_each_ran_once(harness, worker, jobs)


def test_replies_that_arrive_byte_by_byte_cause_no_warning(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    proxy.slice(1)
    worker = start_worker(harness, proxy)
    jobs = send_some(harness, random.Random(1), 30)
    assert_each_ran_once(harness, worker, jobs)
    assert worker.warnings() == []
