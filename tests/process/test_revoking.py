"""Revoking jobs that real workers run: the attempt is cancelled, and the job runs again only on a manual retry."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from bulltask import AsyncResult, TaskRevokedError
from bulltask.testing.worker import wait_until
from bulltask.transport.scripts.move import CRASHES
from tests.support.programs import run_program
from tests.support.worker import wait_until_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio
import select


@app.task(bind=True, name="rest")
def rest(self):
    record("start", job=self.request.id)
    try:
        select.select([], [], [], 60)
    except Exception as exc:
        record("swallowed", job=self.request.id)
    finally:
        record("cleaned", job=self.request.id)


@app.task(bind=True, name="arest")
async def arest(self, seconds=60):
    record("start", job=self.request.id)
    await asyncio.sleep(seconds)
    return "done"


@app.task(bind=True, name="pretend")
def pretend(self):
    record("start", job=self.request.id)
    try:
        select.select([], [], [], 60)
    except BaseException as exc:
        return type(exc).__name__


@app.task(bind=True, name="stubborn")
def stubborn(self):
    record("start", job=self.request.id)
    while True:
        try:
            select.select([], [], [], 60)
        except BaseException as exc:
            record("swallowed", job=self.request.id, what_was=type(exc).__name__)


@app.task(bind=True, name="afails", autoretry_for=(ValueError,))
def afails(self):
    record("start", job=self.request.id)
    raise ValueError("no")
"""
TIMEOUT = 40.0
"""A timeout in seconds for steps that take a second on an idle machine."""


