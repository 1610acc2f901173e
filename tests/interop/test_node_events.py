"""Node's QueueEvents and waitUntilFinished work for jobs that bulltask's workers run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.interop.interop_queue import InteropQueue
from tests.interop.node_bridge import NodeError
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]


def event_names(side: InteropQueue, job_id: str) -> list[str]:
    """Return the names of all events of a job, in order."""
    return [event["event"] for event in side.node.events() if event["args"].get("jobId") == job_id]


@pytest.mark.parametrize("task", ["echo", "aecho"])
def test_node_receives_all_events_of_a_job(any_mail: InteropQueue, task: str) -> None:
    any_mail.worker()
    any_mail.listen()
    job = any_mail.send(task, value={"to": "ä😀", "parts": []})
    assert any_mail.wait_for_event("completed", job.id)["returnvalue"] == {"to": "ä😀", "parts": []}
    assert event_names(any_mail, job.id) == ["added", "waiting", "active", "completed"]
    assert any_mail.wait_for_event("added", job.id)["name"] == task
    assert any_mail.wait_for_event("active", job.id)["prev"] == "waiting"
    assert any_mail.wait_for_event("completed", job.id)["prev"] == "active"
    any_mail.wait_for_event("drained")


def test_a_bulltask_worker_emits_the_same_events_as_a_node_worker(mail: InteropQueue) -> None:
    """Event names and fields, in order, of a job that is delayed, fails, reports, and completes."""
    mail.listen()
    mail.node_worker("fail-n", {"n": 1})
    node_id = mail.add("echo", {}, delay=50, attempts=2, backoff=50)
    mail.wait_for_event("completed", node_id)
    mail.node.reset()

    mail.listen()
    mail.worker()
    job = mail.send("fail_until", options={"countdown": 0.05}, attempt=2)
    mail.wait_for_event("completed", job.id)
    node_events, bulltask_events = (
        [
            (event.fields["event"], sorted(event.fields))
            for event in mail.stream.all()
            if event.fields.get("jobId") == job_id
        ]
        for job_id in (node_id, job.id)
    )
    assert bulltask_events == node_events
    assert [name for name, _ in bulltask_events] == [
        "added", "delayed", "waiting", "active", "delayed", "waiting", "active", "completed",
    ]  # fmt: skip


def test_node_receives_the_events_of_a_delayed_job(mail: InteropQueue) -> None:
    mail.worker()
    mail.listen()
    job = mail.send("echo", options={"countdown": 0.2})
    mail.wait_for_event("completed", job.id)
    assert event_names(mail, job.id) == ["added", "delayed", "waiting", "active", "completed"]
    seen = mail.node_job(job.id)
    assert int(mail.wait_for_event("delayed", job.id)["delay"]) == seen["timestamp"] + 200
    assert mail.wait_for_event("waiting", job.id)["prev"] == "delayed"


def test_node_receives_progress_values_unchanged(mail: InteropQueue) -> None:
    steps: list[Any] = [0, 1.5, "x", [], {}, {"deep": [{"er": None}]}, None, False]
    mail.worker()
    mail.listen()
    job = mail.send("report", steps=steps)
    mail.wait_for_event("completed", job.id)
    assert [event["data"] for event in mail.node_events("progress", job.id)] == steps


def test_node_receives_delayed_for_a_retry_and_failed_for_the_last_attempt(any_mail: InteropQueue) -> None:
    app = any_mail.sender(task_max_retries=2, task_retry_backoff=0.1, task_retry_jitter=False)
    any_mail.worker()
    any_mail.listen()
    job = app.send_task("fail", kwargs={"message": "no ünicorn"})
    assert any_mail.wait_for_event("failed", job.id) == {
        "jobId": job.id,
        "failedReason": "no ünicorn",
        "prev": "active",
    }
    assert any_mail.wait_for_event("retries-exhausted", job.id)["attemptsMade"] == "3"
    assert event_names(any_mail, job.id) == [
        "added", "waiting", "active", "delayed", "waiting", "active", "delayed", "waiting", "active",
        "failed", "retries-exhausted",
    ]  # fmt: skip
    waits = any_mail.waits_ms(job.id)
    assert all(full - scale_to_load(90) <= wait <= full + 10 for wait, full in zip(waits, (100, 200), strict=True)), (
        waits
    )
    seen = any_mail.node_job(job.id)
    assert (seen["state"], seen["attemptsMade"], seen["failedReason"]) == ("failed", 3, "no ünicorn")
    assert len(seen["stacktrace"]) == 3
    assert seen["finishedOn"] >= seen["processedOn"]
    assert any_mail.counts() == {"failed": 1}


def test_an_error_that_is_not_retried_emits_no_retries_exhausted(mail: InteropQueue) -> None:
    mail.worker()
    mail.listen()
    job = mail.send("fail", error="ValueError")
    mail.wait_for_event("failed", job.id)
    mail.node_result(mail.send("echo").id)
    assert event_names(mail, job.id) == ["added", "waiting", "active", "failed"]
    seen = mail.node_job(job.id)
    assert (seen["opts"]["attempts"], seen["attemptsMade"], len(seen["stacktrace"])) == (3, 1, 1)


def test_node_receives_waiting_for_a_retry_without_a_delay(mail: InteropQueue) -> None:
    app = mail.sender(task_retry_backoff=0)
    mail.worker()
    mail.listen()
    job = app.send_task("fail_until", kwargs={"attempt": 2})
    mail.wait_for_event("completed", job.id)
    assert event_names(mail, job.id) == ["added", "waiting", "active", "waiting", "active", "completed"]
    assert [event.get("prev") for event in mail.node_events("waiting", job.id)] == [None, "active"]


def test_node_receives_duplicated_for_a_job_that_was_sent_twice(mail: InteropQueue) -> None:
    mail.listen()
    for value in (1, 2):
        mail.send("echo", options={"job_id": "once"}, value=value)
    assert mail.wait_for_event("duplicated") == {"jobId": "once"}


def test_node_receives_waiting_and_not_stalled_after_a_child_died(mail: InteropQueue) -> None:
    mail.worker()
    mail.listen()
    job = mail.send("hold", gate="gate")
    os.kill(int(mail.wait_for_start(job.id)["pid"]), signal.SIGKILL)
    mail.wait_for_start(job.id, 2)
    mail.open_gate()
    mail.open_gate()
    mail.wait_for_event("completed", job.id)
    assert event_names(mail, job.id) == ["added", "waiting", "active", "waiting", "active", "completed"]
    seen = mail.node_job(job.id)
    assert (seen["attemptsMade"], seen["attemptsStarted"], seen["stalledCounter"]) == (1, 2, 0)


def test_node_waits_until_a_bulltask_job_is_finished(any_mail: InteropQueue) -> None:
    any_mail.worker()
    assert any_mail.node_result(any_mail.send("add", x=1).id) == 11
    assert any_mail.node_result(any_mail.send("aecho").id) is None
    with pytest.raises(NodeError, match=r"^no such thing$"):
        any_mail.node_result(any_mail.send("fail", error="ValueError", message="no such thing").id)
    late = any_mail.send("echo", value="late")
    late.get(timeout=60)
    assert any_mail.node_result(late.id) == "late", "even if it has ended before"


def test_values_that_json_cannot_represent_do_not_stop_a_node_listener(mail: InteropQueue) -> None:
    """Values that JSON lacks would stop Node's QueueEvents permanently; bulltask does not store them."""
    mail.worker()
    mail.listen()
    kinds = {"nan": "is nan", "infinity": r"[0] is inf", "integer": "['total'] is the integer 9007199254740992"}
    for kind, reason in kinds.items():
        job = mail.send("huge", kind=kind)
        failure = mail.wait_for_event("failed", job.id)["failedReason"]
        assert "return value of task huge" in failure
        assert reason in failure
        assert mail.node_job(job.id)["attemptsMade"] == 1, "another attempt would return it again"
    bad = mail.send("report", steps=[50])
    mail.wait_for_event("completed", bad.id)
    assert mail.node.events("events.error") == []
