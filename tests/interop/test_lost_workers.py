"""Workers that are killed, and who runs their jobs then."""

from __future__ import annotations

import os
import signal

import pytest

from bulltask import PermanentError
from bulltask.testing.wait import wait_until
from tests.interop.node_bridge import NodeBridge
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.process]

STALLS = {"lockDuration": 1_000, "stalledInterval": 1_000}


def take_and_die(side: SideBySide, job_id: str) -> None:
    """A Node worker takes the job and is killed; its lock lives a second longer."""
    with NodeBridge.to(side.url) as doomed:
        doomed.call("worker.start", queue=side.name, processor="sleep", args={"ms": 60_000}, opts=STALLS)
        side.wait_for_event("active", job_id)
        os.kill(doomed.pid, signal.SIGKILL)


def wait_for_stalled_checks(side: SideBySide, count: int) -> None:
    """Wait until somebody has looked for stalled jobs so many times."""
    seen: set[str | None] = {None}

    def enough() -> bool:
        seen.add(side.redis.get(side.keys.stalled_check))
        return len(seen) > count

    wait_until(enough, what=f"stalled check number {count}")


@pytest.mark.parametrize("sent_by", ["us", "Node"])
def test_the_job_of_a_killed_node_worker_runs_in_bulltask(mail: SideBySide, sent_by: str) -> None:
    mail.listen()
    job = mail.send("echo", value=1).id if sent_by == "us" else mail.add("echo", {"value": 1})
    take_and_die(mail, job)
    worker = mail.worker(stalled_interval=1)
    assert mail.result(job).get(timeout=60) == 1
    mail.wait_for_event("stalled", job)
    assert worker.wait_for_line("Job stalled", job_id=job)[0]["lock_expired_at"] is not None
    seen = mail.seen(job)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)


def test_a_job_that_stalls_too_often_fails_with_bullmqs_reason(mail: SideBySide) -> None:
    mail.listen()
    job = mail.send("echo", value=1)
    take_and_die(mail, job.id)
    mail.worker(stalled_interval=1, max_stalled_count=0)
    with pytest.raises(PermanentError, match="job stalled more than allowable limit"):
        mail.result(job.id).get(timeout=60)
    assert mail.seen(job.id)["attemptsMade"] == 1, "its attempts are not used, but it is not tried again"


@pytest.mark.parametrize("sent_by", ["us", "Node"])
def test_the_job_of_a_killed_bulltask_worker_runs_in_node(mail: SideBySide, sent_by: str) -> None:
    mail.listen()
    worker = mail.worker(lock_duration=1, stalled_interval=1)  # one check per interval for all, so Node's counts too
    job = mail.send("hold", gate="gate").id if sent_by == "us" else mail.add("hold", {"gate": "gate"})
    mail.started(job)
    worker.send(signal.SIGKILL)  # its children die with it
    worker.wait()
    mail.node_worker("echo", {}, **STALLS)
    assert mail.result(job).get(timeout=60) == {"gate": "gate"}
    mail.wait_for_event("stalled", job)
    seen = mail.seen(job)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)


def test_a_node_worker_does_not_run_the_long_job_of_a_live_bulltask_worker(mail: SideBySide) -> None:
    mail.listen()
    worker = mail.worker(lock_duration=1, stalled_interval=1)
    job = mail.send("hold", gate="gate")
    mail.started(job.id)
    mail.node_worker("echo", {}, **STALLS)
    wait_for_stalled_checks(mail, 4)
    mail.open_gate()
    assert job.get(timeout=60) == "gate"
    assert mail.all_heard("stalled", job.id) == []
    assert worker.warnings() == []


def test_a_job_released_by_a_cold_shutdown_runs_immediately_in_node(mail: SideBySide) -> None:
    worker = mail.worker()
    job = mail.send("hold", gate="gate")
    mail.started(job.id)
    mail.node_worker("echo")
    worker.send(signal.SIGQUIT)
    assert job.get(timeout=60) == {"gate": "gate"}
    seen = mail.seen(job.id)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (0, 1, 2)
    assert worker.wait() == 0


def test_node_runs_the_remaining_jobs_of_a_stopped_bulltask_worker(mail: SideBySide) -> None:
    worker = mail.worker()
    running = mail.send("hold", gate="gate")
    mail.started(running.id)
    waiting = [mail.send("echo", value=number) for number in range(100)]
    worker.send(signal.SIGTERM)
    worker.wait_for_line("Worker stopping")
    mail.open_gate()
    assert running.get(timeout=60) == "gate"
    assert worker.wait() == 0
    counts = mail.counts()
    assert counts.keys() == {"completed", "waiting"}, "the running job ended, and no other was left in between"
    mail.node_worker("echo")
    for job in waiting:
        job.get(timeout=60)
    assert mail.counts() == {"completed": 101}
