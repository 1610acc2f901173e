"""MULTI/EXEC through both clients: all or nothing, whatever the server forgets or refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from bulltask.config.config import Conf
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerOutOfMemoryError, JobNotFoundError
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.operation import run_async, run_sync
from bulltask.transport.scripts.add import add_job
from bulltask.transport.scripts.job import update_progress
from bulltask.transport.transaction import transaction
from tests.conftest import ServerFactory

pytestmark = pytest.mark.redis


@pytest.fixture
def broker(broker_url: str) -> Iterator[Broker]:
    made = Broker(Conf({}).freeze(), broker_url)
    yield made
    made.close()


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    made = broker.client()
    yield made
    made.close()


@pytest.fixture
async def aclient(broker: Broker) -> AsyncIterator[AsyncClient]:
    made = broker.async_client()
    yield made
    await made.close()


def adds(broker: Broker, *ids: str) -> list[Call[Any]]:
    """One job by each of three scripts, and one more by the first."""
    kinds = [JobOptions(), JobOptions(delay_ms=60_000), JobOptions(priority=2), JobOptions()]
    jobs = [NewJob("mail", job_id, "send", b"{}", kinds[index % 4]) for index, job_id in enumerate(ids)]
    return [add_job(broker.keys("mail"), job, 1_700_000_000_000) for job in jobs]


@contextmanager
def scripts_flushed_every_20_ms(url: str) -> Iterator[list[int]]:
    done, flushes = threading.Event(), [0]

    def flush() -> None:
        with redis.Redis.from_url(url) as plain:
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


def test_a_transaction_of_scripts_that_the_server_does_not_know_is_one_round_trip(
    broker: Broker, client: Client, redis_client: redis.Redis
) -> None:
    redis_client.script_flush()
    redis_client.config_resetstat()
    assert run_sync(client, transaction(adds(broker, "a", "b", "c", "d"), "here")) == ["a", "b", "c", "d"]
    stats: Any = redis_client.info("commandstats")
    assert (stats["cmdstat_multi"]["calls"], stats["cmdstat_exec"]["calls"]) == (1, 1)
    assert (stats["cmdstat_eval"]["calls"], stats["cmdstat_evalsha"]["calls"]) == (3, 1)
    assert "cmdstat_script|load" not in stats


def test_no_client_sees_part_of_a_transaction_while_scripts_are_flushed_every_20_ms(
    broker: Broker, client: Client, redis_client: redis.Redis
) -> None:
    """A reader counts the jobs all the time: never a number that is no multiple of four."""
    rounds, done, seen = 150, threading.Event(), set[int]()

    def look() -> None:
        with redis.Redis.from_url(broker.endpoint.url.get_secret_value()) as plain:
            while not done.is_set():
                seen.add(int(plain.get(broker.keys("mail").id) or 0))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        with scripts_flushed_every_20_ms(broker.endpoint.url.get_secret_value()) as flushes:
            for number in range(100_000):
                ids = [f"job-{number}-{letter}" for letter in "abcd"]
                assert run_sync(client, transaction(adds(broker, *ids), "here")) == ids
                if number >= rounds and flushes[0] >= 40:
                    break
    finally:
        done.set()
        reader.join()
    assert {count % 4 for count in seen} == {0}
    assert len(seen) > 10


async def test_tasks_that_share_a_connection_do_not_come_into_each_others_transactions(
    broker: Broker, aclient: AsyncClient, redis_client: redis.Redis
) -> None:
    async def plain(number: int) -> Any:
        return await aclient.run(command("INCR", f"count-{number % 3}"))

    async def atomic(number: int) -> list[Any]:
        ids = [f"job-{number}-{letter}" for letter in "abcd"]
        return await run_async(aclient, transaction(adds(broker, *ids), "here"))

    with scripts_flushed_every_20_ms(broker.endpoint.url.get_secret_value()):
        answers: list[Any] = await asyncio.gather(
            *(part for number in range(200) for part in (plain(number), atomic(number), plain(number)))
        )
    assert all(isinstance(answer, int) for index, answer in enumerate(answers) if index % 3 != 1)
    assert answers[1::3] == [[f"job-{number}-{letter}" for letter in "abcd"] for number in range(200)]
    assert sum(int(redis_client.get(f"count-{number}") or 0) for number in range(3)) == 400


async def test_a_task_that_is_cancelled_in_a_transaction_leaves_the_connection_usable(
    broker: Broker, aclient: AsyncClient
) -> None:
    await aclient.connect()
    ids = [f"job-{number}" for number in range(40)]
    task = asyncio.create_task(run_async(aclient, transaction(adds(broker, *ids), "here")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await aclient.run(command("ECHO", "mine")) == b"mine"
    assert await run_async(aclient, transaction([command("ECHO", "mine too")], "here")) == [b"mine too"]


def test_a_refused_call_does_not_affect_the_results_of_others(
    broker: Broker, client: Client, redis_client: redis.Redis
) -> None:
    redis_client.set("text", "x")
    gone = update_progress(broker.keys("mail"), "gone", b"1")
    results = run_sync(
        client, transaction([*adds(broker, "a"), gone, command("LPUSH", "text", "y"), command("GET", "text")], "there")
    )
    assert (results[0], results[3]) == ("a", b"x")
    assert isinstance(results[1], JobNotFoundError)
    assert isinstance(results[2], BrokerError)
    assert "Redis at there refused a command: WRONGTYPE" in str(results[2])


def test_a_command_that_the_server_refuses_to_queue_stops_the_whole_transaction(
    broker: Broker, client: Client, redis_client: redis.Redis
) -> None:
    with pytest.raises(BrokerError, match="unknown command"):
        run_sync(client, transaction([*adds(broker, "a"), command("NOSUCHCOMMAND"), *adds(broker, "b")], "here"))
    assert redis_client.keys("*") == []
    assert run_sync(client, transaction(adds(broker, "c"), "here")) == ["c"], "the connection is out of the transaction"


def test_a_full_server_takes_nothing_of_a_transaction(server_factory: ServerFactory) -> None:
    server = server_factory(extra=["--maxmemory-policy", "noeviction"])
    broker = Broker(Conf({}).freeze(), server.url)
    client = broker.client()
    with redis.Redis.from_url(server.url, decode_responses=True) as plain:
        run_sync(client, transaction(adds(broker, "a"), "here"))
        before = set(plain.keys("*"))
        plain.config_set("maxmemory", "1mb")
        try:
            refusals = run_sync(client, transaction(adds(broker, "b", "c", "d", "e"), "here"))
        except BrokerOutOfMemoryError as refusal:  # Redis refuses to queue, Valkey 9 to write
            refusals = [refusal]
        assert {type(refusal) for refusal in refusals} == {BrokerOutOfMemoryError}
        plain.config_set("maxmemory", "0")
        assert set(plain.keys("*")) == before
        assert run_sync(client, transaction(adds(broker, "b"), "here")) == ["b"]
    client.close()
    broker.close()


def test_a_replica_takes_nothing_of_a_transaction(server_factory: ServerFactory) -> None:
    server = server_factory()
    broker = Broker(Conf({}).freeze(), server.url)
    client = broker.client()
    with redis.Redis.from_url(server.url) as plain:
        plain.replicaof("127.0.0.1", server.port)  # of itself: it never gets anywhere, and is read-only
        results = run_sync(client, transaction(adds(broker, "a", "b"), "here"))
        assert [type(result) for result in results] == [BrokerNotReadyError, BrokerNotReadyError]
        plain.replicaof("no", "one")
        assert run_sync(client, transaction(adds(broker, "a", "b"), "here")) == ["a", "b"]
    client.close()
    broker.close()
