"""Pausing one worker, not its queue: at its start, by a signal, by a task."""

from __future__ import annotations

import signal

import pytest

from bulltask.worker.slots import ExitCode
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

PAUSE_OWN_WORKER = """
import signal

@app.task(name="pause_my_worker")
def pause_my_worker():
    os.kill(os.getppid(), signal.SIGTSTP)
    return os.getppid()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_starts_paused_acquires_no_job_until_it_is_resumed(harness: WorkerHarness, method: str) -> None:
    job = harness.app.send_task("quick")
    settings = {"worker_start_method": method, "drain_delay": 0.1}
    paused = harness.worker(children=1, options=["--paused"], settings=settings)
    paused.wait_for_line("Worker paused", running=0)
    paused.wait_for_line("Child started")
    harness.worker(options=["-Q", "other"], children=1)
    harness.app.send_task("quick", queue="other", countdown=2).get(timeout=60)  # many drain delays pass
    assert harness.start_count(job) == 0
    assert harness.redis.llen(harness.keys.wait) == 1
    paused.send(signal.SIGCONT)
    paused.wait_for_line("Worker resumed")
    assert job.get(timeout=60) is None
    assert paused.stop() == ExitCode.OK


def test_a_worker_that_starts_paused_can_be_restarted_and_stopped(harness: WorkerHarness) -> None:
    worker = harness.worker(settings={"worker_paused": True})
    worker.wait_for_line("Worker paused")
    worker.send(signal.SIGHUP)
    worker.wait_for_line("Worker paused", count=2)
    assert worker.stop() == ExitCode.OK


def test_other_workers_run_jobs_of_the_queue_while_one_worker_is_paused(harness: WorkerHarness) -> None:
    paused = harness.worker(options=["--paused"])
    paused.wait_for_line("Worker paused")
    other = harness.worker()
    job = harness.app.send_task("quick")
    assert job.get(timeout=60) is None
    assert int(harness.wait_for_start(job)["pid"]) in other.children
    assert not harness.app.queue("default").is_paused()
    assert [worker.stop() for worker in (paused, other)] == [ExitCode.OK, ExitCode.OK]


def test_a_task_can_pause_its_worker_and_completes(harness: WorkerHarness) -> None:
    worker = harness.worker(PAUSE_OWN_WORKER, children=1)
    assert harness.app.send_task("pause_my_worker").get(timeout=60) == worker.pid
    worker.wait_for_line("Worker paused")
    job = harness.app.send_task("quick")
    worker.send(signal.SIGCONT)
    assert job.get(timeout=60) is None
    assert len(worker.logged("Worker resumed")) == 1
    assert worker.stop() == ExitCode.OK
