"""A child that cannot do anything keeps its job: the supervisor renews the lock."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.testing.wait import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

LOCK_S = 1
SHORT_LOCK = {"lock_duration": LOCK_S, "stalled_interval": 1}
GIL = """
import ctypes

@app.task(bind=True, name="c_call")
def c_call(self, micros):
    record("start", job=self.request.id)
    ctypes.PyDLL(None).usleep(micros)  # unlike CDLL it keeps the GIL during the call: no thread of this process runs
"""
NO_HEARTBEAT = """
from bulltask.worker.supervisor.heartbeat import Heartbeat

Heartbeat.tick = lambda *_: None
"""


@dataclass(frozen=True)
class Observed:
    """What became of a job: how often it started and completed, how often its lock was looked for and missed."""

    starts: int
    completed: int
    stalled: int
    samples: int
    without_lock: int


def watch(harness: WorkerHarness, job: AsyncResult[Any], until_end_of: AsyncResult[Any]) -> Observed:
    """Look for the lock of ``job`` every 10 ms until a job ends, itself or another."""
    samples = missing = 0

    def sample() -> bool:
        nonlocal samples, missing
        # In one step: a job that completes between two questions has no lock, and rightly so.
        with harness.redis.pipeline(transaction=True) as asked:
            asked.exists(harness.keys.lock(job.id))
            asked.hexists(harness.keys.job(job.id), "finishedOn")
            asked.hexists(harness.keys.job(until_end_of.id), "finishedOn")
            locked, finished, done = asked.execute()
        samples += not finished
        missing += not (locked or finished)
        return bool(done)

    wait_until(sample, 60, "the end of the job")
    return Observed(
        starts=harness.start_count(job),
        completed=len(harness.events.all(event="completed", jobId=job.id)),
        stalled=len(harness.events.all(event="stalled")),
        samples=samples,
        without_lock=missing,
    )


def hold_the_gil(harness: WorkerHarness, source: str) -> Observed:
    """Run a job that holds the GIL for three times the lock's duration, with a second child that is free."""
    harness.worker(source, children=2, settings=SHORT_LOCK)
    job = harness.app.send_task("c_call", kwargs={"micros": 3 * LOCK_S * 1_000_000})
    harness.wait_for_start(job)
    observed = watch(harness, job, job)
    harness.report(**asdict(observed))
    return observed


def test_a_child_in_a_c_call_that_holds_the_gil_keeps_its_lock_three_times_as_long_as_that_lasts(
    harness: WorkerHarness,
) -> None:
    observed = hold_the_gil(harness, GIL)
    assert observed.samples > 100
    assert (observed.starts, observed.completed, observed.stalled, observed.without_lock) == (1, 1, 0, 0)


def test_a_child_that_is_stopped_for_four_times_the_lock_keeps_it(harness: WorkerHarness) -> None:
    harness.worker(children=2, settings=SHORT_LOCK)
    job = harness.hold()
    child = int(harness.wait_for_start(job)["pid"])
    os.kill(child, signal.SIGSTOP)
    harness.open_gate("gate", 2)
    # Runs on the other child when the first has been stopped for four locks.
    later = harness.app.send_task("quick", countdown=4 * LOCK_S)
    stopped = watch(harness, job, later)
    os.kill(child, signal.SIGCONT)
    after = watch(harness, job, job)
    harness.report(samples=stopped.samples + after.samples, without_lock=stopped.without_lock + after.without_lock)

    assert stopped.samples > 100
    assert (stopped.starts, stopped.completed, stopped.stalled, stopped.without_lock) == (1, 0, 0, 0)
    assert (after.starts, after.completed, after.stalled, after.without_lock) == (1, 1, 0, 0)


def test_a_whole_worker_that_is_stopped_for_four_times_the_lock_does_not_complete_what_another_has_taken(
    harness: WorkerHarness,
) -> None:
    stopped = harness.worker(children=1, settings=SHORT_LOCK)
    job = harness.hold()
    everybody = [stopped.pid, int(harness.wait_for_start(job)["pid"])]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    other = harness.worker(children=1, settings=SHORT_LOCK)
    harness.wait_for_start(job, 2)
    harness.open_gate("gate", 2)
    harness.wait_for_event("completed", job)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    stopped.wait_for_line("Lock lost", job_id=job.id)
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert (stopped.stop(), other.stop()) == (0, 0)
    complaints = sorted(line["event"] for line in stopped.warnings())
    harness.report(complaints=complaints)
    assert len(harness.events.all(event="completed", jobId=job.id)) == 1
    assert harness.start_count(job) == 2
    assert len(complaints) == len(set(complaints)), "each thing is said once"


FETCHING = """
import asyncio
import ctypes

@app.task(bind=True, name="neighbour")
async def neighbour(self, micros):
    await asyncio.sleep(0.1)  # its child asks for the next job meanwhile, and the answer takes longer than this
    ctypes.PyDLL(None).usleep(micros)
"""


def test_a_job_that_is_being_fetched_keeps_its_lock_while_an_async_neighbour_holds_the_gil(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    harness.worker(FETCHING, via=proxy, children=1, settings={**SHORT_LOCK, "worker_async_concurrency": 2})
    harness.wait_until_idle(1)
    proxy.latency(0.15)
    harness.app.send_task("neighbour", kwargs={"micros": 3 * LOCK_S * 1_000_000})
    job = harness.app.send_task("quick")
    harness.wait_for_event("active", job)
    proxy.pass_all()  # the answer comes, and nobody in the child can read it
    observed = watch(harness, job, job)
    harness.report(**asdict(observed))
    assert observed.samples > 100
    assert (observed.starts, observed.completed, observed.stalled, observed.without_lock) == (1, 1, 0, 0)


def test_without_the_heartbeat_the_same_job_loses_its_lock_and_runs_twice(harness: WorkerHarness) -> None:
    observed = hold_the_gil(harness, GIL + NO_HEARTBEAT)
    assert observed.without_lock > 0, "the test above cannot fail"
    assert observed.starts > 1
    assert observed.stalled > 0
