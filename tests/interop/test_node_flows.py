"""bulltask's workers run flows of Node's FlowProducer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.interop_queue import CLOCK_TOLERANCE_MS, InteropQueue, recorded_ids
from tests.interop.node_bridge import NodeError

pytestmark = [pytest.mark.interop, pytest.mark.process]


def node_of(name: str, data: object = None, *children: dict[str, Any], queue: str, **opts: object) -> dict[str, Any]:
    """Return a node of a flow for Node's FlowProducer."""
    return {"name": name, "data": data or {}, "queueName": queue, "opts": opts, "children": list(children)}


def values(side: InteropQueue, parent: str) -> dict[str, Any]:
    """Return Node's ``getChildrenValues`` by job id instead of by key."""
    by_key: dict[str, Any] = side.job_call(parent, "getChildrenValues")
    return {key.rpartition(":")[2]: value for key, value in by_key.items()}


def test_children_run_first_and_node_reads_their_values(any_mail: InteropQueue, tmp_path: Path) -> None:
    any_mail.worker(children=2)
    file, queue = str(tmp_path / "runs"), any_mail.name
    any_mail.call("pause")
    children = [node_of("echo", {"value": {"n": n, "none": None}}, queue=queue) for n in range(3)]
    flow = any_mail.node.call("flow.add", flow=node_of("record", {"file": file}, *children, queue=queue))
    assert any_mail.counts() == {"paused": 3, "waiting-children": 1}
    any_mail.call("resume")
    any_mail.node_result(flow["id"])
    ids = [child["id"] for child in flow["children"]]
    assert values(any_mail, flow["id"]) == {ids[n]: {"n": n, "none": None} for n in range(3)}
    seen = [any_mail.node_job(job) for job in (*ids, flow["id"])]
    assert max(child["finishedOn"] for child in seen[:3]) <= seen[3]["processedOn"] + CLOCK_TOLERANCE_MS
    assert recorded_ids(file) == [flow["id"]]
    assert any_mail.counts() == {"completed": 4}


def test_node_receives_all_events_of_a_parent(mail: InteropQueue) -> None:
    mail.listen()
    mail.worker()
    flow = mail.node.call("flow.add", flow=node_of("echo", {}, node_of("echo", queue=mail.name), queue=mail.name))
    mail.wait_for_event("completed", flow["id"])
    names = [event["event"] for event in mail.node.events() if event["args"].get("jobId") == flow["id"]]
    assert names == ["added", "waiting-children", "waiting", "active", "completed"]
    assert mail.wait_for_event("waiting", flow["id"])["prev"] == "waiting-children"


def test_a_flow_of_three_levels_over_two_queues_runs(mail: InteropQueue) -> None:
    mail.worker(queues=["mail", "parts"])
    leaves = [node_of("add", {"x": n}, queue="{parts}") for n in range(2)]
    middle = node_of("aecho", {"value": "middle"}, *leaves, queue="{mail}")
    flow = mail.node.call("flow.add", flow=node_of("echo", {"value": "top"}, middle, queue="{mail}"))
    assert mail.node_result(flow["id"]) == "top"
    [middle_id] = [child["id"] for child in flow["children"]]
    assert values(mail, flow["id"]) == {middle_id: "middle"}
    assert sorted(values(mail, middle_id).values()) == [10, 11]


def test_a_bulltask_worker_runs_a_parent_whose_children_ran_in_a_node_worker(mail: InteropQueue) -> None:
    mail.worker()
    child = node_of("anything", {"n": 1}, queue="{parts}")
    flow = mail.node.call("flow.add", flow=node_of("echo", {"value": 2}, child, queue="{mail}"))
    mail.node.call("worker.start", queue="{parts}", processor="echo")
    assert mail.node_result(flow["id"]) == 2
    assert list(values(mail, flow["id"]).values()) == [{"n": 1}]


