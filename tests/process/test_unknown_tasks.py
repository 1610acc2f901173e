"""A job whose task nobody here knows."""

from __future__ import annotations

import pytest

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


def test_an_unknown_task_is_put_back_with_growing_delay_until_a_worker_that_knows_it_appears(
    harness: WorkerHarness,
) -> None:
    old = harness.worker(children=1)
    job = harness.app.send_task("new", kwargs={"x": 21})
    ahead_ms = []
    for number in (1, 2):
        entry = harness.wait_for_event("delayed", job, number)
        ahead_ms.append(int(entry["delay"]) - entry.ms)
    lines = old.wait_for_line("Unknown task", count=2)
    assert old.stop() == 0
    assert harness.field(job, "atm") in {None, "0"}, "no attempt was made"
    assert harness.field(job, "failedReason") is None

    due_ms = int(harness.wait_for_event("delayed", job, 2)["delay"])
    harness.worker(NEW, children=1).wait_for_line("Child started")
    due_ms = max(due_ms, server_ms(harness.redis))
    assert job.get(timeout=60) == 42
    late_ms = harness.wait_for_start(job).ms - due_ms
    harness.report(put_back_for_ms=ahead_ms, started_after_due_and_worker_ms=late_ms)
    assert [line["task"] for line in lines] == ["new", "new"]
    assert lines[0]["level"] == "warning"
    assert lines[0]["job_id"] == job.id
    assert 500 <= ahead_ms[0] <= 1100
    assert 1500 <= ahead_ms[1] <= 2100
    assert late_ms <= scale_to_load(1000)
    assert harness.field(job, "atm") == "1"
    assert harness.start_count(job) == 1


def test_known_tasks_of_the_same_queue_run_meanwhile(harness: WorkerHarness) -> None:
    harness.worker(children=1)
    unknown = [harness.app.send_task("new", kwargs={"x": 1}) for _ in range(3)]
    known = harness.app.send_task("quick")
    assert known.get(timeout=60) is None
    for job in unknown:
        harness.wait_for_event("delayed", job)


def test_with_the_policy_fail_an_unknown_task_fails_and_the_reason_names_it(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings={"task_unknown": "fail"})
    job = harness.app.send_task("new", kwargs={"x": 1})
    assert "'new'" in harness.wait_for_event("failed", job)["failedReason"]
