"""An async task blocks the event loop of its child: it is named and blamed, and the other jobs are not."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask.errors import EventLoopBlockedError
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio
import time

from bulltask.worker import limits as canceller

canceller.GRACE_MS = 1_000

@app.task(bind=True, name="innocent")
async def innocent(self):
    record("start", job=self.request.id)
    for _ in range(3):
        await asyncio.sleep(0.1)
    return "undisturbed"

@app.task(bind=True, name="blocks")
async def blocks(self, seconds, where="task"):
    record("start", job=self.request.id)
    await asyncio.sleep(0.05)
    record("blocking")
    if where == "task":
        time.sleep(seconds)  # the culprit
    elif where == "callback":
        asyncio.get_running_loop().call_soon(time.sleep, seconds)
        await asyncio.sleep(0.01)
    else:
        asyncio.create_task(block_later(seconds))

async def block_later(seconds):
    await asyncio.sleep(0.05)
    time.sleep(seconds)

@app.task(bind=True, name="trivial")
async def trivial(self):
    record("trivial")
"""
LIMITS: tuple[dict[str, Any], ...] = (
    {"time_limit": 1.0},
    {"soft_time_limit": 1.0},
    {"time_limit": 1.0, "soft_time_limit": 0.8},
)


@pytest.mark.parametrize("where", ["task", "callback", "left task"])
def test_jobs_get_the_time_back_that_another_job_has_blocked_and_the_log_names_it(
    harness: WorkerHarness, where: str
) -> None:
    worker = harness.worker(TASKS.replace("GRACE_MS = 1_000", "GRACE_MS = 60_000"), children=1)
    blocker = harness.app.send_task("blocks", (1.5, where))
    harness.wait_for_start(blocker)
    innocents = [harness.app.send_task("innocent", max_retries=0, **limits) for limits in LIMITS]
    for job in innocents:
        assert job.get(timeout=20) == "undisturbed"
        assert harness.start_count(job) == 1
    blocker.get(timeout=20)
    (line,) = worker.logged("Event loop misused")
    assert line["job_id"] == blocker.id
    assert "blocks the event loop" in line["problem"]
    if where != "callback":  # time.sleep() itself has no line
        assert "tested.py:" in line["where"]
        assert line["where"].endswith("in blocks" if where == "task" else "in block_later")
    assert not worker.logged("Child killed")
    assert worker.stop() == 0


def test_the_job_that_blocks_the_loop_fails_and_those_that_could_not_be_cancelled_run_again(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(TASKS, children=1)
    innocents = [harness.app.send_task("innocent", max_retries=0, time_limit=0.5) for _ in range(3)]
    for job in innocents:
        harness.wait_for_start(job)
    blocker = harness.app.send_task("blocks", (60,))
    with pytest.raises(EventLoopBlockedError, match="task blocks blocked the event loop of its child for"):
        blocker.get(timeout=30)
    for job in innocents:
        assert job.get(timeout=30) == "undisturbed"
        assert harness.field(job, "atm") == "1"
    assert harness.start_count(blocker) == 1
    assert len(worker.wait_for_line("Child killed", reason="blocked_loop")) == 1
    assert worker.stop() == 0


def test_a_blocked_child_leaves_waiting_jobs_to_the_others(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=2)
    blocker = harness.app.send_task("blocks", (20,))
    harness.wait_for_start(blocker)
    harness.journal.wait_for(1, what="blocking")
    for _ in range(20):
        for job in [harness.app.send_task("trivial") for _ in range(10)]:
            job.get(timeout=5)
    blocked_pid = harness.wait_for_start(blocker)["pid"]
    assert not [entry for entry in harness.journal.all(what="trivial") if entry["pid"] == blocked_pid]
    worker.close()
