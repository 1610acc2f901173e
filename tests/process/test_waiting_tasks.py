"""Tasks that wait for the results of other jobs: they work, and the worker logs a warning."""

from __future__ import annotations

import pytest

from bulltask.testing.worker import wait_until
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
from bulltask import allow_join_result, group
from bulltask.result import AsyncResult


def held():
    return hold.delay("gate")


@app.task(name="waits")
def waits(timeout):
    return held().get(timeout=timeout)


@app.task(name="waits_for_group")
def waits_for_group(timeout):
    return group(hold.s("gate"), quick.s()).delay().join(timeout=timeout)


@app.task(name="says_so")
def says_so(timeout):
    with allow_join_result():
        first = held().get(timeout=timeout)
    return [first, held().wait(timeout=timeout, disable_sync_subtasks=False)]


@app.task(name="awaits")
async def awaits(timeout):
    return await (await hold.adelay("gate")).aget(timeout=timeout)


@app.task(name="reads")
def reads(job_id):
    return AsyncResult(job_id, app=app).get(timeout=60)
"""


def waits_of(worker: Worker) -> list[tuple[str, str]]:
    """Return the task and the text of each warning."""
    return [(line["task"], line["event"]) for line in worker.lines if "occupies a slot of its worker" in line["event"]]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_waits_for_another_job_causes_a_warning_once(harness: WorkerHarness, pool: str) -> None:
    worker = harness.worker(TASKS, children=2, settings={"worker_pool": pool})
    for count, name in enumerate(("waits", "waits_for_group"), start=1):
        job = harness.app.send_task(name, (60,))
        wait_until(lambda: len(waits_of(worker)) == count, 60.0, f"a warning about {name}")  # noqa: B023 - runs now
        harness.open_gate()
        assert "gate" in job.get(timeout=60)
    assert [task for task, _ in waits_of(worker)] == ["waits", "waits_for_group"]
    assert "disable_sync_subtasks=False" in waits_of(worker)[0][1]


def test_a_task_that_says_that_it_may_wait_or_awaits_causes_no_warning(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=2)
    jobs = [harness.app.send_task("says_so", (60,)), harness.app.send_task("awaits", (60,))]
    for number in range(1, 4):
        harness.journal.wait_for(number, what="start")
        harness.open_gate()
    assert [job.get(timeout=60) for job in jobs] == [["gate", "gate"], "gate"]
    assert harness.app.send_task("reads", (jobs[1].id,)).get(timeout=60) == "gate", "a finished job needs no wait"
    assert worker.stop() == 0
    assert waits_of(worker) == []


def test_a_task_that_waits_in_the_only_child_times_out_after_one_warning(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    harness.open_gate(times=2)
    jobs = [harness.app.send_task("waits", (0.1,), max_retries=0) for _ in range(2)]
    for job in jobs:
        assert "did not finish within 0.1 s" in str(job.get(timeout=60, propagate=False))
    assert worker.stop() == 0
    assert [task for task, _ in waits_of(worker)] == ["waits"]
