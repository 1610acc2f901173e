"""``task.map_dataframe`` calls a task for each row of a DataFrame and returns the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bulltask import App, Context
from bulltask.errors import ConfigError
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

TASKS = """
import bulltask

@app.task(name="half", bind=True, queue="sums")
def half(self, value, by=2):
    if value < 0:
        raise bulltask.PermanentError(f"not {value}")
    return {"half": value / by}
"""


@pytest.fixture
def half(app: App) -> Any:
    """The task as declared in the process that calls it."""

    @app.task(name="half", bind=True, queue="sums", max_retries=6, retry_backoff=3, priority=7)
    def function(self: Context, value: float, by: int = 2) -> Any:
        raise AssertionError("a worker runs it")

    return function


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Any) -> Iterator[WorkerHarness]:
    started = WorkerHarness(broker_url, tmp_path, record_property)
    yield started
    started.close()


def queued(redis_client: redis.Redis, queue: str = "sums") -> list[str]:
    return redis_client.zrange(f"bull:{{{queue}}}:prioritized", 0, -1)  # type: ignore[return-value]


def test_each_row_is_returned_with_the_result_of_its_job(
    spark: SparkSession, half: Any, harness: WorkerHarness, redis_client: redis.Redis
) -> None:
    """The rows contain random values, which Spark must not compute again."""
    harness.worker(TASKS, options=["-Q", "sums"], settings={"log_level": "ERROR"})
    rows = spark.range(300, numPartitions=3).select(
        F.col("id"), F.when(F.col("id") % 50 == 49, -1.0).otherwise(F.rand()).alias("x"), F.lit("kept").alias("note")
    )
    mapped = half.map_dataframe(rows, {"value": "x", "by": F.lit(4)}, wait=120, poll=0.2, result_prefix="job_")
    assert mapped.columns == ["id", "x", "note", "job_id", "job_state", "job_return_value", "job_failed_reason"]
    for results in (mapped.collect(), mapped.where("id % 2 = 1").collect()):
        good = [row for row in results if row["x"] >= 0]
        assert all(json.loads(row["job_return_value"]) == {"half": row["x"] / 4} for row in good)
        assert {row["job_state"] for row in good} == {"completed"}
        bad = [row for row in results if row["x"] < 0]
        assert {(row["job_state"], row["job_failed_reason"]) for row in bad} == {("failed", "not -1.0")}
        # These six rows have the same arguments, so they share one job.
        assert len({row["job_id"] for row in bad}) == 1
        assert len(good) + len(bad) == len(results)
    assert mapped.count() == 300
    assert redis_client.zcard("bull:{sums}:completed") == 294


def test_map_dataframe_sends_the_same_jobs_as_delay(
    spark: SparkSession, half: Any, redis_client: redis.Redis, app: App
) -> None:
    sent = half.delay(1.5)
    mapped = half.map_dataframe(spark.createDataFrame([(1.5,)], "value double"), wait=0)
    [row] = mapped.collect()
    assert (row["state"], row["return_value"], row["failed_reason"]) == ("unfinished", None, None)
    jobs: Any = [redis_client.hgetall(f"bull:{{sums}}:{job_id}") for job_id in (sent.id, row["id"])]
    for job in jobs:
        del job["timestamp"]
        job["opts"] = {name: value for name, value in json.loads(job["opts"]).items() if name != "jobId"}
    assert jobs[0] == jobs[1]
    assert jobs[0]["opts"]["attempts"] == 7


def test_map_dataframe_with_a_write_id_sends_jobs_once(
    spark: SparkSession, half: Any, redis_client: redis.Redis
) -> None:
    rows = spark.createDataFrame([(1.0,), (1.0,), (2.0,)], "value double")

    def ids(**options: Any) -> list[str]:
        return [row["id"] for row in half.map_dataframe(rows, wait=0, **options).collect()]

    first = ids(write_id="w1")
    assert ids(write_id="w1") == first
    assert len(set(first)) == 2 == len(queued(redis_client))
    assert not set(first) & set(ids(options={"queue": "other"}))
    assert len(set(queued(redis_client, "other"))) == 2
    kept = ids(write_id="w1", on_duplicate_rows="keep")
    assert len(set(kept)) == 3
    with pytest.raises(ConfigError, match=r"DUPLICATE_ROWS.*2 rows have the same"):
        ids(on_duplicate_rows="error")


@pytest.mark.parametrize(
    ("columns", "options", "error", "message"),
    [
        (["value", "nothing"], {}, TypeError, r"columns value, nothing: .*half\(value.*'nothing'"),
        (["by"], {}, TypeError, r"missing a required argument: 'value'"),
        ("value", {}, ConfigError, r"\['value'\], not 'value'"),
        (["value"], {"timeout": 5}, TypeError, "unknown option 'timeout'; known options are chunk_size"),
        (["value"], {"options": {"job_id": "a"}}, ConfigError, "job_id applies to a single job"),
        (["value"], {"options": {"countdowm": 1}}, TypeError, "countdowm"),
        (["value"], {"options": {"remove_on_complete": True}}, ConfigError, "half keeps no results"),
        (["value"], {"options": {"remove_on_complete": 0}}, ConfigError, "half keeps no results"),
        (["value"], {"write_id": "a b"}, ConfigError, "write id"),
        (["value"], {"chunk_size": 0}, ConfigError, "chunk_size must be"),
        (["value"], {"wait": -1}, ConfigError, "wait must be"),
        (["value"], {"on_duplicate_rows": "drop"}, ConfigError, "on_duplicate_rows must be"),
        (["value"], {"result_prefix": "x_"}, ConfigError, "COLUMN_TAKEN.*'x_state'"),
    ],
)
def test_invalid_columns_and_options_fail_before_anything_is_sent(
    spark: SparkSession, half: Any, redis_client: redis.Redis, *, columns: Any, options: Any, error: Any, message: str
) -> None:
    rows = spark.createDataFrame([(1.0, 2, 3, "a")], "value double, by int, nothing int, x_state string")
    with pytest.raises(error, match=message):
        half.map_dataframe(rows, columns, **options)
    assert redis_client.keys("*") == []


def test_rows_that_differ_only_in_a_decimals_digits_have_their_own_jobs(
    spark: SparkSession, app: App, redis_client: redis.Redis
) -> None:
    @app.task(name="pay")
    def pay(amount: Decimal, at: datetime) -> None: ...

    rows = spark.createDataFrame(
        [("9999999999999999.98", ".000001"), ("9999999999999999.99", ".000001"), ("9999999999999999.99", ".000002")],
        "amount string, at string",
    ).select(
        F.col("amount").cast("decimal(18,2)").alias("amount"),
        F.concat(F.lit("2026-11-30 10:00:00"), "at").cast("timestamp").alias("at"),
    )
    mapped = pay.map_dataframe(rows, wait=0)

    for row in mapped.collect():
        stored = json.loads(str(redis_client.hget(f"bull:{{default}}:{row['id']}", "data")))
        assert stored == {"amount": str(row["amount"]), "at": f"2026-11-30T10:00:00.00000{row['at'].microsecond}Z"}
    assert len({row["id"] for row in mapped.collect()}) == 3


def test_invalid_rows_are_returned_as_rejected(spark: SparkSession, half: Any, redis_client: redis.Redis) -> None:
    rows = spark.createDataFrame([(1.0,), (float("inf"),)], "value double")
    mapped = half.map_dataframe(rows, wait=0, on_invalid_rows="collect", result_prefix="job_")

    sent, rejected = sorted(mapped.collect(), key=lambda row: row["value"])
    assert (sent["job_state"], rejected["job_state"], rejected["job_id"]) == ("unfinished", "rejected", None)
    assert "JSON does not support NaN and Infinity" in rejected["job_failed_reason"]
    assert queued(redis_client) == [sent["job_id"]]


def test_a_task_without_parameters_is_called_for_each_row(
    spark: SparkSession, app: App, redis_client: redis.Redis
) -> None:
    @app.task(name="tick")
    def tick() -> None: ...

    mapped = tick.map_dataframe(spark.range(2).toDF("n"), [], wait=0, on_duplicate_rows="keep")
    assert len({row["id"] for row in mapped.collect()}) == 2
    assert {redis_client.hget(f"bull:{{default}}:{row['id']}", "data") for row in mapped.collect()} == {"{}"}


def test_the_error_for_an_invalid_row_contains_the_write_id(spark: SparkSession, half: Any) -> None:
    rows = spark.createDataFrame([(2**60,)], "value long")
    with pytest.raises(Exception, match=r"beyond .*2\^53-1(?s:.*)BULLTASK_WRITE_ABORTED.* The write w1 ") as caught:
        half.map_dataframe(rows, write_id="w1")
    assert "The write w1 has failed" in caught.value.__notes__[0]
