"""Delayed jobs run when they are due."""

from __future__ import annotations

import os
import random
import signal

import pytest

from bulltask import AsyncResult
from tests.support.machine_load import scale_to_load
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

# Idle workers check the queue only this often, so a job that runs on time has woken one.
LONG_DRAIN_DELAY = {"drain_delay": 30}
EARLY_MS = 20  # error of the workers' estimate of the server's time: up to half a round trip


def late_ms(harness: WorkerHarness, job: AsyncResult[None]) -> int:
    """Return how many milliseconds after its due time a job was acquired."""
    delayed = harness.wait_for_event("delayed", job)
    return harness.wait_for_event("active", job).ms - int(delayed["delay"])


def test_delayed_jobs_in_an_idle_queue_run_within_100_ms_of_their_due_time(
    harness: WorkerHarness, rng: random.Random
) -> None:
    for _ in range(2):
        harness.worker(children=1, settings=LONG_DRAIN_DELAY)
    harness.wait_until_idle(2)
    jobs = [harness.app.send_task("quick", countdown=rng.uniform(0.3, 4)) for _ in range(20)]
    late = sorted(late_ms(harness, job) for job in jobs)
    harness.report(late_ms=late)

    assert late[0] >= -EARLY_MS
    assert late[-1] <= scale_to_load(100)
    for job in jobs:
        job.get(timeout=60)
    assert {harness.start_count(job) for job in jobs} == {1}


def test_a_job_wakes_only_one_of_two_idle_children(harness: WorkerHarness) -> None:
    harness.worker(children=2, settings=LONG_DRAIN_DELAY)
    harness.wait_until_idle(2)
    before = harness.redis.info("commandstats")["cmdstat_bzpopmin"]["calls"]
    for _ in range(20):
        harness.app.send_task("quick").get(timeout=60)
    harness.wait_until_idle(2)
    assert harness.redis.info("commandstats")["cmdstat_bzpopmin"]["calls"] - before <= 25


def test_a_child_that_waits_for_a_delayed_job_runs_one_that_is_due_sooner(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings=LONG_DRAIN_DELAY)
    harness.wait_until_idle(1)
    later = harness.app.send_task("quick", countdown=3)
    sooner = harness.app.send_task("quick", countdown=0.5)
    now = harness.app.send_task("quick")
    assert harness.wait_for_event("active", now).ms - harness.wait_for_event("waiting", now).ms <= scale_to_load(100)
    late = [late_ms(harness, sooner), late_ms(harness, later)]
    harness.report(late_ms=late)
    assert all(-EARLY_MS <= ms <= scale_to_load(100) for ms in late)


def test_a_delayed_job_runs_on_time_even_if_the_waiting_children_were_killed(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2, settings=LONG_DRAIN_DELAY)
    harness.wait_until_idle(2)
    job = harness.app.send_task("quick", countdown=1.5)
    for child in worker.children:
        os.kill(child, signal.SIGKILL)
    worker.wait_for_line("Child started", count=4)
    late = late_ms(harness, job)
    harness.report(late_ms=late)
    assert -EARLY_MS <= late <= scale_to_load(100)


def test_a_delayed_job_whose_worker_was_killed_is_late_by_at_most_the_drain_delay(
    harness: WorkerHarness,
) -> None:
    first = harness.worker(children=1, settings=LONG_DRAIN_DELAY)
    harness.wait_until_idle(1)
    harness.worker(children=1, settings={"drain_delay": 1})
    harness.wait_until_idle(2)
    job = harness.app.send_task("quick", countdown=0.3)
    harness.wait_until_idle(2)  # the first worker has popped the marker, so only it knows when the job is due
    os.kill(first.pid, signal.SIGKILL)
    late = late_ms(harness, job)
    harness.report(late_ms=late, drain_delay_ms=1000)
    assert -EARLY_MS <= late <= scale_to_load(1000)


def test_delayed_jobs_run_on_time_in_a_busy_queue(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2)
    harness.app.send_task("quick").get(timeout=60)
    jobs = [harness.app.send_task("quick", countdown=0.2 * number) for number in range(1, 6)]
    while not harness.events.all(event="active", jobId=jobs[-1].id):
        harness.app.send_task("quick").get(timeout=60)
    late = [late_ms(harness, job) for job in jobs]
    harness.report(late_ms=late)
    assert all(-EARLY_MS <= ms <= scale_to_load(100) for ms in late)
    assert worker.warnings() == []


@pytest.mark.parametrize("reason", ["paused", "global concurrency"])
def test_delayed_jobs_are_promoted_on_time_while_no_job_may_be_acquired(harness: WorkerHarness, reason: str) -> None:
    queue = harness.app.queue(harness.keys.queue)
    harness.worker(children=2, settings=LONG_DRAIN_DELAY)
    harness.wait_until_idle(2)
    if reason == "paused":
        queue.pause()
    else:
        queue.set_global_concurrency(1)
        harness.wait_for_start(harness.hold())
    jobs = [harness.app.send_task("quick", countdown=0.3 * number) for number in range(1, 5)]
    due_ms = [int(harness.events.wait_for(event="delayed", jobId=job.id)[0]["delay"]) for job in jobs]
    promoted = [harness.events.wait_for(event="waiting", jobId=job.id, prev="delayed")[0].ms for job in jobs]
    late = [at_ms - due for at_ms, due in zip(promoted, due_ms, strict=True)]
    harness.report(late_ms=late)
    assert all(-EARLY_MS <= ms <= scale_to_load(100) for ms in late)
    harness.open_gate()
    queue.resume()
    jobs[-1].get(timeout=60)
