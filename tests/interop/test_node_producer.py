"""bulltask's worker runs jobs that Node's Queue sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bulltask import JobState
from tests.interop.interop_queue import CLOCK_TOLERANCE_MS, InteropQueue, recorded_ids
from tests.interop.node_bridge import NodeError
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]


def test_node_gets_the_result_of_a_job_that_a_bulltask_worker_ran(any_mail: InteropQueue) -> None:
    any_mail.worker()
    job = any_mail.add("add", {"x": 1, "y": 2})
    assert any_mail.node_result(job) == 3
    seen = any_mail.node_job(job)
    assert (seen["state"], seen["returnvalue"], seen["failedReason"]) == ("completed", 3, None)
    assert (seen["attemptsMade"], seen["attemptsStarted"], seen["stacktrace"]) == (1, 1, [])
    assert seen["timestamp"] - CLOCK_TOLERANCE_MS <= seen["processedOn"] <= seen["finishedOn"]
    assert any_mail.result(job).get(timeout=60) == 3
    assert any_mail.counts() == {"completed": 1}


def test_node_jobs_sent_in_bulk_all_run(mail: InteropQueue, tmp_path: Path) -> None:
    mail.worker(children=2)
    file = str(tmp_path / "runs")
    jobs = mail.call("addBulk", [{"name": "record", "data": {"file": file}} for _ in range(50)])
    for job in jobs:
        mail.node_result(job["id"])
    assert sorted(recorded_ids(file)) == sorted(job["id"] for job in jobs)


def test_node_jobs_of_a_batch_task_are_settled_one_by_one(mail: InteropQueue) -> None:
    jobs = mail.call("addBulk", [{"name": "lengths", "data": {"text": "a" * count}} for count in range(25)])
    mail.worker()
    assert [mail.node_result(job["id"]) for job in jobs[1:]] == list(range(1, 25))
    with pytest.raises(NodeError, match="no text"):
        mail.node_result(jobs[0]["id"])


def test_objects_become_keyword_arguments_and_arrays_positional_arguments(mail: InteropQueue) -> None:
    mail.worker()
    sums = [({"x": 1, "y": 2}, 3), ({"y": 2, "x": 5}, 7), ({"x": 1}, 11), ([1, 2], 3), ([1], 11), (5, 15)]
    for data, total in sums:
        assert mail.node_result(mail.add("add", data)) == total, data
    assert mail.node_result(mail.add("echo", {})) is None
    assert mail.node_result(mail.add("echo", [])) is None


def test_star_parameters_receive_the_remaining_arguments(mail: InteropQueue) -> None:
    mail.worker()
    calls: list[tuple[object, list[Any]]] = [
        ({"first": 1}, [1, [], {}]),
        ([1, 2, 3], [1, [2, 3], {}]),
        ({"first": 1, "rest": [2, 3], "to": "x"}, [1, [2, 3], {"to": "x"}]),
        ({"first": 1, "more": {"to": "x"}}, [1, [], {"to": "x"}]),
    ]
    for data, arrived in calls:
        assert mail.node_result(mail.add("spread", data)) == arrived
    task: Any = mail.app.tasks["spread"]
    assert mail.node_job(task.delay(1, 2, 3, to="x").id)["data"] == {"first": 1, "rest": [2, 3], "more": {"to": "x"}}


def test_data_that_does_not_match_the_task_fails_without_a_retry(mail: InteropQueue) -> None:
    mail.worker(incompatible_timeout=0)
    misfits = [({}, "'x'"), ({"x": 1, "z": 2}, "'z'"), ([1, 2, 3], "too many"), ({"x": 1, "X": 1}, "'X'")]
    for data, expected in misfits:
        job = mail.add("add", data, attempts=5)
        with pytest.raises(NodeError, match="does not match add") as failure:
            mail.node_result(job)
        assert expected in str(failure.value)
        assert mail.node_job(job)["attemptsMade"] == 1


def test_a_delayed_node_job_runs_when_it_is_due(any_mail: InteropQueue) -> None:
    any_mail.worker().wait_for_line("Child started")
    job = any_mail.add("echo", {"value": "later"}, delay=2_000)
    assert any_mail.node_job(job)["state"] == "delayed"
    assert any_mail.counts() == {"delayed": 1}
    assert any_mail.node_result(job) == "later"
    seen = any_mail.node_job(job)
    assert 2_000 - CLOCK_TOLERANCE_MS <= seen["processedOn"] - seen["timestamp"] < 10_000
    assert (seen["delay"], seen["opts"]["delay"]) == (0, 2_000)


def test_node_jobs_without_a_priority_run_before_those_with_one(any_mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    priorities = [7, 2, None, 1, 2, 2_097_152, None, 1]
    jobs = [
        any_mail.add("record", {"file": file}, **({"priority": priority} if priority else {}))
        for priority in priorities
    ]
    assert any_mail.counts() == {"prioritized": 6, "waiting": 2}
    any_mail.worker()
    for job in jobs:
        any_mail.node_result(job)
    assert recorded_ids(file) == [jobs[index] for index in (2, 6, 3, 7, 1, 4, 0, 5)]


def test_a_lifo_node_job_runs_before_the_waiting_jobs(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    first, second = (mail.add("record", {"file": file}) for _ in range(2))
    last = mail.add("record", {"file": file}, lifo=True)
    mail.worker()
    mail.node_result(second)
    assert recorded_ids(file) == [last, first, second]


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (150, [150, 150, 150]),
        ({"type": "fixed", "delay": 150}, [150, 150, 150]),
        ({"type": "exponential", "delay": 100}, [100, 200, 400]),
        (None, []),
    ],
)
def test_a_node_job_is_retried_after_the_delays_of_its_backoff(
    any_mail: InteropQueue, backoff: object, delays: list[int]
) -> None:
    any_mail.worker()
    any_mail.listen()
    job = any_mail.add("fail_until", {"attempt": 4}, attempts=4, **({"backoff": backoff} if backoff else {}))
    assert any_mail.node_result(job) == 3
    waits = any_mail.waits_ms(job)
    assert len(waits) == len(delays)
    # A script on a busy machine is executed a little after the time that it was given as now.
    assert all(delay - scale_to_load(90) <= wait <= delay + 10 for wait, delay in zip(waits, delays, strict=True)), (
        waits
    )
    seen = any_mail.node_job(job)
    assert (seen["state"], seen["attemptsMade"], seen["attemptsStarted"]) == ("completed", 4, 4)
    assert [trace.splitlines()[-1] for trace in seen["stacktrace"]] == [
        f"ConnectionError: attempt {number} failed" for number in (1, 2, 3)
    ]


def test_the_jitter_of_a_node_job_only_shortens_the_delay(mail: InteropQueue) -> None:
    mail.worker()
    job = mail.add("fail_until", {"attempt": 3}, attempts=3, backoff={"type": "fixed", "delay": 400, "jitter": 0.5})
    mail.node_result(job)
    waits = mail.waits_ms(job)
    assert len(waits) == 2
    assert all(200 - scale_to_load(90) <= wait <= 410 for wait in waits), waits


def test_an_unknown_backoff_strategy_of_a_node_job_counts_as_exponential(mail: InteropQueue) -> None:
    mail.worker()
    job = mail.add("fail_until", {"attempt": 4}, attempts=4, backoff={"type": "mine", "delay": 100})
    mail.node_result(job)
    waits = mail.waits_ms(job)
    assert all(
        delay - scale_to_load(90) <= wait <= delay + 10 for wait, delay in zip(waits, (100, 200, 400), strict=True)
    ), waits


@pytest.mark.parametrize("error", ["ValueError", "ConnectionError"])
def test_every_error_in_a_node_job_is_retried(mail: InteropQueue, error: str) -> None:
    mail.worker()
    assert mail.node_result(mail.add("fail_until", {"attempt": 3, "error": error}, attempts=3)) == 2


def test_a_permanent_error_in_a_node_job_is_not_retried(mail: InteropQueue) -> None:
    mail.worker()
    mail.listen()
    job = mail.add("fail", {"error": "PermanentError", "message": "no such address"}, attempts=5, backoff=10)
    with pytest.raises(NodeError, match="no such address"):
        mail.node_result(job)
    seen = mail.node_job(job)
    assert (seen["state"], seen["attemptsMade"], seen["attemptsStarted"]) == ("failed", 1, 1)
    assert mail.node_events("retries-exhausted", job) == []


def test_node_reads_why_a_job_failed_in_a_bulltask_worker(any_mail: InteropQueue) -> None:
    any_mail.worker()
    any_mail.listen()
    job = any_mail.add("fail", {"message": 'ünfit "{}" 😀', "error": "ValueError"}, attempts=2)
    with pytest.raises(NodeError, match=r'^ünfit "\{\}" 😀$'):
        any_mail.node_result(job)
    seen = any_mail.node_job(job)
    assert (seen["state"], seen["failedReason"], seen["returnvalue"]) == ("failed", 'ünfit "{}" 😀', None)
    assert seen["attemptsMade"] == len(seen["stacktrace"]) == 2
    for trace in seen["stacktrace"]:
        assert trace.startswith("Traceback (most recent call last):\n")
        assert trace.rstrip().endswith('ValueError: ünfit "{}" 😀')
        assert "tasks.py" in trace
    assert seen["finishedOn"] >= seen["processedOn"]
    assert any_mail.wait_for_event("retries-exhausted", job)["attemptsMade"] == "2"
    assert any_mail.counts() == {"failed": 1}


def test_the_option_stack_trace_limit_limits_the_stored_tracebacks(mail: InteropQueue) -> None:
    mail.worker()
    for limit, kept in [(0, []), (1, ["3"]), (2, ["2", "3"]), (9, ["1", "2", "3"])]:
        job = mail.add("fail_until", {"attempt": 4}, attempts=4, stackTraceLimit=limit)
        mail.node_result(job)
        assert [trace.split()[-2] for trace in mail.node_job(job)["stacktrace"]] == kept


@pytest.mark.parametrize("task", ["report", "areport"])
def test_node_reads_progress_and_logs_written_by_a_bulltask_worker(any_mail: InteropQueue, task: str) -> None:
    steps: list[Any] = [10, 33.5, {"sent": 3, "left": []}, "half ½ 😀", True, None]
    any_mail.worker()
    any_mail.listen()
    job = any_mail.add(task, {"steps": steps})
    assert any_mail.node_result(job) == len(steps)
    any_mail.wait_for_event("completed", job)
    assert [event["data"] for event in any_mail.node_events("progress", job)] == steps
    seen = any_mail.node_job(job)
    assert (seen["progress"], seen["logs"]) == (None, [f"at {step}" for step in steps])


def test_the_option_keep_logs_limits_the_stored_log_lines(mail: InteropQueue) -> None:
    mail.worker()
    job = mail.add("report", {"steps": [1, 2, 3, 4]}, keepLogs=2)
    mail.node_result(job)
    assert mail.node_job(job)["logs"] == ["at 3", "at 4"]


@pytest.mark.parametrize(
    ("task", "option", "ends"), [("echo", "removeOnComplete", "completed"), ("fail", "removeOnFail", "failed")]
)
def test_finished_node_jobs_are_removed_as_their_options_require(
    mail: InteropQueue, task: str, option: str, ends: str
) -> None:
    mail.worker()
    mail.listen()
    rules: list[tuple[object, int]] = [(3, 3), ({"count": 2}, 2), ({"age": 3600, "count": 1}, 1), (True, 1)]
    for keep, left in rules:  # each rule keeps fewer jobs; a job that is removed immediately removes no others
        jobs = [mail.add(task, {}, **{option: keep}) for _ in range(4)]
        for job in jobs:
            mail.wait_for_event(ends, job)
        assert mail.counts() == {ends: left}, keep
        assert mail.is_gone(jobs[-1]) is (keep is True)


def test_finished_node_jobs_are_removed_by_age(mail: InteropQueue) -> None:
    old, kept = mail.add("echo"), mail.add("echo")
    mail.worker()
    mail.node_result(kept)
    # As if it had finished two hours ago: BullMQ purges when the next job with an age finishes.
    mail.redis.zincrby(mail.keys.completed, -7_200_000, old)
    new = mail.add("echo", {}, removeOnComplete={"age": 3600})
    mail.node_result(new)
    assert [mail.is_gone(job) for job in (old, kept, new)] == [True, False, False]


def test_a_second_node_job_with_the_same_id_does_not_run(mail: InteropQueue) -> None:
    mail.listen()
    assert mail.add("echo", {"value": "first"}, jobId="invoice-1") == "invoice-1"
    assert mail.add("echo", {"value": "second"}, jobId="invoice-1") == "invoice-1"
    mail.wait_for_event("duplicated", "invoice-1")
    mail.worker()
    assert mail.node_result("invoice-1") == "first"
    assert mail.result("invoice-1").get(timeout=60) == "first"
    assert mail.counts() == {"completed": 1}


def test_a_second_node_job_with_the_same_deduplication_id_does_not_run(mail: InteropQueue) -> None:
    mail.worker()
    gate = mail.add("hold", {"gate": "gate"}, deduplication={"id": "report"})
    mail.wait_for_start(gate)
    assert mail.add("echo", {}, deduplication={"id": "report"}) == gate
    mail.open_gate()
    mail.node_result(gate)
    assert mail.node_result(mail.add("echo", {"value": 1}, deduplication={"id": "report"})) == 1


def test_a_node_job_whose_id_has_colons_runs(mail: InteropQueue) -> None:
    mail.worker()
    job = mail.add("echo", {"value": 1}, jobId="a:b:c")
    assert mail.node_result(job) == 1
    assert mail.result(job).state is JobState.COMPLETED


def test_a_job_with_an_unknown_task_is_rescheduled_for_another_worker(mail: InteropQueue) -> None:
    worker = mail.worker()
    job = mail.add("only-in-node", {"to": "x"}, attempts=1)
    worker.wait_for_line("Job incompatible", count=2)
    seen = mail.node_job(job)
    assert seen["state"] == "delayed"
    (line,) = seen["logs"]  # once, even though it is released several times
    assert "task 'only-in-node' is not registered" in line
    worker.stop()
    mail.node_worker("echo")
    assert mail.node_result(job) == {"to": "x"}
    assert mail.node_job(job)["attemptsMade"] == 1, "a job that another worker runs keeps its attempts"


def test_a_job_with_an_unknown_task_fails_without_a_timeout_for_incompatible_jobs(mail: InteropQueue) -> None:
    mail.worker(incompatible_timeout=0)
    with pytest.raises(NodeError, match="task 'only-in-node' is not registered"):
        mail.node_result(mail.add("only-in-node", {}, attempts=3))


def test_the_tasks_time_limits_apply_to_node_jobs(mail: InteropQueue) -> None:
    mail.worker(task_time_limit=30)
    late = mail.add("limited", {"seconds": 60}, attempts=2)
    with pytest.raises(NodeError, match=r"task limited ran longer than its soft time limit of 0\.3 s"):
        mail.node_result(late)
    assert mail.node_job(late)["attemptsMade"] == 2
    killed = mail.add("limited", {"seconds": 60}, bulltask={"softTimeLimit": 10_000, "timeLimit": 400})
    with pytest.raises(NodeError, match=r"time limit of 0\.4 s and its child was killed"):
        mail.node_result(killed)
    assert mail.node_result(mail.add("limited", {"seconds": 0})) == "spun"
