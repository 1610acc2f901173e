"""Workers that scale the number of their children with the load."""

from __future__ import annotations

import signal

import pytest

from bulltask.testing.worker import wait_until
from bulltask.worker.slots import ExitCode
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

KEEPALIVE = {"worker_autoscale_keepalive": 2}


def test_a_worker_grows_to_its_maximum_and_shrinks_when_it_is_idle(harness: WorkerHarness) -> None:
    worker = harness.worker(children=9, options=["--autoscale", "4,1"], settings=KEEPALIVE)
    assert worker.wait_for_line("Worker started")[0]["concurrency"] == 1
    held = [harness.hold() for _ in range(6)]
    worker.wait_for_line("Concurrency changed", children=4, reason="autoscale")
    harness.journal.wait_for(4, what="start")
    assert [line["children"] for line in worker.logged("Concurrency changed")] == [2, 4]
    harness.open_gate("gate", 6)
    for job in held:
        assert job.get(timeout=60) == "gate"
    worker.wait_for_line("Concurrency changed", children=1, reason="autoscale")
    assert [harness.start_count(job) for job in held] == [1] * 6
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK
    assert worker.logged("Child exited") == []


def test_a_worker_does_not_grow_for_jobs_that_are_already_running(harness: WorkerHarness) -> None:
    worker = harness.worker(options=["--autoscale", "4,2"], settings=KEEPALIVE)
    held = [harness.hold() for _ in range(2)]
    for job in held:
        harness.wait_for_start(job)
    worker.send(signal.SIGTTIN)
    assert "worker_autoscale" in worker.wait_for_line("Signal ignored", signal="SIGTTIN")[0]["reason"]
    limited = harness.app.send_task("quick", countdown=3)
    worker.wait_for_line("Concurrency changed", children=3)
    assert limited.get(timeout=60) is None
    assert len(worker.logged("Concurrency changed")) == 1, "one more child was enough, and only for the third job"
    harness.open_gate("gate", 2)
    assert worker.stop() == ExitCode.OK


def test_a_busy_child_is_not_stopped_by_the_autoscaler(harness: WorkerHarness) -> None:
    worker = harness.worker(options=["--autoscale", "3,1"], settings=KEEPALIVE)
    held = [harness.hold(gate) for gate in ("a", "b", "c")]
    worker.wait_for_line("Concurrency changed", children=3)
    busy = harness.wait_for_start(held[0])["pid"]
    for job in held[1:]:
        harness.wait_for_start(job)
    harness.open_gate("b")
    harness.open_gate("c")
    worker.wait_for_line("Concurrency changed", children=1)
    wait_until(lambda: worker.children == [int(busy)], 60, "the busy child alone")
    following = harness.app.send_task("quick")
    harness.open_gate("a")
    assert held[0].get(timeout=60) == "a"
    assert following.get(timeout=60) is None
    assert harness.start_count(held[0]) == 1
    assert worker.stop() == ExitCode.OK
