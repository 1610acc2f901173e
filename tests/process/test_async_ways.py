"""Async jobs that end, cancel, leave tasks behind and block in twenty ways, beside plain ones."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

from bulltask import AsyncResult
from bulltask.testing.worker import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REPEATS: Final = int(os.environ.get("ASYNC_WAYS", "5"))
"""Jobs for each way, and as many plain ones. With 50, the test takes minutes (CONTRIBUTING.md)."""

TASKS = """
import asyncio
import sys
import time

class OwnInterrupt(BaseException):
    pass

def me():
    return asyncio.current_task()

def loop():
    return asyncio.get_running_loop()

async def fails(exc):
    raise exc

def is_of_bulltask(task):
    return not task.get_name().startswith("Task-")  # jobs cannot be protected from what happens to tasks they start

async def forever():
    await asyncio.sleep(600)

def raises(exc):
    raise exc

async def cancelled_in_cleanup():
    try:
        me().cancel()
        await asyncio.sleep(1)
    finally:
        me().cancel()

async def in_group(*errors):
    async with asyncio.TaskGroup() as group:
        for error in errors:
            group.create_task(fails(error))

async def timed_out():
    async with asyncio.timeout(0.01):
        await asyncio.sleep(1)

ENDS = {
    "returns": lambda: None,
    "cancels itself": lambda: me().cancel(),
    "cancels itself soon": lambda: loop().call_soon(me().cancel),
    "cancels itself later": lambda: loop().call_later(0.001, me().cancel),
    "cancels all jobs": lambda: [task.cancel() for task in asyncio.all_tasks() - {me()} if is_of_bulltask(task)],
    "stops the loop": lambda: loop().stop(),
    "exits in a task": lambda: loop().create_task(fails(SystemExit(3))),
    "interrupts in a callback": lambda: loop().call_soon(raises, KeyboardInterrupt()),
    "leaves a task": lambda: loop().create_task(forever()),
    "leaves a failing task": lambda: loop().create_task(fails(ValueError("left"))),
    "blocks": lambda: time.sleep(0.05),
}
FAILS = {
    "raises": lambda: fails(ValueError("raised")),
    "raises a group": lambda: in_group(ValueError(), KeyError()),
    "raises CancelledError": lambda: fails(asyncio.CancelledError()),
    "cancels itself and awaits": cancelled_in_cleanup,
    "exits": lambda: fails(SystemExit(3)),
    "interrupts": lambda: fails(KeyboardInterrupt()),
    "raises a BaseException": lambda: fails(OwnInterrupt()),
    "times out": timed_out,
    "exceeds its limit": forever,
}

@app.task(bind=True, name="way", max_retries=0)
async def way(self, how):
    record("start", job=self.request.id)
    await asyncio.sleep(0)
    if how in ENDS:
        ENDS[how]()
        return how
    await FAILS[how]()

@app.task(bind=True, name="plain", max_retries=0)
async def plain(self):
    record("start", job=self.request.id)
    await asyncio.sleep(0.01)
    return "undisturbed"
"""
ENDS: Final = (
    *("returns", "cancels itself", "cancels itself soon", "cancels itself later", "cancels all jobs"),
    *(
        "stops the loop",
        "exits in a task",
        "interrupts in a callback",
        "leaves a task",
        "leaves a failing task",
        "blocks",
    ),
)
FAILS: Final = (
    *("raises", "raises a group", "raises CancelledError", "cancels itself and awaits", "exits", "interrupts"),
    *("raises a BaseException", "times out", "exceeds its limit"),
)
NAMED: Final = {
    "cancels all jobs": "cancel",
    "stops the loop": "loop.stop()",
    "exits in a task": "SystemExit(3)",
    "interrupts in a callback": "KeyboardInterrupt()",
}


def test_no_way_to_end_disturbs_other_jobs_and_each_culprit_is_named(harness: WorkerHarness) -> None:
    ways = ENDS + FAILS
    assert len(ways) == 20
    worker = harness.worker(TASKS, children=2)
    jobs: dict[str, list[AsyncResult[Any]]] = {how: [] for how in ways}
    plain: list[AsyncResult[Any]] = []
    for _ in range(REPEATS):
        for how in ways:
            limit = 0.3 if how == "exceeds its limit" else None
            jobs[how].append(harness.app.send_task("way", (how,), max_retries=0, time_limit=limit))
            plain.append(harness.app.send_task("plain"))
    ended = [*plain, *(job for of_way in jobs.values() for job in of_way)]
    wait_until(lambda: all(job.ready() for job in ended), 60.0 + 4 * REPEATS, "the end of the jobs")
    assert [job.get(timeout=5) for job in plain] == ["undisturbed"] * len(plain)
    for how in ways:
        assert [str(job.state) for job in jobs[how]] == ["completed" if how in ENDS else "failed"] * REPEATS, how
    assert worker.stop() == 0
    starts = [entry["job"] for entry in harness.journal.all(what="start")]
    assert sorted(starts) == sorted(job.id for job in ended), "each job has started once"
    assert not worker.logged("Child died")
    assert not worker.logged("Child killed")
    problems = {line["job_id"]: line["problem"] for line in worker.logged("Event loop misused")}
    for how, problem in NAMED.items():
        assert [problem in problems.get(job.id, "") for job in jobs[how]] == [True] * REPEATS, how
    assert any("forever()" in problem for problem in problems.values())
