"""A query finds new queues by the registry, and scans the keys of other programs slowly; a real server, no JVM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from bulltask.queue import Queue
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.discovery import QueueDiscovery
from bulltask.spark.source.options import StreamOptions, read_options
from tests.support.event_writing import fill
from tests.support.fake_query import FakeQuery

pytestmark = pytest.mark.redis

FOREIGN = 120_000  # more than a discovery may scan at once


@pytest.fixture
def connection(broker_url: str) -> Iterator[Connection]:
    with Connection(read_options(StreamOptions, {"url": broker_url, "queue": "*"}).config) as connection:
        yield connection


class Clock:
    now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


def scans(client: redis.Redis) -> int:
    """Return how many times the server was asked to scan its keys."""
    calls: Any = client.info("commandstats")
    return int(calls.get("cmdstat_scan", {"calls": 0})["calls"])


def add_foreign_keys(client: redis.Redis) -> None:
    client.eval("for i = 1, tonumber(ARGV[1]) do redis.call('SET', 'foreign:' .. i, '') end", 0, FOREIGN)


def test_a_registered_queue_is_found_without_a_scan(
    broker_url: str, connection: Connection, redis_client: redis.Redis
) -> None:
    add_foreign_keys(redis_client)
    discovery = QueueDiscovery("bull", Clock())
    for _ in range(2):  # the second call makes all the calls that it may make at once
        assert discovery.names(connection) == set()
    before = scans(redis_client)

    with Queue("mail", broker_url) as queue:
        queue.add("send", {})

    assert discovery.names(connection) == {"{mail}"}
    assert scans(redis_client) == before


def test_a_queue_that_only_node_uses_is_found_by_a_scan_at_a_bounded_rate(
    connection: Connection, redis_client: redis.Redis
) -> None:
    add_foreign_keys(redis_client)
    clock = Clock()
    discovery = QueueDiscovery("bull", clock)
    discovery.names(connection)
    start = scans(redis_client)
    fill(redis_client, 1, "mail")  # it writes to the keys of the queue, as Node does, and registers nothing

    while not discovery.names(connection):
        clock.now_ms += 1_000

    assert clock.now_ms <= FOREIGN / 1_000 / 2 * 1_000 * 2, "two rounds of the scan"
    assert scans(redis_client) - start <= 100 + 2 * clock.now_ms / 1_000


def test_a_trigger_scans_few_keys_all_of_them_only_once(broker_url: str, redis_client: redis.Redis) -> None:
    fill(redis_client, 3, "a")
    query = FakeQuery(broker_url, queue="*")
    query.run_until_idle()
    start = scans(redis_client)

    fill(redis_client, 3, "b")
    assert query.batch()  # it adds the queue
    query.reader.reportLatestOffset()

    assert scans(redis_client) == start + 1
    query.run_until_idle()
    assert len(query.events("b")) == 3


def test_a_registered_queue_without_keys_is_no_queue_and_neither_is_a_deleted_one(
    connection: Connection, redis_client: redis.Redis
) -> None:
    redis_client.zadd("bulltask:queues", {"{unused}": 1, "{mail}": 1})
    fill(redis_client, 1, "mail")
    fill(redis_client, 1, "nodes")
    discovery = QueueDiscovery("bull")
    assert discovery.names(connection) == {"{mail}", "{nodes}"}
    redis_client.delete("bull:{mail}:meta", "bull:{nodes}:meta")
    assert discovery.names(connection) == set()


def test_queues_of_other_prefixes_are_not_found(connection: Connection, redis_client: redis.Redis) -> None:
    redis_client.zadd("bulltask:shop:queues", {"{cart}": 1})
    redis_client.hset("shop:{cart}:meta", "version", "bullmq:5.62.0")
    fill(redis_client, 1, "mail")
    assert QueueDiscovery("bull").names(connection) == {"{mail}"}
    assert QueueDiscovery("shop").names(connection) == {"{cart}"}
