"""Short jobs share round trips in real workers, and no job waits for another one."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.transport.scripts.move import CRASHES
from tests.support.worker import fixed_prefetch_count
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process
needs_prefetching = pytest.mark.skipif(
    os.environ.get("BULLTASK_TEST_PREFETCHING") == "off", reason="counts what prefetching saves, or how it ends"
)

TASKS = """
import ctypes
import os
import signal
import time

@app.task(name="short")
def short(number):
    record("short", number=number)
    return number

@app.task(name="nothing")
def nothing(number):
    return number

@app.task(name="holds_gil")
def holds_gil(seconds):
    record("holds_gil")
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))  # PyDLL keeps the GIL

@app.task(name="large")
def large(seconds):
    time.sleep(seconds)
    return "x" * 10_000  # no slot has room for it

@app.task(name="on_loop")
async def on_loop(number):
    record("on_loop", number=number)
    return number

@app.task(name="dies", bind=True)
def dies(self):
    if self.request.attempts_started == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@app.task(name="medium")
def medium(number):
    record("medium", number=number)
    time.sleep(0.004)
    return number

ran = []

@app.task(name="notes_order")
def notes_order(number, seconds):
    ran.append(number)
    time.sleep(seconds)

@app.task(name="order")
def order():
    return ran

@app.task(name="sleeps")
def sleeps(number):
    record("sleeps", number=number)
    time.sleep(0.001)
