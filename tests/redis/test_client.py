"""Tests of the sync client with a real server."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import redis

from bulltask.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    ConfigError,
    JobNotFoundError,
)
from bulltask.jobs.clock import ServerClock, mono_ms, wall_ms
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import Call, QueueKeys, SyncClient, command, script_call
from bulltask.transport.client import Client, ClientPool
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.scripts.job import add_log, update_progress
from bulltask.transport.scripts.move import retry_job
from bulltask.transport.scripts.queue import get_counts
from tests.conftest import ServerFactory
from tests.support.flaky_proxy import FlakyProxy
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.redis, pytest.mark.one_server]

KEYS = QueueKeys("bull", "{mail}", "mail")
CLIENT_ID: Call[int] = command("CLIENT", "ID")


def endpoint(url: str, timeout_ms: int = 5_000) -> Endpoint:
    return Endpoint(url, 2_000, timeout_ms)


@pytest.fixture
def client(broker_url: str) -> Iterator[Client]:
    client = Client(endpoint(broker_url), ServerClock())
    yield client
    client.close()


@pytest.fixture
def pool(broker_url: str) -> Iterator[ClientPool]:
    pool = ClientPool(lambda: Client(endpoint(broker_url), ServerClock()), limit=3)
    yield pool
    pool.close()


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


def echo(text: object) -> Call[str]:
    return command("ECHO", str(text), parse_reply=bytes.decode)


def start(client: Client, *calls: Call[Any]) -> Callable[[], list[Any]]:
    return client.start_many(calls, [client.pack(call) for call in calls])


def count_calls(client: redis.Redis) -> Callable[[str], tuple[int, int]]:
    """Start counting; return a function that returns a command's calls and failed calls since then."""
    client.config_resetstat()

    def calls(name: str) -> tuple[int, int]:
        stats: Any = client.info("commandstats")
        command_stats = stats.get(f"cmdstat_{name}", {"calls": 0, "failed_calls": 0})
        return command_stats["calls"], command_stats["failed_calls"]

    return calls


def connections(client: redis.Redis, name: str) -> int:
    clients: Any = client.client_list()
    return sum(entry["name"] == name for entry in clients)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_returns_its_parsed_reply(client: Client) -> None:
    assert client.run(command("PING")) == b"PONG"
    assert client.run(echo("é")) == "é"
    assert client.run_many([]) == []
    assert client.run_many([echo(n) for n in range(500)]) == [str(n) for n in range(500)]


def test_an_error_reply_names_the_server_and_leaves_the_connection_usable(client: Client, broker_url: str) -> None:
    before = client.run(CLIENT_ID)
    with pytest.raises(BrokerError, match=r"rejected a command: .*unknown command") as caught:
        client.run(command("NONSENSE"))
    assert broker_url in str(caught.value)
    assert client.run(CLIENT_ID) == before


def test_a_negative_reply_from_a_script_raises_a_job_error(client: Client) -> None:
    with pytest.raises(JobNotFoundError, match=r"job missing in queue \{mail\}"):
        client.run(update_progress(KEYS, "missing", b"1"))


def test_a_pipeline_raises_its_first_error_and_makes_the_other_calls(client: Client, redis_client: redis.Redis) -> None:
    calls = [
        command("SET", "a", 1),
        command("NONSENSE"),
        update_progress(KEYS, "missing", b"1"),
        command("SET", "b", 1),
    ]
    with pytest.raises(BrokerError, match="unknown command"):
        client.run_many(calls)
    assert redis_client.mget("a", "b") == ["1", "1"]
    assert client.run(echo("next")) == "next"


def test_the_first_calls_of_an_iterator_are_executed_while_it_builds_the_next_ones(
    client: Client, redis_client: redis.Redis
) -> None:
    def calls() -> Iterator[Call[Any]]:
        yield command("SET", "first", "x" * 100_000)
        wait_until(lambda: redis_client.exists("first"), what="the first call")
        yield echo("last")

    assert client.run_many(calls()) == [b"OK", "last"]
    assert client.run_many(iter([])) == []


