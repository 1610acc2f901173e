"""Revoking jobs that real workers run: whoever has the job ends it, and it runs again only if a person says so."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from bulltask import AsyncResult, TaskRevokedError
from bulltask.testing.wait import wait_until
from bulltask.transport.scripts.move import CRASHES
from tests.support.programs import run_program
from tests.support.worker import wait_until_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio
import select


@app.task(bind=True, name="rest")
def read_rest(self):
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


@app.task(bind=True, name="afails", autoretry_for=(ValueError,), retry_backoff=3600)
def afails(self):
    record("start", job=self.request.id)
    raise ValueError("no")
"""
LONG = 40.0
"""Seconds that a busy machine may take for what takes one."""


def assert_revoked(harness: WorkerHarness, job: AsyncResult[Any], starts: int = 1) -> None:
    """It has failed for good, and there is nothing left of the wish."""
    assert harness.wait_for_event("failed", job, timeout=LONG)["failedReason"] == "revoked"
    with pytest.raises(TaskRevokedError):
        job.get(timeout=LONG)
    assert harness.start_count(job) == starts
    assert not harness.events.all(event="delayed", jobId=job.id)
    wait_until(lambda: not harness.redis.exists(harness.keys.revoked), LONG, "the end of the mark")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_plain_function_is_ended_and_its_child_goes_on(harness: WorkerHarness, method: str) -> None:
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
    assert harness.wait_for_start(after)["pid"] == pid, "the child lives"
    assert worker.stop() == 0


def test_an_async_task_is_cancelled_and_its_neighbours_are_not(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    jobs = [harness.app.send_task("arest", kwargs={"seconds": seconds}) for seconds in (60, 3, 3)]
    pids = {harness.wait_for_start(job)["pid"] for job in jobs}
    assert jobs[0].revoke(terminate=True) == "terminating"
    assert_revoked(harness, jobs[0])
    assert [job.get(timeout=LONG) for job in jobs[1:]] == ["done", "done"]
    assert harness.wait_for_start(harness.app.send_task("quick"))["pid"] in pids


def test_a_task_that_returns_as_if_nothing_had_happened_was_revoked_all_the_same(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("pretend")
    harness.wait_for_start(job)
    job.revoke(terminate=True)
    assert_revoked(harness, job)


def test_a_task_that_swallows_it_is_killed_and_that_counts_as_no_crash(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.app.send_task("stubborn", max_retries=5)
    pid = harness.wait_for_start(job)["pid"]
    job.revoke(terminate=True)
    assert_revoked(harness, job)
    assert harness.journal.wait_for(1, what="swallowed", what_was="TaskCancelled")
    assert harness.field(job, CRASHES) is None
    assert harness.wait_for_start(harness.app.send_task("quick"))["pid"] != pid
    assert worker.stop() == 0


def test_a_job_that_waits_for_its_next_try_fails_at_once(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("afails", max_retries=5)
    harness.wait_for_event("delayed", job, timeout=LONG)
    assert job.revoke() == "revoked"
    with pytest.raises(TaskRevokedError):
        job.get(timeout=LONG)
    assert harness.start_count(job) == 1


def test_a_marked_job_whose_attempt_fails_by_itself_is_ended_before_its_next_try(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.app.send_task("afails", max_retries=5)
    harness.wait_for_event("delayed", job, timeout=LONG)
    # As when it fails between the wish and the worker's next look.
    harness.redis.zadd(harness.keys.revoked, {job.id: harness.app.now_ms()})
    assert harness.wait_for_event("failed", job, timeout=LONG)["failedReason"] == "revoked"
    assert worker.wait_for_line("Job revoked", job_id=job.id)
    assert not harness.redis.exists(harness.keys.revoked)


def test_a_revocation_that_is_sent_while_the_worker_has_no_connection_acts_when_it_has_one_again(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    worker = harness.worker(TASKS, via=proxy, children=1, settings={"broker_reconnect_delay": 0.05})
    job = harness.app.send_task("rest")
    harness.wait_for_start(job)
    proxy.refuse()
    proxy.reset()
    worker.wait_for_line("Redis disconnected", timeout=LONG)
    assert job.revoke(terminate=True) == "terminating"
    proxy.accept()
    assert_revoked(harness, job)


def test_a_marked_job_whose_worker_has_died_is_ended_by_the_next_one(harness: WorkerHarness) -> None:
    settings = {"lock_duration": 2, "stalled_interval": 1, "max_stalled_count": 5}
    first = harness.worker(TASKS, children=1, settings=settings)
    job = harness.app.send_task("arest")
    pid = int(harness.wait_for_start(job)["pid"])
    for victim in (first.pid, pid):
        os.kill(victim, signal.SIGKILL)
    first.wait()
    wait_until_exited(pid)
    assert job.revoke(terminate=True) == "terminating"
    harness.worker(TASKS, children=1, settings=settings)
    assert harness.wait_for_event("failed", job, timeout=LONG)["failedReason"] == "revoked"
    assert not harness.events.all(event="completed", jobId=job.id)
    wait_until(lambda: not harness.redis.exists(harness.keys.revoked), LONG, "the end of the mark")


def look_at_marks(harness: WorkerHarness) -> None:
    """Wait until the worker has looked at marks after this moment."""
    harness.redis.zadd(harness.keys.revoked, {"gone": harness.app.now_ms()})
    wait_until(lambda: not harness.redis.zscore(harness.keys.revoked, "gone"), LONG, "a look at the marks")


@pytest.mark.parametrize("task", ["hold", "stubborn"])
def test_a_job_that_a_person_retries_in_the_moment_it_has_ended_runs(harness: WorkerHarness, task: str) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task(task, kwargs={"gate": "gate"} if task == "hold" else {}, max_retries=5)
    harness.wait_for_start(job)
    found = harness.app.queue("default").get_job(job.id)
    assert found is not None
    job.revoke(terminate=True)
    harness.wait_for_event("failed", job, timeout=LONG)
    found.retry()
    harness.wait_for_start(job, 2, timeout=LONG)
    for _ in range(3):
        look_at_marks(harness)
    assert job.state == "active"
    assert len(harness.events.all(event="failed", jobId=job.id)) == 1
    assert len(harness.journal.all(what="swallowed")) == (task == "stubborn"), "the second run was told, too"
    if task == "hold":
        harness.open_gate()
        assert job.get(timeout=LONG) == "gate"


REVOKER = """
import sys

from bulltask import App

app = App("revoker", sys.argv[1])
queue = app.queue("default")
for job_id in sys.argv[2:]:
    print(queue.revoke(job_id), flush=True)
"""


def test_a_revoker_that_is_killed_leaves_every_job_waiting_or_ended(harness: WorkerHarness) -> None:
    chance = random.Random(20)
    jobs = [harness.app.send_task("quick") for _ in range(300)]
    left = list(jobs)
    for _ in range(5):
        with run_program(REVOKER, harness.url, *(job.id for job in left)) as program:
            assert {program.read_line() for _ in range(chance.randrange(1, 30))} == {"revoked"}
            program.send(signal.SIGKILL)
        left = [job for job in left if job.state == "waiting"]
    states = [str(job.state) for job in jobs]
    assert set(states) <= {"waiting", "failed"}
    assert 0 < states.count("failed") < len(jobs)
    assert not harness.redis.exists(harness.keys.active)
    harness.worker(children=2)
    for job in left:
        harness.wait_for_event("completed", job, timeout=LONG)
