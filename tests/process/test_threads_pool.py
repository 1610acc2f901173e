"""Sync tasks in threads of one child process: ``-P threads``."""

from __future__ import annotations

import os
import signal

import pytest

from bulltask import TimeLimitExceeded
from bulltask.worker.slots import ExitCode
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio
import threading
import time

from bulltask import SoftTimeLimitExceeded, TaskCancelled

@app.task(bind=True, name="where")
def where(self):
    record("start", job=self.request.id)
    return threading.current_thread().name

@app.task(bind=True, name="meet")
def meet(self, gate):
    record("start", job=self.request.id)
    wait_at(gate)
    return os.getpid()

@app.task(bind=True, name="ahold")
async def ahold(self, gate):
    record("start", job=self.request.id)
    await asyncio.to_thread(wait_at, gate)

@app.task(bind=True, name="spin")
def spin(self, seconds, clean_up=False):
    record("start", job=self.request.id)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            pass
    except SoftTimeLimitExceeded:
        if not clean_up:
            raise
        return "cleaned up"
    except TaskCancelled:
        record("cancelled", job=self.request.id)
        raise

@app.task(bind=True, name="block", max_retries=0)
def block(self):
    record("start", job=self.request.id)
    wait_at("never")

@app.task(name="raise_", max_retries=0)
def raise_(kind):
    raise {"StopIteration": StopIteration, "SystemExit": SystemExit, "ValueError": ValueError}[kind]("why")

@app.task(bind=True, name="fork")
def fork(self):
    if os.fork() == 0:
        return "child"
    os.wait()
    return "parent"

@app.task(bind=True, name="report")
def report(self):
    self.update_progress(50)
    self.log("halfway")
    return self.request.id
