"""In real workers, the event loop fetches the next async job when it writes an outcome."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.testing.worker import wait_until
from bulltask.transport.scripts.move import CRASHES
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio
import contextvars

seen = contextvars.ContextVar("seen", default=None)

@app.task(name="quick")
async def quick(number):
    before = seen.get()
    seen.set(number)
    return before

@app.task(name="nap")
async def nap(number):
    await asyncio.sleep(0.005)
    record("nap", number=number)

@app.task(name="plain")
def plain(number):
    record("plain", number=number)

@app.task(bind=True, name="wait")
async def wait(self):
    record("wait", job=self.request.id)
    await asyncio.sleep(600)
"""


def send(harness: WorkerHarness, name: str, count: int) -> list[AsyncResult[Any]]:
    return [harness.app.send_task(name, (number,)) for number in range(count)]


def script_calls(harness: WorkerHarness) -> int:
    stats: Any = harness.redis.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


def test_an_async_job_takes_one_call_and_has_a_separate_context(harness: WorkerHarness) -> None:
    jobs = send(harness, "quick", 500)
    before = script_calls(harness)
    harness.worker(TASKS, children=1, settings={"worker_async_concurrency": 3})
    wait_until(lambda: harness.redis.zcard(harness.keys.completed) == 500, what="the end of the jobs", timeout=60)
    calls = script_calls(harness) - before
    harness.report(calls=calls)
    assert calls < 500 * 1.2  # two calls per job if the event loop did not fetch the next job
    assert {job.get(timeout=60) for job in jobs} == {None}
    assert {harness.field(job, "ats") for job in jobs} == {"1"}


def test_a_child_with_many_free_slots_fills_them_in_few_round_trips(harness: WorkerHarness) -> None:
    jobs = [harness.app.send_task("wait") for _ in range(60)]
    last = harness.app.send_task("plain", (1,))  # a job of another task, so it is acquired in a separate call
    before = script_calls(harness)
    worker = harness.worker(TASKS, children=1, settings={"worker_async_concurrency": 61})
    harness.journal.wait_for(60, what="wait")
    last.get(timeout=60)
    calls = script_calls(harness) - before
    harness.report(calls=calls)
    assert calls < 25  # one call per job if jobs were acquired one by one
    assert {job.state for job in jobs} == {"active"}
    worker.send(signal.SIGQUIT)


def test_async_jobs_between_sync_ones_cost_no_further_round_trips(harness: WorkerHarness) -> None:
    jobs = [harness.app.send_task(("wait", "plain")[number % 2], (number,) * (number % 2)) for number in range(60)]
    before = script_calls(harness)
    worker = harness.worker(TASKS, children=1, settings={"worker_async_concurrency": 61, "worker_prefetch": 0})
    jobs[-1].get(timeout=60)
    calls = script_calls(harness) - before
    harness.report(calls=calls)
    assert calls < 60 * 1.25  # 90 if the child asked for another async job after each of them
    worker.send(signal.SIGQUIT)


def test_sync_jobs_between_async_ones_run_in_order_and_start_once(harness: WorkerHarness) -> None:
    jobs = send(harness, "nap", 100)
    plain = send(harness, "plain", 10)
    jobs += plain + send(harness, "nap", 900)
    harness.worker(TASKS, children=1, settings={"worker_async_concurrency": 5})
    for job in plain:
        job.get(timeout=60)
    assert len(harness.journal.all(what="nap")) < 900
    for job in jobs:
        job.get(timeout=60)
    assert {harness.field(job, "ats") for job in jobs} == {"1"}


def test_a_crash_counts_only_for_async_jobs_that_have_started(harness: WorkerHarness) -> None:
    send(harness, "quick", 200)
    waiting = [harness.app.send_task("wait") for _ in range(60)]
    harness.worker(TASKS, children=1, settings={"worker_async_concurrency": 20})
    started = harness.journal.wait_for(20, what="wait")
    os.kill(int(started[0]["pid"]), signal.SIGKILL)
    harness.journal.wait_for(21, what="wait")
    ids = {entry["job"] for entry in started}
    crashed = {job.id for job in waiting if harness.field(job, CRASHES) is not None}
    assert crashed == ids