def test_a_failed_child_fails_its_parent_if_node_requires_it(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.worker()
    child = node_of("fail", {"error": "PermanentError"}, queue=mail.name, failParentOnFailure=True)
    flow = mail.node.call("flow.add", flow=node_of("record", {"file": file}, child, queue=mail.name, attempts=3))
    [child_id] = [child["id"] for child in flow["children"]]
    with pytest.raises(NodeError, match=f"child {mail.keys.job(child_id)} failed"):
        mail.node_result(flow["id"])
    seen = mail.node_job(flow["id"])
    assert (seen["state"], seen["attemptsMade"]) == ("failed", 1)
    assert not Path(file).exists(), "the parent's task was not called"


@pytest.mark.parametrize("option", ["ignoreDependencyOnFailure", "removeDependencyOnFailure"])
def test_a_parent_runs_despite_a_failed_child_if_node_allows_it(mail: InteropQueue, option: str) -> None:
    mail.worker()
    bad = node_of("fail", {"error": "ValueError", "message": "no ünicorn"}, queue=mail.name, **{option: True})
    good = node_of("echo", {"value": 1}, queue=mail.name)
    flow = mail.node.call("flow.add", flow=node_of("echo", {"value": 2}, bad, good, queue=mail.name))
    assert mail.node_result(flow["id"]) == 2
    assert list(values(mail, flow["id"]).values()) == [1]
    failures = mail.job_call(flow["id"], "getIgnoredChildrenFailures")
    assert list(failures.values()) == (["no ünicorn"] if option.startswith("ignore") else [])


def early_parent(side: InteropQueue, **opts: object) -> str:
    """Add a flow whose parent is released by a failed child while another child is pending; return the parent's id."""
    bad = node_of("fail", {"error": "PermanentError"}, queue=side.name, continueParentOnFailure=True)
    late = node_of("echo", {"value": "late"}, queue="{later}")
    flow = side.node.call("flow.add", flow=node_of("echo", {"value": 2}, bad, late, queue=side.name, **opts))
    return str(flow["id"])


@pytest.mark.parametrize("ran_by", ["bulltask", "Node"])
def test_a_parent_with_pending_children_is_retried(mail: InteropQueue, ran_by: str) -> None:
    mail.worker() if ran_by == "bulltask" else mail.node_worker("fail-named")
    mail.listen()
    parent = early_parent(mail, attempts=20, backoff=100)
    mail.wait_for_event("delayed", parent)
    mail.node.call("worker.start", queue="{later}", processor="echo")
    assert mail.node_result(parent) == (2 if ran_by == "bulltask" else {"value": 2})
    assert mail.node_job(parent)["attemptsMade"] >= 2


@pytest.mark.parametrize("ran_by", ["bulltask", "Node"])
def test_a_parent_with_pending_children_fails_without_attempts_left(mail: InteropQueue, ran_by: str) -> None:
    mail.worker() if ran_by == "bulltask" else mail.node_worker("fail-named")
    parent = early_parent(mail)
    with pytest.raises(NodeError, match=f"Job {parent} has pending dependencies. moveToFinished"):
        mail.node_result(parent)
    seen = mail.node_job(parent)
    assert (seen["state"], seen["attemptsMade"]) == ("failed", 1)
    assert "" not in seen["stacktrace"]


@pytest.mark.parametrize("ran_by", ["bulltask", "Node"])
def test_a_retried_parent_with_a_failed_child_fails_for_nodes_reason(mail: InteropQueue, ran_by: str) -> None:
    """The parent runs again, although its child has failed, and cannot complete."""
    mail.worker() if ran_by == "bulltask" else mail.node_worker("fail-named")
    bad = node_of("fail", {"error": "PermanentError"}, queue=mail.name, failParentOnFailure=True)
    parent = str(mail.node.call("flow.add", flow=node_of("echo", {"value": 2}, bad, queue=mail.name))["id"])
    with pytest.raises(NodeError, match=r"child .* failed"):
        mail.node_result(parent)
    mail.job_call(parent, "retry")
    failed = mail.stream.wait_for(2, event="failed", jobId=parent)[-1]
    reason = f"Cannot complete job {parent} because it has at least one failed child. moveToFinished"
    assert failed["failedReason"] == reason


@pytest.mark.parametrize("by", ["node", "bulltask"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_job_that_a_retry_moves_to_another_queue_waits_for_a_child_job_there(
    mail: InteropQueue, by: str, *, fails: bool
) -> None:
    mail.listen()
    mail.node.call("queue.pause", queue="{parts}")
    mail.worker(queues=["mail", "parts"])
    if by == "node":
        job = mail.add("move", {"queue": "parts", "fails": fails}, attempts=3)
    else:
        job = mail.send("move", queue="parts", fails=fails).id
    mail.wait_for_event("waiting-children", job)
    assert mail.counts() == {"waiting-children": 1}
    assert mail.job_call(job, "getState") == "waiting-children"
    [child] = mail.node.call("flow.get", queue=mail.name, job=job)["children"]
    moved = mail.node.call("queue.getJob", queue="{parts}", job=child["id"])
    assert {"name": "move", "data": {"queue": "parts", "fails": fails}}.items() <= moved.items()
    assert (moved["id"] == job, moved["parentKey"], moved["state"]) == (by == "bulltask", mail.keys.job(job), "waiting")
    mail.node.call("queue.resume", queue="{parts}")
    mail.wait_for_event(end := "failed" if fails else "completed", job)
    names = [event["event"] for event in mail.node.events() if event["args"].get("jobId") == job]
    assert names == ["added", "waiting", "active", "waiting-children", "waiting", "active", end]
    seen, moved = mail.node_job(job), mail.node.call("queue.getJob", queue="{parts}", job=child["id"])
    for one in (seen, moved):
        assert (one["state"], one["returnvalue"], one["failedReason"]) == (
            ("failed", None, "parts") if fails else ("completed", "parts", None)
        )
