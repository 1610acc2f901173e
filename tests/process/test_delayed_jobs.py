"""Delayed jobs run when they are due, whoever knew of them."""

from __future__ import annotations

import os
import random
import signal

import pytest

from bulltask import AsyncResult
from tests.support.pace import at_this_pace
from tests.support.stage import Stage

pytestmark = pytest.mark.process

# Nobody looks at an idle queue more often than that: who is in time has known when.
PATIENT = {"drain_delay": 30}
EARLY_MS = 20  # how well workers know the server's time: half a round trip at worst, on a busy machine


def late_ms(stage: Stage, job: AsyncResult[None]) -> int:
    """How much later than due the job was taken."""
    delayed = stage.became("delayed", job)
    return stage.became("active", job).ms - int(delayed["delay"])


def test_delayed_jobs_run_within_100_ms_of_their_time_on_an_idle_queue_with_two_workers(
    stage: Stage, dice: random.Random
) -> None:
    for _ in range(2):
        stage.worker(children=1, settings=PATIENT)
    stage.wait_until_idle(2)
    jobs = [stage.app.send_task("quick", countdown=dice.uniform(0.3, 4)) for _ in range(20)]
    late = sorted(late_ms(stage, job) for job in jobs)
    stage.note(late_ms=late)

    assert late[0] >= -EARLY_MS
    assert late[-1] <= at_this_pace(100)
    for job in jobs:
        job.get(timeout=60)
    assert {stage.starts(job) for job in jobs} == {1}


def test_a_job_that_is_due_sooner_than_the_one_a_child_waits_for_does_not_wait_for_that(stage: Stage) -> None:
    stage.worker(children=1, settings=PATIENT)
    stage.wait_until_idle(1)
    later = stage.app.send_task("quick", countdown=3)
    sooner = stage.app.send_task("quick", countdown=0.5)
    now = stage.app.send_task("quick")
    assert stage.became("active", now).ms - stage.became("waiting", now).ms <= at_this_pace(100)
    late = [late_ms(stage, sooner), late_ms(stage, later)]
    stage.note(late_ms=late)
    assert all(-EARLY_MS <= ms <= at_this_pace(100) for ms in late)


def test_a_delayed_job_runs_in_time_although_every_child_that_knew_of_it_was_killed(stage: Stage) -> None:
    worker = stage.worker(children=2, settings=PATIENT)
    stage.wait_until_idle(2)
    job = stage.app.send_task("quick", countdown=1.5)
    for child in worker.children:
        os.kill(child, signal.SIGKILL)
    worker.wait_for_line("Child started", count=4)
    late = late_ms(stage, job)
    stage.note(late_ms=late)
    assert -EARLY_MS <= late <= at_this_pace(100)


def test_a_delayed_job_whose_worker_was_killed_is_late_by_no_more_than_the_drain_delay_of_the_others(
    stage: Stage,
) -> None:
    first = stage.worker(children=1, settings=PATIENT)
    stage.wait_until_idle(1)
    stage.worker(children=1, settings={"drain_delay": 1})
    stage.wait_until_idle(2)
    job = stage.app.send_task("quick", countdown=0.3)
    stage.wait_until_idle(2)  # the first has taken the marker, and nobody else knows when the job is due
    os.kill(first.pid, signal.SIGKILL)
    late = late_ms(stage, job)
    stage.note(late_ms=late, drain_delay_ms=1000)
    assert -EARLY_MS <= late <= at_this_pace(1000)


def test_a_busy_queue_does_not_keep_delayed_jobs_waiting(stage: Stage) -> None:
    worker = stage.worker(children=2)
    stage.app.send_task("quick").get(timeout=60)
    jobs = [stage.app.send_task("quick", countdown=0.2 * number) for number in range(1, 6)]
    while not stage.events.all(event="active", jobId=jobs[-1].id):
        stage.app.send_task("quick").get(timeout=60)
    late = [late_ms(stage, job) for job in jobs]
    stage.note(late_ms=late)
    assert all(-EARLY_MS <= ms <= at_this_pace(100) for ms in late)
    assert worker.complaints() == []
