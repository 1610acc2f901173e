"""Filters of Spark that the reader of jobs hands to Redis: asserted on the commands that arrive there."""

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
from bulltask.spark.source.jobs_source import JobsPartition, PushdownJobsReader
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import BASE, EVERY_STATE, add, age_jobs

pytestmark = pytest.mark.redis


def ms(client: redis.Redis, job_id: str) -> datetime:
    value = int(client.zscore(BASE + "completed", job_id) or 0)
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=value)


def test_state_queue_and_times_reach_redis(
    reader_of: Callable[..., DataSourceReader],
    rows_of: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
    commands: Callable[[], list[str]],
) -> None:
    add(queue, 10)
    ids = [manual_worker.complete() for _ in range(8)]
    manual_worker.fail()
    age_jobs(redis_client, "completed", lambda number: number)
    low, high = ms(redis_client, ids[2]), ms(redis_client, ids[5])
    reader = reader_of(state=EVERY_STATE, queue="mail,bills", pushdown="true")
    filters: list[Any] = [
        EqualTo(("state",), "completed"),
        In(("queue",), ("mail", "absent")),
        GreaterThanOrEqual(("finished_at",), low),
        LessThanOrEqual(("finished_at",), high),
        IsNotNull(("state",)),
    ]

    assert isinstance(reader, PushdownJobsReader)
    left = list(reader.pushFilters(filters))
    commands()
    rows = rows_of(reader)
    sent = commands()

    assert left == filters[2:]
    assert [row["id"] for row in rows] == ids[2:6]
    asked = [command for command in sent if "bull:" in command]
    others = ("bills", f"{BASE}failed", f"{BASE}wait", f"{BASE}active")
    assert not [command for command in asked if any(other in command for other in others)]
    score = [str(int(one.timestamp() * 1000)) for one in (low, high)]
    assert [one for one in asked if one.startswith(f"ZRANGEBYSCORE {BASE}completed {score[0]} {score[1]}")]
    assert len([command for command in asked if command.startswith("HMGET")]) == 4


def test_time_bounds_within_a_millisecond_are_rounded_so_that_no_row_is_lost(
    reader_of: Callable[..., DataSourceReader],
    rows_of: Callable[..., Any],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
) -> None:
    add(queue, 1)
    ended = ms(redis_client, manual_worker.complete())
    inside = timedelta(microseconds=400)

    def count(*filters: Any) -> int:
        reader = reader_of(pushdown="true")
        assert isinstance(reader, PushdownJobsReader)
        assert list(reader.pushFilters(list(filters))) == list(filters)
        return len(rows_of(reader))

    assert count(LessThanOrEqual(("finished_at",), ended - inside)) == 1  # Spark looks once more
    assert count(GreaterThan(("finished_at",), ended + inside)) == 1
    assert count(GreaterThan(("finished_at",), ended + timedelta(milliseconds=1))) == 0
    assert count(LessThanOrEqual(("finished_at",), ended - timedelta(milliseconds=1))) == 0


def test_contradictory_filters_send_no_query(
    reader_of: Callable[..., DataSourceReader], queue: Queue, commands: Callable[[], list[str]]
) -> None:
    add(queue, 3)
    reader = reader_of(state="wait", pushdown="true")
    assert isinstance(reader, PushdownJobsReader)

    left = list(reader.pushFilters([EqualTo(("state",), "wait"), EqualTo(("state",), "failed")]))
    commands()

    assert left == []
    assert reader.partitions() == [JobsPartition()]
    assert not [command for command in commands() if "bull:" in command]


@pytest.mark.parametrize("table", ["jobs", "events", "counts"])
def test_no_reader_takes_filters_unless_asked_to(reader_of: Callable[..., DataSourceReader], table: str) -> None:
    assert type(reader_of(table=table)).pushFilters is DataSourceReader.pushFilters
    assert type(reader_of(table=table, pushdown="true")).pushFilters is not DataSourceReader.pushFilters
