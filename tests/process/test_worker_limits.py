"""How often a job may be taken, how often it may stall, and who looks for stalled jobs."""

from __future__ import annotations

import json
import os
import signal

import pytest

from bulltask import PermanentError
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
TOO_OFTEN = "job started more than allowable limit"
STALLED = "job stalled more than allowable limit"
MORE = """
from bulltask import errors

@app.task(name="fails", max_retries=10, default_retry_delay=0)
def fails():
    raise errors.TransientError("again")

@app.task(name="steps", bind=True)
def steps(self, times):
    record("start", job=self.request.id)
    if self.request.deliveries <= times:
        self.move_to_wait()
    return self.request.deliveries
"""
QUICK = {"lock_duration": 1, "stalled_interval": 1}


# ---- max_started_attempts -------------------------------------------------------------------------------------------


@METHODS
def test_a_job_that_was_taken_as_often_as_it_may_is_failed_before_it_runs_once_more(
    harness: WorkerHarness, method: str
) -> None:
    worker = harness.worker(
        MORE, options=["--max-started-attempts", "2"], settings={"worker_start_method": method}, children=1
    )
    job = harness.app.send_task("steps", kwargs={"times": 2})
    with pytest.raises(PermanentError, match=TOO_OFTEN):
        job.get(timeout=60)
    assert harness.start_count(job) == 2
    assert (harness.field(job, "ats"), harness.field(job, "atm")) == ("3", "1")
    assert harness.field(job, "failedReason") == TOO_OFTEN
    assert worker.wait_for_line("Job failed", job_id=job.id)[0]["category"] == "permanent"
    assert worker.stop() == 0


def test_a_job_that_needs_no_more_than_its_limit_is_not_concerned(harness: WorkerHarness) -> None:
    harness.worker(MORE, settings={"max_started_attempts": 2}, children=1)
    assert harness.app.send_task("steps", kwargs={"times": 1}).get(timeout=60) == 2


def test_retries_count_too_and_tries_that_are_left_are_not_used(harness: WorkerHarness) -> None:
    harness.worker(MORE, settings={"max_started_attempts": 3}, children=1)
    job = harness.app.send_task("fails", max_retries=10, backoff=0)
    with pytest.raises(PermanentError, match=TOO_OFTEN):
        job.get(timeout=60)
    assert (harness.field(job, "ats"), harness.field(job, "atm")) == ("4", "4")
    traces = json.loads(harness.field(job, "stacktrace"))
    assert [TOO_OFTEN in trace for trace in traces] == [False, False, False, True]


def test_dead_children_are_counted_apart_and_each_start_counts_for_both(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1, settings={"max_started_attempts": 1, "max_crashes": 5})
    job = harness.hold()
    os.kill(int(harness.wait_for_start(job)["pid"]), signal.SIGKILL)
    worker.wait_for_line("Job recovered", job_id=job.id, crashes=1)
    with pytest.raises(PermanentError, match=TOO_OFTEN):
        job.get(timeout=60)
    assert harness.start_count(job) == 1
    assert worker.logged("Job crashed") == []


# ---- max_stalled_count and the check --------------------------------------------------------------------------------


def stall(harness: WorkerHarness, job_id: str, count: int) -> None:
    """A worker that takes the job is killed, ``count`` times, and each time somebody finds the job."""
    for number in range(1, count + 1):
        doomed = harness.worker(children=1, settings={**QUICK, "skip_stalled_check": True})
        harness.journal.wait_for(number, what="start", job=job_id)
        kill(doomed)
        finder = harness.worker(children=1, options=["--paused"], settings={**QUICK, "max_stalled_count": 2})
        harness.events.wait_for(number, event="stalled", jobId=job_id)
        kill(finder)


def kill(worker: Worker) -> None:
    worker.send(signal.SIGKILL)
    worker.wait()


def test_a_job_survives_as_many_stalls_as_max_stalled_count_says_and_not_one_more(harness: WorkerHarness) -> None:
    job = harness.hold()
    stall(harness, job.id, 2)
    assert harness.field(job, "stc") == "2"
    assert harness.field(job, "defa") is None, "two stalls are survived where two are allowed"
    stall_once_more = harness.worker(children=1, settings=QUICK)
    harness.wait_for_start(job, 3)
    kill(stall_once_more)
    harness.worker(children=1, settings={**QUICK, "max_stalled_count": 2})
    with pytest.raises(PermanentError, match=STALLED):
        job.get(timeout=60)
    assert harness.start_count(job) == 3
    assert harness.field(job, "stc") == "3"


@METHODS
def test_a_worker_that_skips_the_check_leaves_stalled_jobs_to_others(harness: WorkerHarness, method: str) -> None:
    doomed = harness.worker(children=1, settings=QUICK)
    job = harness.hold()
    harness.wait_for_start(job)
    kill(doomed)
    harness.redis.delete(harness.keys.stalled_check)
    settings = {**QUICK, "worker_start_method": method}
    skipping = harness.worker(children=1, options=["--skip-stalled-check"], settings=settings)
    for _ in range(3):  # three intervals of a check that it would make
        harness.app.send_task("quick", countdown=1).get(timeout=60)
    assert harness.redis.exists(harness.keys.stalled_check) == 0, "nobody has looked"
    assert harness.redis.lrange(harness.keys.active, 0, -1) == [job.id]
    harness.worker(children=1, options=["-Q", "default"], settings=settings)
    harness.wait_for_start(job, 2)
    harness.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
    assert skipping.logged("Job stalled") == []
    assert skipping.stop() == 0


# ---- drain_delay ----------------------------------------------------------------------------------------------------


def test_a_worker_that_was_not_told_of_a_job_looks_again_after_the_drain_delay(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings={"drain_delay": 0.5})
    harness.wait_until_idle(1)
    job = harness.app.build_job("quick", (), {}, {})
    with harness.redis.pipeline() as pipe:  # without a marker: one that was lost, as in a failover
        pipe.hset(harness.keys.job(job.id), mapping={"name": "quick", "data": "{}", "opts": "{}", "timestamp": "1"})
        pipe.lpush(harness.keys.wait, job.id)
        pipe.execute()
    assert harness.app.result(job.id, "default").get(timeout=60) is None


def test_the_wait_on_an_empty_queue_is_the_drain_delay(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings={"drain_delay": 0.3})
    with harness.redis.monitor() as seen:
        waits = (said["command"].split()[-1] for said in seen.listen() if said["command"].startswith("BZPOPMIN"))
        assert [next(waits), next(waits)] == ["0.300", "0.300"]
