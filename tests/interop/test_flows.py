"""Flows that span two queues work with Node and bulltask, whatever the outcome of a child."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from bulltask.queue import FlowJob, FlowProducer, Job
from bulltask.queue.flows import FlowNode
from bulltask.testing.worker import wait_until
from tests.interop.node_bridge import NodeBridge, connection_of
from tests.support.programs import ROOT
from tests.support.streams import Stream
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]

TASKS = """
from bulltask.errors import PermanentError
from bulltask.queue import FlowJob
from bulltask.queue import FlowProducer
from bulltask.queue import Queue

URL = os.environ["JOURNAL_URL"]


@app.task(name="ok")
def ok(n=None):
    return n


@app.task(name="fail")
def fail():
    raise PermanentError("no ünicorn")


@app.task(bind=True, name="gather")
def gather(self):
    with Queue("orders", URL) as queue:
        job = queue.get_job(self.request.id)
        job.remove_unprocessed_children()
        return {"values": self.get_children_values(), "ignored": dict(job.get_failed_children().ignored)}


@app.task(bind=True, name="expand")
def expand(self, step=0):
    if not step:
        with FlowProducer(URL) as flows:
            children = [FlowJob("ok", "parts", {"n": n}, {"delay": 0.3}) for n in (1, 2, 3)]
            flows.add_bulk(children, parent=self.request)
        self.update_data({"step": 1})
        self.move_to_waiting_children()
    return sorted(self.get_children_values().values(), key=str)


@app.task(bind=True, name="aexpand")
async def aexpand(self, step=0):
    if not step:
        from bulltask.queue import AsyncFlowProducer

        async with AsyncFlowProducer(URL) as flows:
            children = [FlowJob("ok", "parts", {"n": n}, {"delay": 0.3}) for n in (1, 2, 3)]
            await flows.add_bulk(children, parent=self.request)
        await self.aupdate_data({"step": 1})
        self.move_to_waiting_children()
    return sorted((await self.aget_children_values()).values(), key=str)
