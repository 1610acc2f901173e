"""A task stops the event loop that it shares with the other async tasks of its child."""

from __future__ import annotations

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

STOPS_THE_LOOP = """
import asyncio, sys

async def leave():
    sys.exit(3)

def interrupt():
    raise KeyboardInterrupt

def stop_and_close(loop):
    loop.run_forever = loop.close  # when bulltask runs it again
    asyncio.BaseEventLoop.stop(loop)

WAYS = {
    "stop": lambda loop: loop.stop(),
    "stop later": lambda loop: loop.call_soon(loop.stop),
    "an exit in another asyncio task": lambda loop: loop.create_task(leave()),
    "an interrupt in a callback": lambda loop: loop.call_soon(interrupt),
}

@app.task(bind=True, name="end")
async def end(self):
    if self.request.attempts_started == 1:
        stop_and_close(asyncio.get_running_loop())
        await asyncio.sleep(60)

@app.task(bind=True, name="misuse")
async def misuse(self, how):
    WAYS[how](asyncio.get_running_loop())
    for _ in range(3):
        await asyncio.sleep(0.01)
    return self.request.attempts_started

@app.task(bind=True, name="other")
async def other(self):
    record("start", job=self.request.id)
    if self.request.attempts_started == 1:
        await asyncio.sleep(60)
"""


def test_a_child_whose_event_loop_was_closed_is_replaced_and_its_jobs_run_again(harness: WorkerHarness) -> None:
    worker = harness.worker(STOPS_THE_LOOP, children=1)
    other = harness.app.send_task("other")
    child = int(harness.wait_for_start(other)["pid"])
    ending = harness.app.send_task("end")
    ending.get(timeout=20)
    other.get(timeout=20)
    (line,) = worker.logged("Event loop stopped")
    assert (line["pid"], line["jobs"]) == (child, [other.id, ending.id])
    worker.wait_for_line("Child died", pid=child)
    assert worker.stop() == 0


def test_a_job_cannot_stop_the_event_loop_and_the_log_names_it(harness: WorkerHarness) -> None:
    worker = harness.worker(STOPS_THE_LOOP, children=1)
    other = harness.app.send_task("other")
    harness.wait_for_start(other)
    problems = {
        "stop": ("loop.stop()", "in <lambda>"),
        "stop later": ("loop.stop()", ""),
        "an exit in another asyncio task": ("SystemExit(3)", "in leave"),
        "an interrupt in a callback": ("KeyboardInterrupt()", "in interrupt"),
    }
    for how, (problem, where) in problems.items():
        job = harness.app.send_task("misuse", (how,))
        assert job.get(timeout=20) == 1, "it has run once"
        (line,) = worker.wait_for_line("Event loop misused", job_id=job.id)
        assert (problem in line["problem"], where in line["where"]) == (True, True), line
        assert line["task"] == "misuse"
    assert harness.start_count(other) == 1
    assert not worker.logged("Child died")
    other.revoke(terminate=True)
    assert worker.stop() == 0


LEAVES_TASKS = """
import asyncio

async def cleans_up():
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.01)
        record("cleaned up")

async def stubborn():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            record("ignored")

@app.task(name="leave_tasks")
async def leave_tasks(kinds):
    for kind in kinds:
        asyncio.create_task({"cleans_up": cleans_up, "stubborn": stubborn}[kind]())
    await asyncio.sleep(0)
"""


def test_asyncio_tasks_that_a_job_leaves_running_are_cancelled_at_the_end_and_the_log_names_the_job(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(LEAVES_TASKS, children=1)
    tidy = harness.app.send_task("leave_tasks", (["cleans_up"] * 3,))
    tidy.get(timeout=20)
    other = harness.app.send_task("leave_tasks", (["stubborn"],))
    other.get(timeout=20)
    assert worker.stop() == 0
    assert len(harness.journal.all(what="cleaned up")) == 3
    lines = {line["job_id"]: line["problem"] for line in worker.logged("Event loop misused")}
    assert lines.keys() == {tidy.id, other.id}
    assert "3 asyncio tasks" in lines[tidy.id]
    assert "cleans_up()" in lines[tidy.id]
    assert "1 of them did not end" in lines[other.id]
