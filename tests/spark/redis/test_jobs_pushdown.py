"""Filters that the jobs reader pushes down to Redis are visible in the commands that the server receives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThanOrEqual,
)

from bulltask.queue import Queue
from bulltask.spark.source.readers import JobsPartition, PushdownJobsReader
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import BASE, EVERY_STATE, add, age_jobs

pytestmark = pytest.mark.redis


def finished_at(client: redis.Redis, job_id: str) -> datetime:
    value = int(client.zscore(BASE + "completed", job_id) or 0)
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=value)


def test_filters_on_state_queue_and_time_reach_redis(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
    commands: Callable[[], list[str]],
) -> None:
    add(queue, 10)
    ids = [manual_worker.complete() for _ in range(8)]
    manual_worker.fail()
    age_jobs(redis_client, "completed", lambda number: number)
    low, high = finished_at(redis_client, ids[2]), finished_at(redis_client, ids[5])
    reader = make_reader(state=EVERY_STATE, queue="mail,bills", pushdown="true")
    filters: list[Any] = [
        EqualTo(("state",), "completed"),
        In(("queue",), ("mail", "absent")),
        GreaterThanOrEqual(("finished_at",), low),
        LessThanOrEqual(("finished_at",), high),
        IsNotNull(("state",)),
    ]

    assert isinstance(reader, PushdownJobsReader)
    remaining = list(reader.pushFilters(filters))
    commands()
    rows = read_rows(reader)
    sent = commands()

    assert remaining == filters[2:]
    assert [row["id"] for row in rows] == ids[2:6]
    reads = [command for command in sent if "bull:" in command]
    others = ("bills", f"{BASE}failed", f"{BASE}wait", f"{BASE}active")
    assert not [command for command in reads if any(other in command for other in others)]
    score = [str(int(bound.timestamp() * 1000)) for bound in (low, high)]
    assert [command for command in reads if command.startswith(f"ZRANGEBYSCORE {BASE}completed {score[0]} {score[1]}")]
    assert len([command for command in reads if command.startswith("HMGET")]) == 4


def test_time_bounds_within_a_millisecond_are_rounded_outward(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
) -> None:
    add(queue, 1)
    finished = finished_at(redis_client, manual_worker.complete())
    fraction = timedelta(microseconds=400)

    def count(*filters: Any) -> int:
        reader = make_reader(pushdown="true")
        assert isinstance(reader, PushdownJobsReader)
        assert list(reader.pushFilters(list(filters))) == list(filters)
        return len(read_rows(reader))

    assert count(LessThanOrEqual(("finished_at",), finished - fraction)) == 1  # Spark applies the filter again
    assert count(GreaterThan(("finished_at",), finished + fraction)) == 1
    assert count(GreaterThan(("finished_at",), finished + timedelta(milliseconds=1))) == 0
    assert count(LessThanOrEqual(("finished_at",), finished - timedelta(milliseconds=1))) == 0


def test_contradictory_filters_send_no_command(
    make_reader: Callable[..., DataSourceReader], queue: Queue, commands: Callable[[], list[str]]
) -> None:
    add(queue, 3)
    reader = make_reader(state="wait", pushdown="true")
    assert isinstance(reader, PushdownJobsReader)

    remaining = list(reader.pushFilters([EqualTo(("state",), "wait"), EqualTo(("state",), "failed")]))
    commands()

    assert remaining == []
    assert reader.partitions() == [JobsPartition()]
    assert not [command for command in commands() if "bull:" in command]


@pytest.mark.parametrize("table", ["jobs", "events", "counts"])
def test_readers_accept_filters_only_with_the_option_pushdown(
    make_reader: Callable[..., DataSourceReader], table: str
) -> None:
    assert type(make_reader(table=table)).pushFilters is DataSourceReader.pushFilters
    assert type(make_reader(table=table, pushdown="true")).pushFilters is not DataSourceReader.pushFilters
