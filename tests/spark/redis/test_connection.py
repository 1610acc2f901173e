"""Reads survive a broken connection, and fail if no server is reachable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from pyspark.sql.datasource import DataSourceReader

from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.queue import Queue
from bulltask.testing.worker import RedisServer
from tests.conftest import ServerFactory
from tests.support.fake_query import FakeQuery
from tests.support.flaky_proxy import FlakyProxy
from tests.support.queue_contents import add

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULLTASK_BROKER_RECONNECT_DELAY", "0.02")
    monkeypatch.setenv("BULLTASK_BROKER_RECONNECT_DELAY_MAX", "0.05")


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as started:
        yield started


@pytest.fixture
def reader(queue: Queue, proxy: FlakyProxy, make_reader: Callable[..., DataSourceReader]) -> DataSourceReader:
    """A reader of 20 jobs, through the proxy."""
    add(queue, 20)
    return make_reader(url=f"redis://127.0.0.1:{proxy.port}/0", state="wait", fetchSize="5")


@pytest.mark.parametrize("match", ["EXEC", "HMGET"])
def test_a_read_continues_when_a_reply_is_lost(
    reader: DataSourceReader, read_rows: Callable[..., Any], proxy: FlakyProxy, match: str
) -> None:
    proxy.drop_replies(1, match=match)

    assert len({row["id"] for row in read_rows(reader)}) == 20
    assert proxy.dropped == 1


def test_a_read_waits_for_a_server_that_is_loading(
    reader: DataSourceReader, read_rows: Callable[..., Any], proxy: FlakyProxy
) -> None:
    proxy.inject_error("LOADING Redis is loading the dataset in memory", match="HMGET")

    assert len(read_rows(reader)) == 20
    assert proxy.injected == 1


def test_a_read_with_an_error_reply_fails_immediately(
    reader: DataSourceReader, read_rows: Callable[..., Any], proxy: FlakyProxy
) -> None:
    proxy.inject_error("ERR no", match="HMGET")
    with pytest.raises(BrokerError, match="rejected a command"):
        read_rows(reader)
    assert proxy.injected == 1


def test_a_read_of_a_stopped_server_fails_with_its_address(
    reader: DataSourceReader, read_rows: Callable[..., Any], proxy: FlakyProxy
) -> None:
    proxy.close()
    with pytest.raises(BrokerUnavailableError, match="cannot connect to Redis"):
        read_rows(reader)


@pytest.mark.slow
def test_a_stream_waits_for_a_restarted_server_and_continues(server_factory: ServerFactory) -> None:
    server = server_factory(appendonly=True)
    with redis.Redis.from_url(server.url) as client:
        client.xadd("bull:{mail}:events", {"event": "paused"})
        query = FakeQuery(server.url)
        client.xadd("bull:{mail}:events", {"event": "paused"})
        end = query.plan()
    for step in (query.plan, lambda: query.read(end)):
        server.kill()
        restart = threading.Timer(1.0, server.restart)
        restart.start()
        try:
            step()
        finally:
            restart.join()
    query.batch()
    assert len(query.events()) == 2


def test_a_stream_with_a_wrong_address_fails_within_30_seconds(server_factory: ServerFactory) -> None:
    server = server_factory()
    server.stop()
    start = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match="cannot connect to Redis"):
        FakeQuery(server.url)
    assert time.monotonic() - start < 30
