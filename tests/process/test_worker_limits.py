"""Limits on a job's starts and stalls, stalled checks, and the drain delay."""

from __future__ import annotations

import json
import os
import signal

import pytest

from bulltask import PermanentError
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

STARTED_TOO_OFTEN = "job started more than allowable limit"
STALLED_TOO_OFTEN = "job stalled more than allowable limit"
TASKS = """
from bulltask import errors

@app.task(name="fails", max_retries=10, default_retry_delay=0)
def fails():
    raise errors.TransientError("again")

@app.task(name="steps", bind=True)
def steps(self, times):
    record("start", job=self.request.id)
    if self.request.attempts_started <= times:
        self.move_to_wait()
    return self.request.attempts_started

def end(self, how):
    record("start", job=self.request.id)
    match how:
        case "released":
            self.move_to_wait()
        case "requeued":
            raise errors.Reject(requeue=True)
        case "rescheduled":
            self.move_to_delayed(0.001)
        case "rate-limited":
            self.rate_limit(0.001)
        case "no children":
            self.move_to_waiting_children()

@app.task(name="repeats", bind=True)
def repeats(self, how):
    end(self, how)

@app.task(name="arepeats", bind=True)
async def arepeats(self, how):
    end(self, how)

@app.task(name="advances", bind=True)
def advances(self):
    started = self.request.attempts_started
    if started == 3:
        self.move_to_delayed(0.1)
    if started < 6:
        self.move_to_wait()
    return started
"""
SHORT_INTERVALS = {"lock_duration": 1, "stalled_interval": 1}


# ---- max_started_attempts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_job_fails_when_it_has_started_max_started_attempts_times(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(
        TASKS, options=["--max-started-attempts", "2"], settings={"worker_start_method": method}, children=1
    )
    job = harness.app.send_task("steps", kwargs={"times": 2})
    with pytest.raises(PermanentError, match=STARTED_TOO_OFTEN):
        job.get(timeout=60)
    assert harness.start_count(job) == 2
    assert (harness.field(job, "ats"), harness.field(job, "atm")) == ("3", "1")
    assert harness.field(job, "failedReason") == STARTED_TOO_OFTEN
    assert worker.wait_for_line("Job failed", job_id=job.id)[0]["category"] == "permanent"
    assert worker.stop() == 0


def test_a_job_with_exactly_max_started_attempts_starts_completes(harness: WorkerHarness) -> None:
    harness.worker(TASKS, settings={"max_started_attempts": 2}, children=1)
    assert harness.app.send_task("steps", kwargs={"times": 1}).get(timeout=60) == 2


def test_retries_count_as_starts_and_remaining_retries_are_not_used(harness: WorkerHarness) -> None:
    harness.worker(TASKS, settings={"max_started_attempts": 3}, children=1)
    job = harness.app.send_task("fails", max_retries=10, backoff=0)
    with pytest.raises(PermanentError, match=STARTED_TOO_OFTEN):
        job.get(timeout=60)
    assert (harness.field(job, "ats"), harness.field(job, "atm")) == ("4", "4")
    traces = json.loads(harness.field(job, "stacktrace"))
    assert [STARTED_TOO_OFTEN in trace for trace in traces] == [False, False, False, True]


def test_a_job_that_releases_itself_again_and_again_fails_with_a_reason(harness: WorkerHarness) -> None:
    harness.worker(TASKS, settings={"max_releases": 3}, children=1)
    ways = ["released", "requeued", "rescheduled", "rate-limited", "no children"]
    jobs = [harness.app.send_task(task, (how,)) for task in ("repeats", "arepeats") for how in ways]
    for job in jobs:
        with pytest.raises(PermanentError, match=r"released 3 times in a row without progress \(max_releases\)"):
            job.get(timeout=60)
        assert harness.start_count(job) == 3
        assert harness.field(job, "bulltask:releases") == "0", "it may be retried"
    assert harness.app.send_task("advances").get(timeout=60) == 6, "a delay is progress"


def test_starts_count_separately_from_crashes(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1, settings={"max_started_attempts": 1, "max_crashes": 5})
    job = harness.hold()
    os.kill(int(harness.wait_for_start(job)["pid"]), signal.SIGKILL)
    worker.wait_for_line("Job recovered", job_id=job.id, crashes=1)
    with pytest.raises(PermanentError, match=STARTED_TOO_OFTEN):
        job.get(timeout=60)
    assert harness.start_count(job) == 1
    assert worker.logged("Crash limit reached") == []


