"""Locks that ran out although their worker lives, as when Redis was away for long: nobody else has the jobs."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.queue.options import AddOptions
from tests.support.stage import Stage

pytestmark = pytest.mark.process

TASKS = """
import asyncio

from bulltask.errors import DelayJob, PermanentError, RateLimited, TransientError, WaitForChildren, WaitJob


def ended(task, how):
    if task.request.deliveries > 1:
        return how
    match how:
        case "fails":
            raise PermanentError("as told")
        case "is retried at once" | "is retried later":
            raise TransientError("as told")
        case "is delayed":
            raise DelayJob(0.01)
        case "goes back":
            raise WaitJob
        case "limits its queue":
            raise RateLimited(0.01)
        case "waits for children":
            quick.apply_async(parent=task.request, countdown=0.3)  # later than it waits
            raise WaitForChildren
    return how


@app.task(bind=True, name="sync")
def sync(self, how):
    tell("start", job=self.request.id)
    wait_at(self.request.id)
    return ended(self, how)


@app.task(bind=True, name="async")
async def async_(self, how):
    tell("start", job=self.request.id)
    await asyncio.to_thread(wait_at, self.request.id)
    return ended(self, how)
"""

RUNS = {
    "completes": 1,
    "fails": 1,
    "is retried at once": 2,
    "is retried later": 2,
    "is delayed": 2,
    "goes back": 2,
    "limits its queue": 2,
    "waits for children": 2,
}


@pytest.mark.parametrize("task", ["sync", "async"])
def test_every_outcome_is_written_although_its_lock_has_run_out_when_no_other_worker_has_the_job(
    stage: Stage, task: str
) -> None:
    worker = stage.worker(TASKS, children=1, settings={"lock_duration": 60, "stalled_interval": 600})
    for how, runs in RUNS.items():
        job = add(stage, task, how)
        stage.started(job)
        assert stage.redis.delete(stage.keys.lock(job.id)) == 1
        stage.open_gate(job.id, runs)
        stage.became("failed" if how == "fails" else "completed", job, timeout=20)
        assert stage.starts(job) == runs, how
    assert worker.logged("Lock lost") == []
    assert worker.stop() == 0


def add(stage: Stage, task: str, how: str) -> AsyncResult[Any]:
    options: AddOptions = {"attempts": 2}
    if how == "is retried later":
        options["backoff"] = 0.01
    return stage.app.result(stage.app.queue("default").add(task, {"how": how}, **options).id)
