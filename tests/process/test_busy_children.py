"""A child that is stopped or blocked keeps its job: the supervisor renews the lock."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.testing.worker import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

LOCK_S = 1
SHORT_LOCK = {"lock_duration": LOCK_S, "stalled_interval": 1}
GIL = """
import ctypes

@app.task(bind=True, name="c_call")
def c_call(self, micros):
    record("start", job=self.request.id)
    ctypes.PyDLL(None).usleep(micros)  # unlike CDLL, PyDLL keeps the GIL during the call, so no other thread runs
"""
NO_HEARTBEAT = """
from bulltask.worker.locks import Heartbeat

Heartbeat.tick = lambda *_: None
"""


@dataclass(frozen=True)
class Observed:
    """Counts of a job's starts and outcomes, and of the checks of its lock."""

    starts: int
    completed: int
    stalled: int
    samples: int
    without_lock: int


def watch(harness: WorkerHarness, job: AsyncResult[Any], until_end_of: AsyncResult[Any]) -> Observed:
    """Check the lock of ``job`` every 10 ms until ``until_end_of`` finishes."""
    samples = missing = 0

    def sample() -> bool:
        nonlocal samples, missing
        # In one transaction: a job that completes between two commands has no lock.
        with harness.redis.pipeline(transaction=True) as pipe:
            pipe.exists(harness.keys.lock(job.id))
            pipe.hexists(harness.keys.job(job.id), "finishedOn")
            pipe.hexists(harness.keys.job(until_end_of.id), "finishedOn")
            locked, finished, done = pipe.execute()
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
    """Run a job that holds the GIL for three lock durations, while a second child is idle."""
    harness.worker(source, children=2, settings=SHORT_LOCK)
    job = harness.app.send_task("c_call", kwargs={"micros": 3 * LOCK_S * 1_000_000})
    harness.wait_for_start(job)
    observed = watch(harness, job, job)
    harness.report(**asdict(observed))
    return observed


def test_a_job_that_holds_the_gil_for_three_lock_durations_keeps_its_lock(
    harness: WorkerHarness,
) -> None:
    observed = hold_the_gil(harness, GIL)
    assert observed.samples > 100
    assert (observed.starts, observed.completed, observed.stalled, observed.without_lock) == (1, 1, 0, 0)


def test_a_job_whose_child_is_stopped_for_four_lock_durations_keeps_its_lock(harness: WorkerHarness) -> None:
    harness.worker(children=2, settings=SHORT_LOCK)
    job = harness.hold()
    child = int(harness.wait_for_start(job)["pid"])
    os.kill(child, signal.SIGSTOP)
    harness.open_gate("gate", 2)
    # Runs on the other child when the first has been stopped for four lock durations.
    later = harness.app.send_task("quick", countdown=4 * LOCK_S)
    stopped = watch(harness, job, later)
    os.kill(child, signal.SIGCONT)
    after = watch(harness, job, job)
    harness.report(samples=stopped.samples + after.samples, without_lock=stopped.without_lock + after.without_lock)

    assert stopped.samples > 100
    assert (stopped.starts, stopped.completed, stopped.stalled, stopped.without_lock) == (1, 0, 0, 0)
    assert (after.starts, after.completed, after.stalled, after.without_lock) == (1, 1, 0, 0)


def test_a_worker_stopped_for_four_lock_durations_does_not_complete_a_recovered_job(
    harness: WorkerHarness,
) -> None:
    stopped = harness.worker(children=1, settings=SHORT_LOCK)
    job = harness.hold()
    stopped_pids = [stopped.pid, int(harness.wait_for_start(job)["pid"])]
    for pid in stopped_pids:
        os.kill(pid, signal.SIGSTOP)
    other = harness.worker(children=1, settings=SHORT_LOCK)
    harness.wait_for_start(job, 2)
    harness.open_gate("gate", 2)
    harness.wait_for_event("completed", job)
    for pid in stopped_pids:
        os.kill(pid, signal.SIGCONT)
    stopped.wait_for_line("Lock lost", job_id=job.id)
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert (stopped.stop(), other.stop()) == (0, 0)
    warnings = sorted(line["event"] for line in stopped.warnings())
    harness.report(warnings=warnings)
    assert len(harness.events.all(event="completed", jobId=job.id)) == 1
    assert harness.start_count(job) == 2
    assert len(warnings) == len(set(warnings)), "each warning is logged once"


FETCHING = """
import asyncio
import ctypes

@app.task(bind=True, name="neighbor")
async def neighbor(self, micros):
    await asyncio.sleep(0.1)  # its child fetches the next job meanwhile, and the reply takes longer than this
    ctypes.PyDLL(None).usleep(micros)
"""


def test_a_job_that_is_being_fetched_keeps_its_lock_while_an_async_job_holds_the_gil(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    harness.worker(FETCHING, via=proxy, children=1, settings={**SHORT_LOCK, "worker_async_concurrency": 2})
    harness.wait_until_idle(1)
    proxy.latency(0.15)
    harness.app.send_task("neighbor", kwargs={"micros": 3 * LOCK_S * 1_000_000})
    job = harness.app.send_task("quick")
    harness.wait_for_event("active", job)
    proxy.pass_all()  # the reply arrives, but no thread of the child can read it
    observed = watch(harness, job, job)
    harness.report(**asdict(observed))
    assert observed.samples > 100
    assert (observed.starts, observed.completed, observed.stalled, observed.without_lock) == (1, 1, 0, 0)


def test_without_the_heartbeat_a_job_that_holds_the_gil_loses_its_lock(harness: WorkerHarness) -> None:
    observed = hold_the_gil(harness, GIL + NO_HEARTBEAT)
    assert observed.without_lock > 0, "otherwise, the tests with the heartbeat could not fail"
    assert observed.starts > 1
    assert observed.stalled > 0