"""

CLIENTS = ["bulltask", "Node"]


@dataclass
class Orders:
    """Queues with parents (``orders``, in Node ``{orders}``) and children (``parts``, in Node ``{parts}``)."""

    url: str
    node: NodeBridge
    directory: Path
    flows: FlowProducer
    redis: redis.Redis
    workers: list[Worker]

    def start_worker(self, queue: str, client: str, processor: str = "gather", /, **args: Any) -> None:
        """Start a worker for a queue: bulltask's runs the tasks above, Node's the named processor."""
        if client == "Node":
            self.node.call("worker.start", queue=f"{{{queue}}}", processor=processor, args=args)
            return
        environ = {"PYTHONPATH": str(ROOT), "JOURNAL_URL": self.url}
        settings = {"broker_url": self.url, "worker_concurrency": 1}
        directory = self.directory / f"worker-{len(self.workers)}"
        self.workers.append(Worker(directory, TASKS, options=["-Q", queue], settings=settings, environ=environ))

    def last_event(self, queue: str, job_id: str) -> dict[str, str]:
        """Wait until a job has finished; return its last event."""
        stream = Stream(self.url, f"bull:{{{queue}}}:events")
        try:
            wait_until(lambda: self._ends(stream, job_id), 60, f"the end of job {job_id}")
            return self._ends(stream, job_id)[-1]
        finally:
            stream.close()

    def _ends(self, stream: Stream, job_id: str) -> list[dict[str, str]]:
        return [entry.fields for entry in stream.all(jobId=job_id) if entry.fields["event"] in {"completed", "failed"}]


@pytest.fixture
def orders(session_node: NodeBridge, broker_url: str, tmp_path: Path) -> Iterator[Orders]:
    with (
        FlowProducer(broker_url, result_expires=None) as flows,
        redis.Redis.from_url(broker_url, decode_responses=True) as client,
    ):
        orders = Orders(broker_url, session_node, tmp_path, flows, client, [])
        yield orders
        for worker in orders.workers:
            worker.close()
            sys.stdout.write(f"{worker.log}\n")
    session_node.reset()


def job(name: str, *children: FlowJob, queue: str = "parts", job_id: str = "", **options: Any) -> FlowJob:
    all_options: Any = {"attempts": 1, **options} | ({"job_id": job_id} if job_id else {})
    return FlowJob(name, queue, {}, all_options, children)


def ok(n: int, **options: Any) -> FlowJob:
    all_options: Any = options
    return FlowJob("ok", "parts", {"n": n}, all_options)


# ---- all failure options, with both workers --------------------------------------------------------------------------


@pytest.mark.parametrize("child_worker", CLIENTS)
@pytest.mark.parametrize("parent_worker", CLIENTS)
def test_a_failed_child_affects_its_parent_as_the_flow_requires(
    orders: Orders, parent_worker: str, child_worker: str
) -> None:
    """The flows have one child for each option that decides what a failed child means to its parent."""
    add = orders.flows.add
    nothing = add(job("gather", job("fail"), ok(1), queue="orders"))
    ignored = add(job("gather", job("fail", ignore_dependency_on_failure=True), ok(2), queue="orders"))
    removed = add(job("gather", job("fail", remove_dependency_on_failure=True), ok(3), queue="orders"))
    early = add(job("gather", job("fail", continue_parent_on_failure=True), ok(4, delay=3_600), queue="orders"))
    failing = add(job("gather", job("fail", fail_parent_on_failure=True), ok(5, delay=3_600), queue="orders"))
    cascade = add(
        job(
            "gather",
            job("gather", job("fail", fail_parent_on_failure=True), queue="orders", fail_parent_on_failure=True),
            queue="orders",
        )
    )
    orders.start_worker("parts", child_worker, "fail-named")
    orders.start_worker("orders", parent_worker)

    def values(flow: FlowNode[Job]) -> Any:
        return json.loads(orders.last_event("orders", flow.job.id)["returnvalue"])

    def child(flow: FlowNode[Job], index: int = 0) -> str:
        return flow.children[index].job.key

    value = (lambda n: {"n": n}) if child_worker == "Node" else (lambda n: n)
    reason = "it failed" if child_worker == "Node" else "no ünicorn"
    assert values(ignored) == {"values": {child(ignored, 1): value(2)}, "ignored": {child(ignored): reason}}
    assert values(removed) == {"values": {child(removed, 1): value(3)}, "ignored": {}}
    assert values(early) == {"values": {}, "ignored": {child(early): reason}}
    assert orders.redis.exists(child(early, 1)) == 0, "the parent removed its other child"
    assert orders.last_event("orders", failing.job.id)["failedReason"] == f"child {child(failing)} failed"
    assert orders.redis.zscore("bull:{parts}:delayed", failing.children[1].job.id), "the other child is still delayed"
    middle = cascade.children[0]
    assert orders.last_event("orders", middle.job.id)["failedReason"] == f"child {child(middle)} failed"
    assert orders.last_event("orders", cascade.job.id)["failedReason"] == f"child {middle.job.key} failed"
    failing.job.refresh()
    assert failing.job.attempts_made == 1

    assert orders.last_event("parts", nothing.children[0].job.id)["event"] == "failed"
    assert orders.last_event("parts", nothing.children[1].job.id)["event"] == "completed"
    assert nothing.job.get_state() == "waiting-children", "until the child is retried and completes"
    counts = nothing.job.get_dependencies_count()
    assert counts == {"processed": 1, "unprocessed": 1, "ignored": 0, "failed": 0}


@pytest.mark.parametrize("child_worker", CLIENTS)
@pytest.mark.parametrize("parent_worker", CLIENTS)
def test_a_parent_has_the_values_of_its_children(orders: Orders, parent_worker: str, child_worker: str) -> None:
    flow = orders.flows.add(job("gather", *(ok(n) for n in range(5)), queue="orders"))
    orders.start_worker("orders", parent_worker)
    orders.start_worker("parts", child_worker, "echo")
    result = json.loads(orders.last_event("orders", flow.job.id)["returnvalue"])
    expected = [{"n": n} if child_worker == "Node" else n for n in range(5)]
    assert result == {
        "values": dict(zip((child.job.key for child in flow.children), expected, strict=True)),
        "ignored": {},
    }
    assert flow.job.result().get(timeout=60) == result
    assert flow.job.get_children_values() == result["values"]


@pytest.mark.parametrize("child_worker", CLIENTS)
@pytest.mark.parametrize(
    ("parent_worker", "task"), [("bulltask", "expand"), ("bulltask", "aexpand"), ("Node", "expand")]
)
def test_a_running_job_adds_children_and_waits_for_them(
    orders: Orders, parent_worker: str, task: str, child_worker: str
) -> None:
    parent = orders.flows.add(job(task, queue="orders", attempts=1))
    orders.start_worker("orders", parent_worker, "expand", queue="{parts}", connection=connection_of(orders.url))
    orders.start_worker("parts", child_worker, "echo")
    value: Callable[[int], Any] = (lambda n: {"n": n}) if child_worker == "Node" else (lambda n: n)
    assert parent.job.result().get(timeout=60) == [value(n) for n in (1, 2, 3)]
    parent.job.refresh()
    assert (parent.job.attempts_made, parent.job.attempts_started) == (1, 2)
    events: Any = orders.redis.xrange("bull:{orders}:events")
    assert [(event["event"], event.get("prev")) for _, event in events if event.get("jobId") == parent.job.id] == [
        ("added", None),
        ("waiting", None),
        ("active", "waiting"),
        ("waiting-children", "active"),
        ("waiting", "waiting-children"),
        ("active", "waiting"),
        ("completed", "active"),
    ]


def test_a_parent_runs_after_its_failed_child_was_retried(orders: Orders) -> None:
    flow = orders.flows.add(job("gather", job("fail"), queue="orders"))
    orders.start_worker("orders", "bulltask")
    handle = orders.node.call("worker.start", queue="{parts}", processor="fail-named")
    child = flow.children[0].job
    orders.last_event("parts", child.id)
    orders.node.call("worker.close", worker=handle)
    orders.node.call("worker.start", queue="{parts}", processor="echo")
    child.retry()
    assert flow.job.result().get(timeout=60) == {"values": {child.key: {}}, "ignored": {}}


# ---- stored flows ----------------------------------------------------------------------------------------------------


def tree(name: str, queue: str, *children: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return a node of a flow with BullMQ's option names."""
    all_options = {"jobId": name, "timestamp": 1_700_000_000_000, "attempts": 2, **options}
    return {
        "name": name,
        "queueName": queue,
        "data": {"to": ["ä😀", None]},
        "opts": all_options,
        "children": list(children),
    }


