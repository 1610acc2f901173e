"""Transactions (MULTI/EXEC) of both clients are atomic, even if scripts are unknown or commands fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from bulltask.config.settings import Settings
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerOutOfMemoryError, JobNotFoundError
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.transport.broker import Broker
from bulltask.transport.call import AnyAsyncClient, Call, SyncClient, command
from bulltask.transport.operation import run_async, run_sync, transaction
from bulltask.transport.scripts.add import add_job
from bulltask.transport.scripts.job import update_progress
from tests.conftest import ServerFactory
from tests.support.server_clients import client_of

pytestmark = pytest.mark.redis


@pytest.fixture
def broker(broker_url: str) -> Iterator[Broker]:
    broker = Broker(Settings({}).freeze(), broker_url)
    yield broker
    broker.close()


@pytest.fixture
def client(broker: Broker) -> Iterator[SyncClient]:
    client = broker.client()
    yield client
    client.close()


@pytest.fixture
async def aclient(broker: Broker) -> AsyncIterator[AnyAsyncClient]:
    aclient = broker.async_client()
    yield aclient
    await aclient.close()


def adds(broker: Broker, *ids: str) -> list[Call[Any]]:
    """Return calls that add one job with each of three scripts, and another one with the first script."""
    kinds = [JobOptions(), JobOptions(delay_ms=60_000), JobOptions(priority=2), JobOptions()]
    jobs = [NewJob("mail", job_id, "send", b"{}", kinds[index % 4]) for index, job_id in enumerate(ids)]
    return [add_job(broker.keys("mail"), job, 1_700_000_000_000) for job in jobs]


@contextmanager
def scripts_flushed_every_20_ms(url: str) -> Iterator[list[int]]:
    done, flushes = threading.Event(), [0]

    def flush() -> None:
        with client_of(url) as plain:
            while not done.wait(0.02):
                plain.script_flush()
                flushes[0] += 1

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield flushes
    finally:
        done.set()
        thread.join()


def test_a_transaction_of_unknown_scripts_takes_one_round_trip(
    broker: Broker, client: SyncClient, redis_client: redis.Redis
) -> None:
    redis_client.script_flush()
    redis_client.config_resetstat()
    assert run_sync(client, transaction(adds(broker, "a", "b", "c", "d"), "server-a")) == ["a", "b", "c", "d"]
    stats: Any = redis_client.info("commandstats")
    assert (stats["cmdstat_multi"]["calls"], stats["cmdstat_exec"]["calls"]) == (1, 1)
    assert (stats["cmdstat_eval"]["calls"], stats["cmdstat_evalsha"]["calls"]) == (3, 1)
    assert "cmdstat_script|load" not in stats


def test_no_client_sees_part_of_a_transaction_while_scripts_are_flushed_every_20_ms(
    broker: Broker, client: SyncClient, redis_client: redis.Redis
) -> None:
    """A reader polls the number of jobs, which is always a multiple of four."""
    rounds, done, seen = 150, threading.Event(), set[int]()

    def read_counts() -> None:
        with client_of(broker.endpoint.url.get_secret_value()) as plain:
            while not done.is_set():
                seen.add(int(plain.get(broker.keys("mail").id) or 0))

    reader = threading.Thread(target=read_counts)
    reader.start()
    try:
        with scripts_flushed_every_20_ms(broker.endpoint.url.get_secret_value()) as flushes:
            for number in range(100_000):
                ids = [f"job-{number}-{letter}" for letter in "abcd"]
                assert run_sync(client, transaction(adds(broker, *ids), "server-a")) == ids
                if number >= rounds and flushes[0] >= 40:
                    break
    finally:
        done.set()
        reader.join()
    assert {count % 4 for count in seen} == {0}
    assert len(seen) > 10


async def test_tasks_on_a_shared_connection_do_not_mix_their_transactions(
    broker: Broker, aclient: AnyAsyncClient, redis_client: redis.Redis
) -> None:
    async def plain(number: int) -> Any:
        return await aclient.run(command("INCR", f"count-{number % 3}"))

    async def atomic(number: int) -> list[Any]:
        ids = [f"job-{number}-{letter}" for letter in "abcd"]
        return await run_async(aclient, transaction(adds(broker, *ids), "server-a"))

    with scripts_flushed_every_20_ms(broker.endpoint.url.get_secret_value()):
        results: list[Any] = await asyncio.gather(
            *(part for number in range(200) for part in (plain(number), atomic(number), plain(number)))
        )
    assert all(isinstance(result, int) for index, result in enumerate(results) if index % 3 != 1)
    assert results[1::3] == [[f"job-{number}-{letter}" for letter in "abcd"] for number in range(200)]
    assert sum(int(redis_client.get(f"count-{number}") or 0) for number in range(3)) == 400


async def test_cancelling_a_task_in_a_transaction_keeps_the_connection_usable(
    broker: Broker, aclient: AnyAsyncClient
) -> None:
    await aclient.connect()
    ids = [f"job-{number}" for number in range(40)]
    task = asyncio.create_task(run_async(aclient, transaction(adds(broker, *ids), "server-a")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await aclient.run(command("ECHO", "mine")) == b"mine"
    assert await run_async(aclient, transaction([command("ECHO", "mine too")], "server-a")) == [b"mine too"]


def test_an_error_reply_does_not_affect_other_results_of_a_transaction(
    broker: Broker, client: SyncClient, redis_client: redis.Redis
) -> None:
    redis_client.set("{mail}", "x")
    gone = update_progress(broker.keys("mail"), "gone", b"1")
    results = run_sync(
        client,
        transaction([*adds(broker, "a"), gone, command("LPUSH", "{mail}", "y"), command("GET", "{mail}")], "server-b"),
    )
    assert (results[0], results[3]) == ("a", b"x")
    assert isinstance(results[1], JobNotFoundError)
    assert isinstance(results[2], BrokerError)
    assert "Redis at server-b rejected a command: WRONGTYPE" in str(results[2])


def test_a_command_that_cannot_be_queued_aborts_the_transaction(
    broker: Broker, client: SyncClient, redis_client: redis.Redis
) -> None:
    with pytest.raises(BrokerError, match="unknown command"):
        run_sync(
            client,
            transaction([*adds(broker, "a"), command("NOSUCHCOMMAND", "{mail}"), *adds(broker, "b")], "server-a"),
        )
    assert redis_client.keys("*") == []
    assert run_sync(client, transaction(adds(broker, "c"), "server-a")) == ["c"], (
        "the connection is out of the transaction"
    )


def test_a_server_that_is_out_of_memory_applies_no_part_of_a_transaction(server_factory: ServerFactory) -> None:
    server = server_factory(extra=["--maxmemory-policy", "noeviction"])
    broker = Broker(Settings({}).freeze(), server.url)
    client = broker.client()
    with redis.Redis.from_url(server.url, decode_responses=True) as plain:
        run_sync(client, transaction(adds(broker, "a"), "server-a"))
        before = set(plain.keys("*"))
        plain.config_set("maxmemory", "1")
        try:
            errors = run_sync(client, transaction(adds(broker, "b", "c", "d", "e"), "server-a"))
        except BrokerOutOfMemoryError as error:  # Redis refuses to queue, Valkey 9 to write
            errors = [error]
        assert {type(error) for error in errors} == {BrokerOutOfMemoryError}
        plain.config_set("maxmemory", "0")
        assert set(plain.keys("*")) == before
        assert run_sync(client, transaction(adds(broker, "b"), "server-a")) == ["b"]
    client.close()
    broker.close()


def test_a_replica_applies_no_part_of_a_transaction(server_factory: ServerFactory) -> None:
    server = server_factory()
    broker = Broker(Settings({}).freeze(), server.url)
    client = broker.client()
    with redis.Redis.from_url(server.url) as plain:
        plain.replicaof("127.0.0.1", server.port)  # a replica of itself never syncs and is read-only
        results = run_sync(client, transaction(adds(broker, "a", "b"), "server-a"))
        assert [type(result) for result in results] == [BrokerNotReadyError, BrokerNotReadyError]
        plain.replicaof("no", "one")
        assert run_sync(client, transaction(adds(broker, "a", "b"), "server-a")) == ["a", "b"]
    client.close()
    broker.close()
