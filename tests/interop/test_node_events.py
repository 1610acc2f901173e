"""Node's QueueEvents and waitUntilFinished on jobs of ours, in our workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.interop.node_bridge import NodeError
from tests.interop.side_by_side import SideBySide
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]


def told(side: SideBySide, job_id: str) -> list[str]:
    """The names of all events of a job, in order."""
    return [found["event"] for found in side.node.events() if found["args"].get("jobId") == job_id]


@pytest.mark.parametrize("task", ["echo", "aecho"])
def test_node_receives_all_events_of_a_job(either: SideBySide, task: str) -> None:
    either.worker()
    either.listen()
    job = either.send(task, value={"to": "ä😀", "parts": []})
    assert either.wait_for_event("completed", job.id)["returnvalue"] == {"to": "ä😀", "parts": []}
    assert told(either, job.id) == ["added", "waiting", "active", "completed"]
    assert either.wait_for_event("added", job.id)["name"] == task
    assert either.wait_for_event("active", job.id)["prev"] == "waiting"
    assert either.wait_for_event("completed", job.id)["prev"] == "active"
    either.wait_for_event("drained")


def test_a_job_in_bulltask_emits_the_same_events_as_in_node(mail: SideBySide) -> None:
    """Event names and fields, in order, of a job that is delayed, fails, reports, and completes."""
    mail.listen()
    mail.node_worker("fail-n", {"n": 1})
    theirs = mail.add("echo", {}, delay=50, attempts=2, backoff=50)
    mail.wait_for_event("completed", theirs)
    mail.node.reset()

    mail.listen()
    mail.worker()
    ours = mail.send("fail_until", options={"countdown": 0.05}, attempt=2)
    mail.wait_for_event("completed", ours.id)
    of_theirs, of_ours = (
        [
            (event.fields["event"], sorted(event.fields))
            for event in mail.stream.all()
            if event.fields.get("jobId") == job_id
        ]
        for job_id in (theirs, ours.id)
    )
    assert of_ours == of_theirs
    assert [name for name, _ in of_ours] == [
        "added", "delayed", "waiting", "active", "delayed", "waiting", "active", "completed",
    ]  # fmt: skip


def test_node_receives_the_events_of_a_delayed_job(mail: SideBySide) -> None:
    mail.worker()
    mail.listen()
    job = mail.send("echo", options={"countdown": 0.2})
    mail.wait_for_event("completed", job.id)
    assert told(mail, job.id) == ["added", "delayed", "waiting", "active", "completed"]
    seen = mail.seen(job.id)
    assert int(mail.wait_for_event("delayed", job.id)["delay"]) == seen["timestamp"] + 200
    assert mail.wait_for_event("waiting", job.id)["prev"] == "delayed"


def test_node_receives_progress_values_unchanged(mail: SideBySide) -> None:
    steps: list[Any] = [0, 1.5, "x", [], {}, {"deep": [{"er": None}]}, None, False]
    mail.worker()
    mail.listen()
    job = mail.send("report", steps=steps)
    mail.wait_for_event("completed", job.id)
    assert [event["data"] for event in mail.all_heard("progress", job.id)] == steps


def test_node_receives_delayed_for_a_retry_and_failed_for_the_last_attempt(either: SideBySide) -> None:
    app = either.sender(task_max_retries=2, task_retry_backoff=0.1, task_retry_jitter=False)
    either.worker()
    either.listen()
    job = app.send_task("fail", kwargs={"message": "no ünicorn"})
    assert either.wait_for_event("failed", job.id) == {"jobId": job.id, "failedReason": "no ünicorn", "prev": "active"}
    assert either.wait_for_event("retries-exhausted", job.id)["attemptsMade"] == "3"
    assert told(either, job.id) == [
        "added", "waiting", "active", "delayed", "waiting", "active", "delayed", "waiting", "active",
        "failed", "retries-exhausted",
    ]  # fmt: skip
    waits = either.waits_ms(job.id)
    assert all(full - scale_to_load(90) <= wait <= full + 10 for wait, full in zip(waits, (100, 200), strict=True)), (
        waits
    )
    seen = either.seen(job.id)
    assert (seen["state"], seen["attemptsMade"], seen["failedReason"]) == ("failed", 3, "no ünicorn")
    assert len(seen["stacktrace"]) == 3
    assert seen["finishedOn"] >= seen["processedOn"]
    assert either.counts() == {"failed": 1}


def test_an_error_that_is_not_retried_emits_no_retries_exhausted(mail: SideBySide) -> None:
    mail.worker()
    mail.listen()
    job = mail.send("fail", error="ValueError")
    mail.wait_for_event("failed", job.id)
    mail.finished(mail.send("echo").id)
    assert told(mail, job.id) == ["added", "waiting", "active", "failed"]
    seen = mail.seen(job.id)
    assert (seen["opts"]["attempts"], seen["attemptsMade"], len(seen["stacktrace"])) == (3, 1, 1)


def test_node_receives_waiting_for_a_retry_without_delay(mail: SideBySide) -> None:
    app = mail.sender(task_retry_backoff=0)
    mail.worker()
    mail.listen()
    job = app.send_task("fail_until", kwargs={"attempt": 2})
    mail.wait_for_event("completed", job.id)
    assert told(mail, job.id) == ["added", "waiting", "active", "waiting", "active", "completed"]
    assert [event.get("prev") for event in mail.all_heard("waiting", job.id)] == [None, "active"]


def test_node_receives_duplicated_for_a_job_that_was_sent_twice(mail: SideBySide) -> None:
    mail.listen()
    for value in (1, 2):
        mail.send("echo", options={"job_id": "once"}, value=value)
    assert mail.wait_for_event("duplicated") == {"jobId": "once"}


def test_node_receives_waiting_and_not_stalled_after_a_child_died(mail: SideBySide) -> None:
    mail.worker()
    mail.listen()
    job = mail.send("hold", gate="gate")
    os.kill(int(mail.started(job.id)["pid"]), signal.SIGKILL)
    mail.started(job.id, 2)
    mail.open_gate()
    mail.open_gate()
    mail.wait_for_event("completed", job.id)
    assert told(mail, job.id) == ["added", "waiting", "active", "waiting", "active", "completed"]
    seen = mail.seen(job.id)
    assert (seen["attemptsMade"], seen["attemptsStarted"], seen["stalledCounter"]) == (1, 2, 0)


def test_node_waits_until_a_bulltask_job_is_finished(either: SideBySide) -> None:
    either.worker()
    assert either.finished(either.send("add", x=1).id) == 11
    assert either.finished(either.send("aecho").id) is None
    with pytest.raises(NodeError, match=r"^no such thing$"):
        either.finished(either.send("fail", error="ValueError", message="no such thing").id)
    late = either.send("echo", value="late")
    late.get(timeout=60)
    assert either.finished(late.id) == "late", "also when it has ended before"


def test_values_that_json_lacks_do_not_stop_nodes_listener(mail: SideBySide) -> None:
    """Values that JSON lacks would end Node's QueueEvents for good; they are refused before they are stored."""
    mail.worker()
    mail.listen()
    kinds = {"nan": "is nan", "infinity": r"[0] is inf", "integer": "['total'] is the integer 9007199254740992"}
    for kind, reason in kinds.items():
        job = mail.send("huge", kind=kind)
        failure = mail.wait_for_event("failed", job.id)["failedReason"]
        assert "return value of task huge" in failure
        assert reason in failure
        assert mail.seen(job.id)["attemptsMade"] == 1, "another attempt would return it again"
    bad = mail.send("report", steps=[50])
    mail.wait_for_event("completed", bad.id)
    assert mail.node.events("events.error") == []