def test_an_error_of_an_iterator_of_calls_never_mixes_up_replies(client: Client) -> None:
    def calls() -> Iterator[Call[Any]]:
        yield echo("x" * 100_000)
        raise ValueError("invalid job")

    with pytest.raises(ValueError, match="invalid job"):
        client.run_many(calls())
    assert client.run(echo("next")) == "next"


def test_the_scripts_of_an_iterator_of_calls_are_resent(client: Client, redis_client: redis.Redis) -> None:
    redis_client.script_flush()
    redis_client.hset(KEYS.job("7"), mapping={"name": "send"})
    calls = [add_log(KEYS, "7", f"line {number} {'x' * 1_000}", None, None) for number in range(100)]
    assert client.run_many(iter(calls)) == list(range(1, 101))


def test_independent_calls_return_their_errors_as_results(client: Client) -> None:
    one, two, three = client.try_many([echo("a"), update_progress(KEYS, "missing", b"1"), command("NONSENSE")])
    assert one == "a"
    assert isinstance(two, JobNotFoundError)
    assert isinstance(three, BrokerError)


def test_an_id_that_is_not_utf8_is_sent_unchanged(client: Client, redis_client: redis.Redis) -> None:
    key = b"\xff\xfe".decode("utf-8", "surrogateescape")
    client.run(command("SET", key, "x"))
    assert client.run(command("KEYS", "*")) == [b"\xff\xfe"]


def test_a_script_call_with_a_wrong_number_of_keys_raises_an_error() -> None:
    script = get_counts(KEYS, ["wait"]).script
    assert script is not None
    with pytest.raises(TypeError, match="script getCounts takes 1 keys, not 2"):
        script_call(script, ("a", "b"), ())


# --- scripts that the server does not know ----------------------------------------------------------------------------


def test_the_source_of_an_unknown_script_is_sent_once(client: Client, redis_client: redis.Redis) -> None:
    client.connect()
    redis_client.script_flush()
    calls = count_calls(redis_client)
    for _ in range(3):
        assert client.run(get_counts(KEYS, ["wait"])) == {"wait": 0}
    assert calls("evalsha") == (3, 1)
    assert calls("eval") == (1, 0)


def test_a_pipeline_resends_only_the_calls_that_failed(client: Client, redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.job("1"), "name", "t")
    redis_client.script_flush()
    client.run(get_counts(KEYS, ["wait"]))
    log = add_log(KEYS, "1", "line", None, None)
    calls = count_calls(redis_client)
    results = client.run_many(
        [command("INCR", "n"), log, get_counts(KEYS, ["wait"]), log, command("INCR", "n"), log, echo("end")]
    )
    assert results == [1, 1, {"wait": 0}, 2, 2, 3, "end"]
    assert redis_client.llen(KEYS.logs("1")) == 3
    assert calls("incr") == (2, 0)
    assert calls("echo") == (1, 0)
    # Four by hash, of which three failed; then one with its source, and the two after it by hash.
    assert calls("evalsha") == (6, 3)
    assert calls("eval") == (1, 0)


def test_a_wait_for_replicas_is_resent_after_the_scripts_that_it_covers(
    client: Client, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.job("1"), "name", "t")
    redis_client.script_flush()
    calls = count_calls(redis_client)
    wait: Call[int] = command("WAIT", 0, 1)
    assert client.run_many([command("SET", "a", 1), add_log(KEYS, "1", "line", None, None), wait]) == [b"OK", 1, 0]
    assert (calls("set"), calls("eval"), calls("wait")) == ((2, 0), (1, 0), (2, 0))


def test_scripts_may_be_flushed_in_the_middle_of_a_pipeline(client: Client, redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.job("1"), "name", "t")
    log = add_log(KEYS, "1", "line", None, None)
    flush: Call[bytes] = command("SCRIPT", "FLUSH")
    assert client.run_many([log, flush, log, flush, log]) == [1, b"OK", 2, b"OK", 3]
    assert redis_client.llen(KEYS.logs("1")) == 3


