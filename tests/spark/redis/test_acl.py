"""Users of Redis that may do only what ``bulltask.spark.acl`` lists: all works, and nothing of it can be left out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import redis
from pyspark.sql.types import StringType, StructField, StructType

from bulltask.errors import BrokerAuthError
from bulltask.queue import Queue
from bulltask.spark.acl import READER, WRITER, Grants
from bulltask.spark.connector.data_source import BulltaskSource
from bulltask.spark.sink.results import JobLookup
from bulltask.spark.sink.writer import JobsWriter
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import EventsOptions, WriteOptions, read_options
from bulltask.spark.source.status import observe_streams
from bulltask.transport.scripts.add import scan_fence
from tests.conftest import ServerFactory
from tests.support.fake_query import FakeQuery
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import EVERY_STATE, add

pytestmark = pytest.mark.redis

COLUMNS = StructType([StructField(name, StringType()) for name in ("id", "name", "data")])
MakeUser = Callable[..., str]
NAMED = r"Grant it: ACL SETUSER spark-|grant all that"


@pytest.fixture
def user(broker_url: str, redis_client: redis.Redis) -> Iterator[MakeUser]:
    """Make a user with these grants, perhaps without one of them; a URL with it."""
    name = f"spark-{secrets.token_hex(4)}"

    def make(grants: Grants, *, without: str = "") -> str:
        redis_client.script_flush()  # scripts that another user has loaded must not help
        words = [word for word in grants.words() if word.lstrip("+") != without]
        assert redis_client.execute_command("ACL", "SETUSER", name, "reset", "on", ">secret", *words)
        return broker_url.replace("redis://", f"redis://{name}:secret@")

    yield make
    redis_client.acl_deluser(name)


@pytest.fixture
def used(queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis) -> list[str]:
    """Ids of jobs in all kinds of states; more than one task's worth of them has ended."""
    ids = add(queue, 6)
    for _ in range(3):
        manual_worker.complete()
    manual_worker.fail()
    add(queue, 1, delay=60)
    add(queue, 1, priority=3)
    redis_client.sadd("bulltask:{mail}:spark:w1", *ids)
    return ids


def read_everything(url: str, ids: list[str]) -> None:
    """All that a reader can be asked for."""
    source = BulltaskSource({"url": url, "queue": "*", "state": EVERY_STATE, "minRowsPerPartition": "1"})
    reader = source.reader(source.schema())
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]  # type: ignore[union-attr]
    assert len(rows) == 8
    for table in ("events", "counts"):
        other = BulltaskSource({"url": url, "queue": "mail", "table": table})
        reader = other.reader(other.schema())
        assert [batch for part in reader.partitions() for batch in reader.read(part)]
    query = FakeQuery(url, eventsPerPartition="3", maxEventsPerTrigger="5")
    query.run_until_idle()
    assert len(query.events()) > 8

    options = read_options(WriteOptions, {"url": url, "queue": "mail"})
    [found] = JobLookup(options.config, options.keys("mail"), None, 1).look_up(iter([pa.array(ids)]))
    assert [one["state"] for one in found.to_pylist()].count("completed") == 3
    with Connection(options.config) as connection:
        assert len(connection.run(scan_fence(options.keys("mail"), "w1", "0"))[1]) == len(ids)
        assert observe_streams(connection, read_options(EventsOptions, {"queue": "mail", "table": "events"})).streams


def write_everything(url: str, client: redis.Redis) -> None:
    """All kinds of jobs that a writer can add, to a queue that has a limit."""
    client.hset("bull:{mail}:meta", "concurrency", 5)
    for number, opts in enumerate(OPTIONS):
        given = {"url": url, "queue": "mail", "writeId": f"w{number}", "jobOpts": json.dumps(opts)}
        rows = pa.RecordBatch.from_pylist([{"id": f"job-{number}", "name": "send", "data": "{}"}])
        writer = JobsWriter(read_options(WriteOptions, given), COLUMNS, overwrite=False)
        writer.write(iter([rows]))
        writer.write(iter([rows]))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"lifo": True},
    {"delay": 60},
    {"priority": 3},
    {"deduplication": {"id": "once"}},
    {"deduplication": {"id": "late", "replace": True}, "delay": 60},
    {"deduplication": {"id": "late", "replace": True}, "delay": 60},
]


