"""Reads and writes on a Redis Cluster of three nodes, with queues on each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StringType, StructField, StructType

from bulltask.errors import BrokerConfigError, BrokerError
from bulltask.queue import Queue
from bulltask.spark.results import JobLookup
from bulltask.spark.sink import JobsWriter, TaskCommit
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import WriteOptions, read_options
from bulltask.transport.streams import entries_since
from tests.support.event_writing import fill
from tests.support.fake_query import FakeQuery
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import add
from tests.support.redis_cluster import Cluster

pytestmark = [pytest.mark.redis, pytest.mark.slow]

COLUMNS = StructType([StructField(name, StringType()) for name in ("queue", "id", "name", "data")])


@pytest.fixture
def broker_url(cluster: Cluster) -> str:
    """The URL of one node; clients discover the others."""
    return cluster.url


@pytest.fixture
def queues(cluster: Cluster) -> list[str]:
    """Two queues on each node."""
    return cluster.queues(2)


@pytest.fixture
def filled(cluster: Cluster, queues: list[str]) -> dict[str, list[str]]:
    """The ids of ten jobs in each queue."""
    ids: dict[str, list[str]] = {}
    for name in queues:
        with Queue(name, cluster.broker_url) as queue:
            ids[name] = add(queue, 10)
    return ids


def write(url: str, queues: list[str], first: int, last: int, **options: str) -> dict[str, int]:
    """Write jobs ``s<n>`` to all queues."""
    rows = [
        {"queue": name, "id": f"s{n}", "name": "send", "data": json.dumps({"n": n})}
        for n in range(first, last)
        for name in queues
    ]
    writer = JobsWriter(read_options(WriteOptions, {"url": url, "chunkSize": "7", **options}), COLUMNS, overwrite=False)
    commit = writer.write(iter([pa.RecordBatch.from_pylist(rows)]))
    assert isinstance(commit, TaskCommit)
    return commit.counts


def by_queue(rows: list[dict[str, Any]], column: str = "id") -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for row in rows:
        values.setdefault(row["queue"], []).append(row[column])
    return values


@pytest.mark.parametrize("named", [True, False])
def test_jobs_on_all_nodes_are_read(read: Callable[..., Any], filled: dict[str, list[str]], named: bool) -> None:
    rows = read(queue=",".join(filled) if named else "*", state="wait,completed", fetchSize="3")
    assert {name: sorted(ids) for name, ids in by_queue(rows).items()} == filled


def test_finished_jobs_are_read_in_parallel(
    read: Callable[..., Any], make_reader: Callable[..., DataSourceReader], cluster: Cluster
) -> None:
    name = cluster.queues(1)[2]
    with Queue(name, cluster.broker_url) as queue:
        add(queue, 20)
        manual_worker = ManualWorker(queue.context.broker, queue.context.broker.keys(name))
        finished = {manual_worker.complete({"n": 1}) for _ in range(12)} | {manual_worker.fail() for _ in range(8)}
        manual_worker.close()
    options = {"queue": name, "numPartitions": "4", "minRowsPerPartition": "2"}
    assert len(make_reader(**options).partitions()) > 2
    assert {row["id"] for row in read(**options)} == finished


def test_events_and_counts_on_all_nodes_are_read(read: Callable[..., Any], filled: dict[str, list[str]]) -> None:
    events = read(table="events", queue="*", eventsPerPartition="7")
    added = [row for row in events if row["event"] == "added"]
    assert by_queue(added, "job_id") == filled
    waiting = {row["queue"]: row["jobs"] for row in read(table="counts", queue="*") if row["state"] == "wait"}
    assert waiting == dict.fromkeys(filled, 10)


def test_a_query_reads_every_event_on_all_nodes_once(broker_url: str, queues: list[str]) -> None:
    rng = random.Random(3)
    query = FakeQuery(broker_url, queue="*", eventsPerPartition="9", fetchSize="4")
    for number in range(10):
        chosen = rng.sample(queues, 3)
        write(broker_url, chosen, 10 * number, 10 * number + rng.randrange(1, 6))
        query.batch(rng.randrange(5, 30))
    query.run_until_idle()
    assert not query.gaps()
    options = read_options(WriteOptions, {"url": broker_url})
    with Connection(options.config) as connection:
        for name in queues:
            assert query.events(name) == [
                entry_id for entry_id, _ in connection.run(entries_since(options.keys(name), "-"))
            ]


def test_a_query_finds_new_queues_on_all_nodes(broker_url: str, queues: list[str], cluster: Cluster) -> None:
    query = FakeQuery(broker_url, queue="*")
    registered, scanned = queues[::2], queues[1::2]
    write(broker_url, registered, 0, 3)
    ids = {name: fill(cluster.client_of(name), 5, name) for name in scanned}
    query.run_until_idle()
    assert {name: query.events(name) for name in scanned} == ids
    assert all(len(query.events(name)) == 6 for name in registered)
    assert not query.gaps()


def test_a_write_to_queues_on_all_nodes_adds_each_job_once(
    broker_url: str, queues: list[str], cluster: Cluster
) -> None:
    assert write(broker_url, queues, 0, 20, writeId="w1") == {"added": 120}
    assert write(broker_url, queues, 0, 25, writeId="w1") == {"added": 30, "duplicate": 120}
    for name in queues:
        assert cluster.client_of(name).llen(f"bull:{{{name}}}:wait") == 25
        assert cluster.client_of(name).ttl(f"bulltask:{{{name}}}:added:w1") > 0


def test_gather_returns_the_results_of_jobs(cluster: Cluster, broker_url: str, queues: list[str]) -> None:
    name = queues[3]
    with Queue(name, cluster.broker_url) as queue:
        ids = add(queue, 3)
        manual_worker = ManualWorker(queue.context.broker, queue.context.broker.keys(name))
        manual_worker.complete(5)
        manual_worker.close()
    options = read_options(WriteOptions, {"url": broker_url, "queue": name})
    [results] = JobLookup(options.config, options.keys(name), 0, 1).look_up(iter([pa.array([*ids, "unknown"])]))
    assert [row["state"] for row in results.to_pylist()] == ["completed", "unfinished", "unfinished", "missing"]


def test_a_queue_without_a_hash_tag_is_rejected_with_advice(
    broker_url: str, make_reader: Callable[..., DataSourceReader]
) -> None:
    with pytest.raises(BrokerError, match=r"one slot.*queue_hash_tag=True"):
        write(broker_url, ["mail"], 0, 1, queueHashTag="false")
    with pytest.raises(BrokerError, match=r"one slot .* \(queue_hash_tag=True"):
        make_reader(queueHashTag="false", state="wait,active").partitions()


def test_a_prefix_with_a_hash_tag_supports_queues_without_one(broker_url: str, read: Callable[..., Any]) -> None:
    options = {"prefix": "{bull}", "queueHashTag": "false"}
    assert write(broker_url, ["mail", "news"], 0, 5, **options) == {"added": 10}
    assert len(read(queue="*", state="wait", **options)) == 10


def test_a_database_other_than_0_is_rejected(broker_url: str, read: Callable[..., Any]) -> None:
    with pytest.raises(BrokerError, match=r"no such database: .* bulltask uses database 0 of a cluster"):
        read(url=broker_url.removesuffix("0") + "3")


def test_the_url_of_another_node_is_rejected_without_cluster_support(cluster: Cluster, queues: list[str]) -> None:
    other = next(server.url for server in cluster.servers if server.url != cluster.url_of(queues[0]))
    with Queue(queues[0], other) as queue, pytest.raises(BrokerConfigError, match="is a node of a Redis Cluster"):
        queue.add("send", {})
