"""Reads through a real session: batch and stream, and what a DataFrame may be used for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col

from bulltask.queue import Queue
from tests.support.queue_contents import BASE, add, ids_in_redis

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

STREAM = f"{BASE}events"


@pytest.fixture
def mail(broker_url: str) -> Iterator[Queue]:
    """The queue ``mail``: 30 jobs wait, 20 are delayed."""
    with Queue("mail", broker_url) as queue:
        add(queue, 30)
        add(queue, 20, delay=60)
        yield queue


def jobs(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    made = {"url": url, "queue": "mail", "state": "wait,delayed", "minRowsPerPartition": "10", **options}
    return spark.read.format("bulltask").options(**made).load()


def test_jobs_are_read_in_parallel_and_a_dataframe_serves_several_queries(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis
) -> None:
    frame = jobs(spark, broker_url, numPartitions=3)

    late = frame.where(col("state") == "delayed")
    assert sorted(row.id for row in late.select("id").collect()) == sorted(ids_in_redis(redis_client, "delayed"))
    assert sorted(row.id for row in frame.collect()) == sorted(
        ids_in_redis(redis_client, "wait") + ids_in_redis(redis_client, "delayed")
    )
    assert late.unionAll(frame.where(col("state") == "wait")).count() == 50


def test_filters_that_redis_applies_give_the_same_rows(spark: SparkSession, broker_url: str, mail: Queue) -> None:
    def ids(pushdown: bool) -> list[str]:
        frame = jobs(spark, broker_url, queue="*", pushdown=pushdown)
        chosen = frame.where((col("state") == "wait") & col("queue").isin("mail", "other"))
        return sorted(row.id for row in chosen.collect())

    assert len(ids(pushdown=True)) == 30
    assert ids(pushdown=True) == ids(pushdown=False)


def test_few_columns_of_a_view_in_sql(spark: SparkSession, broker_url: str, mail: Queue) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW mail (id STRING, data STRING) "
        f"USING bulltask OPTIONS (url '{broker_url}', queue 'mail', state 'wait')"
    )
    found = spark.sql("SELECT min(data) AS least, count(DISTINCT id) AS jobs FROM mail").collect()

    assert [tuple(row) for row in found] == [('{"n":0}', 30)]


def test_counts_and_events_are_tables_too(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis
) -> None:
    counts = jobs_of(spark, broker_url, table="counts").where("jobs > 0").collect()
    events = jobs_of(spark, broker_url, table="events", eventsPerPartition="40")

    assert sorted((row.state, row.jobs) for row in counts) == [("delayed", 20), ("wait", 30)]
    assert events.count() == redis_client.xlen(STREAM)


def jobs_of(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("bulltask").options(url=url, queue="mail", **options).load()


def test_a_stream_brings_every_event_once_over_restarts(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    def run() -> None:
        made = {"url": broker_url, "queue": "mail", "table": "events", "maxEventsPerTrigger": "60"}
        events = spark.readStream.format("bulltask").options(**made).load()
        writer = events.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(tmp_path / "events")).awaitTermination()

    def written() -> list[str]:
        return sorted(row.event_id for row in spark.read.parquet(str(tmp_path / "events")).collect())

    run()
    add(mail, 10)
    run()
    entries: Any = redis_client.xrange(STREAM)
    assert written() == sorted(entry_id for entry_id, _ in entries)


def test_no_password_is_shown_by_a_plan_or_an_error(
    spark: SparkSession, broker_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = jobs(spark, broker_url.replace("redis://", "redis://user:s3cret@"))
    frame.explain(True)

    with pytest.raises(PySparkException, match="rejected the login") as refused:
        frame.count()

    assert "s3cret" not in str(refused.value) + capsys.readouterr().out