"""


def send(harness: WorkerHarness, name: str, count: int, first: int = 0) -> list[AsyncResult[int]]:
    return [harness.app.send_task(name, (number,)) for number in range(first, first + count)]


def releases(harness: WorkerHarness) -> int:
    """Return how many times a job was moved from active back to the waiting list."""
    entries: Any = harness.redis.xrange(harness.keys.events)
    return sum(fields["event"] == "waiting" and fields.get("prev") == "active" for _, fields in entries)


@needs_prefetching
def test_short_jobs_that_are_acquired_together_share_round_trips(harness: WorkerHarness) -> None:
    jobs = send(harness, "nothing", 1_000)
    reads = {}
    for prefetch in (0, 32):
        before = int(harness.redis.info("stats")["total_reads_processed"])
        worker = harness.worker(TASKS, children=1, settings={"worker_prefetch": prefetch})
        assert [job.get(timeout=60) for job in jobs] == list(range(1_000))
        worker.send(signal.SIGTERM)
        worker.wait()
        reads[prefetch] = int(harness.redis.info("stats")["total_reads_processed"]) - before
        jobs = send(harness, "nothing", 1_000)
    harness.report(reads=reads)
    assert reads[32] < 0.7 * reads[0]


@needs_prefetching
def test_a_job_of_some_milliseconds_is_acquired_while_the_one_before_it_runs(harness: WorkerHarness) -> None:
    jobs = send(harness, "medium", 200)
    harness.worker(TASKS + fixed_prefetch_count(2), children=1)  # a busy machine might prefetch too few
    assert [job.get(timeout=60) for job in jobs] == list(range(200))
    times: Any = [harness.redis.hmget(harness.keys.job(job.id), "processedOn", "finishedOn") for job in jobs]
    ahead = [int(before[1]) - int(acquired[0]) for before, acquired in itertools.pairwise(times)]
    assert sum(ms >= 2 for ms in ahead) > 100


@needs_prefetching
@pytest.mark.every_topology
@pytest.mark.parametrize(("name", "prefetched"), [("short", 16), ("medium", 2)], ids=["short", "medium"])
def test_a_job_that_holds_the_gil_delays_no_job_that_its_child_has_prefetched(
    harness: WorkerHarness, name: str, prefetched: int
) -> None:
    jobs = send(harness, name, 300)
    long_job = harness.app.send_task("holds_gil", (20,))
    jobs += send(harness, name, 300, 300)
    worker = harness.worker(TASKS + fixed_prefetch_count(prefetched), children=2)  # a busy machine might prefetch none
    assert [job.get(timeout=15) for job in jobs] == list(range(600))
    assert long_job.state == "active"  # so the outcomes before it were written, and the jobs after it were released
    assert releases(harness) > 0
    assert {harness.field(job, "ats") for job in jobs} == {"1"}
    assert Counter(entry["number"] for entry in harness.journal.all(what=name)).most_common(1)[0][1] == 1
    worker.send(signal.SIGQUIT)  # without waiting for that job


def test_a_job_that_was_released_during_a_job_with_a_large_result_runs_once(harness: WorkerHarness) -> None:
    jobs = send(harness, "short", 300)
    large = harness.app.send_task("large", (0.3,))
    last = [harness.app.send_task("on_loop", (number,)) for number in range(5)]
    worker = harness.worker(TASKS, children=1, settings={"worker_prefetch": 16})
    assert [job.get(timeout=15) for job in jobs] == list(range(300))
    assert len(large.get(timeout=15)) == 10_000
    assert [job.get(timeout=15) for job in last] == list(range(5))
    assert sorted(entry["number"] for entry in harness.journal.all(what="on_loop")) == list("01234")
    assert {harness.field(job, "ats") for job in last} == {"1"}
    assert worker.warnings() == []


@pytest.mark.every_topology
def test_when_a_child_dies_only_the_running_job_runs_again(harness: WorkerHarness) -> None:
    jobs = send(harness, "short", 300)
    dead = harness.app.send_task("dies")
    jobs += send(harness, "short", 300, 300)
    harness.worker(TASKS, children=1, settings={"worker_prefetch": 16})
    assert [job.get(timeout=60) for job in [*jobs, dead]] == [*range(600), None]
    assert len(harness.journal.all(what="short")) == 600  # including those whose outcomes the child had not written
    assert {harness.field(job, "ats") for job in jobs} == {"1"}
    assert {harness.field(job, CRASHES) for job in jobs} == {None}
    assert harness.field(dead, CRASHES) == "1"


def test_a_child_that_stops_releases_the_jobs_that_it_has_prefetched(harness: WorkerHarness) -> None:
    jobs = send(harness, "sleeps", 3_000)
    worker = harness.worker(TASKS, children=1, settings={"worker_prefetch": 16})
    harness.journal.wait_for(100, what="sleeps")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    started = {int(entry["number"]) for entry in harness.journal.all(what="sleeps")}
    assert harness.redis.llen(harness.keys.active) == 0
    assert harness.redis.llen(harness.keys.wait) == 3_000 - len(started)
    assert {harness.field(jobs[number], "ats") for number in started} == {"1"}
    assert {harness.field(job, "ats") for number, job in enumerate(jobs) if number not in started} <= {None, "0"}


@pytest.mark.parametrize("prefetch", [0, 16])
def test_priorities_and_lifo_apply_to_prefetched_jobs(harness: WorkerHarness, prefetch: int) -> None:
    send(harness, "short", 60)
    for number in range(60, 120):
        harness.app.send_task("short", (number,), priority=120 - number)
    for number in range(120, 150):
        harness.app.send_task("short", (number,), lifo=True)
    harness.worker(TASKS, children=1, settings={"worker_prefetch": prefetch})
    order = [int(entry["number"]) for entry in harness.journal.wait_for(150, what="short")]
    assert order == [*range(149, 119, -1), *range(60), *range(119, 59, -1)]


@needs_prefetching
@pytest.mark.parametrize("options", [{}, {"lifo": True}, {"priority": 7}, {"priority": 2**20}], ids=str)
def test_jobs_that_the_supervisor_has_released_keep_their_order(
    harness: WorkerHarness, options: dict[str, Any]
) -> None:
    """A job of 60 ms follows short ones, and short ones follow it: the supervisor releases those that wait for it."""
    numbers = range(200)
    for number in reversed(numbers) if "lifo" in options else numbers:
        seconds = 0.06 if number in {80, 140} else 0
        job_id = f"job-{999 - number}"  # the ids sort the other way round, because Redis sorts equal scores by them
        harness.app.send_task("notes_order", (number, seconds), job_id=job_id, **options)
    last = harness.app.send_task("order", priority=2_000_000)
    harness.worker(TASKS + fixed_prefetch_count(32), children=1)
    assert last.get(timeout=60) == list(numbers)
    assert releases(harness) > 10
