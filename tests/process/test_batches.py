"""Batch tasks in real workers: each job is settled alone, whatever happens to its batch."""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter
from typing import Any

import pytest

from bulltask import AsyncResult, JobState, PermanentError, TimeLimitExceeded
from bulltask.testing.worker import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio
import time

from bulltask import BatchJob, PermanentError

def note(jobs):
    record("start", job=",".join(job.id for job in jobs), others=len(jobs))

@app.task(name="double", batch=100, batch_wait=0.2)
def double(jobs: list[BatchJob[int]]) -> list[int]:
    note(jobs)
    for job in jobs:
        if job.data == 13:
            job.fail(PermanentError("unlucky"))
        elif job.data == 14 and not job.request.retries:
            job.retry(countdown=0.1)
    return [2 * job.data for job in jobs]

@app.task(name="adouble", batch=20, batch_wait=0.2)
async def adouble(jobs: list[BatchJob[int]]) -> list[int]:
    note(jobs)
    await asyncio.sleep(0.01)
    return [2 * job.data for job in jobs]

@app.task(name="slow", batch=10, batch_wait=0.5, time_limit=2, soft_time_limit=0.3, max_retries=0)
def slow(jobs: list[BatchJob[str]]) -> list[str]:
    note(jobs)
    try:
        wait_at("never")
    except BaseException as exc:
        jobs[0].complete(type(exc).__name__)
        raise

@app.task(name="stuck", batch=10, batch_wait=0.5, time_limit=0.5, max_retries=0)
def stuck(jobs: list[BatchJob[str]]) -> None:
    note(jobs)
    wait_at("never")

@app.task(name="meet", batch=10, batch_wait=60)
def meet(jobs: list[BatchJob[str]]) -> list[str]:
    note(jobs)
    wait_at("meet")
    return [job.data for job in jobs]

@app.task(name="poisoned", batch=10, batch_wait=0.3)
def poisoned(jobs: list[BatchJob[str]]) -> None:
    note(jobs)
    if any(job.data == "poison" for job in jobs):
        os.kill(os.getpid(), 9)

@app.task(name="plain")
def plain(x: int) -> int:
    return x
