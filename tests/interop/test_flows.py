"""Flows over two queues: we add and Node adds, parents and children on either side, whatever becomes of a child."""

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
from bulltask.queue.flow_plan import FlowNode
from bulltask.testing.wait import wait_until
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

SIDES = ["ours", "Node's"]


@dataclass
class Orders:
    """Parents in ``orders``, children in ``parts``, which Node calls ``{orders}`` and ``{parts}``."""

    url: str
    node: NodeBridge
    directory: Path
    flows: FlowProducer
    redis: redis.Redis
    workers: list[Worker]

    def work(self, at: str, side: str, processor: str = "gather", **args: Any) -> None:
        """Let one side work on a queue: ours runs the tasks above, Node's worker the named processor."""
        if side == "Node's":
            self.node.call("worker.start", queue=f"{{{at}}}", processor=processor, args=args)
            return
        environ = {"PYTHONPATH": str(ROOT), "JOURNAL_URL": self.url}
        settings = {"broker_url": self.url, "worker_concurrency": 1}
        directory = self.directory / f"worker-{len(self.workers)}"
        self.workers.append(Worker(directory, TASKS, options=["-Q", at], settings=settings, environ=environ))

    def ended(self, queue: str, job_id: str) -> dict[str, str]:
        """Wait for a job's end; its last event."""
        stream = Stream(self.url, f"bull:{{{queue}}}:events")
        try:
            wait_until(lambda: self._ends(stream, job_id), 60, f"the end of job {job_id}")
            return self._ends(stream, job_id)[-1]
        finally:
            stream.close()

    def _ends(self, stream: Stream, job_id: str) -> list[dict[str, str]]:
        return [it.fields for it in stream.all(jobId=job_id) if it.fields["event"] in {"completed", "failed"}]


@pytest.fixture
def orders(session_node: NodeBridge, broker_url: str, tmp_path: Path) -> Iterator[Orders]:
    with (
        FlowProducer(broker_url, result_expires=None) as flows,
        redis.Redis.from_url(broker_url, decode_responses=True) as client,
    ):
        made = Orders(broker_url, session_node, tmp_path, flows, client, [])
        yield made
        for worker in made.workers:
            worker.close()
            sys.stdout.write(f"{worker.log}\n")
    session_node.reset()


def job(name: str, *children: FlowJob, queue: str = "parts", job_id: str = "", **options: Any) -> FlowJob:
    said: Any = {"attempts": 1, **options} | ({"job_id": job_id} if job_id else {})
    return FlowJob(name, queue, {}, said, children)


def ok(n: int, **options: Any) -> FlowJob:
    said: Any = options
    return FlowJob("ok", "parts", {"n": n}, said)


# ---- every policy, on every pair of sides ----------------------------------------------------------------------------


@pytest.mark.parametrize("of_children", SIDES)
@pytest.mark.parametrize("of_parents", SIDES)
def test_a_failed_child_affects_its_parent_as_the_flow_requires(
    orders: Orders, of_parents: str, of_children: str
) -> None:
    """The five ways in which a child can fail, in flows that bulltask adds."""
    add = orders.flows.add
    nothing = add(job("gather", job("fail"), ok(1), queue="orders"))
    ignored = add(job("gather", job("fail", ignore_dependency_on_failure=True), ok(2), queue="orders"))
    forgotten = add(job("gather", job("fail", remove_dependency_on_failure=True), ok(3), queue="orders"))
    early = add(job("gather", job("fail", continue_parent_on_failure=True), ok(4, delay=3_600), queue="orders"))
    failing = add(job("gather", job("fail", fail_parent_on_failure=True), ok(5, delay=3_600), queue="orders"))
    cascade = add(
        job(
            "gather",
            job("gather", job("fail", fail_parent_on_failure=True), queue="orders", fail_parent_on_failure=True),
            queue="orders",
        )
    )
    orders.work("parts", of_children, "fail-named")
    orders.work("orders", of_parents)

    def values(flow: FlowNode[Job]) -> Any:
        return json.loads(orders.ended("orders", flow.job.id)["returnvalue"])

    def child(flow: FlowNode[Job], place: int = 0) -> str:
        return flow.children[place].job.key

    value = (lambda n: {"n": n}) if of_children == "Node's" else (lambda n: n)
    reason = "it failed" if of_children == "Node's" else "no ünicorn"
    assert values(ignored) == {"values": {child(ignored, 1): value(2)}, "ignored": {child(ignored): reason}}
    assert values(forgotten) == {"values": {child(forgotten, 1): value(3)}, "ignored": {}}
    assert values(early) == {"values": {}, "ignored": {child(early): reason}}
    assert orders.redis.exists(child(early, 1)) == 0, "the parent gave up its other child"
    assert orders.ended("orders", failing.job.id)["failedReason"] == f"child {child(failing)} failed"
    assert orders.redis.zscore("bull:{parts}:delayed", failing.children[1].job.id), "the other child goes on"
    middle = cascade.children[0]
    assert orders.ended("orders", middle.job.id)["failedReason"] == f"child {child(middle)} failed"
    assert orders.ended("orders", cascade.job.id)["failedReason"] == f"child {middle.job.key} failed"
    failing.job.refresh()
    assert failing.job.attempts_made == 1

    assert orders.ended("parts", nothing.children[0].job.id)["event"] == "failed"
    assert orders.ended("parts", nothing.children[1].job.id)["event"] == "completed"
    assert nothing.job.get_state() == "waiting-children", "for ever, unless the child is retried and completes"
    counts = nothing.job.get_dependencies_count()
    assert counts == {"processed": 1, "unprocessed": 1, "ignored": 0, "failed": 0}


