"""Tests of reading stored flows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis

from bulltask.config.settings import Settings
from bulltask.errors import ConfigError, InvalidNameError
from bulltask.queue import AsyncFlowProducer, FlowJob, FlowProducer, Queue
from bulltask.queue.flows import FlowNode
from bulltask.transport.broker import Broker
from tests.support.manual_worker import ManualWorker
from tests.support.sync_facade import SyncFacade

pytestmark = pytest.mark.redis


@pytest.fixture(params=["sync", "async"])
def flows(request: pytest.FixtureRequest, broker_url: str) -> Iterator[FlowProducer]:
    """A producer, through its sync class and through its async one."""
    if request.param == "sync":
        with FlowProducer(broker_url) as flows:
            yield flows
        return
    with asyncio.Runner() as runner:
        facade: Any = SyncFacade(AsyncFlowProducer(broker_url), runner)
        yield cast("FlowProducer", facade)
        facade.close()


@pytest.fixture
def manual_worker(broker_url: str) -> Iterator[ManualWorker]:
    """A manual worker of the queue ``q``."""
    broker = Broker(Settings({}).freeze(), broker_url)
    manual_worker = ManualWorker(broker, broker.keys("q"))
    yield manual_worker
    manual_worker.close()
    broker.close()


def job(name: str, *children: FlowJob, queue: str = "q", **options: Any) -> FlowJob:
    """A node whose job id is its name."""
    all_options: Any = {"job_id": name, **options}
    return FlowJob(name, queue, {}, all_options, children)


def shape(node: FlowNode[Any] | None) -> Any:
    """Return the ids of a flow; children are sorted, because sets have no order."""
    assert node is not None
    return (node.job.id, sorted(shape(child) for child in node.children))


def leaf(*names: str) -> list[Any]:
    return [(name, []) for name in names]


@pytest.mark.every_topology
def test_a_flow_is_read_as_it_was_added(flows: FlowProducer) -> None:
    flows.add(job("root", job("a", job("a1", queue="parts{q}")), job("b", queue="parts{q}")))
    flow = flows.get_flow("q", "root")
    assert shape(flow) == ("root", [("a", leaf("a1")), ("b", [])])
    assert flow is not None
    by_id = {node.job.id: node.job for node in flow.walk()}
    assert {job_id: (read.queue, read.name) for job_id, read in by_id.items()} == {
        "root": ("q", "root"),
        "a": ("q", "a"),
        "a1": ("parts{q}", "a1"),
        "b": ("parts{q}", "b"),
    }
    assert by_id["a1"].parent_key == by_id["a"].key == "bull:{q}:a"
    assert shape(flows.get_flow("q", "a")) == ("a", leaf("a1")), "any job is the root of its own flow"
    assert shape(flows.get_flow("parts{q}", "b")) == ("b", [])
    assert flows.get_flow("q", "b") is None


@pytest.mark.every_topology
def test_children_are_found_in_every_state(flows: FlowProducer, manual_worker: ManualWorker) -> None:
    flows.add(
        job(
            "root",
            job("completes"),
            job("is-ignored", ignore_dependency_on_failure=True),
            job("is-forgotten", remove_dependency_on_failure=True),
            job("fails", fail_parent_on_failure=True),
            job("waits", delay=60),
        )
    )
    assert manual_worker.complete(1) == "completes"
    assert [manual_worker.fail() for _ in range(3)] == ["is-ignored", "is-forgotten", "fails"]
    flow = flows.get_flow("q", "root")
    assert flow is not None
    assert [child.job.id for child in flow.children] == ["completes", "waits", "fails", "is-ignored"]
    assert flow.children[0].job.returnvalue == 1
    assert flow.children[3].job.failed_reason == "no"
    assert flow.job.deferred_failure == "child bull:{q}:fails failed"


@pytest.mark.slow
def test_a_flow_may_be_deeper_than_pythons_stack(flows: FlowProducer) -> None:
    flow = FlowJob("leaf", "q")
    for _ in range(1_050):
        flow = FlowJob("n", "q", children=[flow])
    added = flows.add(flow)
    read = flows.get_flow("q", added.job.id, depth=1_100)
    assert [node.job.id for node in read.walk()] == [node.job.id for node in added.walk()]  # type: ignore[union-attr]
    assert sum(1 for _ in added.walk()) == 1_051


@pytest.mark.parametrize(("depth", "levels"), [(1, 1), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_depth_limits_the_levels_that_are_read(flows: FlowProducer, depth: int, levels: int) -> None:
    flows.add(job("l1", job("l2", job("l3", job("l4")))))
    flow = flows.get_flow("q", "l1", depth=depth)
    assert flow is not None
    assert [node.job.id for node in flow.walk()] == ["l1", "l2", "l3", "l4"][:levels]


def test_ten_levels_are_read_by_default(flows: FlowProducer) -> None:
    chain = job("l12")
    for number in range(11, 0, -1):
        chain = job(f"l{number}", chain)
    flows.add(chain)
    flow = flows.get_flow("q", "l1")
    assert flow is not None
    assert len(list(flow.walk())) == 10


@pytest.mark.slow
def test_max_children_limits_the_children_of_each_kind(flows: FlowProducer, manual_worker: ManualWorker) -> None:
    flows.add(job("root", *(job(f"child-{number}") for number in range(900))))
    for _ in range(200):
        manual_worker.complete()
    for limit in (1, 20, 150, 700, 1_000):
        flow = flows.get_flow("q", "root", max_children=limit)
        assert flow is not None
        finished = [child.job for child in flow.children if child.job.finished_ms]
        assert (len(finished), len(flow.children) - len(finished)) == (min(limit, 200), min(limit, 700))
        assert len({child.job.id for child in flow.children}) == len(flow.children)


def test_twenty_children_of_each_kind_are_read_by_default(flows: FlowProducer) -> None:
    flows.add(job("root", *(job(f"child-{number}") for number in range(50))))
    flow = flows.get_flow("q", "root")
    assert flow is not None
    assert len(flow.children) == 20


def test_a_removed_child_is_omitted(
    flows: FlowProducer, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    """BullMQ 5.62 has ``undefined`` in its place."""
    flows.add(job("root", job("a"), job("b")))
    manual_worker.complete()
    redis_client.delete("bull:{q}:a")
    assert shape(flows.get_flow("q", "root")) == ("root", leaf("b"))


@pytest.mark.one_server
def test_children_are_found_whatever_the_format_of_their_keys(
    flows: FlowProducer, broker_url: str, redis_client: redis.Redis
) -> None:
    """The children have other prefixes, no braces, or colons in their ids (which BullMQ 5.62 cuts)."""
    flows.add(job("root", job("repeat:nightly:1795230905789"), job("b", queue="parts{q}")))
    for prefix, tag in (("bull", False), ("other", True), ("a:b", True)):
        with FlowProducer(broker_url, prefix=prefix, queue_hash_tag=tag) as others:
            others.add(job("plain", queue="parts"))
    for key in ("bull:parts:plain", "other:{parts}:plain"):
        redis_client.sadd("bull:{q}:root:dependencies", key)
    flow = flows.get_flow("q", "root")
    assert flow is not None
    assert sorted((child.job.key, child.job.queue) for child in flow.children) == [
        ("bull:parts:plain", "parts"),
        ("bull:parts{q}:b", "parts{q}"),
        ("bull:{q}:repeat:nightly:1795230905789", "q"),
        ("other:{parts}:plain", "{parts}"),
    ]


def test_a_flow_is_read_under_a_prefix_with_a_colon(broker_url: str) -> None:
    """BullMQ 5.62 cannot do this."""
    with FlowProducer(broker_url, prefix="a:b") as flows:
        flows.add(job("root", job("child", queue="parts{q}")))
        assert shape(flows.get_flow("q", "root")) == ("root", leaf("child"))


def test_jobs_in_a_flow_have_the_usual_job_methods(broker_url: str, manual_worker: ManualWorker) -> None:
    with FlowProducer(broker_url) as flows, Queue("q", broker_url) as queue:
        flows.add(job("root", job("a"), job("b")))
        flow = flows.get_flow("q", "root")
        assert flow is not None
        for child in flow.children:
            child.job.remove()
        assert flow.job.get_state() == "waiting", "no child is left to wait for"
        assert queue.get_job_counts("waiting", "waiting-children") == {"waiting": 1, "waiting-children": 0, "paused": 0}


@pytest.mark.parametrize(
    ("name", "number"), [("depth", 0), ("depth", "2"), ("max_children", 0), ("max_children", True)]
)
def test_invalid_limits_of_get_flow_are_rejected(flows: FlowProducer, name: str, number: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer"):
        flows.get_flow("q", "root", **{name: number})
    with pytest.raises(InvalidNameError):
        flows.get_flow("a:b", "root")
