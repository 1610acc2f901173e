"""What happens when a supervisor is killed."""

from __future__ import annotations

import os
import signal

import pytest

from bulltask.testing.worker import wait_until
from tests.support.like_macos import LIKE_MACOS
from tests.support.machine_load import scale_to_load
from tests.support.streams import server_ms
from tests.support.worker import wait_until_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

LOCK_MS, INTERVAL_MS = 1000, 1000
SHORT_LOCK = {"lock_duration": LOCK_MS / 1000, "stalled_interval": INTERVAL_MS / 1000}


@pytest.mark.parametrize("system", ["", LIKE_MACOS], ids=["linux", "macos"])
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_the_children_of_a_killed_supervisor_exit_and_another_worker_runs_their_jobs(
    harness: WorkerHarness, start_method: str, system: str
) -> None:
    worker = harness.worker(system, children=2, settings={**SHORT_LOCK, "worker_start_method": start_method})
    running = [harness.hold(), harness.hold()]
    waiting = [harness.app.send_task("quick") for _ in range(10)]
    for job in running:
        harness.wait_for_start(job)
    children = worker.children
    assert len(children) == 2

    killed_ms = server_ms(harness.redis)
    os.kill(worker.pid, signal.SIGKILL)
    gone_s = [wait_until_exited(child) for child in children]
    other = harness.worker(children=2, settings=SHORT_LOCK)
    other.wait_for_line("Child started")
    ready_ms = max(killed_ms, server_ms(harness.redis) - LOCK_MS)  # not counting the start of the other worker
    again_ms = [harness.wait_for_start(job, 2).ms - ready_ms for job in running]
    harness.report(children_gone_after_s=[round(seconds, 4) for seconds in gone_s], run_again_after_ms=again_ms)

    assert max(gone_s) <= scale_to_load(1)
    assert max(again_ms) <= LOCK_MS + 2 * INTERVAL_MS + scale_to_load(1000)
    harness.open_gate("gate", 4)
    for job in (*running, *waiting):
        job.get(timeout=60)
    assert [harness.start_count(job) for job in running] == [2, 2]
    assert {harness.start_count(job) for job in waiting} == {1}
    after = [entry for entry in harness.journal.all(what="start") if entry.ms > killed_ms]
    assert not {int(entry["pid"]) for entry in after} & set(children), (
        "a child without a supervisor starts no second job"
    )
    stalled = {entry["jobId"] for entry in harness.events.all(event="stalled")}
    if os.environ.get("BULLTASK_TEST_PREFETCHING") in {"always", "random"}:
        # A child may just have prefetched one of the waiting jobs, which then stalls without having started.
        stalled -= {job.id for job in waiting}
    assert stalled == {job.id for job in running}
    assert other.stop() == 0


def test_a_child_in_a_c_call_is_killed_when_its_supervisor_dies(harness: WorkerHarness) -> None:
    worker = harness.worker(
        """
        import ctypes

        @app.task(bind=True, name="c_call")
        def c_call(self):
            record("start", job=self.request.id)
            ctypes.PyDLL(None).usleep(20_000_000)
        """,
        children=1,
    )
    job = harness.app.send_task("c_call")
    child = int(harness.wait_for_start(job)["pid"])
    os.kill(worker.pid, signal.SIGKILL)
    assert wait_until_exited(child) <= scale_to_load(1)


def test_a_scheduled_job_that_kills_its_worker_fails(harness: WorkerHarness) -> None:
    queue = harness.app.queue(harness.keys.queue)
    queue.schedulers.upsert("tick", name="killer", every=1)
    first = queue.get_jobs("waiting")[0]
    source = f"""
        import os
        import signal

        @app.task(bind=True, name="killer")
        def killer(self):
            record("start", job=self.request.id)
            if self.request.id == {first.id!r}:
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
        """
    for number in range(1, 3):
        worker = harness.worker(source, children=1, settings=SHORT_LOCK)
        harness.journal.wait_for(number, what="start", job=first.id)
        wait_until_exited(worker.pid)
    harness.worker(source, children=1, settings=SHORT_LOCK)
    failed = harness.events.wait_for(event="failed", jobId=first.id)[0]
    assert failed["failedReason"] == "job stalled more than allowable limit"
    assert len(harness.journal.all(what="start", job=first.id)) == 2
    wait_until(lambda: len(queue.get_jobs("completed")) >= 2, 60, "the schedule continues")
