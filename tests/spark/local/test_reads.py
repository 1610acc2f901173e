"""Batch and streaming reads with ``format("bulltask")`` and a real session."""

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
from bulltask.spark import jobs as read_jobs
from tests.support.queue_contents import BASE, add, ids_in_redis

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

STREAM = f"{BASE}events"


@pytest.fixture
def mail(broker_url: str) -> Iterator[Queue]:
    """The queue ``mail``: 30 jobs are waiting, 20 are delayed."""
    with Queue("mail", broker_url) as queue:
        add(queue, 30)
        add(queue, 20, delay=60)
        yield queue


def jobs(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    values = {"url": url, "queue": "mail", "state": "wait,delayed", "minRowsPerPartition": "10", **options}
    return spark.read.format("bulltask").options(**values).load()


def test_a_dataframe_is_read_in_parallel_by_several_queries(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis
) -> None:
    frame = jobs(spark, broker_url, numPartitions=3)

    delayed = frame.where(col("state") == "delayed")
    assert sorted(row.id for row in delayed.select("id").collect()) == sorted(ids_in_redis(redis_client, "delayed"))
    assert sorted(row.id for row in frame.collect()) == sorted(
        ids_in_redis(redis_client, "wait") + ids_in_redis(redis_client, "delayed")
    )
    assert delayed.unionAll(frame.where(col("state") == "wait")).count() == 50


def test_a_dataframe_or_view_returns_the_rows_of_each_querys_own_filter(
    spark: SparkSession, broker_url: str, mail: Queue
) -> None:
    """Even if the session allows filters to be pushed down to Python sources."""
    pushdown = "spark.sql.python.filterPushdown.enabled"
    default = spark.conf.get(pushdown)
    spark.conf.set(pushdown, "true")
    try:
        frame = jobs(spark, broker_url, queue="*")
        frame.createOrReplaceTempView("filtered_mail")
        for _ in range(2):
            assert frame.where(col("state") == "delayed").count() == 20
            assert frame.count() == 50
            assert spark.sql("SELECT * FROM filtered_mail WHERE state = 'wait' AND queue = 'mail'").count() == 30
            assert spark.sql("SELECT * FROM filtered_mail WHERE queue = 'other'").count() == 0
        add(mail, 5)
        assert (frame.count(), spark.sql("SELECT * FROM filtered_mail").count()) == (55, 55)
    finally:
        spark.conf.set(pushdown, default or "false")
        spark.catalog.dropTempView("filtered_mail")
    with pytest.raises(PySparkException, match=r"BULLTASK_OPTION_UNKNOWN.*pushdown"):
        jobs(spark, broker_url, pushdown="true").count()


def test_chosen_ids_and_columns_are_read_by_every_query_as_they_are_then(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis
) -> None:
    waiting, delayed = ids_in_redis(redis_client, "wait")[3], ids_in_redis(redis_client, "delayed")[3]
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW two USING bulltask OPTIONS "
        f"(url '{broker_url}', queue 'mail', state 'wait,delayed', id '{waiting},{delayed}', columns 'state,id')"
    )
    states, columns = ["wait", "delayed"], ["state", "id"]
    frame = read_jobs(spark, "mail", states, url=broker_url, ids=[waiting, delayed], columns=columns)

    def both(condition: str = "true") -> list[tuple[str, str]]:
        rows = spark.sql(f"SELECT * FROM two WHERE {condition}").collect()
        assert sorted(rows) == sorted(frame.where(condition).collect())
        return sorted((row.id, row.state) for row in rows)

    assert both(f"id = '{waiting}'") == [(waiting, "wait")]
    assert both() == sorted([(waiting, "wait"), (delayed, "delayed")])
    assert mail.remove(waiting)
    assert both() == [(delayed, "delayed")]


def test_an_sql_view_may_declare_some_of_the_columns(spark: SparkSession, broker_url: str, mail: Queue) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW mail (id STRING, data STRING) "
        f"USING bulltask OPTIONS (url '{broker_url}', queue 'mail', state 'wait')"
    )
    result = spark.sql("SELECT min(data) AS smallest, count(DISTINCT id) AS jobs FROM mail").collect()

    assert [tuple(row) for row in result] == [('{"n":0}', 30)]


def test_counts_and_events_are_read_as_tables(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis
) -> None:
    counts = read_table(spark, broker_url, table="counts").where("jobs > 0").collect()
    events = read_table(spark, broker_url, table="events", eventsPerPartition="40")

    assert sorted((row.state, row.jobs) for row in counts) == [("delayed", 20), ("wait", 30)]
    assert events.count() == redis_client.xlen(STREAM)


def read_table(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("bulltask").options(url=url, queue="mail", **options).load()


def test_a_query_reads_every_event_once_across_restarts(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    def run() -> None:
        options = {"url": broker_url, "queue": "mail", "table": "events", "maxEventsPerTrigger": "60"}
        events = spark.readStream.format("bulltask").options(**options).load()
        writer = events.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(tmp_path / "events")).awaitTermination()

    def written() -> list[str]:
        return sorted(row.event_id for row in spark.read.parquet(str(tmp_path / "events")).collect())

    run()
    add(mail, 10)
    run()
    entries: Any = redis_client.xrange(STREAM)
    assert written() == sorted(entry_id for entry_id, _ in entries)


def test_plans_and_errors_do_not_contain_the_password(
    spark: SparkSession, broker_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = jobs(spark, broker_url.replace("redis://", "redis://user:s3cret@"))
    frame.explain(True)

    with pytest.raises(PySparkException, match="authentication with Redis at") as caught:
        frame.count()

    assert "s3cret" not in str(caught.value) + capsys.readouterr().out
