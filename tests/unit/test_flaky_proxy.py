from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from bulltask.errors import BulltaskError, ConfigError
from bulltask.testing.worker import RedisServer, wait_until
from tests.support import flaky_proxy as flaky
from tests.support.flaky_proxy import FlakyProxy
from tests.support.raw_redis import Connect, RawConnection

pytestmark = pytest.mark.redis

DATA_SEGMENTS_IN = 152  # offset in Linux's struct tcp_info


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port, seed=7) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: FlakyProxy) -> Iterator[Connect]:
    with ExitStack() as opened:
        yield lambda: opened.enter_context(RawConnection(proxy.port))


# Without faults


def test_all_data_passes_until_a_fault_is_set(connect: Connect, redis_client: redis.Redis) -> None:
    client, text = connect(), "x" * 3_000_000
    assert client.ask("SET", "big", text) == b"+OK\r\n"
    assert client.ask("GET", "big") == b"$3000000\r\n%s\r\n" % text.encode()
    assert redis_client.get("big") == text


def test_a_client_that_disconnects_is_disconnected_from_the_server(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    before = len(redis_client.client_list())
    client = connect()
    client.ask("PING")
    assert len(redis_client.client_list()) == before + 1
    client.socket.close()
    wait_until(lambda: len(redis_client.client_list()) == before, what="the end of the connection to the server")
    wait_until(lambda: not proxy._connections, what="the end of the connection")


def test_a_dead_server_resets_the_clients_connection(redis_server: RedisServer) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound to reserve the port, but not listening
        with FlakyProxy("127.0.0.1", silent.getsockname()[1]) as proxy:
            try:
                with RawConnection(proxy.port) as client:
                    assert client.is_reset()
            except ConnectionResetError:
                return  # the reset may come before connect() returns


def test_a_closed_proxy_leaks_no_resources_and_rejects_calls(redis_server: RedisServer) -> None:
    open_files, threads = set(Path("/proc/self/fd").iterdir()), set(threading.enumerate())
    with (
        FlakyProxy("127.0.0.1", redis_server.port) as proxy,
        RawConnection(proxy.port) as served,
        RawConnection(proxy.port) as frozen,
    ):
        assert served.ask("PING") == frozen.ask("PING") == b"+PONG\r\n"
        proxy.freeze()
    proxy.close()
    assert set(Path("/proc/self/fd").iterdir()) <= open_files
    assert set(threading.enumerate()) <= threads
    with pytest.raises(BulltaskError, match="not running"):
        proxy.reset()


def test_a_proxy_starts_on_another_port_if_a_connection_takes_its_port(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    bind = flaky._bind

    def bind_unless_taken(host: str, port: int) -> socket.socket:
        if port and not taken:
            taken.append(port)
            raise OSError("Address already in use")
        return bind(host, port)

    monkeypatch.setattr(flaky, "_bind", bind_unless_taken)
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy, redis.Redis(port=proxy.port) as client:
        assert client.ping()
    assert taken


def test_a_proxy_can_be_started_again(redis_server: RedisServer) -> None:
    proxy = FlakyProxy("127.0.0.1", redis_server.port)
    for _ in range(2):
        with proxy, RawConnection(proxy.port) as client:
            assert client.ask("PING") == b"+PONG\r\n"


# Faults of whole connections


def test_latency_delays_a_request_and_its_reply(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("PING")
    proxy.latency(0.1)
    start = time.monotonic()
    client.ask("PING")
    assert 0.2 <= time.monotonic() - start < 5


def test_latency_does_not_delay_reading_the_next_bytes(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("PING")
    proxy.latency(0.2)
    start = time.monotonic()
    for _ in range(20):
        client.send("PING")
        threading.Event().wait(0.01)
    assert [client.receive() for _ in range(20)] == [b"+PONG\r\n"] * 20
    assert time.monotonic() - start < 7  # sequentially they would take 8 s


def test_pass_all_delivers_delayed_bytes_immediately(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("PING")
    proxy.latency(3_600)
    client.send("PING")
    assert client.receives_nothing()
    proxy.pass_all()
    assert client.receive() == b"+PONG\r\n"


def test_reset_closes_every_connection_and_accepts_new_connections(connect: Connect, proxy: FlakyProxy) -> None:
    clients = [connect() for _ in range(5)]
    for client in clients:
        client.ask("PING")
    proxy.reset()
    assert all(client.is_reset() for client in clients)
    assert connect().ask("PING") == b"+PONG\r\n"
    assert proxy.connections == 6


def test_refused_connections_are_accepted_again_on_the_same_port(connect: Connect, proxy: FlakyProxy) -> None:
    established = connect()
    established.ask("PING")
    for restore in (proxy.accept, proxy.pass_all):
        proxy.refuse()
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect()
        assert established.ask("PING") == b"+PONG\r\n"
        restore()
        assert connect().ask("PING") == b"+PONG\r\n"


def test_the_port_stays_reserved_while_connections_are_refused(proxy: FlakyProxy) -> None:
    proxy.refuse()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", proxy.port))


def test_a_frozen_connection_stays_silent_and_new_connections_work(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    frozen = connect()
    frozen.ask("CLIENT", "SETNAME", "frozen")
    proxy.freeze()
    frozen.send("INCR", "counter")
    frozen.send("SET", "text", "x" * 20_000_000)  # more than all buffers can hold: the proxy discards it
    assert connect().ask("PING") == b"+PONG\r\n"
    proxy.pass_all()
    assert frozen.receives_nothing()
    frozen.socket.close()
    assert redis_client.get("counter") is None
    assert "frozen" in [client["name"] for client in redis_client.client_list()]
    proxy.reset()
    wait_until(lambda: "frozen" not in [client["name"] for client in redis_client.client_list()], what="the reset")


def test_data_sent_to_a_frozen_connection_is_lost(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    waiting = connect()
    waiting.send("BLPOP", "jobs", "0")
    wait_until(lambda: redis_client.info("clients")["blocked_clients"] == 1, what="the blocking pop")
    proxy.freeze()
    redis_client.rpush("jobs", "job 1")
    assert redis_client.llen("jobs") == 0
    assert waiting.receives_nothing()


def test_a_blackhole_stalls_old_and_new_connections_until_it_ends(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    old = connect()
    old.ask("PING")
    client_count = len(redis_client.client_list())
    proxy.blackhole()
    new = connect()
    for client in (old, new):
        client.send("INCR", "counter")
    assert old.receives_nothing()
    assert new.receives_nothing()
    assert len(redis_client.client_list()) == client_count
    assert redis_client.get("counter") is None
    proxy.pass_all()
    assert {old.receive(), new.receive()} == {b":1\r\n", b":2\r\n"}


def test_slices_arrive_in_several_segments(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("SET", "text", "x" * 200)
    proxy.slice(1)
    before = data_segments(client)
    assert client.ask("GET", "text") == b"$200\r\n%s\r\n" % (b"x" * 200)
    # Without slices there is 1 segment. There are rarely 208: the kernel merges data until an acknowledgment arrives.
    assert data_segments(client) - before >= 2


def data_segments(client: RawConnection) -> int:
    info = client.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
    return int(struct.unpack_from("I", info, DATA_SEGMENTS_IN)[0])


def test_bandwidth_limits_both_directions(connect: Connect, proxy: FlakyProxy) -> None:
    client, text = connect(), "x" * 20_000
    proxy.bandwidth(100_000)
    start = time.monotonic()
    client.ask("SET", "text", text)
    middle = time.monotonic()
    assert client.ask("GET", "text") == b"$20000\r\n%s\r\n" % text.encode()
    assert middle - start >= 0.15
    assert time.monotonic() - middle >= 0.15


def test_wait_for_shows_the_counters_when_it_times_out(proxy: FlakyProxy) -> None:
    with pytest.raises(TimeoutError, match="'dropped': 0"):
        proxy.wait_for(lambda proxy: proxy.dropped == 1, timeout=0.05)


@pytest.mark.parametrize(
    "set_fault",
    [
        lambda proxy: proxy.drop_replies(0),
        lambda proxy: proxy.drop_replies(every=0),
        lambda proxy: proxy.drop_replies(probability=1.5),
        lambda proxy: proxy.partial_reply(0),
        lambda proxy: proxy.slice(0),
        lambda proxy: proxy.bandwidth(-1),
        lambda proxy: proxy.latency(-1),
        lambda proxy: proxy.inject_error("-"),
        lambda proxy: proxy.inject_error("ERR two\r\nlines"),
    ],
)
def test_invalid_faults_are_rejected(proxy: FlakyProxy, set_fault: Callable[[FlakyProxy], None]) -> None:
    with pytest.raises(ConfigError):
        set_fault(proxy)
