"""A server that replies in another protocol raises an error: a proxy's error page, another program on the port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bulltask import App, JobState
from bulltask.errors import BrokerUnavailableError
from bulltask.jobs.clock import ServerClock
from bulltask.testing.worker import RedisServer
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client, ClientPool
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.endpoint import Endpoint
from tests.support.flaky_proxy import FlakyProxy

pytestmark = pytest.mark.redis

REPLIES = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "tls": b"\x15\x03\x01\x00\x02\x02\x46",
    "smtp": b"220 mail.example.org ESMTP\r\n",
    "broken": b"*x\r\n",
}
PING: Call[Any] = command("PING")
LENGTH: Call[int] = command("LLEN", "list", parse_reply=int)
TO_OTHER_CALLS = pytest.mark.parametrize("reply", [b"*1\r\n:1\r\n", b"$1\r\nx\r\n", b"*-1\r\n"])


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


def proxy_url(proxy: FlakyProxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}/0"


def endpoint(proxy: FlakyProxy) -> Endpoint:
    return Endpoint(proxy_url(proxy), 2_000, 5_000)


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_a_reply_in_another_protocol_closes_the_connection(proxy: FlakyProxy, reply: bytes) -> None:
    client = Client(endpoint(proxy), ServerClock())
    proxy.inject_reply(reply)
    with pytest.raises(BrokerUnavailableError, match=rf"127\.0\.0\.1:{proxy.port}/0 does not use the Redis protocol"):
        client.connect()
    assert client.run(PING) == b"PONG"
    proxy.inject_reply(reply, match="ping")
    with pytest.raises(BrokerUnavailableError, match="does not use the Redis protocol"):
        client.run_many([PING, PING])
    assert client.run(PING) == b"PONG"
    proxy.inject_reply(reply, match="blpop")
    with pytest.raises(BrokerUnavailableError, match="does not use the Redis protocol"):
        client.wait(command("BLPOP", "nothing", 1), 1_000, lambda: None)
    client.close()


async def test_a_reply_in_another_protocol_closes_an_asyncio_connection(proxy: FlakyProxy) -> None:
    app = App("sender", proxy_url(proxy), broker_publish_retries=0)
    client = app._broker.shared_async_client()
    proxy.inject_reply(REPLIES["http"])
    with pytest.raises(BrokerUnavailableError, match=rf"127\.0\.0\.1:{proxy.port}/0 does not use the Redis protocol"):
        await client.connect()
    assert await client.run(PING) == b"PONG"
    proxy.inject_reply(REPLIES["http"], match="ping")
    with pytest.raises(BrokerUnavailableError, match="does not use the Redis protocol"):
        await client.run_many([PING, PING])
    assert await client.run(PING) == b"PONG"
    await app.aclose()


@TO_OTHER_CALLS
def test_a_reply_to_another_call_closes_the_connection(proxy: FlakyProxy, reply: bytes) -> None:
    client = Client(endpoint(proxy), None)
    assert client.run(LENGTH) == 0
    proxy.inject_reply(reply, match="llen")
    with pytest.raises(BrokerUnavailableError, match=f"{proxy.port}/0 sent a reply that does not belong to the call"):
        client.run(LENGTH)
    assert client.run(LENGTH) == 0
    assert proxy.connections == 2
    client.close()


@TO_OTHER_CALLS
async def test_a_reply_to_another_call_closes_an_asyncio_connection(proxy: FlakyProxy, reply: bytes) -> None:
    app = App("sender", proxy_url(proxy), broker_publish_retries=0)
    client = app._broker.shared_async_client()
    assert await client.run(LENGTH) == 0
    proxy.inject_reply(reply, match="llen")
    with pytest.raises(BrokerUnavailableError, match="sent a reply that does not belong to the call"):
        await client.run(LENGTH)
    assert await client.run(LENGTH) == 0
    assert proxy.connections == 2
    await app.aclose()


async def test_a_reply_that_no_call_waits_for_closes_an_asyncio_connection(proxy: FlakyProxy) -> None:
    app = App("sender", proxy_url(proxy), broker_publish_retries=0)
    client = app._broker.shared_async_client()
    proxy.inject_reply(b"+PONG\r\n+PONG\r\n", match="ping")
    assert await client.run(PING) == b"PONG"
    assert await client.run(LENGTH) == 0
    assert proxy.connections == 2
    await app.aclose()


def test_a_send_is_repeated_and_then_raises_a_broker_error(proxy: FlakyProxy) -> None:
    app = App("sender", proxy_url(proxy), broker_reconnect_delay=0.01)
    proxy.inject_reply(REPLIES["http"], 2)
    assert app.send_task("work").state is JobState.WAITING
    proxy.inject_reply(REPLIES["http"], None)
    with pytest.raises(BrokerUnavailableError, match="does not use the Redis protocol"):
        app.send_task("work")
    app.close()


def test_an_idle_connection_with_unread_bytes_is_not_used_again(proxy: FlakyProxy) -> None:
    pool = ClientPool(lambda: Client(endpoint(proxy), None))
    with pool.client() as client:
        proxy.inject_reply(b"+PONG\r\nHTTP/1.1 408 Request Timeout\r\n\r\n", match="ping")
        assert client.run(PING) == b"PONG"
    assert pool.run(PING) == b"PONG"
    pool.close()


def test_a_cluster_node_that_replies_in_another_protocol_is_unavailable(proxy: FlakyProxy) -> None:
    pool = ClientPool(lambda: ClusterClient(endpoint(proxy), None))
    proxy.inject_reply(REPLIES["http"], None)
    with pool.client() as client, pytest.raises(BrokerUnavailableError, match="does not use the Redis protocol"):
        client.run(PING)
    pool.close()
