"""Thousands of short attempts whose time limits are reached just as they end: each job finishes exactly once."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, Final

import pytest

from bulltask.testing.worker import wait_until
from bulltask.transport.scripts.move import CRASHES
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

TIMEOUT = 400.0

TASKS = """
import asyncio
import random
import time

from bulltask import SoftTimeLimitExceeded
from bulltask.worker.limits import Canceller
from bulltask.worker.limits import TimeLimitCheck

# The supervisor checks as often as it can, so that cancel requests arrive at any moment of an attempt or just after it.
TimeLimitCheck.interval_ms = Canceller.interval_ms = 1


def spin(ms):
    until = time.monotonic() + ms / 1000
    while time.monotonic() < until:
        pass


@app.task(name="spins")
def spins(ms):
    spin(ms)
    return ["x" * 100] * 20


@app.task(name="catches")
def catches(ms):
    try:
        spin(ms)
    except SoftTimeLimitExceeded:
        spin(1)
        return "caught"
    finally:
        spin(0.2)


@app.task(name="raises")
def raises(ms):
    try:
        spin(ms)
        raise ValueError("raised by the task")
    except ValueError:
        spin(0.2)
        raise


@app.task(name="naps")
async def naps(ms):
    await asyncio.sleep(ms / 1000)
    return "slept"
"""

PER_TASK: Final = int(os.environ.get("INTERRUPTS", "200"))
"""Jobs for each of the four tasks; CONTRIBUTING.md has a command for more."""


def test_every_job_interrupted_as_it_ends_finishes_exactly_once(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=2, settings={"loglevel": "warning", "worker_async_concurrency": 5})
    # Time limits from far below to far above the duration of an attempt.
    jobs = [
        harness.app.send_task(name, kwargs={"ms": 4}, soft_time_limit=(1 + number % 8) / 1000, max_retries=0)
        for number in range(PER_TASK)
        for name in ("spins", "catches", "raises", "naps")
    ]
    total = len(jobs)

    def all_finished() -> bool:
        return int(harness.redis.zcard(harness.keys.completed)) + int(harness.redis.zcard(harness.keys.failed)) == total

    wait_until(all_finished, TIMEOUT, "the outcomes of all jobs")
    assert worker.stop(60) == 0
    ids = {job.id for job in jobs}
    finished = [*harness.redis.zrange(harness.keys.completed, 0, -1), *harness.redis.zrange(harness.keys.failed, 0, -1)]
    assert Counter(finished) == dict.fromkeys(ids, 1)
    names = ("ats", "atm", "failedReason", CRASHES)
    fields: list[Any] = [harness.redis.hmget(harness.keys.job(job.id), *names) for job in jobs]
    assert {(started, made, crashes) for started, made, _, crashes in fields} == {("1", "1", None)}
    assert harness.redis.llen(harness.keys.active) == 0
    reasons: Counter[str] = Counter((reason or "completed").partition(" of ")[0] for _, _, reason, _ in fields)
    harness.report(**{name.replace(" ", "_"): count for name, count in reasons.items()})
    time_limits = {f"task {name} ran longer than its soft time limit" for name in ("spins", "raises", "naps")}
    # This task may be interrupted in its "finally" block, where it does not catch the exception.
    reasons.pop("task catches ran longer than its soft time limit", None)
    assert set(reasons) == {"completed", "raised by the task"} | time_limits, "both kinds occurred, and no other"
    events = {line["event"] for line in worker.warnings()}
    assert events <= {"Job failed"}, "no child died, no lock was lost, no job stalled"
