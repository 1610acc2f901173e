"""Attempts that are killed at the moment they end: each job finishes once, and other jobs do not use up an attempt."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask.testing.worker import wait_until
from bulltask.transport.scripts.move import CRASHES
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

TIMEOUT = 400.0

TASKS = """
import asyncio
import time

from bulltask.worker import child_pool, limits as canceller
from bulltask.worker.limits import TimeLimitCheck

TimeLimitCheck.interval_ms = canceller.Canceller.interval_ms = 1
canceller.GRACE_MS = 1
child_pool._MIN_LIFETIME_MS = 0  # a child that is killed soon after its start is replaced immediately


@app.task(name="spins")
def spins(ms):
    until = time.monotonic() + ms / 1000
    while time.monotonic() < until:
        pass
    return "x" * 1000


@app.task(name="naps")
async def naps(ms):
    await asyncio.sleep(ms / 1000)
    return "slept"


@app.task(bind=True, name="neighbor")
async def neighbor(self, ms):
    await asyncio.sleep(ms / 1000)
    return self.request.retries
"""

PER_TASK = 60


def test_a_job_whose_child_is_killed_as_it_ends_finishes_exactly_once(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(TASKS, children=2, settings={"loglevel": "warning", "worker_async_concurrency": 4})
    jobs = [
        harness.app.send_task(name, kwargs={"ms": 20}, time_limit=(17 + number % 6) / 1000, max_retries=0)
        for number in range(PER_TASK)
        for name in ("spins", "naps")
    ]
    neighbors = [harness.app.send_task("neighbor", kwargs={"ms": 5}) for _ in range(PER_TASK)]
    total = len(jobs) + len(neighbors)

    def all_finished() -> bool:
        return int(harness.redis.zcard(harness.keys.completed)) + int(harness.redis.zcard(harness.keys.failed)) == total

    wait_until(all_finished, TIMEOUT, "the outcomes of all jobs")
    assert [job.get(timeout=5) for job in neighbors] == [0] * PER_TASK, "none of their attempts was counted"
    names = ("atm", CRASHES)
    fields: list[Any] = [harness.redis.hmget(harness.keys.job(job.id), *names) for job in (*jobs, *neighbors)]
    assert {tuple(field) for field in fields} == {("1", None)}
    assert harness.redis.llen(harness.keys.active) == 0
    ends = [len(harness.events.all(event=event, jobId=job.id)) for job in jobs for event in ("completed", "failed")]
    assert {completed + failed for completed, failed in zip(ends[::2], ends[1::2], strict=True)} == {1}
    killed = len(worker.logged("Child killed"))
    harness.report(killed=killed, completed=sum(ends[::2]), failed=sum(ends[1::2]))
    assert killed > 5
    assert worker.stop(60) == 0
    assert {line["event"] for line in worker.warnings()} <= {"Job failed", "Child killed"}