OPTION_NAMES = {
    "jobId": "job_id",
    "failParentOnFailure": "fail_parent_on_failure",
    "continueParentOnFailure": "continue_parent_on_failure",
    "ignoreDependencyOnFailure": "ignore_dependency_on_failure",
    "removeDependencyOnFailure": "remove_dependency_on_failure",
}


def to_bulltask(node: dict[str, Any]) -> FlowJob:
    """Return the same node with bulltask's option names."""
    options: Any = {"backoff": None}
    for name, value in node["opts"].items():
        options[OPTION_NAMES.get(name, name)] = value / 1000 if name in {"timestamp", "delay"} else value
    children = [to_bulltask(child) for child in node["children"]]
    return FlowJob(node["name"], node["queueName"], node["data"], options, children)


def everything(client: redis.Redis, prefix: str) -> dict[str, Any]:
    """Return everything under a prefix, without the prefix and the ids of stream entries."""
    values: dict[str, Any] = {}
    for key in sorted(client.scan_iter(f"{prefix}:*")):
        value: Any = READ[str(client.type(key))](client, key)
        text = json.dumps(value, ensure_ascii=False).replace(prefix, "P")
        values[key.removeprefix(prefix)] = json.loads(text)
    return values


READ: dict[str, Callable[[Any, str], Any]] = {
    "hash": lambda client, key: client.hgetall(key),
    "list": lambda client, key: client.lrange(key, 0, -1),
    "set": lambda client, key: sorted(client.smembers(key)),
    "zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    "stream": lambda client, key: [fields for _, fields in client.xrange(key)],
    "string": lambda client, key: client.get(key),
}


