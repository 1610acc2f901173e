"""The official Python Queue sends, our worker runs, the official Job reads how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bulltask import App, TaskError
from bulltask.errors import BulltaskError, EncodeError
from bulltask.queue import Queue
from bulltask.testing.wait import wait_until
from tests.interop.node_bridge import NodeError
from tests.interop.official.versions import FIXED, THE_SAME
from tests.interop.side_by_side import CLOCKS_MS, SideBySide, ran
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]


def test_a_job_that_it_sends_runs_here_and_it_reads_the_result(either: SideBySide) -> None:
    either.worker()
    job = either.add("add", {"x": 1, "y": 2})
    assert either.result(job).get(timeout=60) == 3
    seen = either.seen(job)
    assert (seen["state"], seen["returnvalue"], seen["failedReason"]) == ("completed", 3, None)
    assert (seen["attemptsMade"], seen["attemptsStarted"], seen["stacktrace"]) == (1, 1, [])
    assert seen["timestamp"] - CLOCKS_MS <= seen["processedOn"] <= seen["finishedOn"]
    assert either.counts() == {"completed": 1}
    assert either.job_call(job, "isCompleted") is True


def test_values_go_from_it_to_our_task_and_come_back_the_same(mail: SideBySide) -> None:
    mail.worker()
    nested: Any = {"a": [{"b": {"c": [None, [], {}, [[1]]]}}]}
    values: list[Any] = [None, True, "ünï 😀 \u2028 \x00 \ud800", 2**53 - 1, -0.5, [], {}, nested]
    for value in values:
        job = mail.add("echo", {"value": value})
        assert mail.result(job).get(timeout=60) == value
        assert mail.seen(job)["returnvalue"] == value


def test_a_large_integer_arrives_but_is_not_returned_as_node_would_round_it(mail: SideBySide) -> None:
    mail.worker()
    assert mail.result(mail.add("add", {"x": 2**60, "y": -(2**60) + 1})).get(timeout=60) == 1
    with pytest.raises(TaskError, match="Node"):
        mail.result(mail.add("echo", {"value": 2**53})).get(timeout=60)


def test_jobs_that_it_adds_in_bulk_all_run_here(mail: SideBySide, tmp_path: Path) -> None:
    mail.worker(children=2)
    file = str(tmp_path / "runs")
    jobs = mail.call("addBulk", [{"name": "record", "data": {"file": file}} for _ in range(50)])
    for job in jobs:
        mail.result(job["id"]).get(timeout=60)
    assert sorted(ran(file)) == sorted(job["id"] for job in jobs)


def test_a_delayed_job_of_it_runs_here_when_it_is_due(either: SideBySide) -> None:
    either.worker().wait_for_line("Child started")
    job = either.add("echo", {"value": "later"}, delay=2_000)
    assert either.seen(job)["state"] == "delayed"
    assert either.result(job).get(timeout=60) == "later"
    seen = either.seen(job)
    assert 2_000 - CLOCKS_MS <= seen["processedOn"] - seen["timestamp"] < 10_000


def test_its_jobs_run_here_in_the_order_of_their_priorities_and_lifo_first(mail: SideBySide, tmp_path: Path) -> None:
    data = {"file": str(tmp_path / "runs")}
    priorities = [7, 2, None, 1, 2, 2_097_152, None, 1]
    jobs = [mail.add("record", data, **({"priority": it} if it else {})) for it in priorities]
    jobs.append(mail.add("record", data, lifo=True))
    mail.worker()
    for job in jobs:
        mail.result(job).get(timeout=60)
    assert ran(data["file"]) == [jobs[index] for index in (8, 2, 6, 3, 7, 1, 4, 0, 5)]


BACKOFFS: list[tuple[Any, list[int]]] = [
    (150, [150, 150, 150]),
    ({"type": "fixed", "delay": 150}, [150, 150, 150]),
    ({"type": "exponential", "delay": 100}, [100, 200, 400]),
    (None, []),
]


def test_its_jobs_are_retried_here_after_the_delays_that_they_name(mail: SideBySide) -> None:
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
        seen = mail.seen(job)
        assert (seen["state"], seen["attemptsMade"], seen["attemptsStarted"]) == ("completed", 4, 4)
        assert [trace.splitlines()[-1] for trace in seen["stacktrace"]] == [
            f"ValueError: attempt {number} failed" for number in (1, 2, 3)
        ]


def test_it_reads_why_a_job_failed_here(mail: SideBySide) -> None:
    mail.worker()
    job = mail.add("fail", {"message": 'ünfit "{}" 😀', "error": "ValueError"})
    with pytest.raises(ValueError, match="ünfit"):
        mail.result(job).get(timeout=60)
    seen = mail.seen(job)
    assert (seen["state"], seen["failedReason"], seen["returnvalue"]) == ("failed", 'ünfit "{}" 😀', None)
    assert seen["stacktrace"][0].rstrip().endswith('ValueError: ünfit "{}" 😀')
    assert mail.job_call(job, "isFailed") is True


def test_it_reads_progress_and_logs_of_a_job_that_runs_here(mail: SideBySide) -> None:
    steps: list[Any] = [10, {"sent": 3, "left": []}, "half ½ 😀", None]
    mail.worker()
    job = mail.add("report", {"steps": steps})
    assert mail.result(job).get(timeout=60) == len(steps)
    seen = mail.seen(job)
    assert (seen["progress"], seen["logs"]) == (None, [f"at {step}" for step in steps])


def test_a_second_job_of_it_with_the_same_id_is_not_run(mail: SideBySide) -> None:
    assert mail.add("echo", {"value": "first"}, jobId="invoice-1") == "invoice-1"
    assert mail.add("echo", {"value": "second"}, jobId="invoice-1") == "invoice-1"
    mail.worker()
    assert mail.result("invoice-1").get(timeout=60) == "first"
    assert mail.counts() == {"completed": 1}


@pytest.mark.parametrize(
    ("task", "option", "ends"), [("echo", "removeOnComplete", "completed"), ("fail", "removeOnFail", "failed")]
)
def test_finished_jobs_of_it_are_removed_here_as_it_says(mail: SideBySide, task: str, option: str, ends: str) -> None:
    mail.worker()
    rules: list[tuple[object, int]] = [(3, 3), ({"count": 2}, 2), ({"age": 3600, "count": 1}, 1), (True, 1)]
    for keep, left in rules:  # each leaves fewer than the one before; what is removed at once removes no others
        jobs = [mail.add(task, {}, **{option: keep}) for _ in range(4)]
        for job in jobs:
            mail.stream.wait_for(event=ends, jobId=job)
        assert mail.counts() == {ends: left}, keep
        assert mail.gone(jobs[-1]) is (keep is True)


def test_a_flow_of_it_runs_here_and_the_parent_waits_for_its_children(mail: SideBySide) -> None:
    children = [{"name": "add", "queueName": mail.name, "data": {"x": n}} for n in (1, 2)]
    tree = mail.node.call(
        "flow.add", flow={"name": "echo", "queueName": mail.name, "data": {"value": "all"}, "children": children}
    )
    parent = tree["job"]["id"]
    assert mail.seen(parent)["state"] == "waiting-children"
    mail.worker()
    assert mail.result(parent).get(timeout=60) == "all"
    values = mail.job_call(parent, "getChildrenValues")
    assert sorted(values.values()) == [11, 12]
    assert mail.app.queue("mail").get_job(parent).get_children_values() == values  # type: ignore[union-attr]


# ---- what it cannot say ----------------------------------------------------------------------------------------------


@FIXED
def test_its_option_deduplication_is_stored_and_has_no_effect(mail: SideBySide) -> None:
    first, second = (mail.add("echo", {"value": n}, deduplication={"id": "report", "ttl": 60_000}) for n in (1, 2))
    mail.worker()
    assert [mail.result(job).get(timeout=60) for job in (first, second)] == [1, 2]
    assert mail.redis.keys("*:de:*") == []


@FIXED
def test_its_option_keep_logs_has_no_effect_on_other_clients(mail: SideBySide) -> None:
    mail.worker()
    job = mail.add("report", {"steps": [1, 2, 3]}, keepLogs=2)
    mail.result(job).get(timeout=60)
    assert mail.seen(job)["logs"] == ["at 1", "at 2", "at 3"]


@FIXED
def test_its_default_job_options_hold_for_bulk_only(mail: SideBySide) -> None:
    defaults: dict[str, Any] = {"queue": mail.name, "defaultJobOptions": {"attempts": 7}}
    single = mail.node.call("queue.add", name="echo", data={}, opts={}, **defaults)
    many = mail.node.call("queue.call", method="addBulk", args=[[{"name": "echo", "data": {}}]], **defaults)
    assert (single["opts"]["attempts"], many[0]["opts"]["attempts"]) == (0, 7)
    with Queue("mail", mail.url, default_job_options={"attempts": 7}) as queue:
        [in_bulk] = queue.add_bulk([{"name": "echo"}])
        assert queue.add("echo").opts["attempts"] == in_bulk.opts["attempts"] == 7


@FIXED
def test_in_its_flows_no_policy_for_failed_children_has_an_effect(mail: SideBySide) -> None:
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
        mail.send("echo").get(timeout=60)  # what the failure might have released would have run before
        assert mail.seen(tree["job"]["id"])["state"] == "waiting-children", policy


@FIXED
def test_the_jobs_that_its_flow_producer_returns_cannot_be_asked(mail: SideBySide) -> None:
    flow = {"name": "echo", "queueName": mail.name, "data": {}, "children": []}
    job = mail.node.call("flow.ask", flow=flow)
    assert job["state"] == "unknown"
    assert mail.seen(job["id"])["state"] == "waiting"


@THE_SAME
def test_a_lost_reply_makes_two_jobs_of_its_and_one_of_ours(mail: SideBySide, flaky: Any) -> None:
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
    mail.node.call("queue.add", data={"value": "theirs"}, **at)
    flaky.drop_replies(1, match="evalsha")
    sender.send_task("echo", kwargs={"value": "ours"})
    assert flaky.dropped == 2
    sender.close()

    def stored(value: str) -> int:
        keys = [f"{mail.keys.base}{job}" for job in mail.redis.lrange(mail.keys.wait, 0, -1)]
        return sum(value in mail.redis.hget(key, "data") for key in keys)

    wait_until(lambda: (stored("theirs"), stored("ours")) == (2, 1))


@THE_SAME
def test_it_refuses_less_than_ours(mail: SideBySide) -> None:
    with pytest.raises(NodeError, match="Out of range float"):
        mail.add("echo", {"value": float("nan")})
    mail.add("echo", {"value": 2**53}, priority=-1, attempts=-1, jobId="7", nonsense=1)
    assert mail.seen("7")["opts"]["nonsense"] == 1
    with mail.app.queue("mail") as queue:
        options: list[dict[str, Any]] = [{"priority": -1}, {"attempts": -1}, {"job_id": "7"}, {"nonsense": 1}]
        for said in options:
            with pytest.raises((BulltaskError, TypeError)):
                queue.add("echo", **said)
        for value in (float("nan"), 2**53):
            with pytest.raises(EncodeError):
                queue.add("echo", {"value": value})
        assert queue.count() == 1
