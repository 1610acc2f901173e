"""Time limits of async tasks: the task is cancelled, and its child is killed if the task ignores that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.transport.scripts.move import CRASHES
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

TIMEOUT = 60.0

TASKS = """
import asyncio
import ctypes
import time


@app.task(bind=True, name="nap")
async def nap(self, seconds):
    record("start", job=self.request.id)
    await asyncio.sleep(seconds)
    record("end", job=self.request.id)
    return seconds


@app.task(bind=True, name="tidy")
async def tidy(self, then):
    record("start", job=self.request.id)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as exc:
        await asyncio.sleep(0.01)  # cleanup may await
        record("cleaned", job=self.request.id, why=str(exc))
        if then == "return":
            return "tidy"
        raise


@app.task(bind=True, name="grouped")
async def grouped(self):
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(asyncio.sleep(60))


@app.task(bind=True, name="ignores")
async def ignores(self):
    record("start", job=self.request.id)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as exc:
            record("ignored", job=self.request.id, why=str(exc))


@app.task(bind=True, name="blocks")
async def blocks(self):
    record("start", job=self.request.id)
    ctypes.PyDLL(None).usleep(60_000_000)  # no other code of this child runs


def wait_in_c(seconds):
    # Other threads run, but this thread handles no signal: a wait for a mutex is not interrupted.
    library, mutex, until = ctypes.CDLL(None), ctypes.create_string_buffer(128), (ctypes.c_long * 2)()
    until[0] = int(time.time() + seconds)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, until)


@app.task(bind=True, name="in_c")
def in_c(self, seconds):
    record("start", job=self.request.id)
    wait_in_c(seconds)
    record("end", job=self.request.id)
    return "undisturbed"
"""


def reason_of(harness: WorkerHarness, job: AsyncResult[Any]) -> str:
    return str(harness.wait_for_event("failed", job, timeout=TIMEOUT)["failedReason"])


def ends(harness: WorkerHarness, jobs: Sequence[AsyncResult[Any]]) -> list[int]:
    """Return how many times each job has run to its end, and check that it completed as many times."""
    seen = [len(harness.journal.all(what="end", job=job.id)) for job in jobs]
    assert seen == [len(harness.events.all(event="completed", jobId=job.id)) for job in jobs]
    return seen


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_async_task_is_cancelled_at_the_soft_limit_and_can_clean_up(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(TASKS, children=1, settings={"worker_start_method": method})
    limit: dict[str, Any] = {"soft_time_limit": 0.3, "max_retries": 0}
    raises = harness.app.send_task("tidy", kwargs={"then": "raise"}, **limit)
    returns = harness.app.send_task("tidy", kwargs={"then": "return"}, **limit)
    grouped = harness.app.send_task("grouped", **limit)

    assert reason_of(harness, raises) == "task tidy ran longer than its soft time limit of 0.3 s"
    assert returns.get(timeout=TIMEOUT) == "tidy"
    assert reason_of(harness, grouped) == "task grouped ran longer than its soft time limit of 0.3 s"
    why = harness.journal.wait_for(2, what="cleaned")[0]["why"]
    assert why == "task tidy ran longer than its soft time limit of 0.3 s"
    trace = worker.wait_for_line("Job failed", job_id=raises.id)[0]["traceback"]
    assert "in tidy" in trace
    assert "SoftTimeLimitExceeded" in trace
    assert not worker.logged("Child killed")
    assert worker.stop(TIMEOUT) == 0


def test_an_async_task_is_cancelled_at_the_hard_limit_and_fails(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    other = harness.app.send_task("nap", kwargs={"seconds": 2})
    jobs = [
        harness.app.send_task("tidy", kwargs={"then": then}, time_limit=0.3, max_retries=0)
        for then in ("raise", "return")
    ]
    for job in jobs:
        assert reason_of(harness, job) == "task tidy ran longer than its time limit of 0.3 s"
    assert other.get(timeout=TIMEOUT) == 2
    assert harness.start_count(other) == 1
    assert not worker.logged("Child killed")


def test_a_child_with_an_async_task_that_ignores_cancellation_is_killed(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    short = [harness.app.send_task("nap", kwargs={"seconds": 0.05}) for _ in range(10)]
    hung = harness.app.send_task("ignores", soft_time_limit=0.2, time_limit=0.5, max_retries=0)
    # They are running when the child is killed, after the limit and the grace period.
    long = [harness.app.send_task("nap", kwargs={"seconds": 7}) for _ in range(10)]

    reason = reason_of(harness, hung)
    assert reason == "task ignores ran longer than its time limit of 0.5 s and its child was killed"
    for job in (*short, *long):
        assert job.get(timeout=TIMEOUT) in {0.05, 7}
    assert ends(harness, [*short, *long]) == [1] * 20
    assert harness.start_count(hung) == 1
    assert [entry["why"] for entry in harness.journal.all(what="ignored", job=hung.id)] == [
        "task ignores ran longer than its soft time limit of 0.2 s",
        "task ignores ran longer than its time limit of 0.5 s",
    ]
    assert len(worker.logged("Child killed", reason="hard_limit")) == 1
    assert not any(harness.field(job, CRASHES) for job in (*short, hung, *long)), "no crash is counted"
    assert {harness.field(job, "atm") for job in long} == {"1"}
    assert worker.stop(TIMEOUT) == 0


def test_a_child_with_an_async_task_that_blocks_the_event_loop_is_killed(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    others = [harness.app.send_task("nap", kwargs={"seconds": 0.5}) for _ in range(5)]
    hung = harness.app.send_task("blocks", time_limit=0.5, max_retries=0)
    assert "its child was killed" in reason_of(harness, hung)
    for job in others:
        assert job.get(timeout=TIMEOUT) == 0.5
    assert ends(harness, others) == [1] * 5
    assert len(worker.logged("Child killed")) == 1


def test_limits_of_async_tasks_apply_while_the_main_thread_runs_c_code(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(TASKS, children=1)
    late = harness.app.send_task("tidy", kwargs={"then": "raise"}, time_limit=2, max_retries=0)
    harness.wait_for_start(late, timeout=TIMEOUT)
    in_c = harness.app.send_task("in_c", kwargs={"seconds": 8})  # longer than the limit and the grace period
    assert reason_of(harness, late) == "task tidy ran longer than its time limit of 2 s"
    assert in_c.get(timeout=TIMEOUT) == "undisturbed"
    assert harness.start_count(in_c) == 1
    assert not worker.logged("Child killed")
