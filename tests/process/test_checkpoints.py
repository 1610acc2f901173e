"""Checkpointed tasks in real workers: kill -9, TERM, and the limits of a worker's jobs."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bulltask import AsyncResult
from bulltask.worker.slots import ExitCode
from tests.support.machine_load import scale_to_load
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio
import time

def after(cursor):
    return [number for number in range(100) if cursor is None or number > cursor][:30]


@app.task(bind=True, name="loop", checkpoint=True, checkpoint_interval=0.05)
def loop(self, count):
    record("begin", job=self.request.id, cursor=self.cursor or 0)
    for number in self.iterate(range(count)):
        record("item", job=self.request.id, number=number)
        time.sleep(0.005)
    return self.request.attempts_started


@app.task(bind=True, name="rarely", checkpoint=True, checkpoint_interval=600)
def rarely(self):
    for number in self.iterate(after, cursor=lambda number: number):
        record("item", job=self.request.id, number=number)
        time.sleep(0.01)
    return self.request.attempts_started


@app.task(bind=True, name="ararely", checkpoint=True, checkpoint_interval=600)
async def ararely(self):
    async for number in self.iterate(after, cursor=lambda number: number):
        record("item", job=self.request.id, number=number)
        await asyncio.sleep(0.01)
    return self.request.attempts_started
"""


def items_of(harness: WorkerHarness, job: AsyncResult[int]) -> list[int]:
    return [int(entry["number"]) for entry in harness.journal.all(what="item", job=job.id)]


def test_a_job_of_killed_children_continues_at_the_last_stored_cursor(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1, settings={"max_crashes": 2})  # which limits crashes without progress
    job = harness.app.send_task("loop", (200,))
    for count in (70, 140):
        pid = int(harness.journal.wait_for(count, what="item", job=job.id)[-1]["pid"])
        os.kill(pid, signal.SIGKILL)
        harness.journal.wait_for(2 if count == 70 else 3, what="begin", job=job.id)
    assert job.get(timeout=60) == 3

    items, begins = items_of(harness, job), harness.journal.all(what="begin", job=job.id)
    cursors = [int(begin["cursor"]) for begin in begins]
    harness.report(cursors=cursors, repeated=len(items) - 200)
    assert sorted(set(items)) == list(range(200))
    assert 0 == cursors[0] < cursors[1] < cursors[2]
    # Only the items after the stored cursor are repeated, so each attempt is a range.
    starts = [index for index in range(1, len(items)) if items[index] != items[index - 1] + 1]
    assert [items[index] for index in starts] == cursors[1:]


def test_term_ends_a_loop_between_two_items_and_another_worker_continues(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    jobs = [harness.app.send_task(name) for name in ("ararely", "rarely")]
    for job in jobs:
        harness.journal.wait_for(30, what="item", job=job.id)
    worker.send(signal.SIGTERM)
    began = time.monotonic()
    assert worker.wait() == ExitCode.OK
    took_s = time.monotonic() - began
    harness.report(exit_after_s=round(took_s, 3))
    assert took_s <= scale_to_load(1)
    released = worker.logged("Job released")
    assert {line["job_id"] for line in released} == {job.id for job in jobs}
    assert "stopping" in released[0]["reason"]
    assert [harness.field(job, "atm") for job in jobs] == [None, None]

    harness.worker(TASKS, children=1)
    for job in jobs:
        assert job.get(timeout=60) == 2
        assert items_of(harness, job) == list(range(100))
        assert harness.field(job, "atm") == "1"


def test_a_worker_that_finishes_its_last_jobs_does_not_interrupt_them(harness: WorkerHarness) -> None:
    settings = {"worker_max_tasks_per_child": 1, "shutdown_timeout": 60}
    worker = harness.worker(TASKS, children=1, options=["--max-jobs", "1"], settings=settings)
    job = harness.app.send_task("loop", (60,))
    assert worker.wait() == ExitCode.OK
    assert job.get(timeout=60) == 1
    assert items_of(harness, job) == list(range(60))
