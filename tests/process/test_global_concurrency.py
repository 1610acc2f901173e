"""Global concurrency: when a job leaves the queue, the next one starts immediately in any worker."""

from __future__ import annotations

import pytest

from tests.support.machine_load import scale_to_load
from tests.support.streams import Entry
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

LONG_DRAIN_DELAY = {"drain_delay": 60}
"""Workers do not poll: they must be woken, or know that the global concurrency blocked a job."""

SHORT = """
import asyncio

@app.task(name="short")
async def short():
    await asyncio.sleep(0.1)
"""

OUTCOMES = ("return", "fail", "retry", "retry later", "delay", "release", "die")

LEAVING = """
import asyncio, os

def end(self, how):
    if self.request.attempts_started > 1:
        return
    match how:
        case "fail":
            raise ValueError
        case "retry" | "retry later":
            raise self.retry(countdown=0 if how == "retry" else 0.5)
        case "delay":
            self.move_to_delayed(delay=0.5)
        case "release":
            self.move_to_wait()
        case "die":
            os._exit(1)

@app.task(bind=True, name="sync")
def sync(self, how):
    end(self, how)

@app.task(bind=True, name="async")
async def on_the_loop(self, how):
    await asyncio.sleep(0)
    end(self, how)
"""


def idle_ms(harness: WorkerHarness) -> list[int]:
    """Return the milliseconds without an active job after each job that left."""
    left: Entry | None = None
    gaps = []
    for entry in harness.events.all():
        if entry["event"] == "active":
            gaps += [entry.ms - left.ms] if left else []
            left = None
        elif entry["event"] in {"completed", "failed", "delayed"} or entry.fields.get("prev") == "active":
            left = entry
    return gaps


@pytest.mark.parametrize("workers", [1, 2])
def test_async_jobs_run_without_gaps_with_a_global_concurrency_of_one(harness: WorkerHarness, workers: int) -> None:
    harness.app.queue("default").set_global_concurrency(1)
    for _ in range(workers):
        harness.worker(SHORT, children=2, settings=LONG_DRAIN_DELAY)
    harness.wait_until_idle(2 * workers)
    jobs = [harness.app.send_task("short") for _ in range(5)]
    for job in jobs:
        job.get(timeout=60)
    gaps = idle_ms(harness)
    harness.report(idle_ms=gaps)
    assert sum(gaps) <= scale_to_load(500)


def test_the_next_job_starts_within_a_second_after_every_outcome(harness: WorkerHarness) -> None:
    harness.app.queue("default").set_global_concurrency(1)
    for _ in range(2):
        harness.worker(LEAVING, children=2, settings=LONG_DRAIN_DELAY)
    harness.wait_until_idle(4)
    jobs = [harness.app.send_task(name, kwargs={"how": how}) for how in OUTCOMES for name in ("async", "sync")]
    last = [harness.app.send_task("async", kwargs={"how": "return"}) for _ in range(2)]
    for job in [*jobs, *last]:
        harness.events.wait_for(event="failed" if job in jobs[2:4] else "completed", jobId=job.id)
    gaps = idle_ms(harness)
    harness.report(idle_ms=gaps)
    assert max(gaps) <= scale_to_load(1000)
