"""Jobs whose task is not registered in the worker."""

from __future__ import annotations

import pytest

from bulltask.errors import ResultTimeoutError
from tests.support.machine_load import scale_to_load
from tests.support.streams import server_ms
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

NEW = """
@app.task(bind=True, name="new")
def new(self, x):
    record("start", job=self.request.id)
    return x * 2
"""


def test_a_job_of_an_unknown_task_is_rescheduled_until_a_worker_has_the_task(
    harness: WorkerHarness,
) -> None:
    old = harness.worker(children=1)
    job = harness.app.send_task("new", kwargs={"x": 21})
    delays_ms = []
    for number in (1, 2):
        entry = harness.wait_for_event("delayed", job, number)
        delays_ms.append(int(entry["delay"]) - entry.ms)
    lines = old.wait_for_line("Job incompatible", count=2)
    with pytest.raises(ResultTimeoutError, match="delayed, because no worker could run it: task 'new' is not "):
        job.get(timeout=0.5)
    assert old.stop() == 0
    assert harness.field(job, "atm") in {None, "0"}, "the attempt does not count"
    assert harness.field(job, "failedReason") == "task 'new' is not registered in app 'tested'"

    due_ms = int(harness.wait_for_event("delayed", job, 2)["delay"])
    harness.worker(NEW, children=1).wait_for_line("Child started")
    due_ms = max(due_ms, server_ms(harness.redis))
    assert job.get(timeout=60) == 42
    late_ms = harness.wait_for_start(job).ms - due_ms
    harness.report(delayed_by_ms=delays_ms, started_after_due_and_worker_ms=late_ms)
    assert [line["task"] for line in lines] == ["new", "new"]
    assert lines[0]["level"] == "warning"
    assert lines[0]["job_id"] == job.id
    assert 500 <= delays_ms[0] <= 1100
    assert 1500 <= delays_ms[1] <= 2100
    assert late_ms <= scale_to_load(1000)
    assert harness.field(job, "atm") == "1"
    assert harness.start_count(job) == 1


def test_jobs_of_known_tasks_run_while_jobs_of_unknown_tasks_are_rescheduled(harness: WorkerHarness) -> None:
    harness.worker(children=1)
    unknown = [harness.app.send_task("new", kwargs={"x": 1}) for _ in range(3)]
    known = harness.app.send_task("quick")
    assert known.get(timeout=60) is None
    for job in unknown:
        harness.wait_for_event("delayed", job)


def test_a_job_of_an_unknown_task_fails_without_a_timeout_for_incompatible_jobs(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings={"incompatible_timeout": 0})
    job = harness.app.send_task("new", kwargs={"x": 1})
    assert "'new'" in harness.wait_for_event("failed", job)["failedReason"]
