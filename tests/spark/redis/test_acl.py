"""The ACL grants that ``bulltask.spark.acl`` lists are sufficient and necessary."""

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
from bulltask.spark.acl import READER, WRITER
from bulltask.spark.connector import BulltaskSource
from bulltask.spark.results import JobLookup
from bulltask.spark.sink import JobsWriter
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import EventsOptions, WriteOptions, read_options
from bulltask.spark.source.streams import observe_streams
from bulltask.transport.permissions import Grants
from bulltask.transport.scripts.add import scan_added_ids
from tests.conftest import ServerFactory
from tests.support.fake_query import FakeQuery
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import EVERY_STATE, add

pytestmark = pytest.mark.redis

COLUMNS = StructType([StructField(name, StringType()) for name in ("id", "name", "data")])
MakeUser = Callable[..., str]
GRANT_ADVICE = r"Grant it: ACL SETUSER spark-|grant all that"


@pytest.fixture
def user(broker_url: str, redis_client: redis.Redis) -> Iterator[MakeUser]:
    """Create a user with these grants, optionally without one of them; return a URL with its credentials."""
    name = f"spark-{secrets.token_hex(4)}"

    def make(grants: Grants, *, without: str = "") -> str:
        redis_client.script_flush()  # scripts that another user loaded would hide missing grants
        rules = [rule for rule in grants.rules() if rule.lstrip("+") != without]
        assert redis_client.execute_command("ACL", "SETUSER", name, "reset", "on", ">secret", *rules)
        return broker_url.replace("redis://", f"redis://{name}:secret@")

    yield make
    redis_client.acl_deluser(name)


@pytest.fixture
def job_ids(queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis) -> list[str]:
    """Return ids of jobs in several states; the finished ones do not fit into one partition."""
    ids = add(queue, 6)
    for _ in range(3):
        manual_worker.complete()
    manual_worker.fail()
    add(queue, 1, delay=60)
    add(queue, 1, priority=3)
    redis_client.sadd("bulltask:{mail}:added:w1", *ids)
    return ids


def read_everything(url: str, ids: list[str]) -> None:
    """Perform every operation of a reader."""
    source = BulltaskSource({"url": url, "queue": "*", "state": EVERY_STATE, "minRowsPerPartition": "1"})
    reader = source.reader(source.schema())
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]  # type: ignore[union-attr]
    assert len(rows) == 8
    for table in ("events", "counts"):
        source = BulltaskSource({"url": url, "queue": "mail", "table": table})
        reader = source.reader(source.schema())
        assert [batch for part in reader.partitions() for batch in reader.read(part)]
    query = FakeQuery(url, eventsPerPartition="3", maxEventsPerTrigger="5")
    query.run_until_idle()
    assert len(query.events()) > 8

    options = read_options(WriteOptions, {"url": url, "queue": "mail"})
    [results] = JobLookup(options.config, options.keys("mail"), 0, 1).look_up(iter([pa.array(ids)]))
    assert [row["state"] for row in results.to_pylist()].count("completed") == 3
    with Connection(options.config) as connection:
        assert len(connection.run(scan_added_ids(options.keys("mail"), "w1", "0"))[1]) == len(ids)
        assert observe_streams(connection, read_options(EventsOptions, {"queue": "mail", "table": "events"})).streams


def write_everything(url: str, client: redis.Redis) -> None:
    """Add every kind of job to a queue with a concurrency limit, each twice."""
    client.hset("bull:{mail}:meta", "concurrency", 5)
    for number, opts in enumerate(OPTIONS):
        values = {"url": url, "queue": "mail", "writeId": f"w{number}", "jobOpts": json.dumps(opts)}
        rows = pa.RecordBatch.from_pylist([{"id": f"job-{number}", "name": "send", "data": "{}"}])
        writer = JobsWriter(read_options(WriteOptions, values), COLUMNS, overwrite=False)
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


def test_a_readers_grants_are_sufficient(user: MakeUser, job_ids: list[str]) -> None:
    read_everything(user(READER), job_ids)


@pytest.mark.parametrize("command", READER.commands)
def test_a_reader_needs_each_of_its_commands(user: MakeUser, job_ids: list[str], command: str) -> None:
    with pytest.raises(BrokerAuthError, match=GRANT_ADVICE) as caught:
        read_everything(user(READER, without=command), job_ids)
    assert "secret" not in str(caught.value)


def test_a_writers_grants_are_sufficient_for_all_kinds_of_jobs(user: MakeUser, redis_client: redis.Redis) -> None:
    write_everything(user(WRITER), redis_client)


@pytest.mark.parametrize("command", WRITER.commands)
def test_a_writer_needs_each_of_its_commands(user: MakeUser, redis_client: redis.Redis, command: str) -> None:
    with pytest.raises(BrokerAuthError, match=GRANT_ADVICE) as caught:
        write_everything(user(WRITER, without=command), redis_client)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("grants", "work"), [(READER, read_everything), (WRITER, write_everything)])
def test_a_user_needs_access_to_the_keys_of_both_bullmq_and_bulltask(
    user: MakeUser, job_ids: list[str], redis_client: redis.Redis, grants: Grants, work: Callable[..., None]
) -> None:
    for keys in (f"{grants.access}bull:*", f"{grants.access}bulltask:*"):
        url = user(grants, without=keys)
        with pytest.raises(BrokerAuthError, match=r"ACL SETUSER spark-\w+ ~bull:\* ~bulltask:\*"):
            work(url, job_ids if work is read_everything else redis_client)


def test_a_reader_cannot_write(user: MakeUser, redis_client: redis.Redis) -> None:
    with pytest.raises(BrokerAuthError, match=r"the 'time' command. Grant it: ACL SETUSER spark-\w+ \+time"):
        write_everything(user(READER), redis_client)


def test_grants_contain_the_prefix_of_the_queues() -> None:
    assert READER.rules("shop")[:3] == ["resetkeys", "%R~shop:*", "%R~bulltask:shop:*"]
    assert "+asking" not in READER.rules()
    assert "+asking" in READER.rules(cluster=True)


@pytest.fixture
def broker_url_of_redis(server_factory: ServerFactory) -> str:
    return server_factory(flavor="redis").url


class TestOnRedis:
    """The text of Redis' error replies differs from Valkey's."""

    @pytest.fixture
    def broker_url(self, broker_url_of_redis: str) -> str:
        return broker_url_of_redis

    def test_the_grants_of_readers_and_writers_are_sufficient(
        self, user: MakeUser, job_ids: list[str], redis_client: redis.Redis
    ) -> None:
        read_everything(user(READER), job_ids)
        write_everything(user(WRITER), redis_client)

    def test_a_command_denied_inside_a_script_is_reported_with_advice(
        self, user: MakeUser, redis_client: redis.Redis
    ) -> None:
        with pytest.raises(BrokerAuthError, match=r"grant all that it needs \(bulltask.spark.acl"):
            write_everything(user(WRITER, without="xadd"), redis_client)


class TestOnAServerWithoutHello:
    """HELLO is missing before Redis 6.0 and behind some proxies; scripts cannot be read-only before 7.0."""

    @pytest.fixture
    def broker_url(self, server_factory: ServerFactory) -> str:
        disabled = ["HELLO", "EVALSHA_RO", "EVAL_RO"]
        return (
            server_factory(extra=[word for command in disabled for word in ("--rename-command", command, "")]).url
            + "?protocol=2"
        )

    def test_a_reader_reads_every_table(self, broker_url: str, job_ids: list[str]) -> None:
        read_everything(broker_url, job_ids)
