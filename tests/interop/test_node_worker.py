"""Node's Worker runs jobs that bulltask sends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bulltask import JobState, TaskError
from tests.interop.interop_queue import CLOCK_TOLERANCE_MS, InteropQueue, recorded_ids
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.redis]


def test_get_returns_the_result_of_a_job_that_a_node_worker_ran(any_mail: InteropQueue) -> None:
    any_mail.node_worker("echo")
    job = any_mail.send("add", x=1, y=2)
    assert job.get(timeout=60) == {"x": 1, "y": 2}
    assert (job.state, job.successful(), job.info) == (JobState.COMPLETED, True, {"x": 1, "y": 2})
    seen = any_mail.node_job(job.id)
    assert (seen["name"], seen["data"], seen["state"]) == ("add", {"x": 1, "y": 2}, "completed")
    assert (seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1)
    assert seen["timestamp"] - CLOCK_TOLERANCE_MS <= seen["processedOn"] <= seen["finishedOn"]
    assert any_mail.node_result(job.id) == {"x": 1, "y": 2}
    assert any_mail.counts() == {"completed": 1}


def test_a_node_worker_runs_all_jobs_sent_in_one_call(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.node_worker("record", {"file": file}, concurrency=5)
    task: Any = mail.app.tasks["record"]
    jobs = mail.app.send_many([task.s(file) for _ in range(50)])
    assert {job.get(timeout=60) for job in jobs} == {mail.node.pid}
    assert sorted(recorded_ids(file)) == sorted(job.id for job in jobs)


async def test_async_code_waits_for_a_job_that_a_node_worker_runs(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    job = await mail.app.asend_task("echo", kwargs={"value": "ä😀"})
    assert await job.aget(timeout=60) == {"value": "ä😀"}
    assert await mail.result(job.id) == {"value": "ä😀"}


def test_positional_arguments_and_defaults_reach_a_node_worker_as_an_object(mail: InteropQueue) -> None:
    task: Any = mail.app.tasks["add"]
    assert mail.node_job(task.delay(1).id)["data"] == {"x": 1}
    assert mail.node_job(task.delay(1, 2).id)["data"] == {"x": 1, "y": 2}
    assert mail.node_job(mail.app.send_task("only-in-node", args=[1, "b"]).id)["data"] == [1, "b"]
    assert mail.node_job(mail.app.send_task("only-in-node").id)["data"] == {}


def test_a_node_worker_runs_a_delayed_bulltask_job_when_it_is_due(any_mail: InteropQueue) -> None:
    any_mail.node_worker("echo")
    job = any_mail.send("echo", options={"countdown": 2})
    assert (job.state, any_mail.node_job(job.id)["state"]) == (JobState.DELAYED, "delayed")
    assert any_mail.counts() == {"delayed": 1}
    job.get(timeout=60)
    seen = any_mail.node_job(job.id)
    assert 2_000 - CLOCK_TOLERANCE_MS <= seen["processedOn"] - seen["timestamp"] < 10_000
    assert (seen["delay"], seen["opts"]["delay"]) == (0, 2_000)


def test_an_eta_is_stored_as_a_delay_that_node_reads(mail: InteropQueue) -> None:
    moment = datetime.now(UTC) + timedelta(hours=1)
    seen = mail.node_job(mail.send("echo", options={"eta": moment}).id)
    assert seen["state"] == "delayed"
    assert seen["timestamp"] + seen["delay"] == pytest.approx(moment.timestamp() * 1000, abs=1)
    assert mail.node_job(mail.send("echo", options={"eta": moment - timedelta(hours=2)}).id)["state"] == "waiting"


def test_bulltask_jobs_without_a_priority_run_before_those_with_one(any_mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    priorities = [7, 2, None, 1, 2, 2_097_151, 0, 1]
    jobs = [any_mail.send("record", options={"priority": priority}, file=file) for priority in priorities]
    assert any_mail.counts() == {"prioritized": 6, "waiting": 2}
    any_mail.node_worker("record", {"file": file})
    for job in jobs:
        job.get(timeout=60)
    assert recorded_ids(file) == [jobs[index].id for index in (2, 6, 3, 7, 1, 4, 0, 5)]


def test_a_node_worker_runs_a_lifo_bulltask_job_before_the_waiting_jobs(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    first, second = (mail.send("record", file=file) for _ in range(2))
    last = mail.send("record", options={"lifo": True}, file=file)
    mail.node_worker("record", {"file": file})
    second.get(timeout=60)
    assert recorded_ids(file) == [last.id, first.id, second.id]


def test_a_node_worker_applies_the_attempts_and_backoff_of_a_bulltask_job(any_mail: InteropQueue) -> None:
    app = any_mail.sender(task_max_retries=3, task_retry_backoff=0.1)
    any_mail.node_worker("fail-n", {"n": 3})
    job = app.send_task("echo")
    assert job.get(timeout=60) == 3
    seen = any_mail.node_job(job.id)
    assert (seen["state"], seen["attemptsMade"], seen["attemptsStarted"]) == ("completed", 4, 4)
    assert [trace.splitlines()[0] for trace in seen["stacktrace"]] == [
        f"Error: attempt {number} failed" for number in (1, 2, 3)
    ]
    waits = any_mail.waits_ms(job.id)
    assert len(waits) == 3
    # Exponential from 100 ms; Node's jitter of 0.2 only shortens.
    assert all(
        0.8 * full - scale_to_load(60) <= wait <= full + 10 for wait, full in zip(waits, (100, 200, 400), strict=True)
    ), waits


def test_a_node_worker_applies_a_fixed_retry_delay(mail: InteropQueue) -> None:
    mail.app.task(name="patient", max_retries=2, retry_backoff=False, default_retry_delay=0.15)(print)
    mail.node_worker("fail-n", {"n": 2})
    job = mail.app.send_task("patient")
    assert job.get(timeout=60) == 2
    waits = mail.waits_ms(job.id)
    assert len(waits) == 2
    assert all(150 - scale_to_load(90) <= wait <= 160 for wait in waits), waits


def test_an_unrecoverable_error_in_a_node_worker_fails_a_bulltask_job(mail: InteropQueue) -> None:
    mail.node_worker("fail", {"message": "no such address", "unrecoverable": True})
    job = mail.send("fail")
    with pytest.raises(TaskError, match="no such address"):
        job.get(timeout=60)
    seen = mail.node_job(job.id)
    assert (seen["opts"]["attempts"], seen["attemptsMade"], seen["state"]) == (3, 1, "failed")


def test_get_raises_the_javascript_error_with_its_stack(any_mail: InteropQueue) -> None:
    any_mail.node_worker("fail", {"message": "no such address ½ 😀"})
    job = any_mail.send("fail", options={"max_retries": 0})
    with pytest.raises(TaskError) as failure:
        job.get(timeout=60)
    assert failure.value.reason == "no such address ½ 😀"
    assert failure.value.job_id == job.id
    assert "Error: no such address ½ 😀\n    at " in str(failure.value)
    assert "processors.js" in failure.value.remote_traceback == job.traceback
    assert (job.state, job.failed()) == (JobState.FAILED, True)
    assert isinstance(job.info, TaskError)
    assert any_mail.counts() == {"failed": 1}


def test_a_node_worker_emits_retries_exhausted_for_a_bulltask_job(mail: InteropQueue) -> None:
    app = mail.sender(task_max_retries=1, task_retry_backoff=0.01)
    mail.listen()
    mail.node_worker("fail")
    job = app.send_task("fail")
    with pytest.raises(TaskError, match="it failed"):
        job.get(timeout=60)
    assert mail.wait_for_event("retries-exhausted", job.id)["attemptsMade"] == "2"
    assert job.snapshot().attempts_made == len(job.snapshot().stacktrace) == 2


def test_bulltask_reads_progress_and_logs_written_by_a_node_worker(any_mail: InteropQueue) -> None:
    steps = [10, 33.5, {"sent": 3, "left": []}, "half ½ 😀", True]
    any_mail.listen()
    any_mail.node_worker("progress", {"steps": steps})
    job = any_mail.send("echo")
    assert job.get(timeout=60) == len(steps)
    assert job.progress is True
    assert job.info == len(steps)
    any_mail.wait_for_event("completed", job.id)
    assert [event["data"] for event in any_mail.node_events("progress", job.id)] == steps
    assert len(any_mail.node_job(job.id)["logs"]) == len(steps)


def test_bulltask_reads_progress_while_a_node_worker_runs_the_job(mail: InteropQueue) -> None:
    mail.listen()
    mail.node_worker("progress", {"steps": [{"sent": 3}], "then_ms": 60_000})
    job = mail.send("echo")
    mail.wait_for_event("progress", job.id)
    assert (job.state, job.progress, job.info, job.ready()) == (JobState.ACTIVE, {"sent": 3}, {"sent": 3}, False)


@pytest.mark.parametrize(("processor", "ends"), [("echo", "completed"), ("fail", "failed")])
def test_a_node_worker_applies_the_retention_options_of_bulltask_jobs(
    mail: InteropQueue, processor: str, ends: str
) -> None:
    mail.node_worker(processor)
    mail.listen()
    which = "result_expires" if ends == "completed" else "result_failure_expires"

    gone = mail.sender(**{which: 0, "task_max_retries": 0}).send_task("echo")
    mail.wait_for_event(ends, gone.id)
    assert mail.is_gone(gone.id)

    hour = mail.sender(**{which: 3600, "task_max_retries": 0})
    old, kept = hour.send_task("echo"), hour.send_task("echo")
    mail.wait_for_event(ends, old.id)
    mail.wait_for_event(ends, kept.id)
    # As if it had ended two hours ago: BullMQ purges when the next job ends.
    mail.redis.zincrby(mail.keys.completed if ends == "completed" else mail.keys.failed, -7_200_000, old.id)
    new = hour.send_task("echo")
    mail.wait_for_event(ends, new.id)
    assert [mail.is_gone(job.id) for job in (old, kept, new)] == [True, False, False]


def test_get_returns_the_result_of_a_job_that_a_node_worker_removed(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    mail.listen()
    job = mail.sender(result_expires=0).send_task("echo", kwargs={"value": "ä"})
    mail.wait_for_event("completed", job.id)
    assert mail.is_gone(job.id)
    assert job.get(timeout=60) == {"value": "ä"}


def test_a_second_bulltask_job_with_the_same_id_does_not_run(mail: InteropQueue) -> None:
    mail.listen()
    first = mail.send("echo", options={"job_id": "invoice-1"}, value="first")
    again = mail.send("echo", options={"job_id": "invoice-1"}, value="second")
    mail.wait_for_event("duplicated", "invoice-1")
    assert mail.add("echo", {"value": "third"}, jobId="invoice-1") == "invoice-1"
    mail.add("echo", {"value": "of Node"}, jobId="invoice-2")
    other = mail.send("echo", options={"job_id": "invoice-2"}, value="of bulltask")
    mail.node_worker("echo")
    assert [job.get(timeout=60) for job in (first, again, other)] == [
        {"value": "first"},
        {"value": "first"},
        {"value": "of Node"},
    ]
    assert mail.counts() == {"completed": 2}


def test_a_node_worker_keeps_and_ignores_options_that_only_bulltask_has(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    job = mail.send("echo", options={"expires": 0, "headers": {"trace": [1, {}]}}, value=1)
    assert job.get(timeout=60) == {"value": 1}, "a Node worker does not know expires"
    stored = mail.node_job(job.id)["opts"]["bulltask"]
    assert stored.keys() == {"v", "sender", "expires", "headers"}
