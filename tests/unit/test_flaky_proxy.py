from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from bulltask.errors import BulltaskError, ConfigError
from bulltask.testing.flaky import FlakyProxy
from bulltask.testing.flaky_frames import Frames
from bulltask.testing.server import RedisServer
from bulltask.testing.wait import wait_until

pytestmark = pytest.mark.redis

SILENCE = 0.3  # seconds without a byte that count as "nothing comes"
DATA_SEGMENTS_IN = 152  # offset in Linux' struct tcp_info


def request(*words: str) -> bytes:
    texts = [word.encode() for word in words]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts)


class Raw:
    """A connection without a client library, which would reconnect and try again by itself."""

    def __init__(self, port: int, timeout: float = 10) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout)
        self.frames, self.replies = Frames(), list[bytes]()

    def send(self, *words: str) -> None:
        self.socket.sendall(request(*words))

    def receive(self) -> bytes:
        while not self.replies:
            data = self.socket.recv(65_536)
            if not data:
                raise EOFError
            self.replies += self.frames.feed(data)
        return self.replies.pop(0)

    def ask(self, *words: str) -> bytes:
        self.send(*words)
        return self.receive()

    def hears_nothing(self) -> bool:
        self.socket.settimeout(SILENCE)
        try:
            return not self.socket.recv(1)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(10)

    def is_reset(self) -> bool:
        try:
            self.socket.recv(1)
        except ConnectionResetError:
            return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port, seed=7) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: FlakyProxy) -> Iterator[Callable[[], Raw]]:
    with ExitStack() as open_connections:
        yield lambda: open_connections.enter_context(Raw(proxy.port))


Connect = Callable[[], Raw]


# Without faults


def test_everything_passes_until_a_fault_is_set(connect: Connect, redis_client: redis.Redis) -> None:
    client, text = connect(), "x" * 3_000_000
    assert client.ask("SET", "big", text) == b"+OK\r\n"
    assert client.ask("GET", "big") == b"$3000000\r\n%s\r\n" % text.encode()
    assert redis_client.get("big") == text


