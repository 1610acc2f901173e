"""Tests of the bridge to the official Node client, on which the other interop tests depend."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bulltask.testing.worker import RedisServer, wait_until
from tests.conftest import ServerFactory
from tests.interop.node_bridge import NodeBridge, NodeError, connection_of
from tests.support.processes import has_exited

pytestmark = [pytest.mark.interop, pytest.mark.redis]


@pytest.fixture
def own_node(node_client: None, broker_url: str) -> Iterator[NodeBridge]:
    """A Node process for a test that ends it."""
    with NodeBridge.to(broker_url) as bridge:
        yield bridge


@pytest.fixture
def node(session_node: NodeBridge, broker_url: str) -> Iterator[NodeBridge]:
    """The session's Node process, connected to an empty server."""
    yield session_node
    session_node.reset()


def has_name(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda args: bool(args["name"] == name)


def test_a_job_is_added_and_completed_in_node(node: NodeBridge) -> None:
    node.call("events.start", queue="mail")
    job = node.call("queue.add", queue="mail", name="send", data={"to": "ä😀"}, opts={"attempts": 2})
    node.call("worker.start", queue="mail", processor="echo")
    assert node.wait_event("completed")["returnvalue"] == {"to": "ä😀"}
    seen = node.call("queue.getJob", queue="mail", job=job["id"])
    assert seen["state"] == "completed"
    assert seen["name"] == "send"
    assert seen["data"] == seen["returnvalue"] == {"to": "ä😀"}
    assert seen["opts"]["attempts"] == 2
    assert (seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1)
    assert seen["timestamp"] <= seen["processedOn"] <= seen["finishedOn"]
    assert [event["event"] for event in node.events()][:4] == ["added", "waiting", "active", "completed"]


def test_every_field_of_a_job_is_returned_even_if_it_is_empty(node: NodeBridge) -> None:
    job = node.call("queue.add", queue="mail", name="send", data={}, opts={"delay": 60_000, "priority": 3})
    seen = node.call("queue.getJob", queue="mail", job=job["id"])
    assert {name for name, value in seen.items() if value is None} == {
        "returnvalue", "failedReason", "processedOn", "finishedOn", "parentKey",
    }  # fmt: skip
    assert (seen["state"], seen["delay"], seen["priority"], seen["logs"]) == ("delayed", 60_000, 3, [])
    assert node.call("queue.getJob", queue="mail", job="missing") is None


def test_no_event_is_missed_once_the_listener_has_started(node: NodeBridge) -> None:
    for queue in map(str, range(1_000, 1_020)):
        node.call("events.start", queue=queue)
        node.call("queue.add", queue=queue, name=queue, data={})
        node.wait_event("added", has_name(queue))


def test_events_are_received_until_the_listener_stops(node: NodeBridge) -> None:
    node.call("queue.add", queue="mail", name="early", data={})
    events = node.call("events.start", queue="mail")
    first = node.call("queue.add", queue="mail", name="now", data={})
    node.wait_event("added", lambda args: args["jobId"] == first["id"])
    node.call("events.close", events=events)
    node.call("queue.add", queue="mail", name="late", data={})
    assert [event["args"]["name"] for event in node.events("added")] == ["now"]
    node.call("events.start", queue="mail", after="0-0")
    node.wait_event("added", has_name("late"))


def test_a_failed_job_has_a_reason_and_a_stack(node: NodeBridge) -> None:
    node.call("worker.start", queue="mail", processor="fail", args={"message": "no such address"})
    job = node.call("queue.add", queue="mail", name="send", data={})
    with pytest.raises(NodeError, match="no such address"):
        node.call("job.waitUntilFinished", queue="mail", job=job["id"])
    seen = node.call("queue.getJob", queue="mail", job=job["id"])
    assert (seen["state"], seen["failedReason"]) == ("failed", "no such address")
    assert seen["stacktrace"][0].startswith("Error: no such address")


def test_an_unrecoverable_failure_is_not_retried(node: NodeBridge) -> None:
    node.call("worker.start", queue="mail", processor="fail", args={"unrecoverable": True})
    job = node.call("queue.add", queue="mail", name="send", data={}, opts={"attempts": 5})
    with pytest.raises(NodeError, match="it failed"):
        node.call("job.waitUntilFinished", queue="mail", job=job["id"])
    assert node.call("queue.getJob", queue="mail", job=job["id"])["attemptsMade"] == 1


def test_a_job_can_fail_until_its_third_attempt(node: NodeBridge) -> None:
    node.call("worker.start", queue="mail", processor="fail-n", args={"n": 2})
    job = node.call("queue.add", queue="mail", name="send", data={}, opts={"attempts": 5})
    assert node.call("job.waitUntilFinished", queue="mail", job=job["id"]) == 2
    seen = node.call("queue.getJob", queue="mail", job=job["id"])
    assert (seen["attemptsMade"], len(seen["stacktrace"])) == (3, 2)


def test_progress_and_logs_are_reported(node: NodeBridge) -> None:
    node.call("events.start", queue="mail")
    node.call("worker.start", queue="mail", processor="progress", args={"steps": [10, {"sent": 3}]})
    job = node.call("queue.add", queue="mail", name="send", data={})
    assert node.call("job.waitUntilFinished", queue="mail", job=job["id"]) == 2
    node.wait_event("progress", lambda args: args["data"] == {"sent": 3})
    assert [event["args"]["data"] for event in node.events("progress")] == [10, {"sent": 3}]
    seen = node.call("queue.getJob", queue="mail", job=job["id"])
    assert (seen["progress"], seen["logs"]) == ({"sent": 3}, ["progress 10", 'progress {"sent":3}'])


def test_a_worker_records_what_it_ran(node: NodeBridge, tmp_path: Path) -> None:
    file = tmp_path / "runs"
    node.call("worker.start", queue="mail", processor="record", args={"file": str(file)}, concurrency=2)
    jobs = node.call("queue.addBulk", queue="mail", jobs=[{"name": "send", "data": {"n": n}} for n in range(10)])
    for job in jobs:
        node.call("job.waitUntilFinished", queue="mail", job=job["id"])
    assert sorted(file.read_text().splitlines()) == sorted(f"{job['id']} {node.pid}" for job in jobs)


def test_closing_a_worker_waits_for_its_job_unless_forced(own_node: NodeBridge) -> None:
    worker = own_node.call("worker.start", queue="mail", processor="sleep", args={"ms": 300}, lockDuration=2_000)
    assert len(own_node.call("queue.getWorkers", queue="mail")) == 1
    own_node.call("events.start", queue="mail")
    job = own_node.call("queue.add", queue="mail", name="send", data={})
    own_node.wait_event("active")
    own_node.call("worker.close", worker=worker)
    assert own_node.call("queue.getJob", queue="mail", job=job["id"])["returnvalue"] == 300
    own_node.call("worker.start", queue="slow", processor="sleep", args={"ms": 60_000})
    own_node.call("events.start", queue="slow")
    own_node.call("queue.add", queue="slow", name="send", data={})
    own_node.wait_event("active", lambda args: len(own_node.events("active")) == 2)
    own_node.close()  # not only after 60 s
    assert has_exited(own_node.pid)


def test_a_queue_is_counted_paused_drained_and_obliterated(node: NodeBridge) -> None:
    node.call("queue.addBulk", queue="mail", jobs=[{"name": "send", "data": {}}, {"name": "send", "data": {}}])
    node.call("queue.add", queue="mail", name="send", data={}, opts={"delay": 60_000})
    assert node.call("queue.getJobCounts", queue="mail", states=["wait", "delayed"]) == {"wait": 2, "delayed": 1}
    node.call("queue.pause", queue="mail")
    assert node.call("queue.getJobCounts", queue="mail")["paused"] == 2
    node.call("queue.resume", queue="mail")
    node.call("queue.drain", queue="mail")
    assert node.call("queue.getJobCounts", queue="mail", states=["wait", "delayed"]) == {"wait": 0, "delayed": 1}
    node.call("queue.obliterate", queue="mail", force=True)
    assert set(node.call("queue.getJobCounts", queue="mail").values()) == {0}


def test_a_flow_runs_its_children_first(node: NodeBridge) -> None:
    children = [{"name": "part", "queueName": "parts", "data": {"n": n}} for n in range(2)]
    flow = node.call("flow.add", flow={"name": "whole", "queueName": "wholes", "data": {}, "children": children})
    assert [child["data"] for child in flow["children"]] == [{"n": 0}, {"n": 1}]
    assert node.call("queue.getJob", queue="wholes", job=flow["id"])["state"] == "waiting-children"
    for queue in ("parts", "wholes"):
        node.call("worker.start", queue=queue, processor="echo")
    assert node.call("job.waitUntilFinished", queue="wholes", job=flow["id"]) == {}
    values = node.call("job.call", queue="wholes", job=flow["id"], method="getChildrenValues")
    assert sorted(value["n"] for value in values.values()) == [0, 1]


def test_any_other_method_can_be_called(node: NodeBridge) -> None:
    job = node.call("queue.add", queue="mail", name="send", data={}, opts={"delay": 60_000})
    node.call("job.call", queue="mail", job=job["id"], method="promote")
    [waiting] = node.call("queue.call", queue="mail", method="getJobs", args=[["wait"]])
    assert waiting["id"] == job["id"]


def test_prefix_and_connection_can_be_chosen(node: NodeBridge, server_factory: ServerFactory) -> None:
    server: RedisServer = server_factory(password="secret")
    connection = connection_of(server.url)
    node.call("queue.add", queue="mail", name="send", data={}, connection=connection, prefix="other")
    assert node.call("queue.getJobCounts", queue="mail", connection=connection, prefix="other")["waiting"] == 1
    assert node.call("queue.getJobCounts", queue="mail", connection=connection)["waiting"] == 0
    assert node.call("queue.getJobCounts", queue="mail")["waiting"] == 0


def test_invalid_calls_raise_an_error(node: NodeBridge) -> None:
    with pytest.raises(NodeError, match=r'no operation "queue\.fly".*queue\.add'):
        node.call("queue.fly", queue="mail")
    with pytest.raises(NodeError, match=r'no processor "fly".*echo'):
        node.call("worker.start", queue="mail", processor="fly")
    with pytest.raises(NodeError, match="no job 7 in queue mail"):
        node.call("job.waitUntilFinished", queue="mail", job="7")


def test_two_threads_can_call_at_the_same_time(node: NodeBridge) -> None:
    def add(number: int) -> None:
        for n in range(20):
            assert node.call("queue.add", queue="mail", name="send", data={"n": [number, n]})["data"]["n"] == [
                number,
                n,
            ]
        done.append(number)

    done: list[int] = []
    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]