@pytest.mark.parametrize("kind", ["one server", "cluster"])
def test_an_outcome_that_another_process_has_packed_is_resent_with_its_script(
    kind: str, request: pytest.FixtureRequest
) -> None:
    client: SyncClient
    if kind == "cluster":
        url = request.getfixturevalue("cluster").broker_url
        client = ClusterClient(Endpoint(url, 2_000, 5_000, clustered=True), ServerClock())
    else:
        client = Client(endpoint(request.getfixturevalue("broker_url")), ServerClock())
    client.run_on_all_nodes(command("SCRIPT", "FLUSH"))
    retry = retry_job(KEYS, "1", "token", lifo=False, fields=(), now_ms=1)
    packed = [client.pack(call) for call in (retry, get_counts(KEYS, ["wait"]), retry)]
    first, unknown, second = client.send_packed(packed)
    assert first == second == -1  # no such job
    assert isinstance(unknown, BrokerError)
    assert "No matching script" in str(unknown)
    client.close()


# --- interrupts -------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """The exception that the signal handler raises, like that of a time limit."""


@contextmanager
def interrupting() -> Iterator[Callable[[float], None]]:
    """Yield a function that raises ``Interrupted`` in this thread after a number of seconds."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, handler)
    main = threading.get_ident()
    timers: list[threading.Timer] = []

    def later(seconds: float) -> None:
        timers.append(threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR2)))
        timers[-1].start()

    try:
        yield later
        for timer in timers:
            timer.join()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_an_interrupt_between_send_and_reply_drops_the_connection(client: Client, redis_client: redis.Redis) -> None:
    before = client.run(CLIENT_ID)
    with interrupting() as later:
        later(0.1)
        with pytest.raises(Interrupted):
            client.run(command("BLPOP", "nothing", 30))
    assert client.run(echo("mine")) == "mine"
    assert client.run(CLIENT_ID) != before
    wait_until(lambda: str(before) not in {entry["id"] for entry in redis_client.client_list()}, what="its end")


# An interrupt inside redis-py's connect() leaves a socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_random_moments_never_mix_up_replies(client: Client) -> None:
    rng, interrupted = random.Random(7), 0
    with interrupting() as later:
        for round_number in range(150):
            try:
                later(rng.uniform(0, 0.003))
                for number in range(2_000):
                    text = f"{round_number}-{number}"
                    assert client.run_many([echo(text), echo("second")]) == [text, "second"]
                    started = start(client, echo("started"))
                    assert client.run(echo(text)) == text
                    assert started() == ["started"]
            except Interrupted:
                interrupted += 1
    assert interrupted > 120, "Python swallows the few that arrive in a destructor"


# --- connections ------------------------------------------------------------------------------------------------------


def test_a_client_connects_when_it_is_first_used_and_again_after_close(
    broker_url: str, redis_client: redis.Redis
) -> None:
    client = Client(endpoint(broker_url), None, "the-name")
    assert connections(redis_client, "the-name") == 0
    client.connect()
    client.run(command("PING"))
    assert connections(redis_client, "the-name") == 1
    client.close()
    client.close()
    wait_until(lambda: connections(redis_client, "the-name") == 0, what="the end of the connection")
    assert client.run(echo("again")) == "again"
    client.close()


class ClockAfterStall(ServerClock):
    """A clock whose readings end a fault of the proxy.

    Args:
        proxy: The proxy.
        slow_readings: How many readings are slow.
    """

    def __init__(self, proxy: FlakyProxy, slow_readings: int) -> None:
        super().__init__()
        self.proxy, self.slow_readings, self.readings = proxy, slow_readings, 0

    def set(self, server_ms: float, sent_at_ms: float, received_at_ms: float) -> None:
        """Set the clock; end the fault after the last slow reading."""
        super().set(server_ms, sent_at_ms, received_at_ms)
        self.readings += 1
        if self.readings == self.slow_readings:
            self.proxy.pass_all()


@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_first_reading_of_the_clock_while_the_server_stalls_is_repeated(proxy: FlakyProxy, form: str) -> None:
    clock, end = ClockAfterStall(proxy, 1), endpoint(f"redis://127.0.0.1:{proxy.port}/0")
    proxy.bandwidth(600, replies_only=True)  # the handshake's reply takes a fraction of a second
    if form == "sync":
        client = Client(end, clock)
        client.connect()
        client.close()
    else:

        async def connect() -> None:
            client = AsyncClient(end, clock)
            await client.connect()
            await client.close()

        asyncio.run(connect())
    assert clock.readings == 2
    assert abs(clock.now_ms() - wall_ms()) <= 10


def test_a_slow_reading_of_the_clock_does_not_replace_a_precise_one() -> None:
    clock = ServerClock()
    offset_ms = 1_000_000_000_000
    clock.set(offset_ms + 1, 0, 2)
    assert not clock.is_uncertain
    clock.set(offset_ms + 4_000, 0, 4_000)  # the server has read its clock at the end of a stall
    assert clock.is_uncertain
    assert clock._offset_ms == offset_ms
    clock.set(offset_ms + 90_000, 0, 4_000)  # its clock has been changed
    assert clock._offset_ms == offset_ms + 88_000


def test_over_a_slow_network_the_clock_is_read_at_most_three_times() -> None:
    clock, readings = ServerClock(), 0
    while mono_ms() >= clock.due_at_ms:
        readings += 1
        clock.set(1_000_000_000_000, 0, 300)
    assert readings == 2
    clock.set(1_000_000_000_000, 0, 310)
    assert mono_ms() < clock.due_at_ms
    while mono_ms() >= clock.due_at_ms or readings == 2:
        readings += 1
        clock.set(1_000_000_000_000, 0, 1_000 * 3**readings)
    assert readings == 5


def test_the_clock_is_set_on_connect_and_once_a_minute(
    broker_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ServerClock()
    calls = count_calls(redis_client)
    client = Client(endpoint(broker_url), clock)
    for _ in range(5):
        client.run(command("PING"))
    assert calls("time")[0] == 1
    assert abs(clock.now_ms() - wall_ms()) < 1_000
    redis_client.client_kill_filter(_id=str(client.run(CLIENT_ID)))
    with pytest.raises(BrokerUnavailableError):
        client.run(command("PING"))
    client.run(command("PING"))
    assert calls("time")[0] == 2, "on the new connection"
    monkeypatch.setattr(client._clock, "due_at_ms", 0)
    client.run(command("PING"))
    assert calls("time")[0] == 3
    client.close()
    Client(endpoint(broker_url), None).run(command("PING"))
    assert calls("time")[0] == 3, "a client without a clock never requests the time"


def test_replies_are_bytes_even_if_the_url_requests_decoding(broker_url: str) -> None:
    client = Client(endpoint(f"{broker_url}?decode_responses=True"), ServerClock())
    assert client.run(command("ECHO", "text")) == b"text"
    client.close()


def test_a_connection_that_the_server_closed_is_replaced(client: Client, redis_client: redis.Redis) -> None:
    redis_client.client_kill_filter(_id=str(client.run(CLIENT_ID)))
    with pytest.raises(BrokerUnavailableError, match=r"the connection to Redis at .* was lost"):
        client.run(command("PING"))
    assert client.run(echo("again")) == "again"


def test_a_call_times_out_and_its_late_reply_is_dropped(proxy: FlakyProxy) -> None:
    client = Client(endpoint(f"redis://127.0.0.1:{proxy.port}/0", timeout_ms=300), None)
    assert client.run(echo("first")) == "first"
    proxy.blackhole()
    started = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match=r"[Tt]imeout"):
        client.run(echo("lost"))
    assert 0.3 <= time.monotonic() - started < scale_to_load(2)
    proxy.pass_all()
    assert [client.run(echo(n)) for n in range(5)] == [str(n) for n in range(5)]
    client.close()


def test_a_blocking_endpoint_extends_the_timeout(broker_url: str) -> None:
    client = Client(endpoint(broker_url, timeout_ms=200).blocking(1_000), None)
    assert client.run(command("BLPOP", "nothing", 0.6)) is None
    client.close()


def test_a_blocking_call_times_out_with_millisecond_precision(
    broker_url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = Client(endpoint(broker_url).blocking(1_000), None)
    waiter.connect()
    assert waiter._connection is not None
    timeouts, late = list[float](), list[float]()
    can_read = waiter._connection.can_read

    def record_timeout(timeout: float) -> bool:
        timeouts.append(timeout)
        return can_read(timeout)

    monkeypatch.setattr(waiter._connection, "can_read", record_timeout)
    for _ in range(5):
        started = time.monotonic()
        call: Call[Any] = command("BZPOPMIN", "nothing", "0.050")
        assert waiter.wait(call, 50, lambda: client.run(command("PING"))) is None
        late.append(time.monotonic() - started - 0.05)
    assert min(late) >= -0.001
    assert sorted(late)[2] < 0.03, "without the PING, Redis ends the wait up to 100 ms late"
    assert timeouts == pytest.approx([0.052] * 5)
    client.run(command("ZADD", "nothing", 1, "a"))
    assert waiter.wait(command("BZPOPMIN", "nothing", 1), 1_000, lambda: None) == [b"nothing", b"a", b"1"]
    waiter.close()


def test_a_call_after_a_blocking_one_runs_as_soon_as_the_blocking_one_ends(broker_url: str, client: Client) -> None:
    client.run(command("SCRIPT", "FLUSH"))  # the second call must not depend on an earlier one
    waiter = Client(endpoint(broker_url).blocking(1_000), None)
    counts = get_counts(KEYS, ["wait"])
    pop: Call[Any] = command("BZPOPMIN", "marker", "5")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait_then, pop, counts, 5_000, lambda: None)
        wait_until(lambda: client.run(command("INFO", "clients")).count(b"blocked_clients:1"), what="the blocked call")
        client.run(command("LPUSH", KEYS.wait, "1"))
        client.run(command("ZADD", "marker", 1, "a"))
        assert waiting.result(5) == ([b"marker", b"a", b"1"], {"wait": 1})
    client.run(command("ZADD", "marker", 1, "a"))
    marker, error = waiter.wait_then(pop, command("LPOP", "marker"), 5_000, lambda: None)
    assert marker == [b"marker", b"a", b"1"]
    assert error is None
    client.run(command("ZADD", "marker", 1, "a", 2, "b"))
    _, error = waiter.wait_then(pop, command("LPOP", "marker"), 5_000, lambda: None)
    assert isinstance(error, BrokerError)
    waiter.close()


def test_several_clients_can_wait_at_the_same_time_and_be_unblocked(broker_url: str, client: Client) -> None:
    waiters = [Client(endpoint(broker_url).blocking(10_000), None) for _ in range(2)]
    poll = select.poll()
    for number, waiter in enumerate(waiters):
        assert waiter.connection_id() == waiter.connection_id() == waiter.run(CLIENT_ID)
        waiter.send([command("BZPOPMIN", f"marker-{number}", 10).packed()])
        poll.register(waiter.fileno(), select.POLLIN)
    client.run(command("ZADD", "marker-1", 7, "0"))
    assert [descriptor for descriptor, _ in poll.poll(10_000)] == [waiters[1].fileno()]
    assert [waiter.has_reply() for waiter in waiters] == [False, True]
    assert waiters[1].receive(1) == [[b"marker-1", b"0", b"7"]]
    assert client.run(command("CLIENT", "UNBLOCK", waiters[0].connection_id())) == 1
    assert waiters[0].receive(1) == [None]
    for waiter in waiters:
        first = waiter.connection_id()
        waiter.close()
        assert waiter.fileno() == -1
        assert waiter.has_reply()
        with pytest.raises(BrokerUnavailableError, match="was closed"):
            waiter.receive(1)
        assert waiter.connection_id() != first
        waiter.close()


def test_the_results_of_sent_calls_are_parsed_and_unknown_scripts_are_resent(client: Client) -> None:
    client.run(command("SCRIPT", "FLUSH"))
    calls: list[Call[Any]] = [echo("é"), get_counts(KEYS, ["wait"]), command("LPOP")]
    client.send([call.packed() for call in calls])
    text, counts, error = client.results(calls, client.receive(3))
    assert (text, counts) == ("é", {"wait": 0})
    assert isinstance(error, BrokerError)


def test_calls_that_were_started_return_their_results_later(client: Client, redis_client: redis.Redis) -> None:
    client.run(command("SCRIPT", "FLUSH"))
    started = start(client, command("SET", "key", "value"), get_counts(KEYS, ["wait"]), command("LPOP"))
    wait_until(lambda: redis_client.get("key") == "value", what="the call, whose reply nobody has read")
    assert client.run(echo("another call")) == "another call"
    later = start(client, echo("é"))
    text, counts, error = started()
    assert (text, counts) == (b"OK", {"wait": 0})
    assert isinstance(error, BrokerError)
    assert later() == ["é"]
    assert later() == ["é"]


def test_a_closed_connection_loses_the_replies_to_calls_that_were_started(client: Client) -> None:
    client.connect()
    started = start(client, echo("first"))
    client.close()
    assert client.run(echo("second")) == "second"
    with pytest.raises(BrokerUnavailableError, match="was closed"):
        started()


def test_the_clock_is_set_before_calls_are_started(
    client: Client, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.connect()
    calls = count_calls(redis_client)
    assert start(client, echo("first"))() == ["first"]
    monkeypatch.setattr(client._clock, "due_at_ms", 0)
    assert start(client, echo("second"))() == ["second"]
    assert calls("time") == (1, 0)


def test_an_interrupt_between_sending_and_receiving_closes_the_connection(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.send([echo("first").packed()])
    assert client._connection is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client._connection, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.receive(1)
    assert client.run(echo("second")) == "second"


# --- unavailable servers ----------------------------------------------------------------------------------------------


def test_the_error_for_a_closed_port_suggests_bulltask_server() -> None:
    with pytest.raises(BrokerUnavailableError, match="bulltask server") as caught:
        Client(endpoint("redis://:secret@127.0.0.1:1/0"), None).connect()
    assert caught.value.refused
    assert "secret" not in str(caught.value)
    with pytest.raises(BrokerUnavailableError) as caught:
        Client(endpoint("unix:///nowhere/redis.sock"), None).connect()
    assert caught.value.refused


def test_an_invalid_url_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"Invalid broker_url redis://127\.0\.0\.1:port/0: "):
        Client(endpoint("redis://127.0.0.1:port/0"), None).connect()


def test_a_wrong_password_is_reported_without_showing_it(server_factory: ServerFactory) -> None:
    server = server_factory(password="right")
    url = server.url.replace("right", "wrong")
    with pytest.raises(BrokerAuthError, match="authentication with Redis at") as caught:
        Client(endpoint(url), None).connect()
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
    none = f"redis://127.0.0.1:{server.port}/0"
    with pytest.raises(BrokerAuthError, match=r"authentication with Redis at .* failed: Authentication required"):
        Client(endpoint(none), None).run(command("PING"))
    client = Client(endpoint(server.url), ServerClock())
    assert client.run(command("PING")) == b"PONG"
    client.close()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("LOADING Redis is loading the dataset in memory", BrokerNotReadyError),
        ("READONLY You can't write against a read only replica.", BrokerNotReadyError),
        ("MISCONF Redis is configured to save RDB snapshots", BrokerNotReadyError),
        ("BUSY Redis is busy running a script.", BrokerNotReadyError),
        ("CLUSTERDOWN The cluster is down", BrokerNotReadyError),
        ("MASTERDOWN Link with MASTER is down", BrokerNotReadyError),
        ("NOREPLICAS Not enough good replicas to write.", BrokerNotReadyError),
        ("TRYAGAIN Multiple keys request during rehashing of slot", BrokerNotReadyError),
        ("OOM command not allowed when used memory > 'maxmemory'.", BrokerOutOfMemoryError),
        ("NOPERM this user has no permissions to run the 'echo' command", BrokerAuthError),
        ("NOAUTH Authentication required.", BrokerAuthError),
        ("ERR something else", BrokerError),
    ],
)
def test_each_redis_error_becomes_a_broker_error(proxy: FlakyProxy, reply: str, error: type[BrokerError]) -> None:
    client = Client(endpoint(f"redis://127.0.0.1:{proxy.port}/0"), None)
    client.connect()
    proxy.inject_error(reply, match="echo")
    with pytest.raises(BrokerError) as caught:
        client.run(echo("x"))
    assert type(caught.value) is error
    assert f"127.0.0.1:{proxy.port}" in str(caught.value)
    client.close()


def test_a_server_at_maxclients_is_not_ready(server_factory: ServerFactory) -> None:
    server = server_factory(extra=["--maxclients", "1"])
    first, second = Client(endpoint(server.url), None), Client(endpoint(server.url), None)
    first.run(command("PING"))
    with pytest.raises(BrokerNotReadyError, match=r"accepts no more connections \(maxclients\)"):
        second.run(command("PING"))
    first.close()


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_a_pool_reuses_its_clients(pool: ClientPool) -> None:
    assert pool.run(CLIENT_ID) == pool.run(CLIENT_ID)
    with pool.client() as one, pool.client() as two:
        assert one is not two


def test_the_number_of_idle_clients_is_limited(broker_url: str, redis_client: redis.Redis) -> None:
    pool = ClientPool(lambda: Client(endpoint(broker_url), None), limit=3)
    before = len(redis_client.client_list())
    together = threading.Barrier(8)

    def work(number: int) -> str:
        with pool.client() as client:
            client.connect()
            together.wait(10)
            return client.run(echo(number))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [str(number) for number in range(8)]
    wait_until(lambda: len(redis_client.client_list()) == before + 3, what="the end of five connections")
    pool.close()
    wait_until(lambda: len(redis_client.client_list()) == before, what="the end of all connections")


def test_threads_never_get_each_others_replies(pool: ClientPool) -> None:
    def work(thread: int) -> bool:
        return all(pool.run_many([echo(f"{thread}-{n}")]) == [f"{thread}-{n}"] for n in range(200))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


def test_a_connection_that_died_while_it_was_idle_is_replaced_before_it_is_used(
    pool: ClientPool, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulltask.transport.client._FRESH_MS", 0)
    before = pool.run(CLIENT_ID)
    redis_client.client_kill_filter(_id=str(before))
    assert pool.run(CLIENT_ID) != before


def test_a_client_that_failed_returns_to_the_pool_and_reconnects(pool: ClientPool, redis_client: redis.Redis) -> None:
    with pool.client() as client:
        redis_client.client_kill_filter(_id=str(client.run(CLIENT_ID)))
        with pytest.raises(BrokerUnavailableError):
            client.run(command("PING"))
    with pool.client() as again:
        assert again is client
        assert again.run(echo("again")) == "again"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_opens_a_separate_connection(pool: ClientPool) -> None:
    before = pool.run(CLIENT_ID)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            texts = [pool.run(echo(f"child-{n}")) for n in range(100)]
            good = texts == [f"child-{n}" for n in range(100)]
            os.write(write, f"{pool.run(CLIENT_ID) if good else 0}".encode())
        os._exit(0)
    assert [pool.run(echo(f"parent-{n}")) for n in range(100)] == [f"parent-{n}" for n in range(100)]
    os.waitpid(pid, 0)
    os.close(write)
    of_child = int(os.read(read, 100) or b"0")
    os.close(read)
    assert of_child not in {0, before}
    assert pool.run(CLIENT_ID) == before
