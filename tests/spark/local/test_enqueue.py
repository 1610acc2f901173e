"""Jobs from a DataFrame are sent once, run by a worker and gathered, with a real session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bulltask.errors import ConfigError
from bulltask.spark import EnqueueResult, enqueue, gather
from bulltask.spark.connector import register
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

WAIT = "bull:{default}:wait"
TASKS = """
@app.task(name="double")
def double(n):
    if n % 100 == 99:
        raise bulltask.PermanentError(f"not {n}")
    return 2 * n

import bulltask
"""


@pytest.fixture
def send(spark: SparkSession, broker_url: str) -> Callable[..., EnqueueResult]:
    """Return a function that enqueues ``count`` numbers."""

    def send_numbers(count: int, **options: Any) -> EnqueueResult:
        frame = spark.range(count, numPartitions=2).withColumnRenamed("id", "n")
        return enqueue(frame, "default", name="double", data=["n"], url=broker_url, **options)

    return send_numbers


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Any) -> Iterator[WorkerHarness]:
    started = WorkerHarness(broker_url, tmp_path, record_property)
    yield started
    started.close()


def states(gathered: DataFrame) -> dict[str, int]:
    return {row["state"]: row["count"] for row in gathered.groupBy("state").count().collect()}


def test_1000_jobs_are_sent_run_by_a_worker_and_gathered(
    send: Callable[..., EnqueueResult], spark: SparkSession, harness: WorkerHarness, broker_url: str
) -> None:
    report = send(1_000)
    assert (report.rows, report.added, report.duplicates, report.partitions) == (1_000, 1_000, 0, 2)
    assert states(gather(report, "default", url=broker_url)) == {"unfinished": 1_000}
    harness.worker(TASKS, settings={"log_level": "ERROR"})
    rows = gather(report, "default", wait=120, poll=0.2, url=broker_url).collect()
    results = sorted(int(row["return_value"]) for row in rows if row["state"] == "completed")
    assert results == [2 * n for n in range(1_000) if n % 100 != 99]
    assert {row["failed_reason"] for row in rows if row["state"] == "failed"} == {
        f"not {n}" for n in range(99, 1_000, 100)
    }
    assert len({row["id"] for row in rows}) == len(rows) == 1_000
    assert all(row["finished_at"] is not None for row in rows)


def test_sparks_jobs_have_a_description(send: Callable[..., EnqueueResult], spark: SparkSession) -> None:
    send(10, write_id="described")
    context = spark.sparkContext
    found: Any = context._jsc.sc().statusStore().jobsList(None)
    descriptions = {str(found.apply(n).description()) for n in range(found.size())}
    assert "Some(bulltask: enqueue rows in queue default, write described)" in descriptions
    assert context.getLocalProperty("spark.job.description") is None


def test_a_retried_write_adds_nothing_even_if_its_jobs_were_removed(
    send: Callable[..., EnqueueResult], redis_client: redis.Redis
) -> None:
    assert send(100, write_id="nightly").added == 100
    redis_client.delete(*redis_client.keys("bull:*"))
    repeated = send(100, write_id="nightly")
    assert (repeated.rows, repeated.added, repeated.duplicates) == (100, 0, 100)
    assert not redis_client.exists(WAIT)
    assert send(120, write_id="nightly").added == 20


def test_gather_returns_a_row_for_every_id_even_without_a_job(spark: SparkSession, broker_url: str) -> None:
    ids = spark.createDataFrame([("gone",), ("gone",), (None,)], "id string")
    rows = gather(ids, "default", wait=None, url=broker_url).collect()
    assert sorted((str(row["id"]), row["state"]) for row in rows) == [
        ("None", "missing"), ("gone", "missing"), ("gone", "missing"),
    ]  # fmt: skip


def test_equal_rows_are_collapsed_kept_or_rejected(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis
) -> None:
    frame = spark.range(60).select(F.when(F.col("id") < 10, 1).otherwise(F.col("id")).alias("n")).repartition(4)

    def send(**options: Any) -> EnqueueResult:
        return enqueue(frame, "default", name="double", data=["n"], url=broker_url, **options)

    with pytest.raises(ConfigError, match=r"DUPLICATE_ROWS.*10 rows have the same name 'double', data '{\"n\":1}'"):
        send(on_duplicate_rows="error")
    assert not redis_client.exists(WAIT)
    assert (report := send(write_id="collapsed")).added == 51
    assert report.duplicates == 9
    for added in (60, 0):
        assert send(write_id="kept", on_duplicate_rows="keep").added == added


def sent_data(redis_client: redis.Redis) -> list[str]:
    """Return the data of the waiting jobs, sorted."""
    waiting: Any = redis_client.lrange(WAIT, 0, -1)
    return sorted(str(redis_client.hget(f"bull:{{default}}:{id_}", "data")) for id_ in waiting)


EXACT: list[tuple[Any, Any, Any]] = [
    ("9999999999999999.98", "2026-11-30 10:00:00.000001", [1.5]),
    ("9999999999999999.99", "2026-11-30 10:00:00.000001", [1.5]),
    ("9999999999999999.99", "2026-11-30 10:00:00.000002", [1.5]),
    (None, None, None),
]


def test_decimals_and_microseconds_are_sent_exactly(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis
) -> None:
    text = spark.createDataFrame(EXACT, "amount string, at string, xs array<double>")
    amount, at = F.col("amount").cast("decimal(18,2)"), F.col("at").cast("timestamp")
    frame = text.select(
        F.struct(amount.alias("amount"), F.array(amount).alias("list")).alias("order"),
        F.create_map(F.lit("sum"), amount).alias("sums"),
        at.alias("at"),
        at.cast("timestamp_ntz").alias("local"),
        "xs",
    )
    result = enqueue(frame, "default", name="pay", data=frame.columns, on_duplicate_rows="error", url=broker_url)

    assert (result.rows, result.added) == (4, 4)
    jobs = [json.loads(data) for data in sent_data(redis_client)]
    assert sorted(jobs[:3], key=str) == [
        {
            "order": {"amount": amount, "list": [amount]},
            "sums": {"sum": amount},
            "at": at.replace(" ", "T") + "Z",
            "local": at.replace(" ", "T"),
            "xs": xs,
        }
        for amount, at, xs in EXACT[:3]
    ]
    nothing = {"order": {"amount": None, "list": [None]}, "sums": {"sum": None}, "at": None, "local": None, "xs": None}
    assert jobs[3] == nothing


def test_nan_and_infinity_are_refused_or_sent_as_null(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis
) -> None:
    """A text ``NaN`` is only a text."""
    frame = spark.sql(
        "SELECT named_struct('x', CAST(x AS float)) AS point, array(1D, CAST(x AS double)) AS xs, 'NaN' AS text "
        "FROM VALUES ('NaN'), ('-Infinity'), (NULL), ('2.5') AS t(x)"
    ).coalesce(1)

    def send(**options: Any) -> EnqueueResult:
        return enqueue(frame, "default", name="double", data=frame.columns, url=broker_url, **options)

    with pytest.raises(Exception, match=r"does not support NaN and Infinity; with on_nan='null'.*\"x\":\"NaN\""):
        send()
    assert not redis_client.exists(WAIT)
    with pytest.raises(ConfigError, match="on_nan must be one of error, null"):
        send(on_nan="drop")
    assert send(on_nan="null").added == 2
    assert sent_data(redis_client) == [
        '{"point":{"x":2.5},"xs":[1.0,2.5],"text":"NaN"}', '{"point":{"x":null},"xs":[1.0,null],"text":"NaN"}',
    ]  # fmt: skip


def test_invalid_rows_are_collected_with_their_reasons(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis
) -> None:
    """They are the user's rows, which can be corrected and sent with the same write id."""
    rows = [(1, "double", 0.5), (2, None, 2.5), (3, "double", float("nan")), (4, "double", 1.5)]
    frame = spark.createDataFrame(rows, "key int, task string, n double").coalesce(1)

    def send(frame: DataFrame, **options: Any) -> EnqueueResult:
        options |= {"name": F.col("task"), "data": ["n"], "url": broker_url, "write_id": "w1"}
        return enqueue(frame, "default", **options)

    result = send(frame, on_invalid_rows="collect")
    assert (result.rows, result.added, result.duplicates, result.rejected) == (4, 2, 0, 2)
    assert result.rejected_rows is not None
    assert result.rejected_rows.columns == ["key", "task", "n", "rejected_reason"]
    rejected = {row["key"]: row["rejected_reason"] for row in result.rejected_rows.collect()}
    assert rejected.keys() == {2, 3}
    assert "[BULLTASK_ROW_INCOMPLETE] a row has no name" in rejected[2]
    assert "JSON does not support NaN" in rejected[3]

    corrected = result.rejected_rows.drop("rejected_reason").fillna({"task": "double"})
    again = send(corrected, on_nan="null")
    assert (again.added, again.rejected, again.rejected_rows) == (2, 0, None)
    assert redis_client.llen(WAIT) == 4


