"""Options of Node's Worker that decide a job's outcome have the same effect in bulltask."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue
from tests.interop.node_bridge import NodeBridge
from tests.interop.test_lost_workers import STALLS

pytestmark = [pytest.mark.interop, pytest.mark.process]

RETRIED = {"attempts": 9, "removeOnFail": False}


def outcome(mail: InteropQueue, job: str) -> dict[str, Any]:
    """Return the fields and events of a failed job that describe its attempts."""
    wait_until(lambda: mail.redis.hexists(mail.keys.job(job), "finishedOn"), 60, "the end of the job")
    fields = mail.redis.hgetall(mail.keys.job(job))
    counters = {name: fields.get(name) for name in ("ats", "atm", "stc", "defa", "failedReason")}
    ends = [entry["event"] for entry in mail.stream.all(jobId=job) if entry["event"] in {"failed", "retries-exhausted"}]
    return {**counters, "traces": len(json.loads(fields["stacktrace"])), "ends": ends}


def test_max_started_attempts_fails_a_job_as_a_node_worker_does(mail: InteropQueue) -> None:
    handle = mail.node_worker("fail", {}, maxStartedAttempts=2)
    node_job = mail.add("fail", {"message": "it failed"}, **RETRIED)
    node_outcome = outcome(mail, node_job)
    mail.node.call("worker.close", worker=handle)
    mail.worker(max_started_attempts=2)
    bulltask_job = mail.add("fail", {"message": "it failed"}, **RETRIED)
    assert outcome(mail, bulltask_job) == node_outcome
    assert node_outcome["failedReason"] == "job started more than allowable limit"
    assert (node_outcome["ats"], node_outcome["atm"]) == ("3", "3")


@pytest.mark.parametrize("max_stalled", [0, 1])
def test_max_stalled_count_fails_a_job_as_a_node_worker_does(mail: InteropQueue, max_stalled: int) -> None:
    def add_and_stall() -> str:
        """Add a job that stalls once more than allowed; the worker that acquires it again finds it stalled first."""
        job = mail.add("echo", {"value": 1}, **RETRIED)
        for number in range(max_stalled + 1):
            with NodeBridge.to(mail.url) as doomed:
                doomed.call("worker.start", queue=mail.name, processor="sleep", args={"ms": 60_000}, opts=STALLS)
                mail.stream.wait_for(number + 1, event="active", jobId=job)
                os.kill(doomed.pid, signal.SIGKILL)
        return job

    node_job = add_and_stall()
    handle = mail.node_worker("echo", {}, **STALLS, maxStalledCount=max_stalled)
    node_outcome = outcome(mail, node_job)
    mail.node.call("worker.close", worker=handle)
    bulltask_job = add_and_stall()
    mail.worker(stalled_interval=1, max_stalled_count=max_stalled)
    assert outcome(mail, bulltask_job) == node_outcome
    assert node_outcome["failedReason"] == "job stalled more than allowable limit"
    assert node_outcome["stc"] == str(max_stalled + 1)
