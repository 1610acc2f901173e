"""Workers that stop without a signal: ``--burst`` and ``--max-jobs``."""

from __future__ import annotations

import os
import signal

import pytest

from bulltask.worker.slots import ExitCode
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

FAMILY = """
import asyncio

@app.task(bind=True, name="parent")
def parent(self, left):
    record("start", job=self.request.id)
    if left:
        app.send_task("parent", kwargs={"left": left - 1})

@app.task(bind=True, name="aquick")
async def aquick(self):
    record("start", job=self.request.id)
    await asyncio.sleep(0.01)

@app.task(name="fails", max_retries=1, default_retry_delay=600)
def fails():
    raise ConnectionError("again")
"""


# ---- burst ----------------------------------------------------------------------------------------------------------


def test_a_burst_worker_runs_all_jobs_and_those_that_they_send_and_stops(harness: WorkerHarness) -> None:
    jobs = [harness.app.send_task("quick") for _ in range(50)]
    jobs += [harness.app.send_task("quick", priority=3), harness.app.send_task("quick", countdown=0.001)]
    chain = harness.app.send_task("parent", kwargs={"left": 20})
    worker = harness.worker(FAMILY, children=3, options=["--burst"])
    assert worker.wait() == ExitCode.OK
    assert [job.snapshot().state for job in [*jobs, chain]] == ["completed"] * 53
    assert len(harness.journal.all(what="start")) == 52 + 21
    assert worker.logged("Worker stopping")[0]["mode"] == "burst"
    assert worker.warnings() == []


@pytest.mark.parametrize("prefetch", [0, 16])
def test_a_burst_worker_stops_when_there_is_no_job(harness: WorkerHarness, prefetch: int) -> None:
    worker = harness.worker(children=2, options=["--burst"], settings={"worker_prefetch": prefetch})
    assert worker.wait() == ExitCode.OK


def test_a_burst_worker_does_not_wait_for_jobs_that_cannot_run_now(harness: WorkerHarness) -> None:
    later = harness.app.send_task("quick", countdown=600)
    paused = harness.app.send_task("quick", queue="paused")
    harness.app.send_task("quick", queue="paused", priority=1)
    harness.app.queue("paused").pause()
    retried = harness.app.send_task("fails")
    worker = harness.worker(FAMILY, children=2, options=["--burst", "-Q", "default,paused"])
    assert worker.wait() == ExitCode.OK
    assert [job.snapshot().state for job in (later, retried)] == ["delayed", "delayed"]
    assert paused.snapshot().state != "completed"
    assert harness.journal.all(what="start") == []


def test_a_burst_worker_waits_for_a_long_job_however_long_it_takes(harness: WorkerHarness) -> None:
    job = harness.hold()
    worker = harness.worker(children=2, options=["--burst"], settings={"shutdown_timeout": 0})
    harness.wait_for_start(job)
    following = harness.app.send_task("quick")
    assert following.get(timeout=60) is None
    harness.open_gate()
    assert worker.wait() == ExitCode.OK
    assert job.snapshot().state == "completed"


# ---- max_jobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "task", "method"), [(1, "quick", "fork"), (25, "quick", "spawn"), (30, "aquick", "fork")]
)
def test_a_worker_stops_after_exactly_the_maximum_number_of_jobs(
    harness: WorkerHarness, jobs: int, task: str, method: str
) -> None:
    sent = [harness.app.send_task(task) for _ in range(60)]
    options = ["--max-jobs", str(jobs)]
    worker = harness.worker(FAMILY, children=4, options=options, settings={"worker_start_method": method})
    assert worker.wait() == ExitCode.OK
    assert len(harness.journal.all(what="start")) == jobs
    states: list[str] = [job.snapshot().state for job in sent]
    assert (states.count("completed"), states.count("waiting")) == (jobs, 60 - jobs)
    assert worker.logged("Worker stopping")[0]["mode"] == "max_jobs"
    assert worker.warnings() == []


def test_children_without_a_permit_leave_new_jobs_to_other_workers(harness: WorkerHarness) -> None:
    limited = harness.worker(children=3, options=["--max-jobs", "1"])
    harness.wait_until_idle(3)
    held = harness.hold()
    harness.wait_for_start(held)
    limited.wait_for_line("Worker stopping", mode="max_jobs")
    other = harness.worker(children=1)
    harness.wait_until_idle(1)
    assert harness.app.send_task("quick").get(timeout=60) is None
    harness.open_gate()
    assert limited.wait() == ExitCode.OK
    assert held.get(timeout=60) == "gate"
    assert other.stop() == ExitCode.OK


def test_a_signal_sets_a_deadline_for_the_last_jobs_of_a_worker_that_is_finishing(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1, options=["--max-jobs", "1"], settings={"shutdown_timeout": 0})
    held = harness.hold()
    harness.wait_for_start(held)
    worker.wait_for_line("Worker stopping", mode="max_jobs")
    worker.send(signal.SIGTERM)
    assert worker.wait() == ExitCode.OK
    assert [line["mode"] for line in worker.logged("Worker stopping")] == ["max_jobs", "warm", "cold"]
    assert held.snapshot().state == "waiting"


def test_the_job_of_a_child_that_is_killed_counts_once_for_each_start(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1, options=["--max-jobs", "2"])
    held = harness.hold()
    os.kill(int(harness.wait_for_start(held)["pid"]), signal.SIGKILL)
    harness.wait_for_start(held, 2)
    harness.open_gate("gate", 2)
    assert worker.wait() == ExitCode.OK
    assert held.get(timeout=60) == "gate"
