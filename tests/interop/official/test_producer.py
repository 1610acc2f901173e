"""bulltask's worker runs jobs of the official Python Queue, and the official Job reads the outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bulltask import App, TaskError
from bulltask.errors import BulltaskError, EncodeError
from bulltask.queue import Queue
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import CLOCK_TOLERANCE_MS, InteropQueue, recorded_ids
from tests.interop.node_bridge import NodeError
from tests.interop.official.versions import FIXED_IN_3, SAME_IN_3
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]


def test_a_job_from_the_official_queue_runs_and_its_result_is_read_back(any_mail: InteropQueue) -> None:
    any_mail.worker()
    job = any_mail.add("add", {"x": 1, "y": 2})
    assert any_mail.result(job).get(timeout=60) == 3
    seen = any_mail.node_job(job)
    assert (seen["state"], seen["returnvalue"], seen["failedReason"]) == ("completed", 3, None)
    assert (seen["attemptsMade"], seen["attemptsStarted"], seen["stacktrace"]) == (1, 1, [])
    assert seen["timestamp"] - CLOCK_TOLERANCE_MS <= seen["processedOn"] <= seen["finishedOn"]
    assert any_mail.counts() == {"completed": 1}
    assert any_mail.job_call(job, "isCompleted") is True


def test_values_from_the_official_queue_are_returned_unchanged(mail: InteropQueue) -> None:
    mail.worker()
    nested: Any = {"a": [{"b": {"c": [None, [], {}, [[1]]]}}]}
    values: list[Any] = [None, True, "ünï 😀 \u2028 \x00 \ud800", 2**53 - 1, -0.5, [], {}, nested]
    for value in values:
        job = mail.add("echo", {"value": value})
        assert mail.result(job).get(timeout=60) == value
        assert mail.node_job(job)["returnvalue"] == value


def test_a_large_integer_is_received_but_cannot_be_returned(mail: InteropQueue) -> None:
    mail.worker()
    assert mail.result(mail.add("add", {"x": 2**60, "y": -(2**60) + 1})).get(timeout=60) == 1
    with pytest.raises(TaskError, match="Node"):
        mail.result(mail.add("echo", {"value": 2**53})).get(timeout=60)


def test_jobs_that_the_official_queue_adds_in_bulk_all_run(mail: InteropQueue, tmp_path: Path) -> None:
    mail.worker(children=2)
    file = str(tmp_path / "runs")
    jobs = mail.call("addBulk", [{"name": "record", "data": {"file": file}} for _ in range(50)])
    for job in jobs:
        mail.result(job["id"]).get(timeout=60)
    assert sorted(recorded_ids(file)) == sorted(job["id"] for job in jobs)


def test_a_delayed_job_from_the_official_queue_runs_when_it_is_due(any_mail: InteropQueue) -> None:
    any_mail.worker().wait_for_line("Child started")
    job = any_mail.add("echo", {"value": "later"}, delay=2_000)
    assert any_mail.node_job(job)["state"] == "delayed"
    assert any_mail.result(job).get(timeout=60) == "later"
    seen = any_mail.node_job(job)
    assert 2_000 - CLOCK_TOLERANCE_MS <= seen["processedOn"] - seen["timestamp"] < 10_000


def test_jobs_from_the_official_queue_run_lifo_first_then_by_priority(mail: InteropQueue, tmp_path: Path) -> None:
    data = {"file": str(tmp_path / "runs")}
    priorities = [7, 2, None, 1, 2, 2_097_152, None, 1]
    jobs = [mail.add("record", data, **({"priority": priority} if priority else {})) for priority in priorities]
    jobs.append(mail.add("record", data, lifo=True))
    mail.worker()
    for job in jobs:
        mail.result(job).get(timeout=60)
    assert recorded_ids(data["file"]) == [jobs[index] for index in (8, 2, 6, 3, 7, 1, 4, 0, 5)]


BACKOFFS: list[tuple[Any, list[int]]] = [
    (150, [150, 150, 150]),
    ({"type": "fixed", "delay": 150}, [150, 150, 150]),
    ({"type": "exponential", "delay": 100}, [100, 200, 400]),
    (None, []),
]


def test_jobs_from_the_official_queue_are_retried_after_their_backoff(mail: InteropQueue) -> None:
    mail.worker()
    for backoff, delays in BACKOFFS:
        opts = {"backoff": backoff} if backoff else {}
        job = mail.add("fail_until", {"attempt": 4, "error": "ValueError"}, attempts=4, **opts)
        assert mail.result(job).get(timeout=60) == 3
        waits = mail.waits_ms(job)
        assert len(waits) == len(delays)
        assert all(
            delay - scale_to_load(90) <= wait <= delay + 10 for wait, delay in zip(waits, delays, strict=True)
        ), waits
        seen = mail.node_job(job)
        assert (seen["state"], seen["attemptsMade"], seen["attemptsStarted"]) == ("completed", 4, 4)
        assert [trace.splitlines()[-1] for trace in seen["stacktrace"]] == [
            f"ValueError: attempt {number} failed" for number in (1, 2, 3)
        ]


def test_the_official_client_reads_why_a_job_failed_in_a_bulltask_worker(mail: InteropQueue) -> None:
    mail.worker()
    job = mail.add("fail", {"message": 'ünfit "{}" 😀', "error": "ValueError"})
    with pytest.raises(ValueError, match="ünfit"):
        mail.result(job).get(timeout=60)
    seen = mail.node_job(job)
    assert (seen["state"], seen["failedReason"], seen["returnvalue"]) == ("failed", 'ünfit "{}" 😀', None)
    assert seen["stacktrace"][0].rstrip().endswith('ValueError: ünfit "{}" 😀')
    assert mail.job_call(job, "isFailed") is True


def test_the_official_client_reads_progress_and_logs_written_by_a_bulltask_worker(mail: InteropQueue) -> None:
    steps: list[Any] = [10, {"sent": 3, "left": []}, "half ½ 😀", None]
    mail.worker()
    job = mail.add("report", {"steps": steps})
    assert mail.result(job).get(timeout=60) == len(steps)
    seen = mail.node_job(job)
    assert (seen["progress"], seen["logs"]) == (None, [f"at {step}" for step in steps])


def test_a_second_job_from_the_official_queue_with_the_same_id_does_not_run(mail: InteropQueue) -> None:
    assert mail.add("echo", {"value": "first"}, jobId="invoice-1") == "invoice-1"
    assert mail.add("echo", {"value": "second"}, jobId="invoice-1") == "invoice-1"
    mail.worker()
    assert mail.result("invoice-1").get(timeout=60) == "first"
    assert mail.counts() == {"completed": 1}


@pytest.mark.parametrize(
    ("task", "option", "ends"), [("echo", "removeOnComplete", "completed"), ("fail", "removeOnFail", "failed")]
)
def test_finished_jobs_from_the_official_queue_are_removed_as_its_options_require(
    mail: InteropQueue, task: str, option: str, ends: str
) -> None:
    mail.worker()
    rules: list[tuple[object, int]] = [(3, 3), ({"count": 2}, 2), ({"age": 3600, "count": 1}, 1), (True, 1)]
    for keep, left in rules:  # each rule keeps fewer jobs; a job that is removed immediately removes no others
        jobs = [mail.add(task, {}, **{option: keep}) for _ in range(4)]
        for job in jobs:
            mail.stream.wait_for(event=ends, jobId=job)
        assert mail.counts() == {ends: left}, keep
        assert mail.is_gone(jobs[-1]) is (keep is True)


def test_a_flow_from_the_official_producer_runs_its_children_first(mail: InteropQueue) -> None:
    children = [{"name": "add", "queueName": mail.name, "data": {"x": n}} for n in (1, 2)]
    tree = mail.node.call(
        "flow.add", flow={"name": "echo", "queueName": mail.name, "data": {"value": "all"}, "children": children}
    )
    parent = tree["job"]["id"]
    assert mail.node_job(parent)["state"] == "waiting-children"
    mail.worker()
    assert mail.result(parent).get(timeout=60) == "all"
    values = mail.job_call(parent, "getChildrenValues")
    assert sorted(values.values()) == [11, 12]
    assert mail.app.queue("mail").get_job(parent).get_children_values() == values  # type: ignore[union-attr]


# ---- options without an effect ---------------------------------------------------------------------------------------


@FIXED_IN_3
def test_the_official_deduplication_option_has_no_effect(mail: InteropQueue) -> None:
    first, second = (mail.add("echo", {"value": n}, deduplication={"id": "report", "ttl": 60_000}) for n in (1, 2))
    mail.worker()
    assert [mail.result(job).get(timeout=60) for job in (first, second)] == [1, 2]
    assert mail.redis.keys("*:de:*") == []


@FIXED_IN_3
def test_the_official_keep_logs_option_has_no_effect_on_other_clients(mail: InteropQueue) -> None:
    mail.worker()
    job = mail.add("report", {"steps": [1, 2, 3]}, keepLogs=2)
    mail.result(job).get(timeout=60)
    assert mail.node_job(job)["logs"] == ["at 1", "at 2", "at 3"]


@FIXED_IN_3
def test_official_default_job_options_apply_only_to_bulk_adds(mail: InteropQueue) -> None:
    defaults: dict[str, Any] = {"queue": mail.name, "defaultJobOptions": {"attempts": 7}}
    single = mail.node.call("queue.add", name="echo", data={}, opts={}, **defaults)
    many = mail.node.call("queue.call", method="addBulk", args=[[{"name": "echo", "data": {}}]], **defaults)
    assert (single["opts"]["attempts"], many[0]["opts"]["attempts"]) == (0, 7)
    with Queue("mail", mail.url, default_job_options={"attempts": 7}) as queue:
        [in_bulk] = queue.add_bulk([{"name": "echo"}])
        assert queue.add("echo").opts["attempts"] == in_bulk.opts["attempts"] == 7


@FIXED_IN_3
def test_failure_options_of_children_have_no_effect_in_official_flows(mail: InteropQueue) -> None:
    mail.worker()
    for policy in (
        "failParentOnFailure",
        "continueParentOnFailure",
        "ignoreDependencyOnFailure",
        "removeDependencyOnFailure",
    ):
        child = {"name": "fail", "queueName": mail.name, "data": {"error": "PermanentError"}, "opts": {policy: True}}
        flow = {"name": "echo", "queueName": mail.name, "data": {}, "children": [child]}
        tree = mail.node.call("flow.add", flow=flow)
        mail.stream.wait_for(event="failed", jobId=tree["children"][0]["job"]["id"])
        mail.send("echo").get(timeout=60)  # a job that the failure released would have run before this one
        assert mail.node_job(tree["job"]["id"])["state"] == "waiting-children", policy


@FIXED_IN_3
def test_jobs_returned_by_the_official_flow_producer_have_an_unknown_state(mail: InteropQueue) -> None:
    flow = {"name": "echo", "queueName": mail.name, "data": {}, "children": []}
    job = mail.node.call("flow.state", flow=flow)
    assert job["state"] == "unknown"
    assert mail.node_job(job["id"])["state"] == "waiting"


@SAME_IN_3
def test_a_lost_reply_adds_two_official_jobs_and_one_bulltask_job(mail: InteropQueue, flaky: Any) -> None:
    at: dict[str, Any] = {
        "connection": {"host": flaky.host, "port": flaky.port},
        "queue": mail.name,
        "name": "echo",
        "opts": {},
    }
    mail.node.call("queue.add", data={"value": "warm"}, **at)
    sender = App("sender", f"redis://{flaky.host}:{flaky.port}/0", task_default_queue="mail")
    sender.send_task("echo", kwargs={"value": "warm"})
    flaky.drop_replies(1, match="evalsha")
    mail.node.call("queue.add", data={"value": "official"}, **at)
    flaky.drop_replies(1, match="evalsha")
    sender.send_task("echo", kwargs={"value": "bulltask"})
    assert flaky.dropped == 2
    sender.close()

    def stored(value: str) -> int:
        keys = [f"{mail.keys.base}{job}" for job in mail.redis.lrange(mail.keys.wait, 0, -1)]
        return sum(value in mail.redis.hget(key, "data") for key in keys)

    wait_until(lambda: (stored("official"), stored("bulltask")) == (2, 1))


@SAME_IN_3
def test_the_official_queue_accepts_values_that_bulltasks_queue_rejects(mail: InteropQueue) -> None:
    with pytest.raises(NodeError, match="Out of range float"):
        mail.add("echo", {"value": float("nan")})
    mail.add("echo", {"value": 2**53}, priority=-1, attempts=-1, jobId="7", nonsense=1)
    assert mail.node_job("7")["opts"]["nonsense"] == 1
    with mail.app.queue("mail") as queue:
        options: list[dict[str, Any]] = [{"priority": -1}, {"attempts": -1}, {"job_id": "7"}, {"nonsense": 1}]
        for option in options:
            with pytest.raises((BulltaskError, TypeError)):
                queue.add("echo", **option)
        for value in (float("nan"), 2**53):
            with pytest.raises(EncodeError):
                queue.add("echo", {"value": value})
        assert queue.count() == 1
