"""Tests of the asyncio client with a real server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis

from bulltask.config.settings import Settings
from bulltask.errors import BrokerAuthError, BrokerError, BrokerNotReadyError, BrokerUnavailableError, JobNotFoundError
from bulltask.jobs.clock import ServerClock, mono_ms, wall_ms
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.broker import Broker
from bulltask.transport.call import AnyAsyncClient, Call, QueueKeys, command
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.scripts.job import add_log, update_progress
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
async def client(broker_url: str) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(endpoint(broker_url), ServerClock(), "shared")
    yield client
    await client.close()


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


def echo(text: object) -> Call[str]:
    return command("ECHO", str(text), parse_reply=bytes.decode)


def blocking(seconds: float) -> Call[Any]:
    return command("BLPOP", "nothing", seconds)


def count_calls(client: redis.Redis) -> Callable[[str], tuple[int, int]]:
    """Start counting; return a function that returns a command's calls and failed calls since then."""
    client.config_resetstat()

    def calls(name: str) -> tuple[int, int]:
        stats: Any = client.info("commandstats")
        command_stats = stats.get(f"cmdstat_{name}", {"calls": 0, "failed_calls": 0})
        return command_stats["calls"], command_stats["failed_calls"]

    return calls


def connections(client: redis.Redis, name: str = "shared") -> int:
    clients: Any = client.client_list()
    return sum(entry["name"] == name for entry in clients)


async def outcomes(*tasks: asyncio.Task[Any]) -> list[type]:
    """Wait for tasks; return the types of their results or exceptions, cancellations included."""
    return [type(outcome) for outcome in await asyncio.gather(*tasks, return_exceptions=True)]


# --- calls ------------------------------------------------------------------------------------------------------------


async def test_a_call_returns_its_parsed_reply(client: AsyncClient) -> None:
    assert await client.run(command("PING")) == b"PONG"
    assert await client.run_many([]) == []
    assert await client.run_many([echo(n) for n in range(500)]) == [str(n) for n in range(500)]


async def test_a_hundred_tasks_share_one_connection(client: AsyncClient, redis_client: redis.Redis) -> None:
    async def work(task: int) -> None:
        for number in range(20):
            assert await client.run(echo(f"{task}-{number}")) == f"{task}-{number}"
            assert await client.run_many([echo(task), echo(number)]) == [str(task), str(number)]

    await asyncio.gather(*(work(task) for task in range(100)))
    assert connections(redis_client) == 1