"""

LONG_LOCK = {"lock_duration": 30, "max_crashes": 2}


def send(harness: WorkerHarness, task: str, *values: Any, **options: Any) -> list[AsyncResult[Any]]:
    return harness.app.send_many([harness.app.signature(task, (value,), **options) for value in values])


def batches(harness: WorkerHarness) -> list[list[str]]:
    """The job ids of each call."""
    return [entry["job"].split(",") for entry in harness.journal.all(what="start")]


def test_a_thousand_jobs_run_once_in_batches_and_each_is_settled_alone(harness: WorkerHarness) -> None:
    jobs = send(harness, "double", *range(1_000))
    worker = harness.worker(TASKS, children=2, settings=LONG_LOCK)
    with pytest.raises(PermanentError, match="unlucky"):
        jobs[13].get(timeout=60)
    assert [job.get(timeout=60) for job in jobs if job is not jobs[13]] == [2 * n for n in range(1_000) if n != 13]
    runs = batches(harness)
    starts = Counter(job for run in runs for job in run)
    assert starts == Counter([job.id for job in [*jobs, jobs[14]]])
    assert len(runs) <= 15
    assert max(map(len, runs)) == 100
    harness.report(sizes=sorted(map(len, runs)))
    assert worker.stop() == 0
    assert len(harness.events.all(event="completed")) == 999
    assert harness.redis.exists(harness.keys.active) == 0


def test_async_batches_run_at_the_same_time_as_other_jobs_of_the_queue(harness: WorkerHarness) -> None:
    jobs = [job for n in range(0, 300, 100) for job in send(harness, "adouble", *range(n, n + 100))]
    others = send(harness, "plain", *range(5))
    more = send(harness, "adouble", *range(50))
    harness.worker(TASKS, children=1, settings={**LONG_LOCK, "worker_async_concurrency": 40})
    assert [job.get(timeout=60) for job in [*jobs, *more]] == [2 * n for n in [*range(300), *range(50)]]
    assert [job.get(timeout=60) for job in others] == list(range(5))
    runs = batches(harness)
    assert len(jobs) + len(more) == sum(map(len, runs))
    assert max(map(len, runs)) == 20
    harness.report(sizes=list(map(len, runs)))


def test_a_soft_limit_ends_the_whole_batch_and_a_hard_limit_fails_all_its_jobs(harness: WorkerHarness) -> None:
    done, *soft = send(harness, "slow", "a", "b", "c", max_retries=0)
    worker = harness.worker(TASKS, children=1, settings=LONG_LOCK)
    assert done.get(timeout=60) == "SoftTimeLimitExceeded"
    for job in soft:
        assert "soft time limit" in str(job.get(timeout=60, propagate=False))
    hard = send(harness, "stuck", "a", "b", "c", max_retries=0)
    for job in hard:
        with pytest.raises(TimeLimitExceeded):
            job.get(timeout=60)
    assert sorted(map(len, batches(harness))) == [3, 3]
    assert worker.stop() == 0


def test_a_batch_runs_immediately_if_another_task_is_next_or_the_worker_stops(harness: WorkerHarness) -> None:
    harness.open_gate("meet", 2)
    jobs = [*send(harness, "meet", "a", "b"), *send(harness, "plain", 5)]
    worker = harness.worker(TASKS, children=1, settings=LONG_LOCK)
    assert [job.get(timeout=60) for job in jobs] == ["a", "b", 5]
    (waiting,) = send(harness, "meet", "c")
    harness.wait_for_event("active", waiting)
    assert waiting.state is JobState.ACTIVE
    harness.wait_until_idle(1)  # the child waits for more jobs; before that, it would release this one when it stops
    assert worker.stop() == 0
    assert waiting.get(timeout=1) == "c"
    assert list(map(len, batches(harness))) == [2, 1]


def test_a_job_that_is_revoked_while_its_batch_runs_does_not_stop_the_others(harness: WorkerHarness) -> None:
    jobs = send(harness, "meet", *map(str, range(10)))
    worker = harness.worker(TASKS, children=1, settings=LONG_LOCK)
    harness.journal.wait_for(1, 60.0, what="start")
    jobs[0].revoke(terminate=True)
    jobs[5].revoke(terminate=True)
    for job_id in ("gone", "gone too"):  # the second one is read after a complete check
        harness.redis.zadd(harness.keys.revoked, {job_id: harness.app._now_ms()})
        is_read = functools.partial(lambda name: not harness.redis.zscore(harness.keys.revoked, name), job_id)
        wait_until(is_read, 60.0, "a check for requests")
    harness.open_gate("meet")
    assert [job.get(timeout=60) for job in jobs] == [*map(str, range(10))]
    assert worker.stop() == 0


@pytest.mark.every_topology
def test_killing_a_child_loses_no_job_of_its_batch(harness: WorkerHarness) -> None:
    jobs = send(harness, "meet", *map(str, range(10)))
    harness.worker(TASKS, children=1, settings=LONG_LOCK)
    (start,) = harness.journal.wait_for(1, 60.0, what="start")
    os.kill(int(start["pid"]), signal.SIGKILL)
    harness.open_gate("meet", 20)
    assert [job.get(timeout=60) for job in jobs] == [*map(str, range(10))]


def test_a_poison_pill_fails_and_the_other_jobs_of_its_batch_do_not(harness: WorkerHarness) -> None:
    *jobs, bad = send(harness, "poisoned", *map(str, range(9)), "poison")
    worker = harness.worker(TASKS, children=1, settings=LONG_LOCK)
    assert "max_crashes" in harness.wait_for_event("failed", bad)["failedReason"]
    assert [job.get(timeout=60) for job in jobs] == [None] * 9
    runs = [run for run in batches(harness) if bad.id in run]
    harness.report(sizes_with_the_poison_pill=list(map(len, runs)), deaths=len(worker.logged("Child died")))
    assert len(runs[-1]) == 1
    assert len(runs) == 3
