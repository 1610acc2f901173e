"""Revocation across clients: revoked jobs in Node, revoking from Node, and jobs that Node runs."""

from __future__ import annotations

import pytest

from bulltask import TaskRevokedError
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue
from tests.interop.node_bridge import NodeError

pytestmark = [pytest.mark.interop, pytest.mark.process]


def wait_until_no_request(side: InteropQueue) -> None:
    wait_until(lambda: not side.redis.exists(side.keys.revoked), 40, "the removal of the request")


def test_node_sees_a_revoked_waiting_job_as_failed_and_can_retry_it(any_mail: InteropQueue) -> None:
    any_mail.listen()
    job = any_mail.add("echo", {"value": 7}, attempts=3)
    assert any_mail.result(job).revoke() == "revoked"
    assert any_mail.wait_for_event("failed", job)["failedReason"] == "revoked"
    with pytest.raises(NodeError, match="revoked"):
        any_mail.node_result(job)
    seen = any_mail.node_job(job)
    assert (seen["state"], seen["failedReason"], seen["processedOn"]) == ("failed", "revoked", None)
    assert (seen["attemptsMade"], seen["attemptsStarted"]) == (1, 0)
    assert any_mail.counts() == {"failed": 1}

    any_mail.job_call(job, "retry")
    any_mail.worker()
    assert any_mail.wait_for_event("completed", job)["returnvalue"] == 7
    assert any_mail.node_job(job)["state"] == "completed"


def test_node_revokes_a_job_that_a_bulltask_worker_runs_and_can_retry_it(any_mail: InteropQueue) -> None:
    any_mail.listen()
    any_mail.worker()
    job = any_mail.add("hold", {"gate": "gate"}, attempts=5)
    any_mail.wait_for_start(job)
    any_mail.node.call("job.revoke", queue=any_mail.name, job=job)
    assert any_mail.wait_for_event("failed", job)["failedReason"] == "revoked"
    assert any_mail.node_events("delayed", job) == []
    any_mail.job_call(job, "retry")
    any_mail.wait_for_start(job, 2)
    any_mail.open_gate()
    assert any_mail.wait_for_event("completed", job)["returnvalue"] == "gate"
    wait_until_no_request(any_mail)


@pytest.mark.parametrize("options", [{"delay": 3_600_000}, {"priority": 3}, {}])
def test_node_revokes_a_waiting_job(mail: InteropQueue, options: dict[str, int]) -> None:
    mail.listen()
    if not options:
        mail.call("pause")
    mail.worker()
    if "priority" in options:
        mail.send("hold", gate="gate")  # keeps the only child from the other job
        mail.wait_for_start(mail.stream.wait_for(event="active")[0]["jobId"])
    job = mail.add("echo", {"value": 1}, **options)
    mail.node.call("job.revoke", queue=mail.name, job=job)
    assert mail.wait_for_event("failed", job)["failedReason"] == "revoked"
    with pytest.raises(TaskRevokedError):
        mail.result(job).get(timeout=40)
    mail.open_gate()
    wait_until_no_request(mail)


def test_a_revoked_job_in_a_node_worker_continues_and_its_request_is_removed(mail: InteropQueue) -> None:
    mail.listen()
    mail.node_worker("hold", {"gate": "node"})
    job = mail.add("echo", {})
    mail.wait_for_event("active", job)
    assert mail.result(job).revoke(terminate=True) == "terminating"
    mail.worker(queues=["mail"], worker_paused=True)
    mail.node.call("gate.open", gate="node")
    mail.wait_for_event("completed", job)
    wait_until_no_request(mail)


def test_a_revoked_job_that_fails_in_a_node_worker_is_not_retried(mail: InteropQueue) -> None:
    mail.listen()
    mail.node_worker("fail")
    job = mail.add("echo", {}, attempts=5, backoff=3_600_000)
    mail.wait_for_event("delayed", job)
    mail.node.call("job.revoke", queue=mail.name, job=job)
    mail.worker(worker_paused=True)
    assert mail.wait_for_event("failed", job)["failedReason"] == "revoked"
    assert mail.node_job(job)["state"] == "failed"