async def test_calls_that_tasks_make_at_the_same_moment_are_sent_with_one_system_call(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    write = asyncio.StreamWriter.write

    def record(writer: asyncio.StreamWriter, data: bytes) -> None:
        writes.append(data)
        write(writer, data)

    await client.connect()
    monkeypatch.setattr(asyncio.StreamWriter, "write", record)
    assert await asyncio.gather(*(client.run(echo(n)) for n in range(50))) == [str(n) for n in range(50)]
    assert len(writes) == 1


async def test_an_error_reply_fails_one_call_and_not_the_connection(client: AsyncClient) -> None:
    before = await client.run(CLIENT_ID)
    one, two, three = await asyncio.gather(
        client.run(echo("a")), client.run(command("NONSENSE")), client.run(echo("b")), return_exceptions=True
    )
    assert (one, three) == ("a", "b")
    assert isinstance(two, BrokerError)
    assert "unknown command" in str(two)
    assert await client.run(CLIENT_ID) == before


async def test_a_pipeline_raises_its_first_error_and_makes_the_other_calls(
    client: AsyncClient, redis_client: redis.Redis
) -> None:
    with pytest.raises(JobNotFoundError):
        await client.run_many([command("SET", "a", 1), update_progress(KEYS, "missing", b"1"), command("SET", "b", 1)])
    assert redis_client.mget("a", "b") == ["1", "1"]


async def test_the_source_of_an_unknown_script_is_sent_once(client: AsyncClient, redis_client: redis.Redis) -> None:
    await client.connect()
    redis_client.script_flush()
    calls = count_calls(redis_client)
    for _ in range(3):
        assert await client.run(get_counts(KEYS, ["wait"])) == {"wait": 0}
    assert (calls("evalsha"), calls("eval")) == ((3, 1), (1, 0))


async def test_a_pipeline_resends_only_the_calls_that_failed(client: AsyncClient, redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.job("1"), "name", "t")
    redis_client.script_flush()
    await client.run(get_counts(KEYS, ["wait"]))
    log = add_log(KEYS, "1", "line", None, None)
    calls = count_calls(redis_client)
    results = await client.run_many([command("INCR", "n"), log, get_counts(KEYS, ["wait"]), log, log])
    assert results == [1, 1, {"wait": 0}, 2, 3]
    assert redis_client.llen(KEYS.logs("1")) == 3
    assert (calls("incr"), calls("evalsha"), calls("eval")) == ((1, 0), (6, 3), (1, 0))


async def test_a_wait_for_replicas_is_resent_after_the_scripts_that_it_covers(
    client: AsyncClient, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.job("1"), "name", "t")
    redis_client.script_flush()
    calls = count_calls(redis_client)
    wait: Call[int] = command("WAIT", 0, 1)
    assert await client.run_many([command("SET", "a", 1), add_log(KEYS, "1", "line", None, None), wait]) == [
        b"OK",
        1,
        0,
    ]
    assert (calls("set"), calls("eval"), calls("wait")) == ((2, 0), (1, 0), (2, 0))


# --- cancelled tasks --------------------------------------------------------------------------------------------------


async def test_tasks_cancelled_at_a_thousand_random_points_never_mix_up_replies(
    client: AsyncClient, redis_client: redis.Redis
) -> None:
    rng, done = random.Random(7), asyncio.Event()
    sent = 0

    async def steady(task: int) -> None:
        nonlocal sent
        while not done.is_set():
            sent += 1
            text = f"{task}-{sent}"
            assert await client.run_many([echo(text), echo(task)]) == [text, str(task)]

    async def interrupted(number: int) -> None:
        while True:
            assert await client.run(echo(number)) == str(number)
            assert await client.run_many([echo("x" * 100_000), echo(number)]) == ["x" * 100_000, str(number)]

    before = await client.run(CLIENT_ID)
    workers = [asyncio.create_task(steady(task)) for task in range(5)]
    for number in range(1_000):
        task = asyncio.create_task(interrupted(number))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        task.cancel()
        assert await outcomes(task) == [asyncio.CancelledError]
    done.set()
    await asyncio.gather(*workers)
    assert sent > 50  # how often depends on the machine's load
    assert await client.run(CLIENT_ID) == before, "a cancelled task costs no connection"
    assert connections(redis_client) == 1
    assert not client._pending


async def test_cancelling_a_task_while_it_connects_leaves_a_usable_client(
    broker_url: str, redis_client: redis.Redis
) -> None:
    for steps in range(60):
        client = AsyncClient(endpoint(broker_url), ServerClock(), "half-open")
        task = asyncio.create_task(client.run(echo("lost")))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await outcomes(task)
        assert await client.run(echo(steps)) == str(steps)
        assert connections(redis_client, "half-open") == 1
        await client.close()
        wait_until(lambda: connections(redis_client, "half-open") == 0, what="the end of the connections")


async def test_cancelling_a_task_while_it_sends_keeps_the_connection(proxy: FlakyProxy) -> None:
    client = AsyncClient(endpoint(f"redis://127.0.0.1:{proxy.port}/0"))
    before = await client.run(CLIENT_ID)
    proxy.blackhole()
    sending: asyncio.Task[Any] = asyncio.create_task(client.run(command("SET", "big", b"x" * 30_000_000)))
    behind = asyncio.create_task(client.run(echo("behind")))
    await asyncio.sleep(0.1)
    sending.cancel()
    assert await outcomes(sending) == [asyncio.CancelledError]
    proxy.pass_all()
    assert await behind == "behind"
    assert await client.run(CLIENT_ID) == before
    assert await client.run(command("STRLEN", "big")) == 30_000_000
    await client.close()


async def test_cancelling_a_task_while_it_waits_does_not_delay_others(client: AsyncClient) -> None:
    blocked = asyncio.create_task(client.run(blocking(0.3)))
    behind = asyncio.create_task(client.run(echo("behind")))
    await asyncio.sleep(0.05)
    blocked.cancel()
    assert await outcomes(blocked) == [asyncio.CancelledError]
    assert await behind == "behind"


# --- connections ------------------------------------------------------------------------------------------------------


async def test_many_tasks_that_start_together_open_one_connection(broker_url: str, redis_client: redis.Redis) -> None:
    client = AsyncClient(endpoint(broker_url), ServerClock(), "first")
    calls = count_calls(redis_client)
    assert await asyncio.gather(*(client.run(echo(n)) for n in range(50))) == [str(n) for n in range(50)]
    assert connections(redis_client, "first") == 1
    assert calls("time")[0] == 1
    await client.close()


async def test_close_fails_pending_calls_and_the_client_can_be_used_again(
    client: AsyncClient, redis_client: redis.Redis
) -> None:
    waiting = [asyncio.create_task(client.run(blocking(30))) for _ in range(3)]
    while len(client._pending) < 3:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    started = time.monotonic()
    await client.close()
    await client.close()
    assert await outcomes(*waiting) == [BrokerUnavailableError] * len(waiting)
    assert time.monotonic() - started < scale_to_load(1)
    wait_until(lambda: connections(redis_client) == 0, what="the end of the connection")
    assert await client.run(echo("again")) == "again"


async def test_a_broken_connection_fails_all_its_calls_and_is_replaced_by_one(
    client: AsyncClient, redis_client: redis.Redis
) -> None:
    before = await client.run(CLIENT_ID)
    waiting = [asyncio.create_task(client.run(blocking(30))) for _ in range(20)]
    await asyncio.sleep(0.05)
    redis_client.client_kill_filter(_id=str(before))
    assert await outcomes(*waiting) == [BrokerUnavailableError] * len(waiting)
    assert await asyncio.gather(*(client.run(echo(n)) for n in range(20))) == [str(n) for n in range(20)]
    assert connections(redis_client) == 1


async def test_a_call_on_a_replaced_connection_is_reported_as_lost(client: AsyncClient) -> None:
    before = await client._connected(None)
    await client.close()
    await client.connect()
    with pytest.raises(BrokerUnavailableError, match=r"the connection to Redis at .* was lost"):
        await client._round_trip(before, [command("PING").packed()])


async def test_a_client_reconnects_to_a_restarted_server(server_factory: ServerFactory) -> None:
    server = server_factory()
    client = AsyncClient(endpoint(server.url), ServerClock())
    assert await client.run(echo(1)) == "1"
    server.kill()
    with pytest.raises(BrokerUnavailableError):
        await client.run(echo(2))
    with pytest.raises(BrokerUnavailableError, match="cannot connect to Redis") as caught:
        await client.run(echo(3))
    assert caught.value.refused
    server.restart()
    assert await client.run(echo(4)) == "4"
    await client.close()


async def test_the_clock_is_set_on_connect_and_once_a_minute(
    client: AsyncClient, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(redis_client)
    for _ in range(3):
        await client.run(command("PING"))
    assert calls("time")[0] == 1
    assert client._clock is not None
    assert abs(client._clock.now_ms() - wall_ms()) < 1_000
    monkeypatch.setattr(client._clock, "due_at_ms", 0)
    await client.run(command("PING"))
    assert calls("time")[0] == 2


async def test_a_wrong_password_is_reported_without_showing_it(server_factory: ServerFactory) -> None:
    server = server_factory(password="right")
    client = AsyncClient(endpoint(server.url.replace("right", "wrong")))
    with pytest.raises(BrokerAuthError, match="authentication with Redis at") as caught:
        await client.connect()
    assert "wrong" not in str(caught.value)


async def test_a_server_that_is_loading_is_not_ready(proxy: FlakyProxy) -> None:
    client = AsyncClient(endpoint(f"redis://127.0.0.1:{proxy.port}/0"))
    await client.connect()
    proxy.inject_error("LOADING Redis is loading the dataset in memory", match="echo")
    with pytest.raises(BrokerNotReadyError):
        await client.run(echo("x"))
    assert await client.run(echo("y")) == "y"
    await client.close()


# --- broken connections -----------------------------------------------------------------------------------------------


async def test_a_call_times_out_and_its_late_reply_is_dropped(proxy: FlakyProxy) -> None:
    client = AsyncClient(endpoint(f"redis://127.0.0.1:{proxy.port}/0", timeout_ms=300))
    assert await client.run(echo("first")) == "first"
    proxy.blackhole()
    started = time.monotonic()
    lost = await asyncio.gather(*(client.run(echo(n)) for n in range(5)), return_exceptions=True)
    assert 0.3 <= time.monotonic() - started < scale_to_load(2)
    assert all(isinstance(error, BrokerUnavailableError) for error in lost)
    proxy.pass_all()
    assert await asyncio.gather(*(client.run(echo(n)) for n in range(5))) == [str(n) for n in range(5)]
    await client.close()


async def test_a_call_with_a_deadline_does_not_wait_for_the_timeout_of_an_older_call(proxy: FlakyProxy) -> None:
    client = AsyncClient(endpoint(f"redis://127.0.0.1:{proxy.port}/0", timeout_ms=60_000))
    await client.connect()
    proxy.blackhole()
    older = asyncio.create_task(client.run(echo("older")))
    await asyncio.sleep(0)
    with pytest.raises(BrokerUnavailableError):
        await asyncio.wait_for(client.run_many([echo("newer")], mono_ms() + 200), 10)
    with pytest.raises(BrokerUnavailableError):
        await asyncio.wait_for(older, 10)
    await client.close()


async def test_a_cancelled_call_whose_deadline_passes_does_not_end_the_connection(proxy: FlakyProxy) -> None:
    client = AsyncClient(endpoint(f"redis://127.0.0.1:{proxy.port}/0", timeout_ms=60_000))
    await client.connect()
    proxy.blackhole()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.run_many([echo("cancelled")], mono_ms() + 300), 0.1)
    other = asyncio.create_task(client.run(echo("other")))
    ended, _ = await asyncio.wait([other], timeout=0.4)
    assert not ended
    other.cancel()
    await client.close()


async def test_a_send_times_out_if_the_server_does_not_read(proxy: FlakyProxy) -> None:
    client = AsyncClient(endpoint(f"redis://127.0.0.1:{proxy.port}/0", timeout_ms=300))
    await client.connect()
    proxy.blackhole()
    with pytest.raises(BrokerUnavailableError):
        await asyncio.wait_for(client.run(command("SET", "big", b"x" * 30_000_000)), 10)
    proxy.pass_all()
    assert await client.run(echo("again")) == "again"
    await client.close()


async def test_lost_replies_never_shift_the_replies_that_follow(proxy: FlakyProxy) -> None:
    client = AsyncClient(endpoint(f"redis://127.0.0.1:{proxy.port}/0"))
    await client.connect()
    proxy.drop_replies(20, every=10, match="echo")

    async def work(task: int) -> int:
        lost = 0
        for number in range(60):
            text = f"{task}-{number}"
            try:
                assert await client.run(echo(text)) == text
            except BrokerUnavailableError:
                lost += 1
        return lost

    assert sum(await asyncio.gather(*(work(task) for task in range(5)))) >= 20
    assert proxy.dropped == 20
    await client.close()


async def test_replies_that_arrive_in_pieces_are_reassembled(proxy: FlakyProxy) -> None:
    client = AsyncClient(endpoint(f"redis://127.0.0.1:{proxy.port}/0"))
    proxy.slice(3)
    assert await asyncio.gather(*(client.run(echo(n)) for n in range(50))) == [str(n) for n in range(50)]
    await client.close()


# --- event loops ------------------------------------------------------------------------------------------------------


def run_in_new_loop(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_each_event_loop_has_a_separate_client(broker_url: str, redis_client: redis.Redis) -> None:
    broker = Broker(Settings({}, {}).freeze(), broker_url)
    before = len(redis_client.client_list())

    async def work(text: str) -> AnyAsyncClient:
        client = broker.shared_async_client()
        assert client is broker.shared_async_client()
        assert await client.run(echo(text)) == text
        return client

    first, second = run_in_new_loop(work("one")), run_in_new_loop(work("two"))
    assert first is not second
    wait_until(lambda: len(redis_client.client_list()) == before, what="the end of the connections of ended loops")


def test_the_end_of_a_loop_closes_its_connection_without_warnings(broker_url: str, redis_client: redis.Redis) -> None:
    async def leave_without_closing() -> None:
        client = AsyncClient(endpoint(broker_url), ServerClock(), "left")
        await client.run(command("PING"))
        assert connections(redis_client, "left") == 1

    run_in_new_loop(leave_without_closing())
    wait_until(lambda: connections(redis_client, "left") == 0, what="the end of the connection")
