"""Tasks that delay or release their job, or wait for child jobs. The attempt does not count."""

from __future__ import annotations

import pytest

from bulltask.errors import PermanentError, TaskError
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
from contextlib import suppress

from bulltask.errors import RescheduleJob, WaitForChildren, ReleaseJob


@app.task(bind=True, name="later")
def later(self):
    record("start", job=self.request.id)
    if self.request.attempts_started == 1:
        self.move_to_delayed(0.3)
    return self.request.attempts_started, self.request.retries


@app.task(bind=True, name="alater")
async def alater(self):
    if self.request.attempts_started == 1:
        self.move_to_delayed(0.1)
    return self.request.attempts_started, self.request.retries


@app.task(bind=True, name="release_twice")
def release_twice(self):
    record("start", job=self.request.id)
    if self.request.attempts_started < 3:
        raise ReleaseJob
    return self.request.attempts_started


@app.task(name="square")
def square(x):
    return x * x


@app.task(name="breaks")
def breaks():
    raise ValueError("broke")


@app.task(bind=True, name="parent")
def parent(self, numbers, step=1):
    if step == 1:
        self.update_data({"numbers": numbers, "step": 2})
        for number in numbers:
            square.apply_async((number,), parent=self.request, countdown=1)  # no child finishes before the parent waits
        self.move_to_waiting_children()
    return sum(self.get_children_values().values()), self.request.attempts_started


@app.task(bind=True, name="aparent")
async def aparent(self, numbers, step=1):
    if step == 1:
        await self.aupdate_data({"numbers": numbers, "step": 2})
        for number in numbers:
            await square.aapply_async((number,), parent=self.request, countdown=1)
        raise WaitForChildren
    return sum((await self.aget_children_values()).values())


@app.task(bind=True, name="childless")
def childless(self):
    if self.request.attempts_started == 1:
        self.move_to_waiting_children()
    return self.request.attempts_started


@app.task(bind=True, name="with_failing_child")
def with_failing_child(self, wait):
    child = breaks.apply_async(parent=self.request, max_retries=0, fail_parent_on_failure=True)
    if wait:
        with suppress(ValueError):
            child.get(timeout=60)
    self.move_to_waiting_children()


@app.task(name="invalid_delay")
def invalid_delay():
    raise RescheduleJob("soon")
"""


@pytest.fixture
def started_harness(harness: WorkerHarness) -> WorkerHarness:
    harness.worker(TASKS)
    return harness


@pytest.mark.parametrize("task", ["later", "alater"])
def test_a_task_that_delays_its_job_runs_again_and_the_attempt_does_not_count(
    started_harness: WorkerHarness, task: str
) -> None:
    job = started_harness.app.send_task(task)
    assert job.get(timeout=60) == [2, 0]
    assert (started_harness.field(job, "ats"), started_harness.field(job, "atm")) == ("2", "1")
    assert started_harness.wait_for_event("delayed", job)["jobId"] == job.id
    assert started_harness.field(job, "failedReason") is None


def test_a_task_that_delays_its_job_runs_again_after_the_delay(started_harness: WorkerHarness) -> None:
    job = started_harness.app.send_task("later")
    job.get(timeout=60)
    assert started_harness.wait_for_start(job, 2).ms - started_harness.wait_for_start(job, 1).ms >= 300


def test_a_job_that_its_task_releases_runs_next(started_harness: WorkerHarness) -> None:
    job = started_harness.app.send_task("release_twice")
    assert job.get(timeout=60) == 3
    assert (started_harness.field(job, "ats"), started_harness.field(job, "atm")) == ("3", "1")


@pytest.mark.parametrize(("task", "result"), [("parent", [14, 2]), ("aparent", 14)])
def test_a_task_can_wait_for_child_jobs_that_it_has_added(
    started_harness: WorkerHarness, task: str, result: object
) -> None:
    job = started_harness.app.send_task(task, kwargs={"numbers": [1, 2, 3]})
    assert job.get(timeout=60) == result
    assert started_harness.field(job, "atm") == "1"
    assert started_harness.wait_for_event("waiting-children", job)["prev"] == "active"
    found = started_harness.app.queue("default").get_job(job.id)
    assert found is not None
    assert sorted(found.get_children_values().values()) == [1, 4, 9]


def test_a_task_that_waits_without_pending_children_runs_again_immediately(started_harness: WorkerHarness) -> None:
    assert started_harness.app.send_task("childless").get(timeout=60) == 2


@pytest.mark.parametrize(
    ("wait", "why"),
    [
        (False, r"child bull:\{default\}:.* failed"),
        (True, r"Cannot complete job .* because it has at least one failed child\. moveToWaitingChildren"),
    ],
)
def test_a_task_fails_when_a_child_job_fails_its_parent(harness: WorkerHarness, wait: bool, why: str) -> None:
    harness.worker(TASKS, children=2 if wait else 1)
    job = harness.app.send_task("with_failing_child", kwargs={"wait": wait}, max_retries=0)
    with pytest.raises((TaskError, PermanentError), match=why):
        job.get(timeout=60)


def test_an_invalid_delay_fails_the_job(started_harness: WorkerHarness) -> None:
    with pytest.raises(TaskError, match="RescheduleJob's delay must be a number of seconds"):
        started_harness.app.send_task("invalid_delay").get(timeout=60)


def test_the_log_reports_that_a_task_rescheduled_its_job(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS)
    job = harness.app.send_task("later")
    job.get(timeout=60)
    line = worker.wait_for_line("Job rescheduled", job_id=job.id)[0]
    assert line["delay"] == 0.3
    assert worker.warnings() == []
