"""If a Spark task fails after sending some of its jobs, the next attempt or write adds the missing jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from bulltask.spark import EnqueueResult, enqueue
from bulltask.spark.connector import register
from bulltask.testing.worker import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

ROWS = 300
WAIT = "bull:{default}:wait"
ROWS_PER_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
Fail = Callable[..., Column]


@pytest.fixture
def fail(broker_url: str) -> Fail:
    """Return a function that creates a data column; its last row fails in the first ``failures`` attempts."""

    def column(failures: int) -> Column:
        def data_or_fail(number: int) -> str:
            context = TaskContext.get()
            assert context is not None
            if number == ROWS - 1 and context.attemptNumber() < failures:
                with redis.Redis.from_url(broker_url) as client:
                    wait_until(lambda: client.llen(WAIT) > 0, 60.0, "some of the jobs")
                raise RuntimeError("the data column fails")
            # Long data, because Spark transfers rows in blocks of 64 kB.
            return f'{{"n":{number},"text":"{"x" * 4_000}"}}'

        return F.udf(data_or_fail, "string", useArrow=False)("id")

    return column


@pytest.fixture
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    """Rows of one task, which the sink receives in batches of twenty."""
    before = spark.conf.get(ROWS_PER_BATCH)
    spark.conf.set(ROWS_PER_BATCH, "20")
    yield spark.range(ROWS, numPartitions=1)
    spark.conf.set(ROWS_PER_BATCH, str(before))


def write_by_enqueue(rows: DataFrame, data: Column, url: str) -> EnqueueResult:
    return enqueue(rows, "default", name="double", data=data, write_id="w1", url=url)


def write_by_format(rows: DataFrame, data: Column, url: str) -> None:
    register(rows.sparkSession)
    jobs = rows.select(F.lit("double").alias("name"), data.alias("data"))
    writer = jobs.write.format("bulltask").option("url", url).option("queue", "default").option("writeId", "w1")
    writer.mode("append").save()


@contextmanager
def start_harness(broker_url: str, tmp_path: Path, record: Any) -> Iterator[WorkerHarness]:
    started = WorkerHarness(broker_url, tmp_path, record)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("write", [write_by_enqueue, write_by_format])
def test_the_next_attempt_of_a_failed_task_adds_the_missing_jobs(
    write: Callable[..., Any], rows: DataFrame, fail: Fail, broker_url: str, redis_client: redis.Redis
) -> None:
    report = write(rows, fail(1), broker_url)
    jobs = redis_client.lrange(WAIT, 0, -1)
    assert len(set(jobs)) == len(jobs) == ROWS
    if report is not None:
        assert (report.rows, report.added + report.duplicates) == (ROWS, ROWS)
        assert report.duplicates >= 20


@pytest.mark.parametrize("write", [write_by_enqueue, write_by_format])
def test_the_same_write_adds_the_missing_jobs_after_all_attempts_failed(
    write: Callable[..., Any], rows: DataFrame, fail: Fail, broker_url: str, redis_client: redis.Redis
) -> None:
    with pytest.raises(Exception, match="the data column fails") as caught:
        write(rows, fail(2), broker_url)
    sent = redis_client.lrange(WAIT, 0, -1)
    assert 20 <= len(sent) < ROWS
    if write is write_by_enqueue:
        assert "The write w1 has failed. The jobs that it has sent are not removed" in caught.value.__notes__[0]
    report = write(rows, fail(0), broker_url)
    jobs = redis_client.lrange(WAIT, 0, -1)
    assert len(set(jobs)) == len(jobs) == ROWS
    assert report is None or report.duplicates == len(sent)


def test_an_invalid_row_fails_the_write_and_names_the_write_id(
    rows: DataFrame, broker_url: str, redis_client: redis.Redis
) -> None:
    invalid = F.when(F.col("id") == ROWS - 1, "{").otherwise(F.to_json(F.struct("id")))
    with pytest.raises(Exception, match=r"not valid JSON(?s:.*)BULLTASK_WRITE_ABORTED\] The write w1 has failed"):
        write_by_format(rows, invalid, broker_url)
    assert 20 <= redis_client.llen(WAIT) < ROWS


def test_jobs_that_ran_and_were_removed_do_not_run_again(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis, tmp_path: Path, record_property: Any
) -> None:
    rows, runs = spark.range(50), 0
    with start_harness(broker_url, tmp_path, record_property) as harness:
        harness.worker(
            "@app.task(name='count')\ndef count(id):\n    record('ran', n=id)\n", settings={"log_level": "ERROR"}
        )
        for expected in (50, 0):
            report = enqueue(
                rows, "default", name="count", data=["id"], write_id="w1", url=broker_url,
                opts={"remove_on_complete": True},
            )  # fmt: skip
            assert report.added == expected
            runs += expected
            harness.events.wait_for(runs, 60.0, event="completed")
        assert len(harness.journal.all(what="ran")) == 50
    assert redis_client.keys("bull:{default}:s[0-9a-f]*") == []
