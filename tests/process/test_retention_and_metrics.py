"""Options of a worker for finished jobs: retention and metrics."""

from __future__ import annotations

import os
import signal

import pytest

from bulltask import App
from bulltask.queue.fields import Metrics
from tests.support.streams import server_ms
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

TASKS_AND_METHODS = pytest.mark.parametrize(
    ("task", "method"), [("quick", "fork"), ("aquick", "fork"), ("aquick", "spawn")]
)
MINUTE_MS = 60_000
TASKS = """
@app.task(name="fails")
def fails():
    raise ValueError("it failed")


@app.task(name="aquick", bind=True)
async def aquick(self):
    record("start", job=self.request.id)
"""


def plain_sender(harness: WorkerHarness) -> App:
    """Return a sender whose jobs have no retention options, like Node's jobs."""
    return harness.sender(result_expires=None, result_failure_expires=None)


# ---- remove_on_complete, remove_on_fail -----------------------------------------------------------------------------


@TASKS_AND_METHODS
def test_only_the_newest_completed_jobs_are_kept(harness: WorkerHarness, method: str, task: str) -> None:
    settings = {"worker_start_method": method}
    harness.worker(TASKS, options=["--remove-on-complete", "2"], settings=settings, children=1)
    jobs = [plain_sender(harness).send_task(task).id for _ in range(5)]
    for job in jobs:
        harness.events.wait_for(timeout=60, event="completed", jobId=job)
    assert harness.redis.zrange(harness.keys.completed, 0, -1) == jobs[-2:]
    assert [harness.redis.exists(harness.keys.job(job)) for job in jobs] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_failed_jobs_have_a_separate_retention_option(harness: WorkerHarness, method: str) -> None:
    settings = {"worker_start_method": method}
    harness.worker(TASKS, options=["--remove-on-fail", "age=3600,count=1"], settings=settings, children=1)
    sender = plain_sender(harness)
    failed = [sender.send_task("fails").id for _ in range(3)]
    completed = [sender.send_task("quick") for _ in range(3)]
    for job in completed:
        job.get(timeout=60)
    assert harness.redis.zrange(harness.keys.failed, 0, -1) == failed[-1:]
    assert harness.redis.zcard(harness.keys.completed) == 3


def test_a_jobs_retention_options_override_the_workers(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, settings={"remove_on_complete": "true", "remove_on_fail": "false"}, children=1)
    sender = plain_sender(harness)
    kept = [
        harness.app.send_task("quick"),  # has the retention of result_expires
        sender.send_task("quick", remove_on_complete=False),
        sender.send_task("fails", max_retries=0),
    ]
    removed = [sender.send_task("quick"), sender.send_task("fails", max_retries=0, remove_on_fail=True)]
    for job, event in zip([*kept, *removed], ["completed", "completed", "failed", "completed", "failed"], strict=True):
        harness.wait_for_event(event, job, timeout=60)
    assert [harness.redis.exists(harness.keys.job(job.id)) for job in kept] == [1, 1, 1]
    assert [harness.redis.exists(harness.keys.job(job.id)) for job in removed] == [0, 0]
    assert "Failed jobs are removed" not in worker.log


def test_retention_and_metrics_apply_to_a_job_that_crashed_its_children(harness: WorkerHarness) -> None:
    worker = harness.worker(
        children=1, settings={"remove_on_fail": "true", "max_crashes": 1, "metrics_max_data_points": 10}
    )
    job = plain_sender(harness).send_task("hold", kwargs={"gate": "gate"})
    os.kill(int(harness.wait_for_start(job, timeout=60)["pid"]), signal.SIGKILL)
    worker.wait_for_line("Crash limit reached", job_id=job.id)
    harness.wait_for_event("failed", job, timeout=60)
    assert harness.redis.exists(harness.keys.job(job.id)) == 0
    assert harness.redis.zcard(harness.keys.failed) == 0
    assert harness.app.queue("default").get_metrics("failed").count == 1


# ---- metrics_max_data_points ----------------------------------------------------------------------------------------


@TASKS_AND_METHODS
def test_metrics_count_completed_jobs_per_minute(harness: WorkerHarness, method: str, task: str) -> None:
    settings = {"worker_start_method": method}
    harness.worker(TASKS, options=["--metrics-max-data-points", "3"], settings=settings, children=1)
    queue = harness.app.queue("default")
    for _ in range(4):
        harness.app.send_task(task).get(timeout=60)
    assert queue.get_metrics("completed").count == 4
    assert queue.get_metrics("failed") == Metrics(0, 0, 0, (), 0)
    # As if the last job had been counted ten minutes ago.
    before_ms = server_ms(harness.redis) - 10 * MINUTE_MS
    harness.redis.hset(harness.keys.metrics_completed, mapping={"prevTS": before_ms, "prevCount": 1})
    harness.app.send_task(task).get(timeout=60)
    found = queue.get_metrics("completed")
    # BullMQ's count lags by one: the first job after a minute has passed is counted in the next one.
    assert (found.count, found.previous_count, found.data, found.points) == (5, 4, (0, 0, 3), 3)
    assert found.previous_ms > before_ms


@pytest.mark.every_topology
def test_metrics_count_failed_jobs_separately(harness: WorkerHarness) -> None:
    harness.worker(TASKS, settings={"metrics_max_data_points": 60}, children=1)
    for task in ("fails", "quick", "fails"):
        harness.wait_for_event(
            "failed" if task == "fails" else "completed", harness.app.send_task(task, max_retries=0), timeout=60
        )
    queue = harness.app.queue("default")
    assert (queue.get_metrics("failed").count, queue.get_metrics("completed").count) == (2, 1)


def test_metrics_are_not_stored_by_default_and_failed_jobs_are_bounded(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    worker.wait_for_line("Failed jobs are removed after a week, and the oldest beyond 100,000 of a queue")
    harness.app.send_task("quick").get(timeout=60)
    harness.wait_for_event("failed", harness.app.send_task("fails", max_retries=0))
    assert harness.redis.exists(harness.keys.metrics_completed, harness.keys.metrics_failed) == 0