@pytest.mark.parametrize("end", ["killed", "stopped", "suspended"])
def test_a_job_that_may_start_once_does_not_run_twice_when_its_worker_ends(harness: WorkerHarness, end: str) -> None:
    settings = {**SHORT_INTERVALS, "max_started_attempts": 1}
    first = harness.worker(children=1, settings=settings)
    job = harness.hold()
    processes = [first.pid, int(harness.wait_for_start(job)["pid"])]
    if end == "killed":
        kill(first)
    elif end == "stopped":
        first.send(signal.SIGQUIT)
        assert first.wait() == 0
    else:
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
    harness.worker(children=1, settings=settings)
    with pytest.raises(PermanentError, match=STARTED_TOO_OFTEN):
        job.get(timeout=60)
    if end == "suspended":
        for pid in reversed(processes):
            os.kill(pid, signal.SIGCONT)
        harness.open_gate()
        first.wait_for_line("Lock lost", job_id=job.id)
    assert harness.start_count(job) == 1
    with pytest.raises(PermanentError, match=STARTED_TOO_OFTEN):
        job.get(timeout=60)


# ---- max_stalled_count and the check --------------------------------------------------------------------------------


def stall(harness: WorkerHarness, job_id: str, count: int) -> None:
    """Let the job stall ``count`` times: kill a worker that runs it, and let another worker recover it."""
    for number in range(1, count + 1):
        killed = harness.worker(children=1, settings={**SHORT_INTERVALS, "skip_stalled_check": True})
        harness.journal.wait_for(number, what="start", job=job_id)
        kill(killed)
        checking = harness.worker(
            children=1, options=["--paused"], settings={**SHORT_INTERVALS, "max_stalled_count": 2}
        )
        harness.events.wait_for(number, event="stalled", jobId=job_id)
        kill(checking)


def kill(worker: Worker) -> None:
    worker.send(signal.SIGKILL)
    worker.wait()


def test_a_job_fails_when_it_stalls_more_than_max_stalled_count_times(harness: WorkerHarness) -> None:
    job = harness.hold()
    stall(harness, job.id, 2)
    assert harness.field(job, "stc") == "2"
    assert harness.field(job, "defa") is None, "two stalls are allowed"
    third = harness.worker(children=1, settings=SHORT_INTERVALS)
    harness.wait_for_start(job, 3)
    kill(third)
    harness.worker(children=1, settings={**SHORT_INTERVALS, "max_stalled_count": 2})
    with pytest.raises(PermanentError, match=STALLED_TOO_OFTEN):
        job.get(timeout=60)
    assert harness.start_count(job) == 3
    assert harness.field(job, "stc") == "3"


def test_a_worker_that_skips_the_stalled_check_does_not_recover_stalled_jobs(harness: WorkerHarness) -> None:
    killed = harness.worker(children=1, settings=SHORT_INTERVALS)
    job = harness.hold()
    harness.wait_for_start(job)
    kill(killed)
    harness.redis.delete(harness.keys.stalled_check)
    skipping = harness.worker(children=1, options=["--skip-stalled-check"], settings=SHORT_INTERVALS)
    for _ in range(3):  # three stalled intervals
        harness.app.send_task("quick", countdown=1).get(timeout=60)
    assert harness.redis.exists(harness.keys.stalled_check) == 0, "no worker has checked"
    assert harness.redis.lrange(harness.keys.active, 0, -1) == [job.id]
    harness.worker(children=1, options=["-Q", "default"], settings=SHORT_INTERVALS)
    harness.wait_for_start(job, 2)
    harness.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
    assert skipping.logged("Job stalled") == []
    assert skipping.stop() == 0


# ---- drain_delay ----------------------------------------------------------------------------------------------------


def test_a_job_without_a_marker_is_found_after_the_drain_delay(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings={"drain_delay": 0.5})
    harness.wait_until_idle(1)
    job = harness.app._build_job("quick", (), {}, {})
    with harness.redis.pipeline() as pipe:  # without a marker, as if it had been lost in a failover
        pipe.hset(harness.keys.job(job.id), mapping={"name": "quick", "data": "{}", "opts": "{}", "timestamp": "1"})
        pipe.lpush(harness.keys.wait, job.id)
        pipe.execute()
    assert harness.app.result(job.id, "default").get(timeout=60) is None


def test_a_worker_waits_for_the_drain_delay_on_an_empty_queue(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings={"drain_delay": 0.3})
    with harness.redis.monitor() as monitor:
        commands = (entry["command"] for entry in monitor.listen())
        waits = (command.split()[-1] for command in commands if command.startswith("BZPOPMIN"))
        assert [next(waits), next(waits)] == ["0.300", "0.300"]
