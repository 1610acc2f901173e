"""Async tasks that cancel asyncio tasks: themselves just before they end, other jobs, or bulltask's own."""

from __future__ import annotations

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio

from bulltask import Middleware, Retry

class Quiet(Middleware):
    async def abefore_run(self, request):
        pass

    async def aafter_run(self, request, result, error):
        await asyncio.sleep(0)
        record("after_run", job=request.id)

def later(seconds):
    asyncio.get_running_loop().call_later(seconds, asyncio.current_task().cancel)

def itself():
    asyncio.current_task().cancel()

async def absorbed():
    itself()
    try:
        await asyncio.sleep(1)
    except asyncio.CancelledError:
        itself()

async def all_tasks():
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()

async def soon():
    asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)

WAYS = {
    "itself": lambda: itself(),
    "soon": soon,
    "later": lambda: later(0.001),
    "twice": absorbed,
    "all tasks": all_tasks,
}

@app.task(bind=True, name="cancels", max_retries=3)
async def cancels(self, way, then="return"):
    record("start", job=self.request.id)
    if (waiting := WAYS[way]()) is not None:
        await waiting
    if then == "raise":
        raise ValueError(way)
    if then == "move" and self.request.retries == 0:
        raise self.retry(queue="other", countdown=0)
    return way

@app.task(bind=True, name="neighbour")
async def neighbour(self):
    record("start", job=self.request.id)
    for _ in range(50):
        await asyncio.sleep(0.01)
    return "undisturbed"
"""
WAYS = ("itself", "soon", "later", "twice", "all tasks")


@pytest.mark.parametrize("middleware", ["", "app.add_middleware(Quiet())"], ids=["plain", "with middleware"])
def test_what_a_job_leaves_cancelled_reaches_neither_its_outcome_nor_other_jobs(
    harness: WorkerHarness, middleware: str
) -> None:
    worker = harness.worker(TASKS + middleware, children=1, options=["-Q", "default,other"])
    neighbours = [harness.app.send_task("neighbour") for _ in range(5)]
    for neighbour in neighbours:
        harness.wait_for_start(neighbour)
    returned = {way: [harness.app.send_task("cancels", (way,)) for _ in range(8)] for way in WAYS}
    raised = {way: harness.app.send_task("cancels", (way, "raise"), max_retries=0) for way in WAYS}
    moved = {way: harness.app.send_task("cancels", (way, "move")) for way in WAYS}
    for way, jobs in returned.items():
        assert [job.get(timeout=30) for job in jobs] == [way] * 8
        assert [harness.start_count(job) for job in jobs] == [1] * 8
        with pytest.raises(ValueError, match=way):
            raised[way].get(timeout=30)
        assert moved[way].get(timeout=30) == way
    assert [job.get(timeout=30) for job in neighbours] == ["undisturbed"] * 5
    assert [harness.start_count(job) for job in neighbours] == [1] * 5
    assert not worker.logged("Child died")
    if middleware:
        assert len(harness.journal.all(what="after_run")) >= len(WAYS) * 11
    assert worker.stop() == 0