def test_a_reader_with_these_grants_reads_everything(user: MakeUser, used: list[str]) -> None:
    read_everything(user(READER), used)


@pytest.mark.parametrize("command", READER.commands)
def test_a_reader_needs_each_of_its_commands(user: MakeUser, used: list[str], command: str) -> None:
    with pytest.raises(BrokerAuthError, match=NAMED) as refused:
        read_everything(user(READER, without=command), used)
    assert "secret" not in str(refused.value)


def test_a_writer_with_these_grants_writes_all_kinds_of_jobs(user: MakeUser, redis_client: redis.Redis) -> None:
    write_everything(user(WRITER), redis_client)


@pytest.mark.parametrize("command", WRITER.commands)
def test_a_writer_needs_each_of_its_commands(user: MakeUser, redis_client: redis.Redis, command: str) -> None:
    with pytest.raises(BrokerAuthError, match=NAMED) as refused:
        write_everything(user(WRITER, without=command), redis_client)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("grants", "work"), [(READER, read_everything), (WRITER, write_everything)])
def test_a_user_needs_the_keys_of_bullmq_and_those_of_bulltask(
    user: MakeUser, used: list[str], redis_client: redis.Redis, grants: Grants, work: Callable[..., None]
) -> None:
    for keys in (f"{grants.access}bull:*", f"{grants.access}bulltask:*"):
        url = user(grants, without=keys)
        with pytest.raises(BrokerAuthError, match=r"Grant the keys: ACL SETUSER spark-\w+ ~bull:\* ~bulltask:\*"):
            work(url, used if work is read_everything else redis_client)


def test_a_reader_cannot_write(user: MakeUser, redis_client: redis.Redis) -> None:
    with pytest.raises(BrokerAuthError, match=r"the 'time' command. Grant it: ACL SETUSER spark-\w+ \+time"):
        write_everything(user(READER), redis_client)


def test_grants_are_for_the_prefix_that_is_used() -> None:
    assert READER.words("shop")[:3] == ["resetkeys", "%R~shop:*", "%R~bulltask:shop:*"]
    assert "+asking" not in READER.words()
    assert "+asking" in READER.words(cluster=True)


@pytest.fixture
def broker_url_of_redis(server_factory: ServerFactory) -> str:
    return server_factory(flavour="redis").url


class TestOnRedis:
    """The words of Redis' refusals are not Valkey's."""

    @pytest.fixture
    def broker_url(self, broker_url_of_redis: str) -> str:
        return broker_url_of_redis

    def test_the_same_grants_work_in_a_cluster(
        self, user: MakeUser, used: list[str], redis_client: redis.Redis
    ) -> None:
        read_everything(user(READER), used)
        write_everything(user(WRITER), redis_client)

    def test_a_command_that_a_script_may_not_call_is_on_the_list(
        self, user: MakeUser, redis_client: redis.Redis
    ) -> None:
        with pytest.raises(BrokerAuthError, match=r"grant all that this user needs \(bulltask.spark.acl"):
            write_everything(user(WRITER, without="xadd"), redis_client)


class TestOnAServerThatDoesNotSayWhatItIs:
    """HELLO is missing before Redis 6.0 and behind some proxies; scripts cannot be read-only before 7.0."""

    @pytest.fixture
    def broker_url(self, server_factory: ServerFactory) -> str:
        gone = ["HELLO", "EVALSHA_RO", "EVAL_RO"]
        return (
            server_factory(extra=[word for one in gone for word in ("--rename-command", one, "")]).url + "?protocol=2"
        )

    def test_everything_is_read(self, broker_url: str, used: list[str]) -> None:
        read_everything(broker_url, used)
