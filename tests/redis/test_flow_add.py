"""Tests of adding flows: the stored keys, the rejected flows, and that a flow is never added in part."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
import redis

from bulltask import App, BrokerError
from bulltask.config.settings import Settings
from bulltask.errors import (
    BrokerConfigError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    ConfigError,
    EncodeError,
    InvalidNameError,
    ParentConflictError,
    ParentNotFoundError,
)
from bulltask.jobs.job import JobRef
from bulltask.queue import AsyncFlowProducer, AsyncJob, FlowJob, FlowProducer, Job, Queue
from bulltask.queue.flows import FlowNode
from bulltask.testing.worker import RedisServer
from bulltask.transport.broker import Broker
from tests.conftest import ServerFactory
from tests.redis.test_flow_transaction import scripts_flushed_every_20_ms
from tests.support.cluster_and_sentinel import routed
from tests.support.flaky_proxy import FlakyProxy
from tests.support.manual_worker import ManualWorker
from tests.support.server_clients import client_of
from tests.support.sync_facade import SyncFacade

pytestmark = pytest.mark.redis

PARTS = "parts{q}"
"""A queue in the same slot of a cluster as the queue ``q``, because a flow cannot span several slots."""

FLAGS = {
    "fail_parent_on_failure": "fpof",
    "continue_parent_on_failure": "cpof",
    "ignore_dependency_on_failure": "idof",
    "remove_dependency_on_failure": "rdof",
}


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


def job(name: str, *children: FlowJob, queue: str = "q", data: Any = None, **options: Any) -> FlowJob:
    """A node whose job id is its name."""
    all_options: Any = {"job_id": name, **options}
    return FlowJob(name, queue, {} if data is None else data, all_options, children)


def anonymous(name: str, *children: FlowJob, queue: str = "q", **options: Any) -> FlowJob:
    """A node without a chosen job id."""
    return FlowJob(name, queue, {}, cast("Any", options), children)


def ids_in_events(client: redis.Redis, event: str, queue: str = "q") -> list[str]:
    """Return the job ids of the events of one name, in order."""
    entries: Any = client.xrange(f"bull:{{{queue}}}:events")
    return [fields["jobId"] for _, fields in entries if fields["event"] == event]


def shape(node: FlowNode[Any]) -> Any:
    return (node.job.name, [shape(child) for child in node.children])


def hash_of(client: redis.Redis, job_id: str, queue: str = "{q}") -> dict[str, str]:
    return cast("dict[str, str]", client.hgetall(f"bull:{queue}:{job_id}"))


# ---- stored flows ----------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_a_flow_is_added_level_by_level_as_node_does(flows: FlowProducer, redis_client: redis.Redis) -> None:
    tree = flows.add(job("root", job("a", job("a1", job("a1x")), job("a2")), job("b", job("b1"), job("b2")), job("c")))
    assert ids_in_events(redis_client, "added") == ["root", "a", "b", "c", "a1", "a2", "b1", "b2", "a1x"]
    assert ids_in_events(redis_client, "waiting-children") == ["root", "a", "b", "a1"]
    assert ids_in_events(redis_client, "waiting") == ["c", "a2", "b1", "b2", "a1x"]
    assert redis_client.lrange("bull:{q}:wait", 0, -1) == ["a1x", "b2", "b1", "a2", "c"]
    assert redis_client.smembers("bull:{q}:root:dependencies") == {"bull:{q}:a", "bull:{q}:b", "bull:{q}:c"}
    assert redis_client.smembers("bull:{q}:a:dependencies") == {"bull:{q}:a1", "bull:{q}:a2"}
    assert redis_client.zrange("bull:{q}:waiting-children", 0, -1) == ["a", "a1", "b", "root"]
    assert redis_client.get("bull:{q}:id") == "9"
    assert shape(tree) == (
        "root", [("a", [("a1", [("a1x", [])]), ("a2", [])]), ("b", [("b1", []), ("b2", [])]), ("c", [])],
    )  # fmt: skip
    assert [node.job.name for node in tree.walk()] == ["root", "a", "a1", "a1x", "a2", "b", "b1", "b2", "c"]


@pytest.mark.every_topology
def test_the_jobs_of_a_flow_may_be_in_different_queues(flows: FlowProducer, redis_client: redis.Redis) -> None:
    tree = flows.add(
        anonymous("sum", anonymous("part", queue="parts{sums}"), anonymous("part", queue="{sums}more"), queue="sums")
    )
    root, (first, second) = tree.job, (child.job for child in tree.children)
    assert (root.queue, first.queue, second.queue) == ("sums", "parts{sums}", "{sums}more")
    assert redis_client.lrange("bull:parts{sums}:wait", 0, -1) == [first.id]
    assert redis_client.lrange("bull:{sums}more:wait", 0, -1) == [second.id]
    assert redis_client.smembers(f"bull:{{sums}}:{root.id}:dependencies") == {first.key, second.key}
    parent = {"id": root.id, "queueKey": "bull:{sums}"}
    for child in (first, second):
        stored = hash_of(redis_client, child.id, child.queue)
        assert (stored["parentKey"], json.loads(stored["parent"])) == (root.key, parent)
        assert json.loads(stored["opts"])["parent"] == {"id": root.id, "queue": "bull:{sums}"}
        assert (child.parent_key, child.parent) == (root.key, parent)
    for queue in ("{sums}", "parts{sums}", "{sums}more"):
        assert redis_client.hgetall(f"bull:{queue}:meta") == {
            "version": "bullmq:5.62.0",
            "opts.maxLenEvents": "10000",
        }


@pytest.mark.parametrize(("option", "flag"), FLAGS.items())
def test_failure_flags_are_stored_in_the_options_and_in_the_parent_field(
    flows: FlowProducer, redis_client: redis.Redis, option: str, flag: str
) -> None:
    flag_on: Any = {option: True}
    no_flags: Any = dict.fromkeys(FLAGS, False)
    flows.add(job("root", job("child", **flag_on), job("other", **no_flags)))
    stored = hash_of(redis_client, "child")
    assert json.loads(stored["parent"]) == {"id": "root", "queueKey": "bull:{q}", flag: True}
    assert json.loads(stored["opts"])[flag] is True
    plain = hash_of(redis_client, "other")
    assert json.loads(plain["parent"]) == {"id": "root", "queueKey": "bull:{q}"}
    assert not json.loads(plain["opts"]).keys() & FLAGS.values()


def test_data_and_options_are_stored_like_those_of_queue_add(flows: FlowProducer, redis_client: redis.Redis) -> None:
    tree = flows.add(
        job(
            "root",
            job("late", delay=60, attempts=5, backoff=None),
            job("urgent", priority=1, remove_on_complete=True),
            job("first", lifo=True),
            job("plain", data={"to": "ä😀", "parts": []}),
            FlowJob("nothing", "q", None),
            FlowJob("default", "q"),
            priority=7,
            delay=30,
        )
    )
    assert redis_client.zrange("bull:{q}:delayed", 0, -1) == ["late"]
    assert redis_client.zrange("bull:{q}:prioritized", 0, -1) == ["urgent"]
    assert redis_client.lindex("bull:{q}:wait", -1) == "first"
    by_name = {node.job.name: node.job for node in tree.walk()}
    assert {name: hash_of(redis_client, added.id)["data"] for name, added in by_name.items()} == {
        "root": "{}",
        "late": "{}",
        "urgent": "{}",
        "first": "{}",
        "plain": '{"to":"ä😀","parts":[]}',
        "nothing": "null",
        "default": "{}",
    }
    opts = {name: json.loads(hash_of(redis_client, added.id)["opts"]) for name, added in by_name.items()}
    assert (opts["late"]["attempts"], opts["late"]["delay"], "backoff" in opts["late"]) == (5, 60_000, False)
    assert (opts["urgent"]["priority"], opts["urgent"]["removeOnComplete"]) == (1, True)
    root = hash_of(redis_client, "root")
    assert (root["delay"], root["priority"]) == ("30000", "7")
    assert redis_client.zscore("bull:{q}:waiting-children", "root") == int(root["timestamp"])
    assert by_name["plain"].data == {"to": "ä😀", "parts": []}
    assert by_name["root"].timestamp_ms == int(root["timestamp"])


def test_a_queues_defaults_apply_to_jobs_in_a_flow_without_the_option(
    flows: FlowProducer, redis_client: redis.Redis
) -> None:
    flows.add(
        job("root", job("a", queue=PARTS), job("b", queue=PARTS, attempts=2)),
        queue_defaults={PARTS: {"attempts": 9, "ignore_dependency_on_failure": True}},
    )
    attempts = {name: json.loads(hash_of(redis_client, name, PARTS)["opts"])["attempts"] for name in "ab"}
    assert attempts == {"a": 9, "b": 2}
    assert json.loads(hash_of(redis_client, "root")["opts"])["attempts"] == 3
    assert json.loads(hash_of(redis_client, "a", PARTS)["parent"])["idof"] is True


def test_task_calls_become_jobs_with_the_options_of_their_tasks(flows: FlowProducer, broker_url: str) -> None:
    app = App("shop", broker_url)

    @app.task(name="total", queue="sums", max_retries=4)
    def total(currency: str) -> None: ...

    @app.task(name="price", queue="prices{sums}", priority=3)
    def price(item: str, count: int = 1) -> None: ...

    tree = flows.add(
        FlowJob.of(
            total.s("EUR"),
            [
                price.s("pen", 2),
                FlowJob.of(price.s("ink").set(priority=5, job_id="ink"), fail_parent_on_failure=True),
                FlowJob("anything", "prices{sums}", {"n": 1}),
            ],
        )
    )
    root, (pen, ink, other) = tree.job, (child.job for child in tree.children)
    assert (root.name, root.queue, root.data, root.attempts) == ("total", "sums", {"currency": "EUR"}, 5)
    assert (pen.name, pen.queue, pen.data, pen.priority) == ("price", "prices{sums}", {"item": "pen", "count": 2}, 3)
    assert (ink.id, ink.priority, cast("Mapping[str, Any]", ink.parent)["fpof"]) == ("ink", 5, True)
    assert other.data == {"n": 1}
    single = flows.add(price.s("pad"))
    assert (single.job.name, single.children) == ("price", ())
    with pytest.raises(TypeError, match="unknown option 'delay' of a call in a flow"):
        flows.add(FlowJob.of(price.s("pen"), **cast("Any", {"delay": 3})))
    app.close()


def test_several_flows_are_added_in_one_transaction(flows: FlowProducer, redis_client: redis.Redis) -> None:
    redis_client.config_resetstat()
    trees = flows.add_bulk([job("a", job("a1")), job("b"), job("c", job("c1"), job("c2"))])
    assert [shape(tree) for tree in trees] == [
        ("a", [("a1", [])]),
        ("b", []),
        ("c", [("c1", []), ("c2", [])]),
    ]
    assert ids_in_events(redis_client, "added") == ["a", "b", "c", "a1", "c1", "c2"]
    stats: Any = redis_client.info("commandstats")
    assert stats["cmdstat_exec"]["calls"] == 1
    assert flows.add_bulk([]) == []


@pytest.mark.slow
def test_a_chain_may_be_longer_than_pythons_stack(flows: FlowProducer, redis_client: redis.Redis) -> None:
    chain = anonymous("end")
    for number in range(3_000):
        chain = anonymous(f"link-{number}", chain)
    tree = flows.add(chain)
    assert len(list(tree.walk())) == 3_001
    assert redis_client.zcard("bull:{q}:waiting-children") == 3_000


def test_sync_and_async_producers_return_sync_and_async_jobs(broker_url: str, redis_client: redis.Redis) -> None:
    with FlowProducer(broker_url) as flows:
        tree = flows.add(anonymous("root", anonymous("child", queue=PARTS)))
        assert isinstance(tree.job, Job)
        assert (tree.job.get_state(), tree.children[0].job.get_state()) == ("waiting-children", "waiting")
        assert tree.job.result().id == tree.job.id

    async def main() -> None:
        async with AsyncFlowProducer(broker_url) as aflows:
            tree = await aflows.add(anonymous("root", anonymous("child", queue=PARTS)))
            assert isinstance(tree.job, AsyncJob)
            assert (await tree.job.get_state(), await tree.children[0].job.get_state()) == (
                "waiting-children",
                "waiting",
            )

    asyncio.run(main())


# ---- rejected flows --------------------------------------------------------------------------------------------------


def expected_error(reason: str) -> tuple[type[Exception], str]:
    return {
        "two flags": (ConfigError, "use only one of the options"),
        "another parent": (ConfigError, "cannot have another parent"),
        "deduplicated": (ConfigError, "cannot be deduplicated"),
        "twice": (ConfigError, "two jobs in the flow have the job_id .* in queue q;"),
        "no node": (TypeError, "a flow consists of FlowJobs and calls"),
        "bad data": (EncodeError, "nan"),
        "bad queue": (InvalidNameError, "queue name"),
        "unknown": (TypeError, "unknown option 'attemptz'"),
        "bad id": (InvalidNameError, "job_id"),
    }[reason]


@pytest.mark.parametrize(
    ("reason", "child"),
    [
        ("two flags", job("x", fail_parent_on_failure=True, ignore_dependency_on_failure=True)),
        ("another parent", job("x", parent={"id": "1", "queue": "q"})),
        ("deduplicated", job("x", deduplication="same")),
        ("twice", job("good")),
        ("twice", job("x", job("root"))),
        ("no node", {"name": "x", "queue": "q"}),
        ("bad data", job("x", data=float("nan"))),
        ("bad queue", job("x", queue="a:b")),
        ("unknown", job("x", attemptz=3)),
        ("bad id", FlowJob("x", "q", {}, {"job_id": "123"})),
    ],
)
def test_an_invalid_job_in_a_flow_raises_an_error_before_anything_is_sent(
    flows: FlowProducer, redis_client: redis.Redis, reason: str, child: Any
) -> None:
    kind, text = expected_error(reason)
    with pytest.raises(kind, match=text):
        flows.add(FlowJob("root", "q", {}, {"job_id": "root"}, [job("good"), child]))
    assert redis_client.keys("*") == []


def test_the_same_id_in_two_queues_is_two_jobs(flows: FlowProducer) -> None:
    assert shape(flows.add(job("x", job("x", queue="other{q}")))) == ("x", [("x", [])])


# ---- parents that exist already --------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_a_flow_may_be_the_child_of_an_existing_job(
    flows: FlowProducer, broker_url: str, redis_client: redis.Redis
) -> None:
    with Queue("orders{q}", broker_url) as orders:
        parent = orders.add("order")
    parent_forms: list[Any] = [parent, JobRef("orders{q}", parent.id), {"id": parent.id, "queue": "orders{q}"}]
    for number, parent_form in enumerate(parent_forms):
        tree = flows.add(
            job(f"child-{number}", job(f"grandchild-{number}"), continue_parent_on_failure=True), parent=parent_form
        )
        assert tree.job.parent == {"id": parent.id, "queueKey": "bull:orders{q}", "cpof": True}
    flows.add(job("child-3", parent=parent))
    assert redis_client.smembers(f"{parent.key}:dependencies") == {f"bull:{{q}}:child-{n}" for n in range(4)}


@pytest.mark.every_topology
def test_a_missing_parent_is_an_error_and_nothing_is_added(flows: FlowProducer, redis_client: redis.Redis) -> None:
    with pytest.raises(ParentNotFoundError, match=r"job root in queue \{q\}.*Nothing was added"):
        flows.add_bulk([job("fine"), job("root", job("child"), parent=JobRef("orders{q}", "gone"))])
    assert set(cast("list[str]", redis_client.keys("*"))) <= {"bull:{q}:meta", "bull:orders{q}:meta"}


@pytest.mark.every_topology
def test_a_job_that_belongs_to_another_parent_is_an_error_and_nothing_is_added(
    flows: FlowProducer, redis_client: redis.Redis
) -> None:
    flows.add(job("first", job("shared", queue=PARTS)))
    before = set(cast("list[str]", redis_client.keys("*")))
    with pytest.raises(ParentConflictError, match=r"job shared in queue parts\{q\}.*Nothing was added"):
        flows.add(job("second", job("new"), job("shared", queue=PARTS)))
    assert set(cast("list[str]", redis_client.keys("*"))) == before
    redis_client.delete("bull:{q}:first")
    flows.add(job("second", job("shared", queue=PARTS)))
    # As in BullMQ: the existing job keeps its parent key, even though that parent no longer exists.
    assert hash_of(redis_client, "shared", PARTS)["parentKey"] == "bull:{q}:first"


@pytest.mark.every_topology
def test_a_flow_with_chosen_ids_may_be_sent_again(flows: FlowProducer, redis_client: redis.Redis) -> None:
    for _ in range(2):
        assert shape(flows.add(job("root", job("a"), job("b")))) == ("root", [("a", []), ("b", [])])
    assert ids_in_events(redis_client, "added") == ["root", "a", "b"]
    assert ids_in_events(redis_client, "duplicated") == ["root", "a", "b"]
    assert redis_client.smembers("bull:{q}:root:dependencies") == {"bull:{q}:a", "bull:{q}:b"}
    assert redis_client.llen("bull:{q}:wait") == 2


def test_a_parent_waits_for_new_children_even_if_its_first_child_has_completed(
    flows: FlowProducer, broker_url: str, redis_client: redis.Redis
) -> None:
    """BullMQ 5.62 runs a parent as soon as it has no pending child; Node links the completed child first."""
    broker = Broker(Settings({}).freeze(), broker_url)
    manual_worker = ManualWorker(broker, broker.keys("q"))
    flows.add(job("done"))
    assert manual_worker.complete(5) == "done"
    flows.add(job("root", job("done"), job("new")))
    assert redis_client.zrange("bull:{q}:waiting-children", 0, -1) == ["root"]
    assert redis_client.lrange("bull:{q}:wait", 0, -1) == ["new"]
    assert redis_client.hgetall("bull:{q}:root:processed") == {"bull:{q}:done": "5"}
    assert manual_worker.complete() == "new"
    assert manual_worker.complete() == "root"
    manual_worker.close()
    broker.close()


@pytest.mark.every_topology
def test_a_flow_with_a_deduplicated_root_adds_nothing(flows: FlowProducer, redis_client: redis.Redis) -> None:
    first = flows.add(anonymous("import", anonymous("part"), deduplication="import"))
    again = flows.add_bulk([anonymous("import", anonymous("part"), deduplication="import"), job("other")])
    assert (again[0].job.id, again[0].children, again[1].job.id) == (first.job.id, (), "other")
    assert redis_client.llen("bull:{q}:wait") == 2, "one part, and the job 'other'"


# ---- atomicity -------------------------------------------------------------------------------------------------------


def test_no_client_sees_part_of_a_flow_while_scripts_are_flushed_every_20_ms(
    flows: FlowProducer, broker_url: str, redis_client: redis.Redis
) -> None:
    done, seen = threading.Event(), set[int]()

    def read_counts() -> None:
        with client_of(broker_url) as plain:
            while not done.is_set():
                seen.add(int(plain.get("bull:{q}:id") or 0))

    reader = threading.Thread(target=read_counts)
    reader.start()
    sent = 0
    try:
        with scripts_flushed_every_20_ms(broker_url) as flushes:
            while flushes[0] < 40 or sent < 100:
                flows.add(
                    anonymous("root", anonymous("late", delay=60), anonymous("urgent", priority=2), anonymous("a"))
                )
                sent += 1
    finally:
        done.set()
        reader.join()
    assert redis_client.zcard("bull:{q}:waiting-children") == redis_client.zcard("bull:{q}:delayed") == sent
    assert {count % 4 for count in seen} == {0}


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


@pytest.fixture(params=["sync", "async"])
def unreliable_flows(request: pytest.FixtureRequest, proxy: FlakyProxy) -> Iterator[FlowProducer]:
    """A producer whose connection the test may break."""
    url = f"redis://127.0.0.1:{proxy.port}/0"
    settings: dict[str, Any] = {"redis_socket_timeout": 1, "broker_reconnect_delay": 0.05}
    if request.param == "sync":
        with FlowProducer(url, **settings) as unreliable_flows:
            yield unreliable_flows
        return
    with asyncio.Runner() as runner:
        facade: Any = SyncFacade(AsyncFlowProducer(url, **settings), runner)
        yield cast("FlowProducer", facade)
        facade.close()


def test_a_flow_whose_reply_was_lost_is_stored_once(
    unreliable_flows: FlowProducer, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    unreliable_flows.add(job("before"))
    for number in range(5):
        proxy.drop_replies(1, match="exec")
        tree = unreliable_flows.add(anonymous("root", job(f"chosen-{number}"), anonymous("child")))
        assert redis_client.zscore("bull:{q}:waiting-children", tree.job.id)
    assert proxy.dropped == 5
    assert redis_client.get("bull:{q}:id") == "16", "no add was made twice"
    assert ids_in_events(redis_client, "duplicated") == []
    proxy.drop_replies(1, match="exec")
    unreliable_flows.add(job("root", job("a"), job("b")))
    assert redis_client.get("bull:{q}:id") == "19"


def test_a_child_that_failed_before_a_resend_does_not_block_its_parent(
    unreliable_flows: FlowProducer, proxy: FlakyProxy, broker_url: str, redis_client: redis.Redis
) -> None:
    """Sending the flow again would make the parent wait for a child that has ended."""
    broker = Broker(Settings({}).freeze(), broker_url)
    manual_worker = ManualWorker(broker, broker.keys("q"))
    unreliable_flows.add(job("before"))
    manual_worker.complete()
    proxy.drop_replies(1, match="exec")
    failed = threading.Thread(target=fail_first, args=(manual_worker,))
    failed.start()
    unreliable_flows.add(job("root", job("bad", ignore_dependency_on_failure=True)))
    failed.join()
    assert redis_client.exists("bull:{q}:root:dependencies") == 0
    assert redis_client.hgetall("bull:{q}:root:failed") == {"bull:{q}:bad": "no"}
    assert redis_client.lrange("bull:{q}:wait", 0, -1) == ["root"]
    manual_worker.close()
    broker.close()


def test_a_flow_that_ran_before_a_resend_does_not_run_again(
    unreliable_flows: FlowProducer, proxy: FlakyProxy, broker_url: str, redis_client: redis.Redis
) -> None:
    broker = Broker(Settings({}).freeze(), broker_url)
    manual_worker = ManualWorker(broker, broker.keys("q"))
    unreliable_flows.add(job("before"))
    manual_worker.complete()
    proxy.drop_replies(1, match="exec")
    worker = threading.Thread(target=run_and_remove, args=(manual_worker, redis_client))
    worker.start()
    unreliable_flows.add(anonymous("root", anonymous("child")))
    worker.join()
    before, root, child = ids_in_events(redis_client, "added")
    assert ids_in_events(redis_client, "completed") == [before, child, root]
    assert redis_client.exists(f"bull:{{q}}:{root}", f"bull:{{q}}:{child}") == 0
    manual_worker.close()
    broker.close()


def run_and_remove(manual_worker: ManualWorker, client: redis.Redis) -> None:
    for _ in range(2):
        while not (job_id := manual_worker.acquire()):
            pass
        manual_worker.finish(job_id)
        client.delete(f"bull:{{q}}:{job_id}", f"bull:{{q}}:{job_id}:processed")


def fail_first(manual_worker: ManualWorker) -> None:
    while not (job_id := manual_worker.acquire()):
        pass
    manual_worker.finish(job_id, failure="no")


def test_a_flow_that_could_not_be_sent_is_not_stored(
    unreliable_flows: FlowProducer, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    unreliable_flows.add(job("before"))
    proxy.refuse()
    proxy.reset()
    with pytest.raises(BrokerUnavailableError):
        unreliable_flows.add(job("root", job("a")))
    proxy.accept()
    assert ids_in_events(redis_client, "added") == ["before"]


def test_a_server_that_is_out_of_memory_adds_no_job_of_a_flow(server_factory: ServerFactory) -> None:
    server = server_factory()
    with FlowProducer(server.url) as flows, redis.Redis.from_url(server.url, decode_responses=True) as plain:
        flows.add(job("before"))
        before = set(cast("list[str]", plain.keys("*")))
        plain.config_set("maxmemory", "1")
        with pytest.raises(BrokerOutOfMemoryError):
            flows.add(job("root", job("a"), job("b", delay=5)))
        plain.config_set("maxmemory", "0")
        assert set(cast("list[str]", plain.keys("*"))) == before
        flows.add(job("root", job("a")))


def test_the_error_for_a_broken_queue_counts_the_jobs_that_were_added(
    flows: FlowProducer, redis_client: redis.Redis
) -> None:
    """A Lua error is not rolled back; nothing else leaves an incomplete flow."""
    flows.add(job("before", queue="broken{q}"))
    redis_client.delete("bull:broken{q}:wait")
    redis_client.set("bull:broken{q}:wait", "text")
    with pytest.raises(BrokerError, match=r"WRONGTYPE.*; 2 of the 3 jobs sent with it were added"):
        flows.add(job("root", job("a"), job("b", queue="broken{q}")))


# ---- Redis Cluster ---------------------------------------------------------------------------------------------------


SLOTS = r"in one slot.*bull:\{orders\} \(slot 105\), bull:\{parts\} \(slot 3809\).*Nothing was sent.*prefix='\{bull\}'"


@pytest.mark.slow
def test_a_flow_across_slots_of_a_cluster_raises_an_error_with_a_solution(cluster_url: str) -> None:
    with FlowProducer(routed(cluster_url)) as flows, redis.Redis.from_url(cluster_url) as plain:
        with pytest.raises(ConfigError, match=SLOTS):
            flows.add(job("root", job("a", queue="parts"), queue="orders"))
        assert plain.keys("*") == []
        assert shape(flows.add(job("root", job("a"), job("b")))) == ("root", [("a", []), ("b", [])])

    async def main() -> None:
        async with AsyncFlowProducer(routed(cluster_url)) as aflows:
            with pytest.raises(ConfigError, match=SLOTS):
                await aflows.add(job("root", job("a", queue="parts"), queue="orders"))

    asyncio.run(main())


def test_names_with_the_same_tag_let_flows_span_queues_on_a_cluster(cluster_url: str) -> None:
    with FlowProducer(routed(cluster_url)) as flows:
        flows.add(job("root", job("a", queue="parts{shop}"), queue="orders{shop}"))
        read = flows.get_flow("orders{shop}", "root")
        assert read is not None
        assert shape(read) == ("root", [("a", [])])


def test_a_prefix_with_braces_lets_flows_span_queues_on_a_cluster(cluster_url: str) -> None:
    with FlowProducer(routed(cluster_url), prefix="{bull}") as flows:
        tree = flows.add(job("root", job("a", queue="parts"), queue="orders"))
        assert tree.children[0].job.key == "{bull}:{parts}:a"
        read = flows.get_flow("orders", "root")
        assert read is not None
        assert shape(read) == ("root", [("a", [])])


def test_a_flow_on_a_cluster_needs_queue_names_with_a_hash_tag(cluster_url: str) -> None:
    with (
        FlowProducer(routed(cluster_url), queue_hash_tag=False) as flows,
        pytest.raises(BrokerConfigError, match="bull:orders"),
    ):
        flows.add(job("root", queue="orders"))
