"""Tasks that die after sending a part of their jobs: the next attempt adds the rest, errors say how to resume."""

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

from bulltask.spark import EnqueueReport, enqueue
from bulltask.spark.connector.session import register
from bulltask.testing.wait import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

ROWS = 300
WAIT = "bull:{default}:wait"
AT_ONCE = "spark.sql.execution.arrow.maxRecordsPerBatch"
Fail = Callable[..., Column]


@pytest.fixture
def fail(broker_url: str) -> Fail:
    """A column that makes the last row fail, once a part of the others has been sent: in some tries, or in each."""

    def column(tries: int) -> Column:
        def checked(number: int) -> str:
            context = TaskContext.get()
            assert context is not None
            if number == ROWS - 1 and context.attemptNumber() < tries:
                with redis.Redis.from_url(broker_url) as plain:
                    wait_until(lambda: plain.llen(WAIT) > 0, 60.0, "jobs of this task")
                raise RuntimeError("this task dies here")
            # Long, as Spark hands rows over by the 64 kB.
            return f'{{"n":{number},"text":"{"x" * 4_000}"}}'

        return F.udf(checked, "string", useArrow=False)("id")

    return column


@pytest.fixture
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    """Rows in one task, that are handed to the sink by twenty."""
    before = spark.conf.get(AT_ONCE)
    spark.conf.set(AT_ONCE, "20")
    yield spark.range(ROWS, numPartitions=1)
    spark.conf.set(AT_ONCE, str(before))


def write_by_enqueue(rows: DataFrame, data: Column, url: str) -> EnqueueReport:
    return enqueue(rows, "default", name="double", data=data, write_id="w1", url=url)


def write_by_format(rows: DataFrame, data: Column, url: str) -> None:
    register(rows.sparkSession)
    jobs = rows.select(F.lit("double").alias("name"), data.alias("data"))
    writer = jobs.write.format("bulltask").option("url", url).option("queue", "default").option("writeId", "w1")
    writer.mode("append").save()


@contextmanager
def harness_of(broker_url: str, tmp_path: Path, record: Any) -> Iterator[WorkerHarness]:
    made = WorkerHarness(broker_url, tmp_path, record)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("write", [write_by_enqueue, write_by_format])
def test_a_task_that_dies_after_a_part_was_sent_runs_again_and_adds_the_rest(
    write: Callable[..., Any], rows: DataFrame, fail: Fail, broker_url: str, redis_client: redis.Redis
) -> None:
    report = write(rows, fail(1), broker_url)
    jobs = redis_client.lrange(WAIT, 0, -1)
    assert len(set(jobs)) == len(jobs) == ROWS
    if report is not None:
        assert (report.rows, report.added + report.duplicated) == (ROWS, ROWS)
        assert report.duplicated >= 20


@pytest.mark.parametrize("write", [write_by_enqueue, write_by_format])
def test_when_all_attempts_fail_the_same_write_adds_what_is_missing(
    write: Callable[..., Any], rows: DataFrame, fail: Fail, broker_url: str, redis_client: redis.Redis
) -> None:
    with pytest.raises(Exception, match="this task dies here") as told:
        write(rows, fail(2), broker_url)
    sent = redis_client.lrange(WAIT, 0, -1)
    assert 20 <= len(sent) < ROWS
    if write is write_by_enqueue:
        assert "The write w1 has failed; the jobs that it has sent stay" in told.value.__notes__[0]
    report = write(rows, fail(0), broker_url)
    jobs = redis_client.lrange(WAIT, 0, -1)
    assert len(set(jobs)) == len(jobs) == ROWS
    assert report is None or report.duplicated == len(sent)


def test_an_invalid_row_fails_the_write_and_names_the_write_id(
    rows: DataFrame, broker_url: str, redis_client: redis.Redis
) -> None:
    bad = F.when(F.col("id") == ROWS - 1, "{").otherwise(F.to_json(F.struct("id")))
    with pytest.raises(Exception, match=r"not valid JSON(?s:.*)BULLTASK_WRITE_ABORTED\] The write w1 has failed"):
        write_by_format(rows, bad, broker_url)
    assert 20 <= redis_client.llen(WAIT) < ROWS


def test_jobs_that_have_run_and_were_removed_do_not_run_again(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis, tmp_path: Path, record_property: Any
) -> None:
    rows, runs = spark.range(50), 0
    with harness_of(broker_url, tmp_path, record_property) as harness:
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
