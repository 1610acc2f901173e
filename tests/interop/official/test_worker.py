"""We send, the official Python Worker runs; its results are read by ours."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bulltask import JobState, TaskError
from bulltask.queue import FlowJob
from bulltask.queue.events import Completed, Progress
from bulltask.testing.wait import wait_until
from tests.interop.official.versions import FIXED, THE_SAME
from tests.interop.side_by_side import CLOCKS_MS, SideBySide, ran
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.redis]


def test_a_bulltask_job_runs_in_the_official_worker_and_get_returns_its_result(either: SideBySide) -> None:
    either.node_worker("echo")
    job = either.send("add", x=1, y=2)
    assert job.get(timeout=60) == {"x": 1, "y": 2}
    assert (job.state, job.successful(), job.info) == (JobState.COMPLETED, True, {"x": 1, "y": 2})
    seen = either.seen(job.id)
    assert (seen["name"], seen["data"], seen["state"]) == ("add", {"x": 1, "y": 2}, "completed")
    assert (seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1)
    assert either.counts() == {"completed": 1}


def test_values_are_returned_unchanged_by_the_official_worker(mail: SideBySide) -> None:
    mail.node_worker("echo")
    values: list[Any] = [None, "ünï 😀 \u2028 \x00 \ud800", 2**53 - 1, -0.5, [], {}, {"a": [{"b": [None, [], {}]}]}]
    for value in values:
        assert mail.send("echo", value=value).get(timeout=60) == {"value": value}


def test_jobs_sent_in_one_call_all_run_in_the_official_worker(mail: SideBySide, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.node_worker("record", {"file": file}, concurrency=5)
    task: Any = mail.app.tasks["record"]
    jobs = mail.app.send_many([task.s(file) for _ in range(50)])
    assert {job.get(timeout=60) for job in jobs} == {mail.node.pid}
    assert sorted(ran(file)) == sorted(job.id for job in jobs)


def test_options_of_bulltasks_queue_apply_in_the_official_worker(mail: SideBySide, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    with mail.app.queue("mail") as queue:
        jobs = [queue.add("record", priority=it) for it in (3, 1, 2)]
        jobs.append(queue.add("record"))
        jobs.append(queue.add("record", lifo=True))
        gone = queue.add("record", remove_on_complete=True, priority=4)
        first = queue.add("record", deduplication={"id": "once"}, priority=5)
        assert queue.add("record", deduplication={"id": "once"}).id == first.id
        mail.node_worker("record", {"file": file})
        for job in [*jobs, first]:
            mail.result(job.id).get(timeout=60)
        assert ran(file) == [job.id for job in (jobs[4], jobs[3], jobs[1], jobs[2], jobs[0], gone, first)]
        assert mail.gone(gone.id)
        assert mail.redis.keys("*:de:*") == [], "the owner of a deduplication id gives it back when it ends"


@THE_SAME
def test_the_official_worker_runs_delayed_jobs_up_to_a_second_late(mail: SideBySide) -> None:
    """Its wait for the marker is rounded up to whole seconds; ours and Node's end when the job is due."""
    mail.node_worker("echo")
    mail.send("echo").get(timeout=60)
    late = []
    for _ in range(3):
        job = mail.send("echo", options={"countdown": 0.25})
        assert (job.state, mail.seen(job.id)["state"]) == (JobState.DELAYED, "delayed")
        job.get(timeout=60)
        seen = mail.seen(job.id)
        late.append(seen["processedOn"] - seen["timestamp"] - 250)
    assert all(it > 500 for it in late), late


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (0.15, [150, 150]),
        ({"type": "exponential", "delay": 0.1}, [100, 200]),
        # Node's jitter shortens the delay, ours spreads it; the official Python client has none, and knows no cap.
        ({"type": "exponential", "delay": 0.1, "jitter": 0.5, "max_delay": 0.1}, [100, 200]),
    ],
)
@THE_SAME
def test_the_official_worker_retries_without_jitter_and_maximum_delay(
    mail: SideBySide, backoff: Any, delays: list[int]
) -> None:
    mail.node_worker("fail-n", {"n": 2})
    job = mail.send("echo", options={"backoff": backoff})
    assert job.get(timeout=60) == 2
    waits = mail.waits_ms(job.id)
    assert all(delay - scale_to_load(90) <= wait <= delay + 10 for wait, delay in zip(waits, delays, strict=True)), (
        waits
    )
    assert mail.seen(job.id)["attemptsMade"] == 3


@FIXED
def test_the_official_worker_stores_the_failed_reason_in_quotes(
    mail: SideBySide,
) -> None:
    """Node and bulltask store the text; the official Python client stores it as JSON."""
    mail.node_worker("fail", {"message": 'no "ünicorn"'})
    job = mail.send("echo", options={"max_retries": 0})
    with pytest.raises(Exception, match="nicorn") as failure:
        job.get(timeout=60)
    assert mail.redis.hget(mail.keys.job(job.id), "failedReason") == '"no \\"\\u00fcnicorn\\""'
    assert 'no "ünicorn"' in str(failure.value), "its traceback"
    assert job.state is JobState.FAILED
    assert mail.stream.wait_for(event="failed", jobId=job.id)[0]["failedReason"] == '"no \\"\\u00fcnicorn\\""'


