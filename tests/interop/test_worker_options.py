"""Options of Node's Worker that decide what becomes of a job: ours leave the same behind."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from bulltask.testing.wait import wait_until
from tests.interop.node_bridge import NodeBridge
from tests.interop.side_by_side import SideBySide
from tests.interop.test_lost_workers import STALLS

pytestmark = [pytest.mark.interop, pytest.mark.process]

RETRIED = {"attempts": 9, "removeOnFail": False}


def remains(mail: SideBySide, job: str) -> dict[str, Any]:
    """What the fields of a failed job say about its attempts."""
    wait_until(lambda: mail.redis.hexists(mail.keys.job(job), "finishedOn"), 60, "the end of the job")
    fields = mail.redis.hgetall(mail.keys.job(job))
    told = {name: fields.get(name) for name in ("ats", "atm", "stc", "defa", "failedReason")}
    ends = [entry["event"] for entry in mail.stream.all(jobId=job) if entry["event"] in {"failed", "retries-exhausted"}]
    return {**told, "traces": len(json.loads(fields["stacktrace"])), "ends": ends}


def test_max_started_attempts_fails_a_job_like_in_node(mail: SideBySide) -> None:
    handle = mail.node_worker("fail", {}, maxStartedAttempts=2)
    theirs = mail.add("fail", {"message": "it failed"}, **RETRIED)
    there = remains(mail, theirs)
    mail.node.call("worker.close", worker=handle)
    mail.worker(max_started_attempts=2)
    ours = mail.add("fail", {"message": "it failed"}, **RETRIED)
    assert remains(mail, ours) == there
    assert there["failedReason"] == "job started more than allowable limit"
    assert (there["ats"], there["atm"]) == ("3", "3")


@pytest.mark.parametrize("most", [0, 1])
def test_max_stalled_count_fails_a_job_like_in_node(mail: SideBySide, most: int) -> None:
    def taken_and_lost() -> str:
        """One stall more than allowed; the worker that takes the job the second time finds it first."""
        job = mail.add("echo", {"value": 1}, **RETRIED)
        for number in range(most + 1):
            with NodeBridge.to(mail.url) as doomed:
                doomed.call("worker.start", queue=mail.name, processor="sleep", args={"ms": 60_000}, opts=STALLS)
                mail.stream.wait_for(number + 1, event="active", jobId=job)
                os.kill(doomed.pid, signal.SIGKILL)
        return job

    theirs = taken_and_lost()
    handle = mail.node_worker("echo", {}, **STALLS, maxStalledCount=most)
    there = remains(mail, theirs)
    mail.node.call("worker.close", worker=handle)
    ours = taken_and_lost()
    mail.worker(stalled_interval=1, max_stalled_count=most)
    assert remains(mail, ours) == there
    assert there["failedReason"] == "job stalled more than allowable limit"
    assert there["stc"] == str(most + 1)