def without_intended_differences(state: dict[str, Any]) -> dict[str, Any]:
    """Remove meta.version and the option ``bulltask``, which bulltask adds, and parse JSON."""
    for key, value in state.items():
        if key.endswith(":meta"):
            value.pop("version", None)
        if isinstance(value, dict) and "opts" in value:
            value["opts"] = json.loads(value["opts"])
            value["opts"].pop("bulltask", None)
            if "parent" in value:
                value["parent"] = json.loads(value["parent"])
    return state


FLOWS = {
    "one level": tree("root", "a", tree("x", "a"), tree("y", "b"), tree("z", "c")),
    "four levels": tree(
        "n1", "a", tree("n1.1", "a", tree("n1.1.1", "a", tree("n1.1.1.1", "a")), tree("n1.1.2", "a")),
        tree("n1.2", "a", tree("n1.2.1", "a"), tree("n1.2.2", "b")), tree("n1.3", "a"),
    ),
    "every failure": tree(
        "root", "a",
        tree("f", "a", tree("ff", "b", failParentOnFailure=True), failParentOnFailure=True),
        tree("c", "a", continueParentOnFailure=True),
        tree("i", "a", ignoreDependencyOnFailure=True),
        tree("r", "a", removeDependencyOnFailure=True),
    ),
    "every kind of child": tree(
        "root", "a", tree("late", "a", delay=60_000), tree("urgent", "a", priority=3), tree("lifo", "a", lifo=True),
        tree("twin", "a", priority=3, delay=1_000), delay=5_000, priority=9,
    ),
    "no children": tree("root", "a", priority=2),
}  # fmt: skip


@pytest.mark.parametrize("flow", FLOWS)
def test_bulltask_and_node_store_a_flow_in_the_same_form(
    session_node: NodeBridge, broker_url: str, redis_client: redis.Redis, flow: str
) -> None:
    session_node.call("flow.add", flow=FLOWS[flow], prefix="of-node")
    with FlowProducer(broker_url, prefix="of-bulltask", queue_hash_tag=False, result_expires=None) as flows:
        flows.add(to_bulltask(FLOWS[flow]))
    node_state, bulltask_state = (
        without_intended_differences(everything(redis_client, prefix)) for prefix in ("of-node", "of-bulltask")
    )
    for state in (node_state, bulltask_state):  # the due times come from different clocks
        for key in [key for key in state if key.endswith((":delayed", ":marker"))]:
            state[key] = [member for member, _ in state[key]]
        for value in state.values():
            for fields in value if isinstance(value, list) else ():
                if isinstance(fields, dict) and "delay" in fields:
                    fields["delay"] = "due"
    assert bulltask_state == node_state
    session_node.reset()


def shape(node: FlowNode[Job] | dict[str, Any] | None) -> Any:
    """Return the ids of a flow; children are sorted, because a set has no order."""
    assert node is not None
    if isinstance(node, dict):
        return (node["id"], sorted(shape(child) for child in node["children"]))
    return (node.job.id, sorted(shape(child) for child in node.children))


def test_bulltask_and_node_can_read_each_others_flows(
    session_node: NodeBridge, broker_url: str, redis_client: redis.Redis
) -> None:
    flow = FLOWS["four levels"]
    with FlowProducer(broker_url, queue_hash_tag=False) as flows:
        flows.add(to_bulltask(flow))
        read = flows.get_flow("a", "n1")
        assert (
            shape(session_node.call("flow.get", queue="a", job="n1"))
            == shape(read)
            == shape({**flow, **with_ids(flow)})
        )
        redis_client.flushall()
        session_node.call("flow.addBulk", flows=[flow])
        assert shape(flows.get_flow("a", "n1")) == shape(read)
        assert shape(flows.get_flow("a", "n1", depth=2)) == shape(
            session_node.call("flow.get", queue="a", job="n1", opts={"depth": 2})
        )
    session_node.reset()


def with_ids(node: dict[str, Any]) -> dict[str, Any]:
    """Return the node as Node returns it: with ids."""
    return {"id": node["opts"]["jobId"], "children": [with_ids(child) for child in node["children"]]}
