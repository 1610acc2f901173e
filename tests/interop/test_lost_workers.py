"""Jobs of a killed or stopped worker run in the other client's worker."""

from __future__ import annotations

import os
import signal

import pytest

from bulltask import PermanentError
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue
from tests.interop.node_bridge import NodeBridge

pytestmark = [pytest.mark.interop, pytest.mark.process]

STALLS = {"lockDuration": 1_000, "stalledInterval": 1_000}


def acquire_and_kill(side: InteropQueue, job_id: str) -> None:
    """Let a Node worker acquire the job, and kill it; its lock expires a second later."""
    with NodeBridge.to(side.url) as doomed:
        # A stalled check by this worker would not record when the lock expires.
        opts = {**STALLS, "skipStalledCheck": True}
        doomed.call("worker.start", queue=side.name, processor="sleep", args={"ms": 60_000}, opts=opts)
        side.wait_for_event("active", job_id)
        os.kill(doomed.pid, signal.SIGKILL)


def wait_for_stalled_checks(side: InteropQueue, count: int) -> None:
    """Wait until there have been a number of stalled checks."""
    seen: set[str | None] = {None}

    def enough() -> bool:
        seen.add(side.redis.get(side.keys.stalled_check))
        return len(seen) > count

    wait_until(enough, what=f"stalled check number {count}")


@pytest.mark.parametrize("sent_by", ["bulltask", "Node"])
def test_a_bulltask_worker_runs_the_job_of_a_killed_node_worker(mail: InteropQueue, sent_by: str) -> None:
    mail.listen()
    job = mail.send("echo", value=1).id if sent_by == "bulltask" else mail.add("echo", {"value": 1})
    acquire_and_kill(mail, job)
    worker = mail.worker(stalled_interval=1)
    assert mail.result(job).get(timeout=60) == 1
    mail.wait_for_event("stalled", job)
    assert worker.wait_for_line("Job stalled", job_id=job)[0]["lock_expired_at"] is not None
    seen = mail.node_job(job)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)


def test_a_job_that_stalls_too_many_times_fails_with_bullmqs_reason(mail: InteropQueue) -> None:
    mail.listen()
    job = mail.send("echo", value=1)
    acquire_and_kill(mail, job.id)
    mail.worker(stalled_interval=1, max_stalled_count=0)
    with pytest.raises(PermanentError, match="job stalled more than allowable limit"):
        mail.result(job.id).get(timeout=60)
    assert mail.node_job(job.id)["attemptsMade"] == 1, "the job is not retried even though attempts are left"


@pytest.mark.parametrize("sent_by", ["bulltask", "Node"])
def test_a_node_worker_runs_the_job_of_a_killed_bulltask_worker(mail: InteropQueue, sent_by: str) -> None:
    mail.listen()
    worker = mail.worker(lock_duration=1, stalled_interval=1)  # one check per interval for all, so Node's counts too
    job = mail.send("hold", gate="gate").id if sent_by == "bulltask" else mail.add("hold", {"gate": "gate"})
    mail.wait_for_start(job)
    worker.send(signal.SIGKILL)  # its children die with it
    worker.wait()
    mail.node_worker("echo", {}, **STALLS)
    assert mail.result(job).get(timeout=60) == {"gate": "gate"}
    mail.wait_for_event("stalled", job)
    seen = mail.node_job(job)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)


def test_a_node_worker_does_not_run_the_long_job_of_a_live_bulltask_worker(mail: InteropQueue) -> None:
    mail.listen()
    worker = mail.worker(lock_duration=1, stalled_interval=1)
    job = mail.send("hold", gate="gate")
    mail.wait_for_start(job.id)
    mail.node_worker("echo", {}, **STALLS)
    wait_for_stalled_checks(mail, 4)
    mail.open_gate()
    assert job.get(timeout=60) == "gate"
    assert mail.node_events("stalled", job.id) == []
    assert worker.warnings() == []


def test_a_node_worker_immediately_runs_a_job_released_by_a_cold_shutdown(mail: InteropQueue) -> None:
    worker = mail.worker()
    job = mail.send("hold", gate="gate")
    mail.wait_for_start(job.id)
    mail.node_worker("echo")
    worker.send(signal.SIGQUIT)
    assert job.get(timeout=60) == {"gate": "gate"}
    seen = mail.node_job(job.id)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (0, 1, 2)
    assert worker.wait() == 0


def test_a_node_worker_runs_the_remaining_jobs_of_a_stopped_bulltask_worker(mail: InteropQueue) -> None:
    worker = mail.worker()
    running = mail.send("hold", gate="gate")
    mail.wait_for_start(running.id)
    waiting = [mail.send("echo", value=number) for number in range(100)]
    worker.send(signal.SIGTERM)
    worker.wait_for_line("Worker stopping")
    mail.open_gate()
    assert running.get(timeout=60) == "gate"
    assert worker.wait() == 0
    counts = mail.counts()
    assert counts.keys() == {"completed", "waiting"}, "the running job has ended, and no other was started"
    mail.node_worker("echo")
    for job in waiting:
        job.get(timeout=60)
    assert mail.counts() == {"completed": 101}
