"""How often a job may be taken, how often it may stall, and who looks for stalled jobs."""

from __future__ import annotations

import json
import os
import signal

import pytest

from bulltask import PermanentError
from tests.support.stage import Stage
from tests.support.worker import Worker

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
    tell("start", job=self.request.id)
    if self.request.deliveries <= times:
        self.move_to_wait()
    return self.request.deliveries
"""
QUICK = {"lock_duration": 1, "stalled_interval": 1}


# ---- max_started_attempts -------------------------------------------------------------------------------------------


@METHODS
def test_a_job_that_was_taken_as_often_as_it_may_is_failed_before_it_runs_once_more(stage: Stage, method: str) -> None:
    worker = stage.worker(
        MORE, options=["--max-started-attempts", "2"], settings={"worker_start_method": method}, children=1
    )
    job = stage.app.send_task("steps", kwargs={"times": 2})
    with pytest.raises(PermanentError, match=TOO_OFTEN):
        job.get(timeout=60)
    assert stage.starts(job) == 2
    assert (stage.field(job, "ats"), stage.field(job, "atm")) == ("3", "1")
    assert stage.field(job, "failedReason") == TOO_OFTEN
    assert worker.wait_for_line("Job failed", job_id=job.id)[0]["category"] == "permanent"
    assert worker.stop() == 0


def test_a_job_that_needs_no_more_than_its_limit_is_not_concerned(stage: Stage) -> None:
    stage.worker(MORE, settings={"max_started_attempts": 2}, children=1)
    assert stage.app.send_task("steps", kwargs={"times": 1}).get(timeout=60) == 2


def test_retries_count_too_and_tries_that_are_left_are_not_used(stage: Stage) -> None:
    stage.worker(MORE, settings={"max_started_attempts": 3}, children=1)
    job = stage.app.send_task("fails", max_retries=10, backoff=0)
    with pytest.raises(PermanentError, match=TOO_OFTEN):
        job.get(timeout=60)
    assert (stage.field(job, "ats"), stage.field(job, "atm")) == ("4", "4")
    traces = json.loads(stage.field(job, "stacktrace"))
    assert [TOO_OFTEN in trace for trace in traces] == [False, False, False, True]


def test_dead_children_are_counted_apart_and_each_start_counts_for_both(stage: Stage) -> None:
    worker = stage.worker(children=1, settings={"max_started_attempts": 1, "max_crashes": 5})
    job = stage.hold()
    os.kill(int(stage.started(job)["pid"]), signal.SIGKILL)
    worker.wait_for_line("Job recovered", job_id=job.id, crashes=1)
    with pytest.raises(PermanentError, match=TOO_OFTEN):
        job.get(timeout=60)
    assert stage.starts(job) == 1
    assert worker.logged("Job crashed") == []


# ---- max_stalled_count and the check --------------------------------------------------------------------------------


def stall(stage: Stage, job_id: str, count: int) -> None:
    """A worker that takes the job is killed, ``count`` times, and each time somebody finds the job."""
    for number in range(1, count + 1):
        doomed = stage.worker(children=1, settings={**QUICK, "skip_stalled_check": True})
        stage.journal.wait_for(number, what="start", job=job_id)
        kill(doomed)
        finder = stage.worker(children=1, options=["--paused"], settings={**QUICK, "max_stalled_count": 2})
        stage.events.wait_for(number, event="stalled", jobId=job_id)
        kill(finder)


def kill(worker: Worker) -> None:
    worker.send(signal.SIGKILL)
    worker.wait()


def test_a_job_survives_as_many_stalls_as_max_stalled_count_says_and_not_one_more(stage: Stage) -> None:
    job = stage.hold()
    stall(stage, job.id, 2)
    assert stage.field(job, "stc") == "2"
    assert stage.field(job, "defa") is None, "two stalls are survived where two are allowed"
    stall_once_more = stage.worker(children=1, settings=QUICK)
    stage.started(job, 3)
    kill(stall_once_more)
    stage.worker(children=1, settings={**QUICK, "max_stalled_count": 2})
    with pytest.raises(PermanentError, match=STALLED):
        job.get(timeout=60)
    assert stage.starts(job) == 3
    assert stage.field(job, "stc") == "3"


@METHODS
def test_a_worker_that_skips_the_check_leaves_stalled_jobs_to_others(stage: Stage, method: str) -> None:
    doomed = stage.worker(children=1, settings=QUICK)
    job = stage.hold()
    stage.started(job)
    kill(doomed)
    stage.redis.delete(stage.keys.stalled_check)
    settings = {**QUICK, "worker_start_method": method}
    skipping = stage.worker(children=1, options=["--skip-stalled-check"], settings=settings)
    for _ in range(3):  # three intervals of a check that it would make
        stage.app.send_task("quick", countdown=1).get(timeout=60)
    assert stage.redis.exists(stage.keys.stalled_check) == 0, "nobody has looked"
    assert stage.redis.lrange(stage.keys.active, 0, -1) == [job.id]
    stage.worker(children=1, options=["-Q", "default"], settings=settings)
    stage.started(job, 2)
    stage.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
    assert skipping.logged("Job stalled") == []
    assert skipping.stop() == 0


# ---- drain_delay ----------------------------------------------------------------------------------------------------


def test_a_worker_that_was_not_told_of_a_job_looks_again_after_the_drain_delay(stage: Stage) -> None:
    stage.worker(children=1, settings={"drain_delay": 0.5})
    stage.wait_until_idle(1)
    job = stage.app.build_job("quick", (), {}, {})
    with stage.redis.pipeline() as pipe:  # without a marker: one that was lost, as in a failover
        pipe.hset(stage.keys.job(job.id), mapping={"name": "quick", "data": "{}", "opts": "{}", "timestamp": "1"})
        pipe.lpush(stage.keys.wait, job.id)
        pipe.execute()
    assert stage.app.result(job.id, "default").get(timeout=60) is None


def test_the_wait_on_an_empty_queue_is_the_drain_delay(stage: Stage) -> None:
    stage.worker(children=1, settings={"drain_delay": 0.3})
    with stage.redis.monitor() as seen:
        waits = (said["command"].split()[-1] for said in seen.listen() if said["command"].startswith("BZPOPMIN"))
        assert [next(waits), next(waits)] == ["0.300", "0.300"]
