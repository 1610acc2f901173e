"""Jobs that one side sends and the other runs, promotes, retries or finds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bulltask.jobs.states import JobState
from bulltask.testing.wait import wait_until
from tests.hazard.conftest import PACKAGES
from tests.interop.node_bridge import NodeBridge
from tests.interop.side_by_side import SideBySide, ran

pytestmark = [pytest.mark.interop, pytest.mark.process]

STALLS = {"lockDuration": 1_000, "stalledInterval": 1_000}
KINDS: list[dict[str, Any]] = [{}, {"priority": 3}, {"delay": 150}, {"lifo": True}, {"attempts": 3}]
VALUES = {"text": "ä😀", "list": [1, None, 2.5], "number": 2**53 - 1, "none": None}


RETRIED = {"attempts": 30, "backoff": {"type": "fixed", "delay": 300}}
"""So many that some are left when the worker that fails them has stopped."""


def test_our_jobs_run_in_their_worker(mail: SideBySide, documented: str) -> None:
    calls: list[dict[str, Any]] = [{}, {"priority": 3}, {"countdown": 0.15}, {"lifo": True}, {"job_id": "own"}]
    jobs = [mail.send("echo", options=options, value=VALUES) for options in calls]
    mail.node_worker("echo")
    assert [job.get(timeout=60) for job in jobs] == [{"value": VALUES}] * len(jobs)
    assert mail.counts() == {"completed": len(jobs)}
    assert documented == "safe"


def test_their_jobs_run_in_our_worker(mail: SideBySide, documented: str) -> None:
    jobs = [mail.add("echo", {"value": VALUES}, **options) for options in [*KINDS, {"jobId": "own"}]]
    mail.worker()
    assert [mail.finished(job) for job in jobs] == [VALUES] * len(jobs)
    assert mail.counts() == {"completed": len(jobs)}
    seen = [mail.seen(job) for job in jobs]
    assert {(job["attemptsMade"], job["attemptsStarted"], job["stalledCounter"]) for job in seen} == {(1, 1, 0)}
    assert documented == "safe"


def assert_retried(side: SideBySide, job: str) -> None:
    """Each failed attempt of the one counts for the other."""
    seen = side.seen(job)
    assert seen["attemptsMade"] >= 2
    assert seen["attemptsStarted"] == seen["attemptsMade"]
    assert len(seen["stacktrace"]) == seen["attemptsMade"] - 1


def test_a_job_that_failed_in_their_worker_is_tried_again_in_ours(mail: SideBySide, documented: str) -> None:
    job = mail.add("echo", {"value": 1}, **RETRIED)
    theirs = mail.node_worker("fail", {"message": "theirs"})
    mail.stream.wait_for(event="delayed", jobId=job)
    mail.node.call("worker.close", worker=theirs)
    mail.worker()
    assert mail.finished(job) == 1
    assert_retried(mail, job)
    assert documented == "safe"


def test_a_job_that_failed_in_our_worker_is_tried_again_in_theirs(mail: SideBySide, documented: str) -> None:
    job = mail.add("fail", {"message": "ours"}, **RETRIED)
    ours = mail.worker()
    mail.stream.wait_for(event="delayed", jobId=job)
    ours.stop()
    mail.node_worker("fail-n", {"n": 1})
    assert mail.finished(job) >= 1
    assert_retried(mail, job)
    assert documented == "safe"


def test_delayed_jobs_are_promoted_by_the_other_side(mail: SideBySide, documented: str) -> None:
    ours = mail.send("echo", options={"countdown": 60}, value=1).id
    theirs = mail.add("echo", {"value": 2}, delay=60_000, priority=2)
    mail.job_call(ours, "promote")
    with mail.app.queue("mail") as queue:
        job = queue.get_job(theirs)
        assert job is not None
        job.promote()
        more = mail.add("echo", {"value": 3}, delay=60_000)
        queue.promote_jobs()
    late = mail.send("echo", options={"countdown": 60}, value=4).id
    mail.call("promoteJobs")
    mail.worker()
    assert [mail.finished(job) for job in (ours, theirs, more, late)] == [1, 2, 3, 4]
    assert documented == "safe"


def test_the_order_of_priorities_holds_for_jobs_of_both(mail: SideBySide, documented: str, tmp_path: Path) -> None:
    def fill(file: str) -> list[str]:
        def ours(**options: Any) -> str:
            return mail.send("record", options=options, file=file).id

        def theirs(**options: Any) -> str:
            return mail.add("record", {"file": file}, **options)

        mine, other, plain = ours(priority=5), theirs(priority=5), theirs()
        return [ours(lifo=True), plain, theirs(priority=1), mine, other, ours(priority=2**21 - 1)]

    order = fill(str(tmp_path / "theirs"))
    theirs = mail.node_worker("record", {"file": str(tmp_path / "theirs")})
    wait_until(lambda: mail.counts() == {"completed": 6})
    assert ran(str(tmp_path / "theirs")) == order
    mail.node.call("worker.close", worker=theirs)

    order = fill(str(tmp_path / "ours"))
    mail.worker()
    wait_until(lambda: mail.counts() == {"completed": 12}, 20)
    assert ran(str(tmp_path / "ours")) == order
    assert documented == "safe"


def test_the_job_of_their_killed_worker_runs_in_ours(mail: SideBySide, documented: str, version: str) -> None:
    jobs = [mail.add("echo", {"value": 1}), mail.send("echo", value=1).id]
    with NodeBridge.to(mail.url, package=PACKAGES[version]) as doomed:
        opts = {**STALLS, "concurrency": 2}
        doomed.call("worker.start", queue=mail.name, processor="sleep", args={"ms": 60_000}, opts=opts)
        for job in jobs:
            mail.stream.wait_for(event="active", jobId=job)
        os.kill(doomed.pid, signal.SIGKILL)
    mail.worker(stalled_interval=1)
    for job in jobs:
        assert mail.result(job).get(timeout=60) == 1
        seen = mail.seen(job)
        assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)
    assert documented == "safe"


def test_the_job_of_our_killed_worker_runs_in_theirs(mail: SideBySide, documented: str) -> None:
    worker = mail.worker(lock_duration=1, stalled_interval=1)
    job = mail.send("hold", gate="gate").id
    mail.started(job)
    worker.send(signal.SIGKILL)
    worker.wait()
    mail.node_worker("echo", {}, **STALLS)
    assert mail.result(job).get(timeout=60) == {"gate": "gate"}
    seen = mail.seen(job)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)
    assert documented == "safe"


def test_finished_jobs_are_kept_as_long_as_the_sender_said(mail: SideBySide, documented: str) -> None:
    gone = mail.send("echo", options={"remove_on_complete": True}).id
    kept = mail.send("echo", options={"remove_on_complete": False}).id
    theirs = mail.node_worker("echo")
    wait_until(lambda: mail.result(kept).state is JobState.COMPLETED)
    assert mail.gone(gone)
    mail.node.call("worker.close", worker=theirs)

    gone = mail.add("echo", {"value": 1}, removeOnComplete=True)
    counted = [mail.add("echo", {"value": 1}, removeOnComplete={"count": 2, "age": 60}) for _ in range(4)]
    mail.worker()
    wait_until(lambda: mail.result(counted[-1]).state is JobState.COMPLETED, 20)
    assert mail.gone(gone)
    assert [mail.gone(job) for job in (kept, *counted)] == [True, True, True, False, False]
    assert documented == "safe"


def test_failed_jobs_are_retried_by_the_other_side(mail: SideBySide, documented: str) -> None:
    ours = mail.send("echo", options={"max_retries": 0, "priority": 4}, value=1).id
    theirs = mail.add("echo", {"value": 2})
    failing = mail.node_worker("fail")
    wait_until(lambda: mail.counts() == {"failed": 2})
    mail.node.call("worker.close", worker=failing)
    mail.job_call(ours, "retry")
    with mail.app.queue("mail") as queue:
        job = queue.get_job(theirs)
        assert job is not None
        job.retry()
    mail.worker()
    assert (mail.finished(ours), mail.finished(theirs)) == (1, 2)
    assert documented == "safe"


def test_options_that_only_one_side_knows_survive(mail: SideBySide, documented: str) -> None:
    """Headers and expiry are ours, and Node keeps them when it rewrites a job."""
    job = mail.send("echo", options={"headers": {"tenant": "a"}, "expires": 600, "countdown": 60}, value=1).id
    before = json.loads(mail.redis.hget(mail.keys.job(job), "opts"))
    mail.job_call(job, "changePriority", {"priority": 3})
    mail.job_call(job, "updateData", {"value": 2})
    mail.job_call(job, "promote")
    after = json.loads(mail.redis.hget(mail.keys.job(job), "opts"))
    assert after.pop("priority", 3) == 3
    assert after == {name: value for name, value in before.items() if name != "priority"}
    mail.worker()
    assert mail.finished(job) == 2
    assert documented == "safe"