def test_missing_replies_and_events_raise_a_timeout(node: NodeBridge) -> None:
    job = node.call("queue.add", queue="mail", name="send", data={})
    with pytest.raises(TimeoutError, match=r"job\.waitUntilFinished did not come"):
        node.call("job.waitUntilFinished", queue="mail", job=job["id"], timeout=0.2)
    with pytest.raises(TimeoutError, match="'completed' did not come"):
        node.wait_event("completed", timeout=0.1)


def test_a_dead_node_process_raises_an_error_instead_of_a_timeout(own_node: NodeBridge) -> None:
    os.kill(own_node.pid, signal.SIGKILL)
    with pytest.raises(NodeError, match="Node"):
        own_node.call("queue.add", queue="mail", name="send", data={})
    with pytest.raises(NodeError, match="Node exited"):
        own_node.wait_event("completed")


def test_node_exits_even_if_its_server_is_gone(node_client: None, server_factory: ServerFactory) -> None:
    server = server_factory()
    with NodeBridge.to(server.url) as node:
        node.call("events.start", queue="mail")
        node.call("worker.start", queue="mail", processor="echo")
        server.kill()
        node.wait_event("worker.error")
    assert has_exited(node.pid)


def test_a_node_process_that_does_not_exit_is_killed(own_node: NodeBridge) -> None:
    os.kill(own_node.pid, signal.SIGSTOP)
    own_node.close()
    assert has_exited(own_node.pid)


def test_the_exit_operation_ends_the_node_process(own_node: NodeBridge) -> None:
    own_node.call("exit")
    wait_until(lambda: has_exited(own_node.pid), what="the end of Node")
