"""Concurrent async tasks in one child, and task exceptions that do not affect other jobs."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.machine_load import scale_to_load
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.quick]

ASYNC = """
import asyncio
import sys

@app.task(bind=True, name="nap")
async def nap(self, seconds):
    record("start", job=self.request.id)
    await asyncio.sleep(seconds)
    record("end", job=self.request.id)
    return seconds

@app.task(bind=True, name="wait_async")
async def wait_async(self):
    record("start", job=self.request.id)
    await asyncio.sleep(600)

@app.task(bind=True, name="kill_async")
async def kill_async(self):
    record("start", job=self.request.id)
    await asyncio.sleep(0.02)
    os.kill(os.getpid(), 9)

class CustomInterrupt(BaseException):
    pass

def bomb(depth=0):
    return bomb(depth + 1)

def raise_it(kind):
    if kind == "exit":
        sys.exit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "base":
        raise CustomInterrupt("raised by the task")
    if kind == "generator exit":
        raise GeneratorExit
    if kind == "cancelled":
        raise asyncio.CancelledError("by the task itself")
    if kind == "recursion":
        bomb()

@app.task(bind=True, name="raise_sync")
def raise_sync(self, kind):
    record("start", job=self.request.id)
    raise_it(kind)

@app.task(bind=True, name="raise_async")
async def raise_async(self, kind):
    record("start", job=self.request.id)
    await asyncio.sleep(0)
    raise_it(kind)

@app.task(name="broken_error")
def broken_error():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("not even this")
    raise Broken

@app.task(name="endless_result")
def endless_result():
    deep = []
    deep.append(deep)
    return deep
"""
KINDS = ["exit", "interrupt", "base", "generator exit", "cancelled", "recursion"]


def test_a_hundred_sleeping_async_jobs_run_concurrently_in_one_child(harness: WorkerHarness) -> None:
    worker = harness.worker(ASYNC, children=1)
    harness.app.send_task("nap", kwargs={"seconds": 0}).get(timeout=60)
    jobs = [harness.app.send_task("nap", kwargs={"seconds": 0.5}) for _ in range(100)]
    ended = [harness.wait_for_event("completed", job) for job in jobs]
    began_ms = min(harness.wait_for_event("active", job).ms for job in jobs)
    took_ms = max(entry.ms for entry in ended) - began_ms
    harness.report(took_ms=took_ms)
    assert took_ms <= scale_to_load(1200)
    assert len({entry["pid"] for entry in harness.journal.all(what="start")}) == 1
    assert worker.stop() == 0


def test_async_and_sync_jobs_of_one_child_run_concurrently(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(ASYNC, children=1)
    naps = [harness.app.send_task("nap", kwargs={"seconds": 0.3}) for _ in range(20)]
    held = harness.hold()
    harness.wait_for_start(held)
    for job in naps:
        job.get(timeout=60)
    more = [harness.app.send_task("nap", kwargs={"seconds": 0.1}) for _ in range(20)]
    harness.open_gate()
    assert held.get(timeout=60) == "gate"
    quick = [harness.app.send_task("quick") for _ in range(20)]
    for job in (*more, *quick):
        job.get(timeout=60)
    assert {harness.start_count(job) for job in (*naps, held, *more, *quick)} == {1}
    assert worker.stop() == 0


@pytest.mark.parametrize("task", ["raise_sync", "raise_async"])
def test_any_exception_raised_by_a_task_fails_its_job_and_no_other(harness: WorkerHarness, task: str) -> None:
    worker = harness.worker(ASYNC, children=1)
    other = harness.app.send_task("nap", kwargs={"seconds": 1})
    harness.wait_for_start(other)
    bad = {kind: harness.app.send_task(task, kwargs={"kind": kind}, max_retries=0) for kind in KINDS}
    reasons = {kind: harness.wait_for_event("failed", job)["failedReason"] for kind, job in bad.items()}
    harness.report(**reasons)
    assert other.get(timeout=60) == 1
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert all(reasons.values())
    assert "raised by the task" in reasons["base"]
    assert "recursion" in reasons["recursion"]
    assert {harness.start_count(job) for job in (other, *bad.values())} == {1}
    assert worker.logged("Child died") == []
    assert worker.stop() == 0


@pytest.mark.parametrize("task", ["broken_error", "endless_result"])
def test_an_error_or_result_that_cannot_be_serialized_fails_only_its_job(harness: WorkerHarness, task: str) -> None:
    worker = harness.worker(ASYNC, children=1)
    job = harness.app.send_task(task, max_retries=0)
    assert harness.wait_for_event("failed", job)["failedReason"]
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert worker.logged("Child died") == []


def test_all_async_jobs_of_a_killed_child_are_released_and_run_once_more(harness: WorkerHarness) -> None:
    worker = harness.worker(ASYNC, children=1, settings={"lock_duration": 30, "max_crashes": 5})
    jobs = [harness.app.send_task("nap", kwargs={"seconds": 0.5}) for _ in range(30)]
    harness.journal.wait_for(30, what="start")
    os.kill(worker.children[0], signal.SIGKILL)
    for job in jobs:
        assert job.get(timeout=60) == 0.5
    assert {harness.start_count(job) for job in jobs} == {2}


def test_jobs_that_run_with_a_poison_pill_do_not_fail(harness: WorkerHarness) -> None:
    worker = harness.worker(ASYNC, children=1, settings={"lock_duration": 30, "max_crashes": 2})
    before = [harness.app.send_task("nap", kwargs={"seconds": 0.1}) for _ in range(20)]
    poison = harness.app.send_task("kill_async")
    after = [harness.app.send_task("nap", kwargs={"seconds": 0.1}) for _ in range(20)]
    assert "SIGKILL" in harness.wait_for_event("failed", poison)["failedReason"]
    for job in (*before, *after):
        assert job.get(timeout=60) == 0.1
    deaths = len(worker.logged("Child died"))
    harness.report(deaths=deaths, max_starts_of_other_jobs=max(harness.start_count(job) for job in (*before, *after)))
    assert deaths == harness.start_count(poison) == 3, "with many, with a few, alone"


def test_all_async_jobs_are_released_at_the_shutdown_timeout(harness: WorkerHarness) -> None:
    worker = harness.worker(ASYNC, children=2, settings={"shutdown_timeout": 0.3, "max_crashes": 1})
    jobs = [harness.app.send_task("wait_async") for _ in range(60)]
    harness.journal.wait_for(60, what="start")
    assert worker.stop() == 0
    assert harness.redis.llen(harness.keys.active) == 0
    assert set(harness.redis.lrange(harness.keys.wait, 0, -1)) == {job.id for job in jobs}


def test_a_warm_shutdown_waits_for_async_jobs(harness: WorkerHarness) -> None:
    worker = harness.worker(ASYNC, children=1)
    jobs = [harness.app.send_task("nap", kwargs={"seconds": 0.5}) for _ in range(20)]
    harness.journal.wait_for(20, what="start")
    assert worker.stop() == 0
    assert all(job.successful() for job in jobs)
    assert {harness.start_count(job) for job in jobs} == {1}
