"""Jobs that one client sends and the other runs, promotes, retries or recovers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bulltask.jobs.names import JobState
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue, recorded_ids
from tests.interop.node_bridge import NodeBridge
from tests.mixed_versions.conftest import PACKAGES

pytestmark = [pytest.mark.interop, pytest.mark.process]

STALLS = {"lockDuration": 1_000, "stalledInterval": 1_000}
KINDS: list[dict[str, Any]] = [{}, {"priority": 3}, {"delay": 150}, {"lifo": True}, {"attempts": 3}]
VALUES = {"text": "ä😀", "list": [1, None, 2.5], "number": 2**53 - 1, "none": None}


RETRIED = {"attempts": 30, "backoff": {"type": "fixed", "delay": 300}}
"""Enough attempts that some remain when the failing worker has stopped."""


def test_bulltask_jobs_run_in_a_bullmq_worker(mail: InteropQueue, documented: str) -> None:
    calls: list[dict[str, Any]] = [{}, {"priority": 3}, {"countdown": 0.15}, {"lifo": True}, {"job_id": "custom"}]
    jobs = [mail.send("echo", options=options, value=VALUES) for options in calls]
    mail.node_worker("echo")
    assert [job.get(timeout=60) for job in jobs] == [{"value": VALUES}] * len(jobs)
    assert mail.counts() == {"completed": len(jobs)}
    assert documented == "safe"


def test_bullmq_jobs_run_in_a_bulltask_worker(mail: InteropQueue, documented: str) -> None:
    jobs = [mail.add("echo", {"value": VALUES}, **options) for options in [*KINDS, {"jobId": "custom"}]]
    mail.worker()
    assert [mail.node_result(job) for job in jobs] == [VALUES] * len(jobs)
    assert mail.counts() == {"completed": len(jobs)}
    seen = [mail.node_job(job) for job in jobs]
    assert {(job["attemptsMade"], job["attemptsStarted"], job["stalledCounter"]) for job in seen} == {(1, 1, 0)}
    assert documented == "safe"


def assert_retried(side: InteropQueue, job: str) -> None:
    """Check that attempts of both workers are counted."""
    seen = side.node_job(job)
    assert seen["attemptsMade"] >= 2
    assert seen["attemptsStarted"] == seen["attemptsMade"]
    assert len(seen["stacktrace"]) == seen["attemptsMade"] - 1


def test_a_job_that_failed_in_a_bullmq_worker_is_retried_by_bulltask(mail: InteropQueue, documented: str) -> None:
    job = mail.add("echo", {"value": 1}, **RETRIED)
    failing = mail.node_worker("fail", {"message": "failed in BullMQ"})
    mail.stream.wait_for(event="delayed", jobId=job)
    mail.node.call("worker.close", worker=failing)
    mail.worker()
    assert mail.node_result(job) == 1
    assert_retried(mail, job)
    assert documented == "safe"


def test_a_job_that_failed_in_a_bulltask_worker_is_retried_by_bullmq(mail: InteropQueue, documented: str) -> None:
    job = mail.add("fail", {"message": "failed in bulltask"}, **RETRIED)
    worker = mail.worker()
    mail.stream.wait_for(event="delayed", jobId=job)
    worker.stop()
    mail.node_worker("fail-n", {"n": 1})
    assert mail.node_result(job) >= 1
    assert_retried(mail, job)
    assert documented == "safe"


def test_delayed_jobs_are_promoted_by_the_other_client(mail: InteropQueue, documented: str) -> None:
    by_bulltask = mail.send("echo", options={"countdown": 60}, value=1).id
    by_bullmq = mail.add("echo", {"value": 2}, delay=60_000, priority=2)
    mail.job_call(by_bulltask, "promote")
    with mail.app.queue("mail") as queue:
        job = queue.get_job(by_bullmq)
        assert job is not None
        job.promote()
        more = mail.add("echo", {"value": 3}, delay=60_000)
        queue.promote_jobs()
    late = mail.send("echo", options={"countdown": 60}, value=4).id
    mail.call("promoteJobs")
    mail.worker()
    assert [mail.node_result(job) for job in (by_bulltask, by_bullmq, more, late)] == [1, 2, 3, 4]
    assert documented == "safe"


def test_jobs_of_both_clients_run_in_the_order_of_their_priorities(
    mail: InteropQueue, documented: str, tmp_path: Path
) -> None:
    def fill(file: str) -> list[str]:
        def bulltask(**options: Any) -> str:
            return mail.send("record", options=options, file=file).id

        def bullmq(**options: Any) -> str:
            return mail.add("record", {"file": file}, **options)

        first, second, plain = bulltask(priority=5), bullmq(priority=5), bullmq()
        return [bulltask(lifo=True), plain, bullmq(priority=1), first, second, bulltask(priority=2**21 - 1)]

    order = fill(str(tmp_path / "bullmq"))
    worker = mail.node_worker("record", {"file": str(tmp_path / "bullmq")})
    wait_until(lambda: mail.counts() == {"completed": 6})
    assert recorded_ids(str(tmp_path / "bullmq")) == order
    mail.node.call("worker.close", worker=worker)

    order = fill(str(tmp_path / "bulltask"))
    mail.worker()
    wait_until(lambda: mail.counts() == {"completed": 12}, 20)
    assert recorded_ids(str(tmp_path / "bulltask")) == order
    assert documented == "safe"


def test_the_jobs_of_a_killed_bullmq_worker_run_in_a_bulltask_worker(
    mail: InteropQueue, documented: str, version: str
) -> None:
    jobs = [mail.add("echo", {"value": 1}), mail.send("echo", value=1).id]
    with NodeBridge.to(mail.url, package=PACKAGES[version]) as killed:
        opts = {**STALLS, "concurrency": 2}
        killed.call("worker.start", queue=mail.name, processor="sleep", args={"ms": 60_000}, opts=opts)
        for job in jobs:
            mail.stream.wait_for(event="active", jobId=job)
        os.kill(killed.pid, signal.SIGKILL)
    mail.worker(stalled_interval=1)
    for job in jobs:
        assert mail.result(job).get(timeout=60) == 1
        seen = mail.node_job(job)
        assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)
    assert documented == "safe"


def test_the_job_of_a_killed_bulltask_worker_runs_in_a_bullmq_worker(mail: InteropQueue, documented: str) -> None:
    worker = mail.worker(lock_duration=1, stalled_interval=1)
    job = mail.send("hold", gate="gate").id
    mail.wait_for_start(job)
    worker.send(signal.SIGKILL)
    worker.wait()
    mail.node_worker("echo", {}, **STALLS)
    assert mail.result(job).get(timeout=60) == {"gate": "gate"}
    seen = mail.node_job(job)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)
    assert documented == "safe"


def test_retention_set_by_one_client_is_applied_by_the_others_worker(mail: InteropQueue, documented: str) -> None:
    removed = mail.send("echo", options={"remove_on_complete": True}).id
    kept = mail.send("echo", options={"remove_on_complete": False}).id
    worker = mail.node_worker("echo")
    wait_until(lambda: mail.result(kept).state is JobState.COMPLETED)
    assert mail.is_gone(removed)
    mail.node.call("worker.close", worker=worker)

    removed = mail.add("echo", {"value": 1}, removeOnComplete=True)
    counted = [mail.add("echo", {"value": 1}, removeOnComplete={"count": 2, "age": 60}) for _ in range(4)]
    mail.worker()
    wait_until(lambda: mail.result(counted[-1]).state is JobState.COMPLETED, 20)
    assert mail.is_gone(removed)
    assert [mail.is_gone(job) for job in (kept, *counted)] == [True, True, True, False, False]
    assert documented == "safe"


def test_failed_jobs_are_retried_by_the_other_client(mail: InteropQueue, documented: str) -> None:
    by_bulltask = mail.send("echo", options={"max_retries": 0, "priority": 4}, value=1).id
    by_bullmq = mail.add("echo", {"value": 2})
    failing = mail.node_worker("fail")
    wait_until(lambda: mail.counts() == {"failed": 2})
    mail.node.call("worker.close", worker=failing)
    mail.job_call(by_bulltask, "retry")
    with mail.app.queue("mail") as queue:
        job = queue.get_job(by_bullmq)
        assert job is not None
        job.retry()
    mail.worker()
    assert (mail.node_result(by_bulltask), mail.node_result(by_bullmq)) == (1, 2)
    assert documented == "safe"


def test_bullmq_preserves_bulltask_options_when_it_changes_a_job(mail: InteropQueue, documented: str) -> None:
    """BullMQ preserves headers and ``expires`` when it changes a job."""
    job = mail.send("echo", options={"headers": {"tenant": "a"}, "expires": 600, "countdown": 60}, value=1).id
    before = json.loads(mail.redis.hget(mail.keys.job(job), "opts"))
    mail.job_call(job, "changePriority", {"priority": 3})
    mail.job_call(job, "updateData", {"value": 2})
    mail.job_call(job, "promote")
    after = json.loads(mail.redis.hget(mail.keys.job(job), "opts"))
    assert after.pop("priority", 3) == 3
    assert after == {name: value for name, value in before.items() if name != "priority"}
    mail.worker()
    assert mail.node_result(job) == 2
    assert documented == "safe"
