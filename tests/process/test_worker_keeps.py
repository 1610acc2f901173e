"""What a worker's options say of jobs that end: which of them stay, and how many of them are counted."""

from __future__ import annotations

import os
import signal

import pytest

from bulltask import App
from bulltask.queue.responses import Metrics
from tests.support.stage import Stage
from tests.support.streams import server_ms

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
MINUTE_MS = 60_000
TASKS = """
@app.task(name="fails")
def fails():
    raise ValueError("it failed")


@app.task(name="aquick", bind=True)
async def aquick(self):
    tell("start", job=self.request.id)
"""


def silent(stage: Stage) -> App:
    """A sender whose jobs say nothing of how long they stay, as those of Node."""
    return stage.sender(result_expires=None, result_failure_expires=None)


# ---- remove_on_complete, remove_on_fail -----------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("task", ["quick", "aquick"])
def test_only_the_newest_completed_jobs_stay(stage: Stage, method: str, task: str) -> None:
    settings = {"worker_start_method": method}
    stage.worker(TASKS, options=["--remove-on-complete", "2"], settings=settings, children=1)
    jobs = [silent(stage).send_task(task).id for _ in range(5)]
    for job in jobs:
        stage.events.wait_for(timeout=60, event="completed", jobId=job)
    assert stage.redis.zrange(stage.keys.completed, 0, -1) == jobs[-2:]
    assert [stage.redis.exists(stage.keys.job(job)) for job in jobs] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_failed_jobs_have_an_option_of_their_own(stage: Stage, method: str) -> None:
    settings = {"worker_start_method": method}
    stage.worker(TASKS, options=["--remove-on-fail", "age=3600,count=1"], settings=settings, children=1)
    sender = silent(stage)
    failed = [sender.send_task("fails").id for _ in range(3)]
    completed = [sender.send_task("quick") for _ in range(3)]
    for job in completed:
        job.get(timeout=60)
    assert stage.redis.zrange(stage.keys.failed, 0, -1) == failed[-1:]
    assert stage.redis.zcard(stage.keys.completed) == 3


def test_what_a_job_says_itself_wins(stage: Stage) -> None:
    stage.worker(TASKS, settings={"remove_on_complete": "true", "remove_on_fail": "false"}, children=1)
    sender = silent(stage)
    kept = [
        stage.app.send_task("quick"),  # our own jobs say result_expires
        sender.send_task("quick", remove_on_complete=False),
        sender.send_task("fails", max_retries=0),
    ]
    gone = [sender.send_task("quick"), sender.send_task("fails", max_retries=0, remove_on_fail=True)]
    for job, event in zip([*kept, *gone], ["completed", "completed", "failed", "completed", "failed"], strict=True):
        stage.became(event, job, timeout=60)
    assert [stage.redis.exists(stage.keys.job(job.id)) for job in kept] == [1, 1, 1]
    assert [stage.redis.exists(stage.keys.job(job.id)) for job in gone] == [0, 0]


def test_a_job_that_killed_its_children_is_kept_and_counted_by_the_same_options(stage: Stage) -> None:
    worker = stage.worker(
        children=1, settings={"remove_on_fail": "true", "max_crashes": 1, "metrics_max_data_points": 10}
    )
    job = silent(stage).send_task("hold", kwargs={"gate": "gate"})
    os.kill(int(stage.started(job, timeout=60)["pid"]), signal.SIGKILL)
    worker.wait_for_line("Job crashed", job_id=job.id)
    stage.became("failed", job, timeout=60)
    assert stage.redis.exists(stage.keys.job(job.id)) == 0
    assert stage.redis.zcard(stage.keys.failed) == 0
    assert stage.app.queue("default").get_metrics("failed").count == 1


# ---- metrics_max_data_points ----------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("task", ["quick", "aquick"])
def test_jobs_are_counted_minute_by_minute(stage: Stage, method: str, task: str) -> None:
    settings = {"worker_start_method": method}
    stage.worker(TASKS, options=["--metrics-max-data-points", "3"], settings=settings, children=1)
    queue = stage.app.queue("default")
    for _ in range(4):
        stage.app.send_task(task).get(timeout=60)
    assert queue.get_metrics("completed").count == 4
    assert queue.get_metrics("failed") == Metrics(0, 0, 0, (), 0)
    # Time passes: what was counted last was counted ten minutes ago.
    before_ms = server_ms(stage.redis) - 10 * MINUTE_MS
    stage.redis.hset(stage.keys.metrics_completed, mapping={"prevTS": before_ms, "prevCount": 1})
    stage.app.send_task(task).get(timeout=60)
    found = queue.get_metrics("completed")
    # BullMQ's count lags by one: the job that ends a minute belongs to the next.
    assert (found.count, found.previous_count, found.data, found.points) == (5, 4, (0, 0, 3), 3)
    assert found.previous_ms > before_ms


def test_failed_jobs_are_counted_apart(stage: Stage) -> None:
    stage.worker(TASKS, settings={"metrics_max_data_points": 60}, children=1)
    for task in ("fails", "quick", "fails"):
        stage.became("failed" if task == "fails" else "completed", stage.app.send_task(task, max_retries=0), timeout=60)
    queue = stage.app.queue("default")
    assert (queue.get_metrics("failed").count, queue.get_metrics("completed").count) == (2, 1)


def test_nothing_is_counted_unless_it_is_asked_for(stage: Stage) -> None:
    stage.worker(TASKS, children=1)
    stage.app.send_task("quick").get(timeout=60)
    stage.became("failed", stage.app.send_task("fails", max_retries=0))
    assert stage.redis.exists(stage.keys.metrics_completed, stage.keys.metrics_failed) == 0
