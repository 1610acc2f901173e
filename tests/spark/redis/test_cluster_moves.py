"""A cluster is read and written while slots move and nodes crash; nothing is lost or duplicated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from pyspark.sql.types import StringType, StructField, StructType

from bulltask.errors import BrokerNotReadyError
from bulltask.jobs.clock import mono_ms
from bulltask.queue import Queue
from bulltask.spark.sink import JobsWriter, TaskCommit
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import WriteOptions, read_options
from bulltask.testing.worker import wait_until
from bulltask.transport.call import Call
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.operation import atomic
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.queue import STATES, scan_queues, state_size
from bulltask.transport.streams import last_id_of_range
from tests.conftest import FLAVOR
from tests.support.fake_query import FakeQuery
from tests.support.queue_contents import add
from tests.support.redis_cluster import Cluster

# Clients wait for a cluster for up to a minute.
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(180)]

COLUMNS = StructType([StructField(name, StringType()) for name in ("queue", "name", "data")])


@pytest.fixture(scope="module")
def moving_cluster(
    session_id: str, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster whose slots move."""
    with Cluster.started(tmp_path_factory.mktemp("moving"), FLAVOR) as started:
        session_processes.update(server.pid for server in started.servers)
        yield started


@pytest.fixture
def cluster(moving_cluster: Cluster) -> Cluster:
    moving_cluster.flush()
    return moving_cluster


@pytest.fixture
def broker_url(cluster: Cluster) -> str:
    return cluster.url


@pytest.fixture
def ids(cluster: Cluster) -> list[str]:
    """The ids of 30 jobs in the queue ``mail``."""
    with Queue("mail", cluster.broker_url) as queue:
        return add(queue, 30)


@pytest.fixture
def options(broker_url: str) -> WriteOptions:
    return read_options(WriteOptions, {"url": broker_url, "queue": "mail"})


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], Any]], Callable[[], Any]]]:
    """Start a function in a thread; return a function that waits for its result."""
    threads: list[threading.Thread] = []

    def start(work: Callable[[], Any]) -> Callable[[], Any]:
        results: list[Any] = []
        threads.append(threading.Thread(target=lambda: results.append(work())))
        threads[-1].start()

        def result() -> Any:
            threads[-1].join(60)
            return results[0]

        return result

    yield start
    for thread in threads:
        thread.join(60)


def other_node(cluster: Cluster, slot: int) -> int:
    return (cluster.owner(slot) + 1) % 3


def error_replies(client: redis.Redis, prefix: str) -> int:
    stats: Any = client.info("errorstats")
    return int(stats.get(f"errorstat_{prefix}", {"count": 0})["count"])


def refused_scripts(cluster: Cluster) -> int:
    return sum(error_replies(client, "TRYAGAIN") for client in cluster.clients)


def write(url: str, first: int, last: int, **options: str) -> dict[str, int]:
    rows = [{"queue": "mail", "name": "send", "data": f'{{"n":{n}}}'} for n in range(first, last)]
    writer = JobsWriter(read_options(WriteOptions, {"url": url, "writeId": "w1", **options}), COLUMNS, overwrite=False)
    commit = writer.write(iter([pa.RecordBatch.from_pylist(rows)]))
    assert isinstance(commit, TaskCommit)
    return commit.counts


def move(cluster: Cluster, slot: int, target: int | None = None) -> None:
    target = other_node(cluster, slot) if target is None else target
    cluster.begin_move(slot, target)
    cluster.move_keys(slot, target)
    cluster.end_move(slot, target)


@contextmanager
def moving_slot(cluster: Cluster, queue: str, keys: int = 1_000_000) -> Iterator[int]:
    """Move ``keys`` keys of a queue to another node, and yield the node's number; complete the move at the end."""
    slot = cluster.slot(queue)
    target = other_node(cluster, slot)
    cluster.begin_move(slot, target)
    try:
        cluster.move_keys(slot, target, keys)
        yield target
    finally:
        while cluster.move_keys(slot, target):
            pass
        cluster.end_move(slot, target)


def test_an_open_connection_follows_a_moved_slot(cluster: Cluster, ids: list[str], options: WriteOptions) -> None:
    keys = options.keys("mail")
    with Connection(options.config) as connection:
        assert connection.run(state_size(keys, "wait")) == 30
        for _ in range(3):
            move(cluster, cluster.slot("mail"))
            assert connection.run(state_size(keys, "wait")) == 30
            assert connection.run_atomically([state_size(keys, state) for state in STATES])[0] == 30


def test_a_partly_moved_slot_is_read_from_both_nodes(cluster: Cluster, ids: list[str], options: WriteOptions) -> None:
    keys = options.keys("mail")
    with Connection(options.config) as connection, moving_slot(cluster, "mail", 15):
        replies = connection.run_many([job_fields(keys, job_id, ("name",)) for job_id in ids])
        assert replies == [[b"send"]] * 30
        assert error_replies(cluster.client_of("mail"), "ASK") > 0


def test_planning_waits_until_a_moving_slot_has_arrived(
    cluster: Cluster, ids: list[str], read: Callable[..., Any], in_thread: Callable[..., Any]
) -> None:
    source = cluster.client_of("mail")
    with moving_slot(cluster, "mail"):
        before = error_replies(source, "ASK")
        rows = in_thread(lambda: read(queue="mail", state="wait,active,delayed"))
        wait_until(lambda: error_replies(source, "ASK") > before, 60, "a transaction with the reply ASK")
    assert {row["id"] for row in rows()} == set(ids)


