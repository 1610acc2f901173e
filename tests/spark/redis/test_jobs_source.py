"""The jobs reader returns the jobs in Redis, even while they change states; a real server, no JVM."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    DataSourceReader,
)
from pyspark.sql.types import StructType

from bulltask.errors import BrokerError, ConfigError
from bulltask.queue import FlowJob, FlowProducer, Queue
from bulltask.spark.source.columns import JOB_FIELDS, JOBS, arrow_schema, hash_fields, job_record_batch
from bulltask.spark.source.readers import JobsPartition
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import BASE, EVERY_STATE, add, age_jobs, ids_in_redis

pytestmark = pytest.mark.redis

SMALL_PARTITIONS = {"minRowsPerPartition": "5", "numPartitions": "4", "fetchSize": "3"}
TIMES = ("created_at", "processed_at", "finished_at")
NUMBERS = ("delay_ms", "priority", "attempts_made", "attempts_started", "stalled_count")

Read = Callable[..., list[dict[str, Any]]]


def add_jobs_in_every_state(queue: Queue, manual_worker: ManualWorker, broker_url: str) -> None:
    add(queue, 24)
    for number in range(12):
        manual_worker.complete({"n": number})
    for number in range(6):
        manual_worker.fail(f"reason {number}")
    manual_worker.acquire()
    add(queue, 11, delay=3_600)
    add(queue, 11, priority=3)
    with FlowProducer(broker_url) as flows:
        flows.add(FlowJob("parent", queue="mail", children=[FlowJob("child", queue="other")]))


def as_row(client: redis.Redis, state: str, job_id: str) -> dict[str, Any]:
    """Return the expected row of a job, from its hash: the oracle."""
    stored = client.hgetall(BASE + job_id)
    row: dict[str, Any] = {"queue": "mail", "state": state, "id": job_id}
    for column, field in JOB_FIELDS.items():
        value = stored.get(field)
        if value is not None and column in TIMES:
            row[column] = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(value))
        else:
            row[column] = int(value) if value is not None and column in NUMBERS else value
    return row


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["state"], row["id"]))


def test_rows_of_every_state_equal_the_jobs_in_redis(
    read: Read, queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis, broker_url: str
) -> None:
    add_jobs_in_every_state(queue, manual_worker, broker_url)

    rows = read(state=EVERY_STATE, **SMALL_PARTITIONS)

    ids = {state: ids_in_redis(redis_client, state) for state in EVERY_STATE.split(",")}
    assert [len(job_ids) for job_ids in ids.values()] == [5, 1, 0, 11, 11, 1, 12, 6]
    assert by_id(rows) == by_id(
        [as_row(redis_client, state, job_id) for state, job_ids in ids.items() for job_id in job_ids]
    )


def test_waiting_jobs_of_a_paused_queue_have_the_state_paused(read: Read, queue: Queue) -> None:
    ids = add(queue, 7)
    queue.pause()

    assert read(state="wait") == []
    assert sorted(row["id"] for row in read(state="paused")) == sorted(ids)


@pytest.mark.parametrize("state", ["completed", "failed", "wait", "delayed", "prioritized", "waiting-children"])
def test_only_a_state_with_many_jobs_is_read_in_parallel(
    make_reader: Callable[..., DataSourceReader],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
    state: str,
) -> None:
    options = {"delayed": {"delay": 60}, "prioritized": {"priority": 1}}
    ids = add(queue, 20, **options.get(state, {}))
    if state == "waiting-children":
        redis_client.zadd(BASE + state, dict.fromkeys(ids, 1))
    if state in {"completed", "failed"}:
        for _ in range(20):
            (manual_worker.complete if state == "completed" else manual_worker.fail)()
        age_jobs(redis_client, state, lambda number: number + 1)

    large = make_reader(state=state, minRowsPerPartition="5", numPartitions="3").partitions()
    small = make_reader(state=state, minRowsPerPartition="11", numPartitions="3").partitions()

    assert (len(large), len(small)) == (3, 1)


@pytest.mark.parametrize("hours", [lambda n: n, lambda n: n // 7, lambda n: 5 if n else 0])
def test_finished_jobs_are_partitioned_by_time(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
    hours: Callable[[int], int],
) -> None:
    ids = add(queue, 40)
    for _ in range(20):
        manual_worker.complete()
        manual_worker.fail()
    age_jobs(redis_client, "completed", hours)
    age_jobs(redis_client, "failed", hours)
    reader = make_reader(**SMALL_PARTITIONS)

    parts = reader.partitions()
    rows = read_rows(reader, parts)

    assert sorted(row["id"] for row in rows) == sorted(ids)
    assert any(share.ranges for part in parts if isinstance(part, JobsPartition) for share in part.shares)
    assert by_id(rows) == by_id([as_row(redis_client, row["state"], row["id"]) for row in rows])


def test_only_jobs_that_finished_in_a_period_are_requested_from_redis(
    read: Read,
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
    commands: Callable[[], list[str]],
) -> None:
    add(queue, 12)
    ids = [manual_worker.complete() for _ in range(8)]
    age_jobs(redis_client, "completed", lambda number: number)
    first, last = (
        datetime.fromtimestamp(int(redis_client.zscore(BASE + "completed", ids[n]) or 0) / 1000, UTC) for n in (2, 5)
    )
    fraction = timedelta(microseconds=400)
    commands()

    def ids_between(since: datetime, until: datetime) -> list[str]:
        rows = read(state=EVERY_STATE, since=str(since), until=str(until), **SMALL_PARTITIONS)
        return sorted((row["id"] for row in rows), key=ids.index)

    assert ids_between(first, last) == ids[2:5]
    sent = [command for command in commands() if "bull:" in command]
    assert not [command for command in sent if f"{BASE}wait" in command or f"{BASE}active" in command]
    assert len([command for command in sent if command.startswith("HMGET")]) == 3
    assert ids_between(first + fraction, last + fraction) == ids[3:6]
    assert ids_between(first - fraction, last - fraction) == ids[2:5]
    assert ids_between(last, first) == []
    assert {row["id"] for row in read(since=str(last))} == set(ids[5:])
    assert read(state="wait", since=str(first)) == []


def test_a_read_without_jobs_has_one_empty_partition(
    make_reader: Callable[..., DataSourceReader], read_rows: Callable[..., Any]
) -> None:
    reader = make_reader()

    parts = reader.partitions()

    assert len(parts) == 1
    assert read_rows(reader, parts) == []


def test_a_job_that_finishes_between_planning_and_reading_is_read_once(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
) -> None:
    ids = add(queue, 20)
    for _ in range(8):
        manual_worker.complete()
    active_id = manual_worker.acquire()
    reader = make_reader(state=EVERY_STATE, **SMALL_PARTITIONS)

    parts = reader.partitions()
    manual_worker.finish(active_id)
    manual_worker.fail()
    late = add(queue, 3)
    rows = read_rows(reader, parts)

    assert sorted(row["id"] for row in rows) == sorted([*ids, *late])


def test_a_plan_reads_the_jobs_that_exist_when_it_is_used_again(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
    broker_url: str,
) -> None:
    """Spark uses it for each query of a DataFrame or view."""
    add(queue, 20)
    for _ in range(12):
        manual_worker.complete()
    age_jobs(redis_client, "completed", lambda number: number)
    reader = make_reader(state=EVERY_STATE, queue="*", **SMALL_PARTITIONS)
    parts = reader.partitions()

    def states() -> list[tuple[str, str]]:
        return sorted((row["state"], row["id"]) for row in read_rows(reader, parts))

    def expected() -> list[tuple[str, str]]:
        return sorted((state, id_) for state in EVERY_STATE.split(",") for id_ in ids_in_redis(redis_client, state))

    assert states() == expected()
    manual_worker.complete()
    manual_worker.fail()
    manual_worker.acquire()
    add(queue, 7)
    queue.remove(ids_in_redis(redis_client, "completed")[0])
    assert states() == expected()
    with Queue("bills", broker_url) as bills:
        job = bills.add("pay")
    assert ("wait", job.id) in states()


def test_a_job_that_finishes_with_an_older_timestamp_is_read_once(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
) -> None:
    add(queue, 5)
    for _ in range(3):
        manual_worker.complete()
    age_jobs(redis_client, "completed", lambda number: number)
    active_id = manual_worker.acquire()
    reader = make_reader(state="active,completed")

    parts = reader.partitions()
    manual_worker.finish(active_id)
    newest = max(
        redis_client.zscore(BASE + "completed", job_id) or 0 for job_id in ids_in_redis(redis_client, "completed")
    )
    redis_client.zadd(BASE + "completed", {active_id: newest - 5_000})
    rows = read_rows(reader, parts)

    assert [row["state"] for row in rows if row["id"] == active_id] == ["completed"]
    assert len(rows) == 4


def test_jobs_at_the_boundary_of_recent_jobs_are_read_once(
    read: Read, queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    ids = add(queue, 4)
    for _ in range(4):
        manual_worker.complete()
    scores = [1_760_000_010_000, 1_760_000_000_001, 1_760_000_000_000, 1_759_999_999_999]
    redis_client.zadd(BASE + "completed", dict(zip(ids, scores, strict=True)))

    assert sorted(row["id"] for row in read()) == sorted(ids)


def test_all_states_of_a_queue_are_listed_in_one_transaction(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., Any],
    queue: Queue,
    commands: Callable[[], list[str]],
) -> None:
    add(queue, 3)
    reader = make_reader(state=EVERY_STATE)
    parts = reader.partitions()
    commands()

    read_rows(reader, parts)

    sent = [command.split()[0] for command in commands()]
    inside = sent[sent.index("MULTI") + 1 : sent.index("EXEC")]
    assert sorted(inside) == ["LRANGE"] * 3 + ["ZRANGEBYSCORE"] * 5


def test_chosen_ids_are_looked_up_without_listing_jobs_or_reading_others(
    read: Read,
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
    commands: Callable[[], list[str]],
) -> None:
    ids = add(queue, 20)
    done = [manual_worker.complete() for _ in range(10)]
    failed = manual_worker.fail()
    every = {row["id"]: row for row in read(state=EVERY_STATE)}
    commands()

    rows = read(id=f"{done[3]}, {failed},{ids[-1]},{done[3]},unknown", **SMALL_PARTITIONS)

    sent = [command.split()[0] for command in commands() if "bull:" in command]
    assert by_id(rows) == by_id([every[done[3]], every[failed]]), "ids[-1] is waiting; other states were not wanted"
    assert sorted(sent) == ["HMGET"] * 2 + ["ZMSCORE"] * 4
    wanted = json.dumps([done[3], ids[-1], failed])
    assert by_id(read(id=wanted, state=EVERY_STATE)) == by_id([every[done[3]], every[ids[-1]], every[failed]])
    redis_client.zadd(BASE + "completed", dict(zip(done, [1_000, 2_000], strict=False)))
    found = read(id=",".join(done[:3]), since="1970-01-01T00:00:01", until="1970-01-01T00:00:02")
    assert [row["id"] for row in found] == done[:1]


def test_the_option_columns_selects_the_hash_fields_to_read(
    make_reader: Callable[..., DataSourceReader], read: Read, queue: Queue, commands: Callable[[], list[str]]
) -> None:
    ids = add(queue, 2)
    commands()

    rows = read(state="wait", columns="id, state, priority")

    assert by_id(rows) == [{"id": job_id, "state": "wait", "priority": 0} for job_id in sorted(ids)]
    fields = {tuple(command.split()[2:]) for command in commands() if command.startswith("HMGET")}
    assert fields == {("priority", "name", "timestamp")}, "the last two show that the job exists"
    with pytest.raises(ConfigError, match=r"\[BULLTASK_SCHEMA\] table jobs has no column 'stat'; did you mean 'state'"):
        make_reader(columns="id,stat")


@pytest.mark.slow
def test_every_job_is_read_once_while_a_worker_processes_jobs(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
    broker_url: str,
) -> None:
    ids = set(add(queue, 600))
    started, reads = threading.Event(), []

    def work() -> None:
        for number in range(600):
            if number == 50:
                started.set()
            (manual_worker.fail if number % 5 == 0 else manual_worker.complete)()

    worker = threading.Thread(target=work)
    worker.start()
    assert started.wait(30)
    while worker.is_alive():
        reads.append(read_rows(make_reader(state=EVERY_STATE, minRowsPerPartition="20", numPartitions="4")))
    worker.join()

    assert reads
    for rows in reads:
        assert len(rows) == 600
        assert {row["id"] for row in rows} == ids


def test_small_queues_share_a_task(make_reader: Callable[..., DataSourceReader], broker_url: str) -> None:
    for number in range(5):
        with Queue(f"queue-{number}", broker_url) as opened:
            opened.add("send")
    parts = make_reader(state="wait", queue="*", numPartitions="2").partitions()
    assert [len(part.shares) for part in parts if isinstance(part, JobsPartition)] == [3, 2]


def test_a_job_removed_after_planning_is_not_read(
    make_reader: Callable[..., DataSourceReader], read_rows: Callable[..., Any], queue: Queue
) -> None:
    ids = add(queue, 4)
    reader = make_reader(state="wait")
    parts = reader.partitions()

    queue.remove(ids[1])

    assert sorted(row["id"] for row in read_rows(reader, parts)) == sorted({*ids} - {ids[1]})


def test_a_column_without_values_does_not_hide_jobs(read: Read, queue: Queue) -> None:
    ids = add(queue, 3)
    schema = StructType([JOBS["return_value"], JOBS["id"]])

    rows = read(schema, state="wait")

    assert sorted(row["id"] for row in rows) == sorted(ids)
    assert {row["return_value"] for row in rows} == {None}


def test_all_queues_are_discovered_with_their_names_in_the_app(read: Read, queue: Queue, broker_url: str) -> None:
    add(queue, 2)
    with Queue("bills", broker_url) as bills:
        add(bills, 1)

    rows = read(queue="*", state="wait")

    assert sorted(row["queue"] for row in rows) == ["bills", "mail", "mail"]


@pytest.mark.parametrize(
    ("fields", "column", "expected"),
    [
        ({"timestamp": "soon"}, "created_at", None),
        ({"timestamp": str(10**18)}, "created_at", None),
        ({"priority": str(2**40)}, "priority", None),
        ({"delay": "1500.5"}, "delay_ms", 1500),
        ({"atm": ""}, "attempts_made", None),
        ({"data": b'"\xff"'}, "data", '"\\xff"'),
    ],
)
def test_invalid_values_of_another_client_do_not_fail_a_read(
    read: Read, queue: Queue, redis_client: redis.Redis, fields: dict[Any, Any], column: str, expected: Any
) -> None:
    first, second = add(queue, 2)
    redis_client.hset(BASE + first, mapping=fields)

    rows = {row["id"]: row[column] for row in read(state="wait")}

    assert rows[first] == expected
    assert rows[second] != expected or expected is None


# ---- columns ---------------------------------------------------------------------------------------------------------

FIELDS = st.one_of(st.none(), st.binary(max_size=12), st.integers(-(2**70), 2**70).map(lambda n: str(n).encode()))


@pytest.mark.slow
@given(st.lists(st.lists(FIELDS, min_size=16, max_size=16), max_size=5))
def test_columns_are_built_from_any_fields(replies: list[list[bytes | None]]) -> None:
    schema = arrow_schema(JOBS)
    assert len(hash_fields(schema.names)) == 16
    stored = [reply for reply in replies if any(value is not None for value in reply)]

    batch = job_record_batch(schema, {"queue": "q", "state": "wait"}, [str(n) for n in range(len(replies))], replies)

    assert batch.schema == schema
    assert batch.num_rows == len(stored)
    for row, reply in zip(batch.to_pylist(), stored, strict=True):
        data = reply[hash_fields(schema.names).index("data")]
        assert row["data"] == (None if data is None else data.decode("utf-8", "backslashreplace"))


# ---- secrets ---------------------------------------------------------------------------------------------------------


def test_errors_and_repr_of_a_reader_mask_the_password(
    broker_url: str, make_reader: Callable[..., DataSourceReader]
) -> None:
    secret = broker_url.replace("redis://", "redis://user:s3cret@")
    reader = make_reader(url=secret)

    with pytest.raises(BrokerError) as caught:
        reader.partitions()

    assert "s3cret" not in repr(reader) + repr(vars(reader)) + str(caught.value) + repr(caught.value)
    assert "***" in str(caught.value)
