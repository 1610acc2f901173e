"""One worker is paused, and not the queue: from its start, from the shell, from a task, from a program."""

from __future__ import annotations

import signal

import pytest

from bulltask.worker.exit_codes import ExitCode
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
PAUSES_ITS_WORKER = """
import signal

@app.task(name="pause_my_worker")
def pause_my_worker():
    os.kill(os.getppid(), signal.SIGTSTP)
    return os.getppid()
"""


@METHODS
def test_a_worker_that_starts_paused_takes_nothing_until_it_may_go_on(harness: WorkerHarness, method: str) -> None:
    job = harness.app.send_task("quick")
    settings = {"worker_start_method": method, "drain_delay": 0.1}
    paused = harness.worker(options=["--paused"], settings=settings)
    paused.wait_for_line("Worker paused", running=0)
    paused.wait_for_line("Child started", count=2)
    harness.worker(options=["-Q", "other"], children=1)
    harness.app.send_task("quick", queue="other", countdown=2).get(timeout=60)  # many drain delays pass
    assert harness.start_count(job) == 0
    assert harness.redis.llen(harness.keys.wait) == 1
    paused.send(signal.SIGCONT)
    paused.wait_for_line("Worker resumed")
    assert job.get(timeout=60) is None
    assert paused.stop() == ExitCode.OK


def test_a_worker_that_starts_paused_can_be_stopped_and_starts_paused_again(harness: WorkerHarness) -> None:
    worker = harness.worker(settings={"worker_paused": True})
    worker.wait_for_line("Worker paused")
    worker.send(signal.SIGHUP)
    worker.wait_for_line("Worker paused", count=2)
    assert worker.stop() == ExitCode.OK


def test_a_queue_goes_on_in_other_workers_while_one_is_paused(harness: WorkerHarness) -> None:
    paused = harness.worker(options=["--paused"])
    paused.wait_for_line("Worker paused")
    other = harness.worker()
    job = harness.app.send_task("quick")
    assert job.get(timeout=60) is None
    assert int(harness.wait_for_start(job)["pid"]) in other.children
    assert not harness.app.queue("default").is_paused()
    assert [worker.stop() for worker in (paused, other)] == [ExitCode.OK, ExitCode.OK]


@METHODS
def test_a_task_can_pause_its_own_worker_and_is_not_waited_for(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(PAUSES_ITS_WORKER, settings={"worker_start_method": method}, children=1)
    assert harness.app.send_task("pause_my_worker").get(timeout=60) == worker.pid
    worker.wait_for_line("Worker paused")
    job = harness.app.send_task("quick")
    worker.send(signal.SIGCONT)
    assert job.get(timeout=60) is None
    assert len(worker.logged("Worker resumed")) == 1
    assert worker.stop() == ExitCode.OK
