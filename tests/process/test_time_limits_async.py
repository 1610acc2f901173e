"""Runs of async tasks that take longer than they may: cancelled, and killed where that does not help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.transport.scripts.move import CRASHES
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PATIENCE = 60.0

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
        await asyncio.sleep(0.01)  # it may wait for what it cleans up
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
    ctypes.PyDLL(None).usleep(60_000_000)  # nothing else of this child runs


def wait_in_c(seconds):
    # Other threads run, but this one hears no signal: a wait for a mutex goes on after one.
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
    return str(harness.wait_for_event("failed", job, timeout=PATIENCE)["failedReason"])


def ends(harness: WorkerHarness, jobs: Sequence[AsyncResult[Any]]) -> list[int]:
    """How often each job has run to its end and has completed."""
    seen = [len(harness.journal.all(what="end", job=job.id)) for job in jobs]
    assert seen == [len(harness.events.all(event="completed", jobId=job.id)) for job in jobs]
    return seen


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_at_the_soft_limit_an_async_task_is_cancelled_and_may_clean_up(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(TASKS, children=1, settings={"worker_start_method": method})
    limit: dict[str, Any] = {"soft_time_limit": 0.3, "max_retries": 0}
    lets_it_pass = harness.app.send_task("tidy", kwargs={"then": "raise"}, **limit)
    returns = harness.app.send_task("tidy", kwargs={"then": "return"}, **limit)
    grouped = harness.app.send_task("grouped", **limit)

    assert reason_of(harness, lets_it_pass) == "task tidy ran longer than its soft time limit of 0.3 s"
    assert returns.get(timeout=PATIENCE) == "tidy"
    assert reason_of(harness, grouped) == "task grouped ran longer than its soft time limit of 0.3 s"
    why = harness.journal.wait_for(2, what="cleaned")[0]["why"]
    assert why == "task tidy ran longer than its soft time limit of 0.3 s"
    trace = worker.wait_for_line("Job failed", job_id=lets_it_pass.id)[0]["traceback"]
    assert "in tidy" in trace
    assert "SoftTimeLimitExceeded" in trace
    assert not worker.logged("Child killed")
    assert worker.stop(PATIENCE) == 0


def test_at_the_hard_limit_an_async_task_is_cancelled_and_fails_whatever_it_returns(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    neighbour = harness.app.send_task("nap", kwargs={"seconds": 2})
    jobs = [
        harness.app.send_task("tidy", kwargs={"then": then}, time_limit=0.3, max_retries=0)
        for then in ("raise", "return")
    ]
    for job in jobs:
        assert reason_of(harness, job) == "task tidy ran longer than its time limit of 0.3 s"
    assert neighbour.get(timeout=PATIENCE) == 2
    assert harness.start_count(neighbour) == 1
    assert not worker.logged("Child killed")


def test_one_that_ignores_it_is_killed_with_its_child_and_the_others_end_exactly_once(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    short = [harness.app.send_task("nap", kwargs={"seconds": 0.05}) for _ in range(10)]
    culprit = harness.app.send_task("ignores", soft_time_limit=0.2, time_limit=0.5, max_retries=0)
    long = [harness.app.send_task("nap", kwargs={"seconds": 12}) for _ in range(10)]

    reason = reason_of(harness, culprit)
    assert reason == "task ignores ran longer than its time limit of 0.5 s and its child was killed"
    for job in (*short, *long):
        assert job.get(timeout=PATIENCE) in {0.05, 12}
    assert ends(harness, [*short, *long]) == [1] * 20
    assert harness.start_count(culprit) == 1
    assert [entry["why"] for entry in harness.journal.all(what="ignored", job=culprit.id)] == [
        "task ignores ran longer than its soft time limit of 0.2 s",
        "task ignores ran longer than its time limit of 0.5 s",
    ]
    assert len(worker.logged("Child killed", reason="hard_limit")) == 1
    assert not any(harness.field(job, CRASHES) for job in (*short, culprit, *long)), "no crash is counted"
    assert {harness.field(job, "atm") for job in long} == {"1"}
    assert worker.stop(PATIENCE) == 0


def test_one_that_blocks_the_event_loop_is_killed_with_its_child(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    neighbours = [harness.app.send_task("nap", kwargs={"seconds": 0.5}) for _ in range(5)]
    culprit = harness.app.send_task("blocks", time_limit=0.5, max_retries=0)
    assert "its child was killed" in reason_of(harness, culprit)
    for job in neighbours:
        assert job.get(timeout=PATIENCE) == 0.5
    assert ends(harness, neighbours) == [1] * 5
    assert len(worker.logged("Child killed")) == 1


def test_a_plain_function_in_c_code_on_the_main_thread_does_not_keep_async_tasks_from_their_limits(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(TASKS, children=1)
    late = harness.app.send_task("tidy", kwargs={"then": "raise"}, time_limit=2, max_retries=0)
    harness.wait_for_start(late, timeout=PATIENCE)
    in_c = harness.app.send_task("in_c", kwargs={"seconds": 12})  # longer than the limit and the grace
    assert reason_of(harness, late) == "task tidy ran longer than its time limit of 2 s"
    assert in_c.get(timeout=PATIENCE) == "undisturbed"
    assert harness.start_count(in_c) == 1
    assert not worker.logged("Child killed")