def test_a_client_that_leaves_is_gone_at_the_server_too(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    before = len(redis_client.client_list())
    client = connect()
    client.ask("PING")
    assert len(redis_client.client_list()) == before + 1
    client.socket.close()
    wait_until(lambda: len(redis_client.client_list()) == before, what="the end of the connection to the server")
    wait_until(lambda: not proxy._links, what="the end of the link")


def test_a_dead_server_is_a_reset_for_the_client(redis_server: RedisServer) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, so that nobody else gets the port, and not listening
        with FlakyProxy("127.0.0.1", nobody.getsockname()[1]) as proxy, Raw(proxy.port) as client:
            assert client.is_reset()


def test_a_closed_proxy_leaves_nothing_behind_and_says_so(redis_server: RedisServer) -> None:
    open_files, threads = set(Path("/proc/self/fd").iterdir()), set(threading.enumerate())
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy, Raw(proxy.port) as served, Raw(proxy.port) as frozen:
        assert served.ask("PING") == frozen.ask("PING") == b"+PONG\r\n"
        proxy.freeze()
    proxy.close()
    assert set(Path("/proc/self/fd").iterdir()) <= open_files
    assert set(threading.enumerate()) <= threads
    with pytest.raises(BulltaskError, match="not running"):
        proxy.reset()


def test_it_can_be_started_again(redis_server: RedisServer) -> None:
    proxy = FlakyProxy("127.0.0.1", redis_server.port)
    for _ in range(2):
        with proxy, Raw(proxy.port) as client:
            assert client.ask("PING") == b"+PONG\r\n"


# Faults of whole connections


def test_latency_delays_a_request_and_its_reply(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("PING")
    proxy.latency(0.1)
    start = time.monotonic()
    client.ask("PING")
    assert 0.2 <= time.monotonic() - start < 5


def test_latency_delays_bytes_but_not_the_reading_of_the_next(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("PING")
    proxy.latency(0.2)
    start = time.monotonic()
    for _ in range(20):
        client.send("PING")
        threading.Event().wait(0.01)
    assert [client.receive() for _ in range(20)] == [b"+PONG\r\n"] * 20
    assert time.monotonic() - start < 2  # one after the other they would take 8 s


def test_pass_all_wakes_up_what_a_latency_holds(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("PING")
    proxy.latency(3_600)
    client.send("PING")
    assert client.hears_nothing()
    proxy.pass_all()
    assert client.receive() == b"+PONG\r\n"


def test_reset_ends_every_connection_and_lets_new_ones_in(connect: Connect, proxy: FlakyProxy) -> None:
    clients = [connect() for _ in range(5)]
    for client in clients:
        client.ask("PING")
    proxy.reset()
    assert all(client.is_reset() for client in clients)
    assert connect().ask("PING") == b"+PONG\r\n"
    assert proxy.connections == 6


def test_refused_connections_are_accepted_again_on_the_same_port(connect: Connect, proxy: FlakyProxy) -> None:
    living = connect()
    living.ask("PING")
    for heal in (proxy.accept, proxy.pass_all):
        proxy.refuse()
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect()
        assert living.ask("PING") == b"+PONG\r\n"
        heal()
        assert connect().ask("PING") == b"+PONG\r\n"


def test_nobody_else_gets_the_port_while_connections_are_refused(proxy: FlakyProxy) -> None:
    proxy.refuse()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", proxy.port))


def test_a_frozen_connection_hears_nothing_for_ever_and_new_ones_work(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    frozen = connect()
    frozen.ask("CLIENT", "SETNAME", "frozen")
    proxy.freeze()
    frozen.send("INCR", "ran")
    frozen.send("SET", "text", "x" * 20_000_000)  # no buffer takes as much: it vanishes
    assert connect().ask("PING") == b"+PONG\r\n"
    proxy.pass_all()
    assert frozen.hears_nothing()
    frozen.socket.close()
    assert redis_client.get("ran") is None
    assert "frozen" in [client["name"] for client in redis_client.client_list()]
    proxy.reset()
    wait_until(lambda: "frozen" not in [client["name"] for client in redis_client.client_list()], what="the reset")


def test_what_the_server_sends_to_a_frozen_connection_is_lost(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    waiting = connect()
    waiting.send("BLPOP", "jobs", "0")
    wait_until(lambda: redis_client.info("clients")["blocked_clients"] == 1, what="the blocking pop")
    proxy.freeze()
    redis_client.rpush("jobs", "job 1")
    assert redis_client.llen("jobs") == 0
    assert waiting.hears_nothing()


def test_a_blackhole_stalls_old_and_new_connections_until_it_ends(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    old = connect()
    old.ask("PING")
    known = len(redis_client.client_list())
    proxy.blackhole()
    new = connect()
    for client in (old, new):
        client.send("INCR", "ran")
    assert old.hears_nothing()
    assert new.hears_nothing()
    assert len(redis_client.client_list()) == known
    assert redis_client.get("ran") is None
    proxy.pass_all()
    assert {old.receive(), new.receive()} == {b":1\r\n", b":2\r\n"}


def test_slices_reach_the_reader_one_by_one(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("SET", "text", "x" * 200)
    proxy.slice(1)
    before = data_segments(client)
    assert client.ask("GET", "text") == b"$200\r\n%s\r\n" % (b"x" * 200)
    # 1 without slices, and seldom all 208: the kernel joins what is sent while the last segment is on its way.
    assert data_segments(client) - before >= 2


def data_segments(client: Raw) -> int:
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


# Faults of single commands


def test_a_dropped_reply_belongs_to_a_command_that_ran(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(3)
    for n in range(1, 4):
        client = connect()
        client.send("INCR", "ran")
        assert client.is_reset()
        assert redis_client.get("ran") == str(n)
    assert connect().ask("INCR", "ran") == b":4\r\n"
    assert proxy.dropped == 3


def test_thirty_retried_calls_with_ten_lost_replies_run_forty_times(
    proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(10, every=2, match="incr")
    with redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 3)) as client:
        for _ in range(30):
            client.incr("ran")
    assert proxy.dropped == 10
    assert redis_client.get("ran") == "40"


def test_a_reply_is_dropped_only_when_its_command_has_ended(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(match="blpop")
    client = connect()
    client.send("BLPOP", "jobs", "0")
    assert client.hears_nothing()
    redis_client.rpush("jobs", "job 1")
    assert client.is_reset()
    assert redis_client.llen("jobs") == 0


def test_every_third_reply_is_dropped(connect: Connect, proxy: FlakyProxy) -> None:
    proxy.drop_replies(every=3)
    assert [survives(connect) for _ in range(7)] == [True, True, False, True, True, False, True]
    proxy.pass_all()
    assert all(survives(connect) for _ in range(4))


def survives(connect: Connect) -> bool:
    try:
        return connect().ask("PING") == b"+PONG\r\n"
    except ConnectionResetError:
        return False


def test_the_seed_decides_which_replies_a_probability_drops(redis_server: RedisServer) -> None:
    def survivors() -> list[bool]:
        with FlakyProxy("127.0.0.1", redis_server.port, seed=42) as proxy, ExitStack() as opened:
            proxy.drop_replies(probability=0.5)
            return [survives(lambda: opened.enter_context(Raw(proxy.port))) for _ in range(40)]

    first = survivors()
    assert first == survivors()
    assert 5 < sum(first) < 35


def test_only_replies_to_matching_commands_are_dropped(connect: Connect, proxy: FlakyProxy) -> None:
    proxy.drop_replies(match="INCR")
    client = connect()
    assert client.ask("PING") == b"+PONG\r\n"
    client.send("incr", "ran")
    assert client.is_reset()


def test_a_connection_can_freeze_after_the_lost_reply(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(1, then="freeze")
    client = connect()
    client.send("INCR", "ran")
    proxy.wait_for(lambda proxy: proxy.dropped == 1)
    client.send("INCR", "ran")
    assert client.hears_nothing()
    assert redis_client.get("ran") == "1"


@pytest.mark.parametrize("size", [10, 200_000], ids=["small", "more than one read"])
def test_a_transaction_runs_when_the_first_of_its_replies_is_lost(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis, size: int
) -> None:
    proxy.drop_replies(1)
    client, text = connect(), "x" * size
    client.socket.sendall(request("MULTI") + request("SET", "text", text) + request("INCR", "ran") + request("EXEC"))
    assert client.is_reset()
    assert redis_client.get("text") == text
    assert redis_client.get("ran") == "1"


def test_the_rest_of_a_pipeline_runs_before_the_connection_is_reset(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(1)
    client = connect()
    client.socket.sendall(request("PING") + request("BLPOP", "jobs", "0") + request("INCR", "ran"))
    assert client.hears_nothing()
    redis_client.rpush("jobs", "job 1")
    assert client.is_reset()
    assert redis_client.get("ran") == "1"


def test_a_command_of_which_a_part_was_sent_runs_before_the_connection_is_reset(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(1)
    client, last = connect(), request("INCR", "ran")
    client.socket.sendall(request("PING") + last[:10])
    assert client.hears_nothing()
    client.socket.sendall(last[10:])
    assert client.is_reset()
    assert redis_client.get("ran") == "1"


def test_a_command_that_latency_still_holds_runs_before_the_connection_is_reset(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.drop_replies(1)
    proxy.latency(2 * SILENCE)
    client = connect()
    client.send("PING")
    assert client.hears_nothing()
    assert client.hears_nothing()
    assert client.hears_nothing()
    client.send("INCR", "ran")  # on its way until after the reply to PING is lost
    assert client.is_reset()
    assert redis_client.get("ran") == "1"


def test_a_partial_reply_is_followed_by_a_reset(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.ask("SET", "text", "0123456789")
    proxy.partial_reply(7, match="get")
    client.ask("PING")
    client.send("GET", "text")
    assert client.socket.recv(100, socket.MSG_WAITALL) == b"$10\r\n01"
    assert client.is_reset()
    assert connect().ask("GET", "text") == b"$10\r\n0123456789\r\n"


def test_an_injected_error_is_the_answer_to_the_next_commands(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.inject_error("-READONLY You can't write against a read only replica.", 2)
    client = connect()
    for _ in range(2):
        assert client.ask("INCR", "ran") == b"-READONLY You can't write against a read only replica.\r\n"
    assert redis_client.get("ran") is None
    assert client.ask("INCR", "ran") == b":1\r\n"
    assert proxy.injected == 2


def test_an_injected_error_keeps_its_place_in_a_pipeline(connect: Connect, proxy: FlakyProxy) -> None:
    proxy.inject_error("LOADING Redis is loading the dataset in memory", None, match="get")
    client = connect()
    commands = [("INCR", "ran"), ("GET", "ran"), ("GET", "ran"), ("INCR", "ran"), ("GET", "ran")]
    client.socket.sendall(b"".join(request(*words) for words in commands))
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    assert [client.receive() for _ in commands] == [b":1\r\n", loading, loading, b":2\r\n", loading]


def test_an_injected_error_waits_for_the_reply_before_it(
    connect: Connect, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    proxy.inject_error("BUSY", match="ping")
    client = connect()
    client.socket.sendall(request("BLPOP", "jobs", "0") + request("PING"))
    assert client.hears_nothing()
    redis_client.rpush("jobs", "job 1")
    assert client.receive() == b"*2\r\n$4\r\njobs\r\n$5\r\njob 1\r\n"
    assert client.receive() == b"-BUSY\r\n"


def test_published_messages_are_not_taken_for_replies(
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


def test_a_stream_that_is_not_resp_is_cut_into_chunks(connect: Connect, proxy: FlakyProxy) -> None:
    client = connect()
    client.socket.sendall(b"PING\r\n")
    assert client.receive() == b"+PONG\r\n"
    proxy.inject_error("BUSY")
    client.socket.sendall(b"PING\r\n")
    assert client.receive() == b"-BUSY\r\n"
    proxy.drop_replies(1)
    client.socket.sendall(b"INCR ran\r\n")
    assert client.is_reset()


def test_faults_add_up(connect: Connect, proxy: FlakyProxy) -> None:
    proxy.latency(0.1)
    proxy.slice(1)
    proxy.drop_replies(1, match="incr")
    client = connect()
    start = time.monotonic()
    assert client.ask("PING") == b"+PONG\r\n"
    assert time.monotonic() - start >= 0.2
    client.send("INCR", "ran")
    assert client.is_reset()


def test_waiting_for_what_does_not_happen_ends_with_the_counters(proxy: FlakyProxy) -> None:
    with pytest.raises(TimeoutError, match="'dropped': 0"):
        proxy.wait_for(lambda proxy: proxy.dropped == 1, timeout=0.05)


@pytest.mark.parametrize(
    "wrong",
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
def test_a_fault_that_makes_no_sense_is_refused(proxy: FlakyProxy, wrong: Callable[[FlakyProxy], None]) -> None:
    with pytest.raises(ConfigError):
        wrong(proxy)


# Frames

lines = st.sampled_from([b"+OK\r\n", b"-ERR no\r\n", b":12\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(123\r\n"])
empty = st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"$0\r\n\r\n", b"*0\r\n", b"%0\r\n"])
strings = st.builds(
    lambda kind, text: b"%s%d\r\n%s\r\n" % (kind, len(text), text), st.sampled_from([b"$", b"!", b"="]), st.binary()
)


def collections(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    def build(kind: bytes, items: list[bytes]) -> bytes:
        pairs = kind in b"%|"
        items = items[: len(items) // 2 * 2] if pairs else items
        described = b":1\r\n" if kind == b"|" else b""
        return b"%s%d\r\n%s%s" % (kind, len(items) // (1 + pairs), b"".join(items), described)

    return st.builds(build, st.sampled_from([b"*", b"~", b">", b"%", b"|"]), st.lists(values, max_size=5))


resp_values = st.recursive(lines | empty | strings, collections, max_leaves=8)


@given(st.lists(resp_values, max_size=6), st.lists(st.integers(1, 20), min_size=1))
def test_values_come_out_whole_however_the_stream_is_cut(values: list[bytes], cuts: list[int]) -> None:
    frames, stream, found, at = Frames(), b"".join(values), list[bytes](), 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        found += frames.feed(stream[at : at + size])
        at += size
    assert found == values
    assert not frames.opaque
    assert frames.rest() == b""


@given(st.lists(st.binary(min_size=1), min_size=1))
def test_no_byte_is_lost_or_added_whatever_the_stream_is(chunks: list[bytes]) -> None:
    frames = Frames()
    passed = b"".join(value for chunk in chunks for value in frames.feed(chunk))
    assert passed + frames.rest() == b"".join(chunks)
