"""Revoked jobs as Node sees them, revoking from Node, and jobs that Node runs."""

from __future__ import annotations

import pytest

from bulltask import TaskRevokedError
from bulltask.testing.wait import wait_until
from tests.interop.node_bridge import NodeError
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.process]


def no_marks(side: SideBySide) -> None:
    wait_until(lambda: not side.redis.exists(side.keys.revoked), 40, "the end of the mark")


def test_a_revoked_waiting_job_fails_in_node_and_can_be_retried(either: SideBySide) -> None:
    either.listen()
    job = either.add("echo", {"value": 7}, attempts=3)
    assert either.result(job).revoke() == "revoked"
    assert either.wait_for_event("failed", job)["failedReason"] == "revoked"
    with pytest.raises(NodeError, match="revoked"):
        either.finished(job)
    seen = either.seen(job)
    assert (seen["state"], seen["failedReason"], seen["processedOn"]) == ("failed", "revoked", None)
    assert (seen["attemptsMade"], seen["attemptsStarted"]) == (1, 0)
    assert either.counts() == {"failed": 1}

    either.job_call(job, "retry")
    either.worker()
    assert either.wait_for_event("completed", job)["returnvalue"] == 7
    assert either.seen(job)["state"] == "completed"


def test_node_revokes_a_job_that_bulltask_runs_and_can_retry_it(either: SideBySide) -> None:
    either.listen()
    either.worker()
    job = either.add("hold", {"gate": "gate"}, attempts=5)
    either.started(job)
    either.node.call("job.revoke", queue=either.name, job=job)
    assert either.wait_for_event("failed", job)["failedReason"] == "revoked"
    assert either.all_heard("delayed", job) == []
    either.job_call(job, "retry")
    either.started(job, 2)
    either.open_gate()
    assert either.wait_for_event("completed", job)["returnvalue"] == "gate"
    no_marks(either)


@pytest.mark.parametrize("options", [{"delay": 3_600_000}, {"priority": 3}, {}])
def test_node_revokes_a_waiting_job(mail: SideBySide, options: dict[str, int]) -> None:
    mail.listen()
    if not options:
        mail.call("pause")
    mail.worker()
    if "priority" in options:
        mail.send("hold", gate="gate")  # keeps the only child from the other job
        mail.started(mail.stream.wait_for(event="active")[0]["jobId"])
    job = mail.add("echo", {"value": 1}, **options)
    mail.node.call("job.revoke", queue=mail.name, job=job)
    assert mail.wait_for_event("failed", job)["failedReason"] == "revoked"
    with pytest.raises(TaskRevokedError):
        mail.result(job).get(timeout=40)
    mail.open_gate()
    no_marks(mail)


def test_a_run_in_nodes_worker_continues_and_its_request_is_removed(mail: SideBySide) -> None:
    mail.listen()
    mail.node_worker("hold", {"gate": "theirs"})
    job = mail.add("echo", {})
    mail.wait_for_event("active", job)
    assert mail.result(job).revoke(terminate=True) == "terminating"
    mail.worker(queues=["mail"], worker_paused=True)
    mail.node.call("gate.open", gate="theirs")
    mail.wait_for_event("completed", job)
    no_marks(mail)


def test_a_revoked_job_that_fails_in_nodes_worker_is_not_retried(mail: SideBySide) -> None:
    mail.listen()
    mail.node_worker("fail")
    job = mail.add("echo", {}, attempts=5, backoff=3_600_000)
    mail.wait_for_event("delayed", job)
    mail.node.call("job.revoke", queue=mail.name, job=job)
    mail.worker(worker_paused=True)
    assert mail.wait_for_event("failed", job)["failedReason"] == "revoked"
    assert mail.seen(job)["state"] == "failed"
