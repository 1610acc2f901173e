"""Delayed jobs run when they are due, whoever knew of them."""

from __future__ import annotations

import os
import random
import signal

import pytest

from bulltask import AsyncResult
from tests.support.machine_load import scale_to_load
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

# Nobody looks at an idle queue more often than that: who is in time has known when.
PATIENT = {"drain_delay": 30}
EARLY_MS = 20  # how well workers know the server's time: half a round trip at worst, on a busy machine


def late_ms(harness: WorkerHarness, job: AsyncResult[None]) -> int:
    """How much later than due the job was taken."""
    delayed = harness.wait_for_event("delayed", job)
    return harness.wait_for_event("active", job).ms - int(delayed["delay"])


def test_delayed_jobs_run_within_100_ms_of_their_time_on_an_idle_queue_with_two_workers(
    harness: WorkerHarness, rng: random.Random
) -> None:
    for _ in range(2):
        harness.worker(children=1, settings=PATIENT)
    harness.wait_until_idle(2)
    jobs = [harness.app.send_task("quick", countdown=rng.uniform(0.3, 4)) for _ in range(20)]
    late = sorted(late_ms(harness, job) for job in jobs)
    harness.report(late_ms=late)

    assert late[0] >= -EARLY_MS
    assert late[-1] <= scale_to_load(100)
    for job in jobs:
        job.get(timeout=60)
    assert {harness.start_count(job) for job in jobs} == {1}


def test_a_job_that_is_due_sooner_than_the_one_a_child_waits_for_does_not_wait_for_that(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings=PATIENT)
    harness.wait_until_idle(1)
    later = harness.app.send_task("quick", countdown=3)
    sooner = harness.app.send_task("quick", countdown=0.5)
    now = harness.app.send_task("quick")
    assert harness.wait_for_event("active", now).ms - harness.wait_for_event("waiting", now).ms <= scale_to_load(100)
    late = [late_ms(harness, sooner), late_ms(harness, later)]
    harness.report(late_ms=late)
    assert all(-EARLY_MS <= ms <= scale_to_load(100) for ms in late)


def test_a_delayed_job_runs_in_time_although_every_child_that_knew_of_it_was_killed(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2, settings=PATIENT)
    harness.wait_until_idle(2)
    job = harness.app.send_task("quick", countdown=1.5)
    for child in worker.children:
        os.kill(child, signal.SIGKILL)
    worker.wait_for_line("Child started", count=4)
    late = late_ms(harness, job)
    harness.report(late_ms=late)
    assert -EARLY_MS <= late <= scale_to_load(100)


def test_a_delayed_job_whose_worker_was_killed_is_late_by_no_more_than_the_drain_delay_of_the_others(
    harness: WorkerHarness,
) -> None:
    first = harness.worker(children=1, settings=PATIENT)
    harness.wait_until_idle(1)
    harness.worker(children=1, settings={"drain_delay": 1})
    harness.wait_until_idle(2)
    job = harness.app.send_task("quick", countdown=0.3)
    harness.wait_until_idle(2)  # the first has taken the marker, and nobody else knows when the job is due
    os.kill(first.pid, signal.SIGKILL)
    late = late_ms(harness, job)
    harness.report(late_ms=late, drain_delay_ms=1000)
    assert -EARLY_MS <= late <= scale_to_load(1000)


def test_a_busy_queue_does_not_keep_delayed_jobs_waiting(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2)
    harness.app.send_task("quick").get(timeout=60)
    jobs = [harness.app.send_task("quick", countdown=0.2 * number) for number in range(1, 6)]
    while not harness.events.all(event="active", jobId=jobs[-1].id):
        harness.app.send_task("quick").get(timeout=60)
    late = [late_ms(harness, job) for job in jobs]
    harness.report(late_ms=late)
    assert all(-EARLY_MS <= ms <= scale_to_load(100) for ms in late)
    assert worker.warnings() == []
