"""The official Python Worker runs jobs that bulltask sends, and bulltask reads the results."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bulltask import JobState, TaskError
from bulltask.queue import FlowJob
from bulltask.queue.events import Completed, Progress
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import CLOCK_TOLERANCE_MS, InteropQueue, recorded_ids
from tests.interop.official.versions import FIXED_IN_3, SAME_IN_3
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.redis]


def test_a_bulltask_job_runs_in_the_official_worker_and_get_returns_its_result(any_mail: InteropQueue) -> None:
    any_mail.node_worker("echo")
    job = any_mail.send("add", x=1, y=2)
    assert job.get(timeout=60) == {"x": 1, "y": 2}
    assert (job.state, job.successful(), job.info) == (JobState.COMPLETED, True, {"x": 1, "y": 2})
    seen = any_mail.node_job(job.id)
    assert (seen["name"], seen["data"], seen["state"]) == ("add", {"x": 1, "y": 2}, "completed")
    assert (seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1)
    assert any_mail.counts() == {"completed": 1}


def test_values_are_returned_unchanged_by_the_official_worker(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    values: list[Any] = [None, "ünï 😀 \u2028 \x00 \ud800", 2**53 - 1, -0.5, [], {}, {"a": [{"b": [None, [], {}]}]}]
    for value in values:
        assert mail.send("echo", value=value).get(timeout=60) == {"value": value}


def test_jobs_sent_in_one_call_all_run_in_the_official_worker(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.node_worker("record", {"file": file}, concurrency=5)
    task: Any = mail.app.tasks["record"]
    jobs = mail.app.send_many([task.s(file) for _ in range(50)])
    assert {job.get(timeout=60) for job in jobs} == {mail.node.pid}
    assert sorted(recorded_ids(file)) == sorted(job.id for job in jobs)


def test_options_of_bulltasks_queue_apply_in_the_official_worker(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    with mail.app.queue("mail") as queue:
        jobs = [queue.add("record", priority=priority) for priority in (3, 1, 2)]
        jobs.append(queue.add("record"))
        jobs.append(queue.add("record", lifo=True))
        gone = queue.add("record", remove_on_complete=True, priority=4)
        first = queue.add("record", deduplication={"id": "once"}, priority=5)
        assert queue.add("record", deduplication={"id": "once"}).id == first.id
        mail.node_worker("record", {"file": file})
        for job in [*jobs, first]:
            mail.result(job.id).get(timeout=60)
        assert recorded_ids(file) == [job.id for job in (jobs[4], jobs[3], jobs[1], jobs[2], jobs[0], gone, first)]
        assert mail.is_gone(gone.id)
        assert mail.redis.keys("*:de:*") == [], "a job frees its deduplication id when it ends"


@SAME_IN_3
def test_the_official_worker_runs_delayed_jobs_up_to_a_second_late(mail: InteropQueue) -> None:
    """The official worker waits in whole seconds; bulltask's and Node's waits end when the job is due."""
    mail.node_worker("echo")
    mail.send("echo").get(timeout=60)
    late = []
    for _ in range(3):
        job = mail.send("echo", options={"countdown": 0.25})
        assert (job.state, mail.node_job(job.id)["state"]) == (JobState.DELAYED, "delayed")
        job.get(timeout=60)
        seen = mail.node_job(job.id)
        late.append(seen["processedOn"] - seen["timestamp"] - 250)
    assert all(late_ms > 500 for late_ms in late), late


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (0.15, [150, 150]),
        ({"type": "exponential", "delay": 0.1}, [100, 200]),
        # The official Python client has no jitter and no maximum delay.
        ({"type": "exponential", "delay": 0.1, "jitter": 0.5, "max_delay": 0.1}, [100, 200]),
    ],
)
@SAME_IN_3
def test_the_official_worker_retries_without_jitter_or_a_maximum_delay(
    mail: InteropQueue, backoff: Any, delays: list[int]
) -> None:
    mail.node_worker("fail-n", {"n": 2})
    job = mail.send("echo", options={"backoff": backoff})
    assert job.get(timeout=60) == 2
    waits = mail.waits_ms(job.id)
    assert all(delay - scale_to_load(90) <= wait <= delay + 10 for wait, delay in zip(waits, delays, strict=True)), (
        waits
    )
    assert mail.node_job(job.id)["attemptsMade"] == 3


@FIXED_IN_3
def test_the_official_worker_stores_the_failed_reason_in_quotes(
    mail: InteropQueue,
) -> None:
    """Node and bulltask store the text; the official Python client stores it as JSON."""
    mail.node_worker("fail", {"message": 'no "ünicorn"'})
    job = mail.send("echo", options={"max_retries": 0})
    with pytest.raises(Exception, match="nicorn") as failure:
        job.get(timeout=60)
    assert mail.redis.hget(mail.keys.job(job.id), "failedReason") == '"no \\"\\u00fcnicorn\\""'
    assert 'no "ünicorn"' in str(failure.value), "the traceback has no quotes"
    assert job.state is JobState.FAILED
    assert mail.stream.wait_for(event="failed", jobId=job.id)[0]["failedReason"] == '"no \\"\\u00fcnicorn\\""'


def test_an_unrecoverable_error_in_the_official_worker_fails_the_job(mail: InteropQueue) -> None:
    mail.node_worker("fail", {"unrecoverable": True})
    job = mail.send("echo")
    with pytest.raises(TaskError):
        job.get(timeout=60)
    assert mail.node_job(job.id)["attemptsMade"] == 1


def test_a_result_of_nan_also_fails_the_job_in_the_official_worker(mail: InteropQueue) -> None:
    mail.node_worker("nan")
    with pytest.raises(TaskError, match="Out of range float"):
        mail.send("echo", options={"max_retries": 0}).get(timeout=60)


def test_bulltask_reads_progress_and_logs_written_by_the_official_worker(mail: InteropQueue) -> None:
    steps: list[Any] = [10, {"sent": 3}, "half ½ 😀", 100]
    with mail.app.events("mail") as events:
        mail.node_worker("progress", {"steps": steps})
        job = mail.send("echo")
        assert job.get(timeout=60) == 4
        received = list(iter(lambda: events.next(timeout=0), None))
    assert [event.data for event in received if isinstance(event, Progress)] == steps
    assert [event.returnvalue for event in received if isinstance(event, Completed)] == [4]
    assert job.progress == 100
    assert mail.node_job(job.id)["logs"] == [f"at {step}" for step in steps]


def test_a_bulltask_flow_runs_in_the_official_worker_with_its_child_values(mail: InteropQueue) -> None:
    children = [FlowJob("echo", "mail", {"n": n}) for n in (1, 2)]
    with mail.app.flows() as flows:
        tree = flows.add(FlowJob("parent", "mail", {"all": True}, children=children))
    worker = mail.node_worker("echo")
    assert mail.result(tree.job.id).get(timeout=60) == {"all": True}
    values = tree.job.get_children_values()
    assert sorted(value["n"] for value in values.values()) == [1, 2]
    assert mail.job_call(tree.job.id, "getChildrenValues") == values
    assert worker


def test_a_child_that_fails_in_the_official_worker_fails_its_parent(mail: InteropQueue) -> None:
    child = FlowJob("echo", "mail", options={"attempts": 1, "fail_parent_on_failure": True})
    with mail.app.flows() as flows:
        tree = flows.add(FlowJob("parent", "mail", {}, children=[child]))
    mail.node_worker("fail")
    with pytest.raises(TaskError, match=r"child .* failed"):
        mail.result(tree.job.id).get(timeout=60)


# ---- missing functions -----------------------------------------------------------------------------------------------


@FIXED_IN_3
def test_a_schedule_ends_after_one_iteration_in_the_official_worker(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    with mail.app.queue("mail") as queue:
        queue.schedulers.upsert("often", every=0.2, name="record", data={"file": file})
        official_worker = mail.node_worker("record", {"file": file})
        wait_until(lambda: len(recorded_ids_or_none(file)) == 1)
        marker = mail.send("record", file=file, options={"countdown": 1})
        marker.get(timeout=60)
        assert len(recorded_ids(file)) == 2, "the iteration and the job a second later"
        assert set(queue.get_job_counts("delayed", "waiting").values()) == {0}
        assert queue.schedulers.get("often") is not None, "the scheduler still exists"
        mail.node.call("worker.close", worker=official_worker, timeout=20)

        queue.schedulers.upsert("often", every=0.2, name="record", data={"file": file})
        mail.worker()
        wait_until(lambda: len(recorded_ids(file)) >= 6, 60, "four more iterations in bulltask's worker")


def recorded_ids_or_none(file: str) -> list[str]:
    return recorded_ids(file) if Path(file).exists() else []


@SAME_IN_3
def test_the_official_worker_ignores_options_that_only_bulltask_has(mail: InteropQueue) -> None:
    job = mail.send("echo", options={"expires": timedelta(milliseconds=1), "headers": {"trace": "1"}})
    mail.redis.blpop("missing", 0.1)
    mail.node_worker("echo")
    assert job.get(timeout=60) == {}, "an expired job runs"


def test_pause_stops_the_official_worker_and_resume_wakes_it(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    mail.send("echo").get(timeout=60)
    with mail.app.queue("mail") as queue:
        queue.pause()
        job = mail.send("echo")
        assert mail.counts() == {"completed": 1, "paused": 1}
        assert mail.call("isPaused") is True
        queue.resume()
    assert job.get(timeout=60) == {}


@SAME_IN_3
def test_the_official_worker_waits_between_jobs_at_the_concurrency_limit(mail: InteropQueue) -> None:
    """The official worker fetches no job when it finishes one, and no marker wakes it when a job ends."""
    with mail.app.queue("mail") as queue:
        queue.set_global_concurrency(1)
        mail.node_worker("sleep", {"ms": 60}, concurrency=4, drainDelay=1)
        jobs = [mail.send("echo") for _ in range(4)]
        for job in jobs:
            job.get(timeout=60)
    times = sorted((mail.node_job(job.id)["processedOn"], mail.node_job(job.id)["finishedOn"]) for job in jobs)
    idle = [start - end for (start, _), (_, end) in zip(times[1:], times, strict=False)]
    assert all(ms >= -CLOCK_TOLERANCE_MS for ms in idle), times
    assert max(idle) > 500, times


@SAME_IN_3
def test_the_official_worker_is_in_no_list_of_workers(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    mail.send("echo").get(timeout=60)
    with mail.app.queue("mail") as queue:
        assert queue.get_workers() == []