def assert_revoked(harness: WorkerHarness, job: AsyncResult[Any], starts: int = 1) -> None:
    """Check that the job has failed without a retry and that the revocation request is removed."""
    assert harness.wait_for_event("failed", job, timeout=TIMEOUT)["failedReason"] == "revoked"
    with pytest.raises(TaskRevokedError):
        job.get(timeout=TIMEOUT)
    assert harness.start_count(job) == starts
    assert not harness.events.all(event="delayed", jobId=job.id)
    wait_until(lambda: not harness.redis.exists(harness.keys.revoked), TIMEOUT, "the removal of the revocation request")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_revoked_sync_task_is_interrupted_and_its_child_continues(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(TASKS, children=1, settings={"worker_start_method": method})
    job = harness.app.send_task("rest", max_retries=5)
    pid = harness.wait_for_start(job)["pid"]

    assert job.revoke() == "running"
    assert job.revoke(terminate=True) == "terminating"
    assert_revoked(harness, job)
    assert harness.journal.wait_for(1, what="cleaned", job=job.id)
    assert not harness.journal.all(what="swallowed")
    assert worker.wait_for_line("Job failed", job_id=job.id)[0]["category"] == "revoked"
    after = harness.app.send_task("quick")
    assert harness.wait_for_start(after)["pid"] == pid, "the child is still running"
    assert worker.stop() == 0


@pytest.mark.every_topology
def test_a_revoked_async_task_is_cancelled_and_other_async_tasks_are_not(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    jobs = [harness.app.send_task("arest", kwargs={"seconds": seconds}) for seconds in (60, 3, 3)]
    pids = {harness.wait_for_start(job)["pid"] for job in jobs}
    assert jobs[0].revoke(terminate=True) == "terminating"
    assert_revoked(harness, jobs[0])
    assert [job.get(timeout=TIMEOUT) for job in jobs[1:]] == ["done", "done"]
    assert harness.wait_for_start(harness.app.send_task("quick"))["pid"] in pids


def test_a_revoked_job_fails_even_if_its_task_returns_a_value(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("pretend")
    harness.wait_for_start(job)
    job.revoke(terminate=True)
    assert_revoked(harness, job)


def test_a_revoked_task_that_catches_the_exception_is_killed_without_a_crash(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.app.send_task("stubborn", max_retries=5)
    pid = harness.wait_for_start(job)["pid"]
    job.revoke(terminate=True)
    assert_revoked(harness, job)
    assert harness.journal.wait_for(1, what="swallowed", what_was="TaskCancelled")
    assert harness.field(job, CRASHES) is None
    assert harness.wait_for_start(harness.app.send_task("quick"))["pid"] != pid
    assert worker.stop() == 0


@pytest.mark.parametrize("task", ["stubborn", "stubborn, before the worker has read the request", "arest"])
def test_a_revoked_job_does_not_start_again_when_its_child_dies(harness: WorkerHarness, task: str) -> None:
    name, _, early = task.partition(",")
    worker = harness.worker(TASKS, children=1, settings={"max_crashes": 1})
    job = harness.app.send_task(name, max_retries=5)
    pid = int(harness.wait_for_start(job)["pid"])
    if early:
        os.kill(worker.pid, signal.SIGSTOP)
    elif name == "arest":
        os.kill(pid, signal.SIGSTOP)
    job.revoke(terminate=True)
    if not early:
        worker.wait_for_line("Cancel requested", job_id=job.id)
    os.kill(pid, signal.SIGKILL)
    os.kill(worker.pid, signal.SIGCONT)
    assert_revoked(harness, job)
    assert harness.wait_for_start(harness.app.send_task("quick"))["pid"] != str(pid)
    assert harness.start_count(job) == 1
    assert worker.stop() == 0


def test_a_revoked_job_that_waits_for_a_retry_fails_immediately(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("afails", max_retries=5, backoff=3600)
    harness.wait_for_event("delayed", job, timeout=TIMEOUT)
    assert job.revoke() == "revoked"
    with pytest.raises(TaskRevokedError):
        job.get(timeout=TIMEOUT)
    assert harness.start_count(job) == 1


def test_a_job_revoked_just_after_a_failed_attempt_is_not_retried(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.app.send_task("afails", max_retries=5, backoff=3600)
    harness.wait_for_event("delayed", job, timeout=TIMEOUT)
    # As if it fails between the revocation request and the worker's next check.
    harness.redis.zadd(harness.keys.revoked, {job.id: harness.app._now_ms()})
    assert harness.wait_for_event("failed", job, timeout=TIMEOUT)["failedReason"] == "revoked"
    assert worker.wait_for_line("Job revoked", job_id=job.id)
    assert not harness.redis.exists(harness.keys.revoked)


def test_a_revocation_sent_while_the_worker_is_disconnected_takes_effect_later(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    worker = harness.worker(TASKS, via=proxy, children=1, settings={"broker_reconnect_delay": 0.05})
    job = harness.app.send_task("rest")
    harness.wait_for_start(job)
    proxy.refuse()
    proxy.reset()
    worker.wait_for_line("Redis disconnected", timeout=TIMEOUT)
    assert job.revoke(terminate=True) == "terminating"
    proxy.accept()
    assert_revoked(harness, job)


def test_a_revoked_job_of_a_killed_worker_is_failed_by_another_worker(harness: WorkerHarness) -> None:
    settings = {"lock_duration": 2, "stalled_interval": 1, "max_stalled_count": 5}
    first = harness.worker(TASKS, children=1, settings=settings)
    job = harness.app.send_task("arest")
    pid = int(harness.wait_for_start(job)["pid"])
    for process in (first.pid, pid):
        os.kill(process, signal.SIGKILL)
    first.wait()
    wait_until_exited(pid)
    assert job.revoke(terminate=True) == "terminating"
    harness.worker(TASKS, children=1, settings=settings)
    assert harness.wait_for_event("failed", job, timeout=TIMEOUT)["failedReason"] == "revoked"
    assert not harness.events.all(event="completed", jobId=job.id)
    wait_until(lambda: not harness.redis.exists(harness.keys.revoked), TIMEOUT, "the removal of the revocation request")


def wait_for_revocation_check(harness: WorkerHarness) -> None:
    """Wait until the worker has checked for revocation requests."""
    harness.redis.zadd(harness.keys.revoked, {"gone": harness.app._now_ms()})
    wait_until(
        lambda: not harness.redis.zscore(harness.keys.revoked, "gone"), TIMEOUT, "a check for revocation requests"
    )


@pytest.mark.parametrize("task", ["hold", "stubborn"])
def test_a_revoked_job_that_is_retried_manually_runs_again(harness: WorkerHarness, task: str) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task(task, kwargs={"gate": "gate"} if task == "hold" else {}, max_retries=5)
    harness.wait_for_start(job)
    found = harness.app.queue("default").get_job(job.id)
    assert found is not None
    job.revoke(terminate=True)
    harness.wait_for_event("failed", job, timeout=TIMEOUT)
    found.retry()
    harness.wait_for_start(job, 2, timeout=TIMEOUT)
    for _ in range(3):
        wait_for_revocation_check(harness)
    assert job.state == "active"
    assert len(harness.events.all(event="failed", jobId=job.id)) == 1
    assert len(harness.journal.all(what="swallowed")) == (task == "stubborn"), "the second attempt was interrupted, too"
    if task == "hold":
        harness.open_gate()
        assert job.get(timeout=TIMEOUT) == "gate"


REVOKER = """
import sys

from bulltask import App

app = App("revoker", sys.argv[1])
queue = app.queue("default")
for job_id in sys.argv[2:]:
    print(queue.revoke(job_id), flush=True)
"""


def test_a_killed_revoker_leaves_every_job_waiting_or_failed(harness: WorkerHarness) -> None:
    rng = random.Random(20)
    jobs = [harness.app.send_task("quick") for _ in range(300)]
    left = list(jobs)
    for _ in range(5):
        with run_program(REVOKER, harness.url, *(job.id for job in left)) as program:
            assert {program.read_line() for _ in range(rng.randrange(1, 30))} == {"revoked"}
            program.send(signal.SIGKILL)
        left = [job for job in left if job.state == "waiting"]
    states = [str(job.state) for job in jobs]
    assert set(states) <= {"waiting", "failed"}
    assert 0 < states.count("failed") < len(jobs)
    assert not harness.redis.exists(harness.keys.active)
    harness.worker(children=2)
    for job in left:
        harness.wait_for_event("completed", job, timeout=TIMEOUT)