@pytest.mark.parametrize("of_children", SIDES)
@pytest.mark.parametrize("of_parents", SIDES)
def test_a_parent_has_the_values_of_its_children(orders: Orders, of_parents: str, of_children: str) -> None:
    flow = orders.flows.add(job("gather", *(ok(n) for n in range(5)), queue="orders"))
    orders.work("orders", of_parents)
    orders.work("parts", of_children, "echo")
    found = json.loads(orders.ended("orders", flow.job.id)["returnvalue"])
    wanted = [{"n": n} if of_children == "Node's" else n for n in range(5)]
    assert found == {"values": dict(zip((it.job.key for it in flow.children), wanted, strict=True)), "ignored": {}}
    assert flow.job.result().get(timeout=60) == found
    assert flow.job.get_children_values() == found["values"]


@pytest.mark.parametrize("of_children", SIDES)
@pytest.mark.parametrize(("of_parents", "task"), [("ours", "expand"), ("ours", "aexpand"), ("Node's", "expand")])
def test_a_running_job_adds_children_and_waits_for_them(
    orders: Orders, of_parents: str, task: str, of_children: str
) -> None:
    parent = orders.flows.add(job(task, queue="orders", attempts=1))
    orders.work("orders", of_parents, "expand", queue="{parts}", connection=connection_of(orders.url))
    orders.work("parts", of_children, "echo")
    value: Callable[[int], Any] = (lambda n: {"n": n}) if of_children == "Node's" else (lambda n: n)
    assert parent.job.result().get(timeout=60) == [value(n) for n in (1, 2, 3)]
    parent.job.refresh()
    assert (parent.job.attempts_made, parent.job.attempts_started) == (1, 2)
    events: Any = orders.redis.xrange("bull:{orders}:events")
    assert [(it["event"], it.get("prev")) for _, it in events if it.get("jobId") == parent.job.id] == [
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
    orders.work("orders", "ours")
    handle = orders.node.call("worker.start", queue="{parts}", processor="fail-named")
    child = flow.children[0].job
    orders.ended("parts", child.id)
    orders.node.call("worker.close", worker=handle)
    orders.node.call("worker.start", queue="{parts}", processor="echo")
    child.retry()
    assert flow.job.result().get(timeout=60) == {"values": {child.key: {}}, "ignored": {}}


# ---- what stands in Redis, and what each reads of the other ----------------------------------------------------------


def tree(name: str, queue: str, *children: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A node of a flow in Node's spelling."""
    said = {"jobId": name, "timestamp": 1_700_000_000_000, "attempts": 2, **options}
    return {"name": name, "queueName": queue, "data": {"to": ["ä😀", None]}, "opts": said, "children": list(children)}


SPELLINGS = {
    "jobId": "job_id",
    "failParentOnFailure": "fail_parent_on_failure",
    "continueParentOnFailure": "continue_parent_on_failure",
    "ignoreDependencyOnFailure": "ignore_dependency_on_failure",
    "removeDependencyOnFailure": "remove_dependency_on_failure",
}


def in_python(node: dict[str, Any]) -> FlowJob:
    """The same node in ours."""
    options: Any = {"backoff": None}
    for name, value in node["opts"].items():
        options[SPELLINGS.get(name, name)] = value / 1000 if name in {"timestamp", "delay"} else value
    children = [in_python(child) for child in node["children"]]
    return FlowJob(node["name"], node["queueName"], node["data"], options, children)


def everything(client: redis.Redis, prefix: str) -> dict[str, Any]:
    """All that Redis holds under a prefix, which is taken out of it; stream ids are the server's."""
    found: dict[str, Any] = {}
    for key in sorted(client.scan_iter(f"{prefix}:*")):
        value: Any = READ[str(client.type(key))](client, key)
        text = json.dumps(value, ensure_ascii=False).replace(prefix, "P")
        found[key.removeprefix(prefix)] = json.loads(text)
    return found


READ: dict[str, Callable[[Any, str], Any]] = {
    "hash": lambda client, key: client.hgetall(key),
    "list": lambda client, key: client.lrange(key, 0, -1),
    "set": lambda client, key: sorted(client.smembers(key)),
    "zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    "stream": lambda client, key: [fields for _, fields in client.xrange(key)],
    "string": lambda client, key: client.get(key),
}


def without_intended(found: dict[str, Any]) -> dict[str, Any]:
    """Ours writes meta.version, and its own options; the order of JSON's keys means nothing."""
    for key, value in found.items():
        if key.endswith(":meta"):
            value.pop("version", None)
        if isinstance(value, dict) and "opts" in value:
            value["opts"] = json.loads(value["opts"])
            value["opts"].pop("bulltask", None)
            if "parent" in value:
                value["parent"] = json.loads(value["parent"])
    return found


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
def test_bulltask_and_node_store_the_same_flow(
    session_node: NodeBridge, broker_url: str, redis_client: redis.Redis, flow: str
) -> None:
    session_node.call("flow.add", flow=FLOWS[flow], prefix="theirs")
    with FlowProducer(broker_url, prefix="ours", queue_hash_tag=False, result_expires=None) as flows:
        flows.add(in_python(FLOWS[flow]))
    theirs, ours = (without_intended(everything(redis_client, prefix)) for prefix in ("theirs", "ours"))
    for found in (theirs, ours):  # the moment at which a delayed job is due is each clock's own
        for key in [key for key in found if key.endswith((":delayed", ":marker"))]:
            found[key] = [member for member, _ in found[key]]
        for value in found.values():
            for fields in value if isinstance(value, list) else ():
                if isinstance(fields, dict) and "delay" in fields:
                    fields["delay"] = "due"
    assert ours == theirs
    session_node.reset()


def shape(node: FlowNode[Job] | dict[str, Any] | None) -> Any:
    """The ids, children sorted by theirs: a set has no order."""
    assert node is not None
    if isinstance(node, dict):
        return (node["id"], sorted(shape(child) for child in node["children"]))
    return (node.job.id, sorted(shape(child) for child in node.children))


def test_bulltask_and_node_read_each_others_flows(
    session_node: NodeBridge, broker_url: str, redis_client: redis.Redis
) -> None:
    flow = FLOWS["four levels"]
    with FlowProducer(broker_url, queue_hash_tag=False) as flows:
        flows.add(in_python(flow))
        ours = flows.get_flow("a", "n1")
        assert (
            shape(session_node.call("flow.get", queue="a", job="n1")) == shape(ours) == shape({**flow, **named(flow)})
        )
        redis_client.flushall()
        session_node.call("flow.addBulk", flows=[flow])
        assert shape(flows.get_flow("a", "n1")) == shape(ours)
        assert shape(flows.get_flow("a", "n1", depth=2)) == shape(
            session_node.call("flow.get", queue="a", job="n1", opts={"depth": 2})
        )
    session_node.reset()


def named(node: dict[str, Any]) -> dict[str, Any]:
    """The node as an answer of Node's: with its id."""
    return {"id": node["opts"]["jobId"], "children": [named(child) for child in node["children"]]}
