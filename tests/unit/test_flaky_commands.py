from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bulltask.testing.worker import RedisServer, wait_until
from tests.support.flaky_proxy import FlakyProxy
from tests.support.raw_redis import SILENCE, Connect, RawConnection, request

pytestmark = pytest.mark.redis


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port, seed=7) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: FlakyProxy) -> Iterator[Connect]:
    with ExitStack() as opened:
        yield lambda: opened.enter_context(RawConnection(proxy.port))


def test_the_command_of_a_dropped_reply_was_executed(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(3)
    for n in range(1, 4):
        client = connect()
        client.send("INCR", "counter")
        assert client.is_reset()
        assert redis_client.get("counter") == str(n)
    assert connect().ask("INCR", "counter") == b":4\r\n"
    assert proxy.dropped == 3


def test_a_retried_call_whose_reply_was_dropped_runs_twice(proxy: FlakyProxy, redis_client: redis.Redis) -> None:
    proxy.drop_replies(10, every=2, match="incr")
    with redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 3)) as client:
        for _ in range(30):
            client.incr("counter")
    assert proxy.dropped == 10
    assert redis_client.get("counter") == "40"


def test_a_reply_is_dropped_after_its_command_has_ended(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(match="blpop")
    client = connect()
    client.send("BLPOP", "jobs", "0")
    assert client.receives_nothing()
    redis_client.rpush("jobs", "job 1")
    assert client.is_reset()
    assert redis_client.llen("jobs") == 0


def test_every_third_reply_is_dropped(connect: Connect, proxy: FlakyProxy) -> None:
    proxy.drop_replies(every=3)
    assert [ping_succeeds(connect) for _ in range(7)] == [True, True, False, True, True, False, True]
    proxy.pass_all()
    assert all(ping_succeeds(connect) for _ in range(4))


def ping_succeeds(connect: Connect) -> bool:
    try:
        return connect().ask("PING") == b"+PONG\r\n"
    except ConnectionResetError:
        return False


def test_the_seed_determines_which_replies_are_dropped(redis_server: RedisServer) -> None:
    def results() -> list[bool]:
        with FlakyProxy("127.0.0.1", redis_server.port, seed=42) as proxy, ExitStack() as opened:
            proxy.drop_replies(probability=0.5)
            return [ping_succeeds(lambda: opened.enter_context(RawConnection(proxy.port))) for _ in range(40)]

    first = results()
    assert first == results()
    assert 5 < sum(first) < 35


def test_only_replies_to_matching_commands_are_dropped(connect: Connect, proxy: FlakyProxy) -> None:
    proxy.drop_replies(match="INCR")
    client = connect()
    assert client.ask("PING") == b"+PONG\r\n"
    client.send("incr", "counter")
    assert client.is_reset()


def test_a_connection_can_freeze_after_a_dropped_reply(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(1, then="freeze")
    client = connect()
    client.send("INCR", "counter")
    proxy.wait_for(lambda proxy: proxy.dropped == 1)
    client.send("INCR", "counter")
    assert client.receives_nothing()
    assert redis_client.get("counter") == "1"


@pytest.mark.parametrize("size", [10, 200_000], ids=["small", "more than one read"])
def test_a_transaction_runs_even_if_its_first_reply_is_dropped(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis, size: int
) -> None:
    proxy.drop_replies(1)
    client, text = connect(), "x" * size
    commands = [("MULTI",), ("SET", "text", text), ("INCR", "counter"), ("EXEC",)]
    client.socket.sendall(b"".join(request(*args) for args in commands))
    assert client.is_reset()
    assert redis_client.get("text") == text
    assert redis_client.get("counter") == "1"


def test_the_rest_of_a_pipeline_runs_before_the_connection_is_reset(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(1)
    client = connect()
    client.socket.sendall(request("PING") + request("BLPOP", "jobs", "0") + request("INCR", "counter"))
    assert client.receives_nothing()
    redis_client.rpush("jobs", "job 1")
    assert client.is_reset()
    assert redis_client.get("counter") == "1"


def test_a_partly_sent_command_runs_before_the_connection_is_reset(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(1)
    client, last = connect(), request("INCR", "counter")
    client.socket.sendall(request("PING") + last[:10])
    assert client.receives_nothing()
    client.socket.sendall(last[10:])
    assert client.is_reset()
    assert redis_client.get("counter") == "1"


@pytest.mark.slow
def test_a_command_delayed_by_latency_runs_before_the_connection_is_reset(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(1)
    proxy.latency(2 * SILENCE)
    client = connect()
    client.send("PING")
    assert client.receives_nothing()
    assert client.receives_nothing()
    assert client.receives_nothing()
    client.send("INCR", "counter")  # delayed until after the reply to PING is dropped
    assert client.is_reset()
    assert redis_client.get("counter") == "1"


def test_a_partial_reply_is_followed_by_a_reset(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("SET", "text", "0123456789")
    proxy.partial_reply(7, match="get")
    client.ask("PING")
    client.send("GET", "text")
    assert client.socket.recv(100, socket.MSG_WAITALL) == b"$10\r\n01"
    assert client.is_reset()
    assert connect().ask("GET", "text") == b"$10\r\n0123456789\r\n"


def test_an_injected_error_replaces_the_replies_of_the_next_commands(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.inject_error("-READONLY You can't write against a read only replica.", 2)
    client = connect()
    for _ in range(2):
        assert client.ask("INCR", "counter") == b"-READONLY You can't write against a read only replica.\r\n"
    assert redis_client.get("counter") is None
    assert client.ask("INCR", "counter") == b":1\r\n"
    assert proxy.injected == 2


def test_an_injected_error_keeps_its_position_in_a_pipeline(connect: Connect, proxy: FlakyProxy) -> None:
    proxy.inject_error("LOADING Redis is loading the dataset in memory", None, match="get")
    client = connect()
    commands = [("INCR", "counter"), ("GET", "counter"), ("GET", "counter"), ("INCR", "counter"), ("GET", "counter")]
    client.socket.sendall(b"".join(request(*args) for args in commands))
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    assert [client.receive() for _ in commands] == [b":1\r\n", loading, loading, b":2\r\n", loading]


def test_an_injected_error_waits_for_the_previous_reply(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.inject_error("BUSY", match="ping")
    client = connect()
    client.socket.sendall(request("BLPOP", "jobs", "0") + request("PING"))
    assert client.receives_nothing()
    redis_client.rpush("jobs", "job 1")
    assert client.receive() == b"*2\r\n$4\r\njobs\r\n$5\r\njob 1\r\n"
    assert client.receive() == b"-BUSY\r\n"


def test_published_messages_do_not_count_as_replies(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    resp2, resp3 = connect(), connect()
    resp3.ask("HELLO", "3")
    for client in (resp2, resp3):
        client.ask("SUBSCRIBE", "news")
    proxy.drop_replies()
    redis_client.publish("news", "hello")
    assert b"hello" in resp2.receive()
    assert b"hello" in resp3.receive()
    resp3.send("BLPOP", "jobs", "0")
    wait_until(lambda: redis_client.info("clients")["blocked_clients"] == 1, what="the blocking pop")
    redis_client.publish("news", "again")
    assert b"again" in resp3.receive()
    redis_client.rpush("jobs", "job 1")
    assert resp3.is_reset()


def test_inline_commands_are_handled_as_chunks(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.socket.sendall(b"PING\r\n")
    assert client.receive() == b"+PONG\r\n"
    proxy.inject_error("BUSY")
    client.socket.sendall(b"PING\r\n")
    assert client.receive() == b"-BUSY\r\n"
    proxy.drop_replies(1)
    client.socket.sendall(b"INCR counter\r\n")
    assert client.is_reset()


def test_several_faults_apply_together(connect: Connect, proxy: FlakyProxy) -> None:
    proxy.latency(0.1)
    proxy.slice(1)
    proxy.drop_replies(1, match="incr")
    client = connect()
    start = time.monotonic()
    assert client.ask("PING") == b"+PONG\r\n"
    assert time.monotonic() - start >= 0.2
    client.send("INCR", "counter")
    assert client.is_reset()