def test_a_write_waits_until_a_moving_slot_has_arrived(
    cluster: Cluster, ids: list[str], broker_url: str, in_thread: Callable[..., Any]
) -> None:
    assert write(broker_url, 0, 10) == {"added": 10}
    with moving_slot(cluster, "mail", 20):
        # The old node sends a script whose keys have all moved to the new one, which lacks the rest of the slot.
        before = refused_scripts(cluster)
        counts = in_thread(lambda: write(broker_url, 0, 40))
        wait_until(lambda: refused_scripts(cluster) > before, 60, "a script with the reply TRYAGAIN")
    assert counts() == {"added": 30, "duplicate": 10}
    assert cluster.client_of("mail").llen("bull:{mail}:wait") == 70


def test_a_script_is_loaded_on_the_new_node_while_a_slot_moves(
    cluster: Cluster, ids: list[str], options: WriteOptions
) -> None:
    with Connection(options.config) as connection, moving_slot(cluster, "mail") as target:
        cluster.clients[target].script_flush()
        assert connection.run(last_id_of_range(options.keys("mail"), "0-0", "+", 5)).count == 5


def test_a_transaction_that_waits_too_long_names_the_moving_slot(
    cluster: Cluster, ids: list[str], options: WriteOptions
) -> None:
    client = ClusterClient(Endpoint.from_config(options.config, cluster.url), None)
    wait = state_size(options.keys("mail"), "wait")
    with moving_slot(cluster, "mail"):
        assert client.run(wait) == 30  # the new node replies
        client.set_deadline(mono_ms() + 3_000)
        with pytest.raises(BrokerNotReadyError, match=r"slot 4247 of the Redis Cluster at redis://.* is being moved"):
            client.run_many(atomic([wait, wait], "test"))
    client.set_deadline(None)
    assert client.run_many(atomic([wait, wait], "test"))[-1] == [30, 30]
    client.close()


def test_a_scan_finds_a_queue_that_moves_to_a_node_already_scanned(
    cluster: Cluster, broker_url: str, options: WriteOptions
) -> None:
    first, second, _ = sorted(range(3), key=lambda number: cluster.servers[number].port)
    name = next(queue for queue in cluster.queues(1) if cluster.owner(cluster.slot(queue)) == second)
    with Queue(name, cluster.broker_url) as queue:
        add(queue, 1)
    node_scans = 0

    def step(cursor: str) -> Call[tuple[str, list[str]]]:
        nonlocal node_scans
        node_scans += cursor == "0"
        if node_scans == 2 and cluster.owner(cluster.slot(name)) == second:
            move(cluster, cluster.slot(name), first)
            cluster.wait_for_owner(cluster.slot(name), first)  # otherwise, a third scan may be needed
        return scan_queues("bull", cursor)

    with Connection(options.config) as connection:
        assert connection.scan_all(step) == {f"{{{name}}}"}
    assert node_scans == 6


def test_every_event_is_read_once_while_slots_move(cluster: Cluster, broker_url: str) -> None:
    slot = cluster.slot("mail")
    query = FakeQuery(broker_url, queue="*", fetchSize="5", eventsPerPartition="9")
    for number in range(6):
        write(broker_url, 10 * number, 10 * (number + 1))
        end = query.plan(max_rows=15)
        move(cluster, slot)
        query.rows += query.read(end)
        query.offset = end
    query.run_until_idle()
    entries: Any = cluster.client_of("mail").xrange("bull:{mail}:events")
    assert query.events() == [entry_id for entry_id, _ in entries]
    assert len(query.events()) == 120


def test_a_connection_gives_up_on_an_unassigned_slot(
    cluster: Cluster, ids: list[str], options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulltask.spark.source.connection.CLUSTER_OUTAGE_TIMEOUT_MS", 300)
    slot = cluster.slot("mail")
    owner = cluster.owner(slot)
    for client in cluster.clients:
        client.config_set("cluster-require-full-coverage", "no")
    try:
        for client in cluster.clients:
            client.execute_command("CLUSTER DELSLOTS", slot)
        with (
            Connection(options.config) as connection,
            pytest.raises(BrokerNotReadyError, match=f"slot {slot}|not served"),
        ):
            connection.run(state_size(options.keys("mail"), "wait"))
    finally:
        for client in cluster.clients:
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", cluster.ids[owner])


def test_clients_of_a_killed_node_wait_for_its_replica(tmp_path: Path) -> None:
    with Cluster.started(tmp_path, FLAVOR, replicas=1, node_timeout_ms=2_000) as cluster:
        number = cluster.owner(cluster.slot("mail"))
        url = cluster.servers[(number + 1) % 3].url
        query = FakeQuery(url)
        assert write(url, 0, 10) == {"added": 10}
        assert cluster.clients[number].wait(1, 20_000) == 1
        options = read_options(WriteOptions, {"url": url, "queue": "mail"})
        with Connection(options.config) as connection:
            assert connection.run(state_size(options.keys("mail"), "wait")) == 10
            cluster.servers[number].kill()
            assert connection.run(state_size(options.keys("mail"), "wait")) == 10
        assert write(url, 0, 20) == {"added": 10, "duplicate": 10}
        query.run_until_idle()
        assert sum(row["event"] == "added" for row in query.rows) == 20
        assert not query.gaps()