def test_an_unrecoverable_error_in_the_official_worker_fails_the_job(mail: SideBySide) -> None:
    mail.node_worker("fail", {"unrecoverable": True})
    job = mail.send("echo")
    with pytest.raises(TaskError):
        job.get(timeout=60)
    assert mail.seen(job.id)["attemptsMade"] == 1


def test_nan_fails_the_job_in_the_official_worker_too(mail: SideBySide) -> None:
    mail.node_worker("nan")
    with pytest.raises(TaskError, match="Out of range float"):
        mail.send("echo", options={"max_retries": 0}).get(timeout=60)


def test_progress_and_logs_of_the_official_worker_are_read_by_bulltask(mail: SideBySide) -> None:
    steps: list[Any] = [10, {"sent": 3}, "half ½ 😀", 100]
    with mail.app.events("mail") as events:
        mail.node_worker("progress", {"steps": steps})
        job = mail.send("echo")
        assert job.get(timeout=60) == 4
        heard = list(iter(lambda: events.next(timeout=0), None))
    assert [event.data for event in heard if isinstance(event, Progress)] == steps
    assert [event.returnvalue for event in heard if isinstance(event, Completed)] == [4]
    assert job.progress == 100
    assert mail.seen(job.id)["logs"] == [f"at {step}" for step in steps]


def test_a_bulltask_flow_runs_in_the_official_worker_with_its_child_values(mail: SideBySide) -> None:
    children = [FlowJob("echo", "mail", {"n": n}) for n in (1, 2)]
    with mail.app.flows() as flows:
        tree = flows.add(FlowJob("parent", "mail", {"all": True}, children=children))
    worker = mail.node_worker("echo")
    assert mail.result(tree.job.id).get(timeout=60) == {"all": True}
    values = tree.job.get_children_values()
    assert sorted(value["n"] for value in values.values()) == [1, 2]
    assert mail.job_call(tree.job.id, "getChildrenValues") == values
    assert worker


def test_a_child_that_fails_in_the_official_worker_fails_its_parent(mail: SideBySide) -> None:
    child = FlowJob("echo", "mail", options={"attempts": 1, "fail_parent_on_failure": True})
    with mail.app.flows() as flows:
        tree = flows.add(FlowJob("parent", "mail", {}, children=[child]))
    mail.node_worker("fail")
    with pytest.raises(TaskError, match=r"child .* failed"):
        mail.result(tree.job.id).get(timeout=60)


# ---- what it does not do ---------------------------------------------------------------------------------------------


@FIXED
def test_a_series_ends_after_one_iteration_in_the_official_worker(mail: SideBySide, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    with mail.app.queue("mail") as queue:
        queue.schedulers.upsert("often", every=0.2, name="record", data={"file": file})
        theirs = mail.node_worker("record", {"file": file})
        wait_until(lambda: len(ran_or_none(file)) == 1)
        marker = mail.send("record", file=file, options={"countdown": 1})
        marker.get(timeout=60)
        assert len(ran(file)) == 2, "the iteration and the job that came a second after it"
        assert set(queue.get_job_counts("delayed", "waiting").values()) == {0}
        assert queue.schedulers.get("often") is not None, "it is listed all the same"
        mail.node.call("worker.close", worker=theirs, timeout=20)

        queue.schedulers.upsert("often", every=0.2, name="record", data={"file": file})
        mail.worker()
        wait_until(lambda: len(ran(file)) >= 6, 60, "four more iterations, by ours")


def ran_or_none(file: str) -> list[str]:
    return ran(file) if Path(file).exists() else []


@THE_SAME
def test_the_official_worker_ignores_options_of_bulltask(mail: SideBySide) -> None:
    job = mail.send("echo", options={"expires": timedelta(milliseconds=1), "headers": {"trace": "1"}})
    mail.redis.blpop("nobody", 0.1)
    mail.node_worker("echo")
    assert job.get(timeout=60) == {}, "an expired job runs"


def test_pause_stops_the_official_worker_and_resume_wakes_it(mail: SideBySide) -> None:
    mail.node_worker("echo")
    mail.send("echo").get(timeout=60)
    with mail.app.queue("mail") as queue:
        queue.pause()
        job = mail.send("echo")
        assert mail.counts() == {"completed": 1, "paused": 1}
        assert mail.call("isPaused") is True
        queue.resume()
    assert job.get(timeout=60) == {}


@THE_SAME
def test_the_official_worker_waits_between_jobs_at_the_concurrency_limit(mail: SideBySide) -> None:
    """It does not fetch a job as it ends one, and nothing wakes it: BullMQ sets no marker at the end of a job."""
    with mail.app.queue("mail") as queue:
        queue.set_global_concurrency(1)
        mail.node_worker("sleep", {"ms": 60}, concurrency=4, drainDelay=1)
        jobs = [mail.send("echo") for _ in range(4)]
        for job in jobs:
            job.get(timeout=60)
    times = sorted((mail.seen(job.id)["processedOn"], mail.seen(job.id)["finishedOn"]) for job in jobs)
    idle = [start - end for (start, _), (_, end) in zip(times[1:], times, strict=False)]
    assert all(ms >= -CLOCKS_MS for ms in idle), times
    assert max(idle) > 500, times


@THE_SAME
def test_the_official_worker_is_in_no_list_of_workers(mail: SideBySide) -> None:
    mail.node_worker("echo")
    mail.send("echo").get(timeout=60)
    with mail.app.queue("mail") as queue:
        assert queue.get_workers() == []