def test_a_write_with_format_requires_append_mode(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis
) -> None:
    register(spark)
    frame = spark.range(50).select(
        F.lit("double").alias("name"), F.to_json(F.struct(F.col("id").alias("n"))).alias("data")
    )
    writer = frame.write.format("bulltask").option("url", broker_url).option("queue", "default")
    with pytest.raises(Exception, match="BULLTASK_OVERWRITE"):
        writer.mode("overwrite").save()
    writer.option("writeId", "one").mode("append").save()
    writer.option("writeId", "one").mode("append").save()
    job_ids = redis_client.lrange(WAIT, 0, -1)
    assert len(job_ids) == 50
    assert json.loads(str(redis_client.hget(f"bull:{{default}}:{job_ids[0]!s}", "data"))).keys() == {"n"}


def test_a_batch_that_a_streaming_query_runs_again_adds_no_jobs(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    register(spark)
    (tmp_path / "in").mkdir()

    def run() -> None:
        rows = spark.readStream.schema("name string, data string").json(str(tmp_path / "in"))
        writer = rows.writeStream.format("bulltask").option("url", broker_url).option("queue", "default")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        writer.start().awaitTermination()

    (tmp_path / "in" / "1.json").write_text('{"name":"double","data":"{\\"n\\":1}"}\n')
    run()
    assert redis_client.llen(WAIT) == 1
    redis_client.delete(*redis_client.keys("bull:*"))
    (tmp_path / "checkpoint" / "commits" / "0").unlink()
    (tmp_path / "checkpoint" / "commits" / ".0.crc").unlink(missing_ok=True)
    run()
    assert not redis_client.exists(WAIT)
    (tmp_path / "in" / "2.json").write_text('{"name":"double","data":"{\\"n\\":1}"}\n')
    run()
    assert redis_client.llen(WAIT) == 1