"""


def options(threads: int) -> list[str]:
    return ["-P", "threads", "-c", str(threads)]


def test_sync_tasks_run_at_the_same_time_in_threads_of_one_process(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=options(8))
    jobs = [harness.app.send_task("meet", kwargs={"gate": "gate"}) for _ in range(9)]
    started = harness.journal.wait_for(8, what="start")
    assert len({entry["pid"] for entry in started}) == 1
    assert worker.wait_for_line("Worker started")[0]["concurrency"] == 8
    assert len(worker.children) == 1
    waiting = [job for job in jobs if job.snapshot().state == "waiting"]
    assert len(waiting) == 1, "the ninth job is not acquired, so that another worker can run it"
    harness.open_gate("gate", 9)
    assert {str(job.get(timeout=60)) for job in jobs} == {started[0]["pid"]}
    assert harness.app.send_task("where").get(timeout=60).startswith("bulltask-task")
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK


def test_async_tasks_run_alongside_the_threads(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=options(2))
    held = [harness.app.send_task("ahold", kwargs={"gate": "gate"}) for _ in range(5)]
    for job in held:
        harness.wait_for_start(job)
    jobs = [harness.app.send_task("quick") for _ in range(20)]
    for sync_job in jobs:
        assert sync_job.get(timeout=60) is None
    harness.open_gate("gate", 5)
    for job in held:
        assert job.get(timeout=60) is None
    assert worker.stop() == ExitCode.OK


def test_a_task_in_a_thread_reports_progress_and_any_exception_fails_its_job_only(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=options(3))
    reported = harness.app.send_task("report")
    assert reported.get(timeout=60) == reported.id
    assert harness.field(reported, "progress") == "50"
    for kind in ("StopIteration", "SystemExit", "ValueError"):
        failed = harness.app.send_task("raise_", kwargs={"kind": kind})
        assert harness.wait_for_event("failed", failed)["failedReason"] == "why"
    assert harness.app.send_task("fork").get(timeout=60) == "parent"
    assert len(worker.logged("Child started")) == 1
    assert worker.stop() == ExitCode.OK


@pytest.mark.parametrize("clean_up", [False, True])
def test_the_soft_limit_is_raised_in_the_thread_of_the_task(harness: WorkerHarness, clean_up: bool) -> None:
    worker = harness.worker(TASKS, options=options(2))
    held = harness.app.send_task("meet", kwargs={"gate": "gate"})
    harness.wait_for_start(held)
    job = harness.app.send_task(
        "spin", kwargs={"seconds": 60, "clean_up": clean_up}, soft_time_limit=0.3, max_retries=0
    )
    if clean_up:
        assert job.get(timeout=60) == "cleaned up"
    else:
        reason = harness.wait_for_event("failed", job)["failedReason"]
        assert reason == "task spin ran longer than its soft time limit of 0.3 s"
    harness.open_gate()
    assert str(held.get(timeout=60)) == harness.wait_for_start(held)["pid"]
    assert harness.start_count(held) == 1
    assert len(worker.logged("Child started")) == 1
    assert worker.stop() == ExitCode.OK


def test_the_hard_limit_ends_a_thread_that_runs_python_code(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=options(2))
    job = harness.app.send_task("spin", kwargs={"seconds": 60}, time_limit=0.3, max_retries=0)
    with pytest.raises(TimeLimitExceeded, match=r"time limit of 0\.3 s$"):
        job.get(timeout=60)
    assert len(worker.logged("Child started")) == 1
    assert worker.stop() == ExitCode.OK


def test_the_hard_limit_kills_the_child_of_a_blocked_thread_and_other_jobs_run_again(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=options(2), settings={"max_crashes": 1})
    innocent = harness.app.send_task("meet", kwargs={"gate": "gate"})
    first = harness.wait_for_start(innocent)["pid"]
    blocked = harness.app.send_task("block", time_limit=0.3, max_retries=0)
    reason = harness.wait_for_event("failed", blocked)["failedReason"]
    assert reason == "task block ran longer than its time limit of 0.3 s and its child was killed"
    assert harness.wait_for_start(innocent, 2)["pid"] != first
    harness.open_gate("gate", 2)
    innocent.get(timeout=60)
    assert harness.field(innocent, "atm") == "1", "neither an attempt nor a crash is counted"
    assert worker.logged("Child killed", reason="hard_limit")
    assert worker.stop() == ExitCode.OK


def test_a_revoked_job_is_cancelled_in_its_thread(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=options(2))
    job = harness.app.send_task("spin", kwargs={"seconds": 60})
    harness.wait_for_start(job)
    job.revoke(terminate=True)
    assert harness.wait_for_event("failed", job)["failedReason"] == "revoked"
    harness.journal.wait_for(1, what="cancelled", job=job.id)
    assert worker.stop() == ExitCode.OK


@pytest.mark.every_topology
def test_a_shutdown_waits_for_the_threads_and_a_crash_runs_their_jobs_again(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=options(3), settings={"max_crashes": 5})
    jobs = [harness.app.send_task("meet", kwargs={"gate": "gate"}) for _ in range(3)]
    starts = [harness.wait_for_start(job) for job in jobs]
    os.kill(int(starts[0]["pid"]), signal.SIGKILL)
    for job in jobs:
        harness.journal.wait_for(1, what="start", job=job.id)
    worker.wait_for_line("Job recovered", count=3)
    harness.open_gate("gate", 6)
    for job in jobs:
        job.get(timeout=60)
    last = harness.app.send_task("meet", kwargs={"gate": "last"})
    harness.wait_for_start(last)
    worker.send(signal.SIGTERM)
    worker.wait_for_line("Worker stopping", mode="warm")
    harness.open_gate("last")
    assert worker.wait() == ExitCode.OK
    assert last.snapshot().state == "completed"


def test_a_child_with_threads_is_replaced_after_its_maximum_number_of_jobs(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=[*options(4), "--max-tasks-per-child", "10"])
    jobs = [harness.app.send_task("quick") for _ in range(40)]
    for job in jobs:
        job.get(timeout=60)
    assert [harness.start_count(job) for job in jobs] == [1] * 40
    worker.wait_for_line("Child exited", count=3, reason="max_tasks_per_child")
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK
