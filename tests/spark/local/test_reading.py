"""The read functions ``jobs()``, ``events()``, ``counts()`` and ``stream_events()`` with a real session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import bulltask.spark
from bulltask.errors import ConfigError
from bulltask.queue import Queue
from tests.support.queue_contents import BASE, add, ids_in_redis

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]


@pytest.fixture
def mail(broker_url: str) -> Iterator[Queue]:
    """The queue ``mail``: 30 jobs are waiting, 20 are delayed."""
    with Queue("mail", broker_url) as queue:
        add(queue, 30)
        add(queue, 20, delay=60)
        yield queue


def test_jobs_events_and_counts_are_read_by_functions(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis
) -> None:
    jobs = bulltask.spark.jobs(spark, ["mail"], ["waiting", "delayed"], columns=["state", "id"], url=broker_url)
    rows = [tuple(row) for row in jobs.collect()]
    assert jobs.columns == ["state", "id"]
    assert set(rows) == {(state, job) for state in ("wait", "delayed") for job in ids_in_redis(redis_client, state)}
    assert len(rows) == 50
    events = bulltask.spark.events(spark, columns=["event_id", "event"], url=broker_url)
    entries: Any = redis_client.xrange(f"{BASE}events")
    assert {row.event_id for row in events.collect()} == {entry_id for entry_id, _ in entries}
    counts = bulltask.spark.counts(spark, "mail", url=broker_url).where("jobs > 0")
    assert {row.state: row.jobs for row in counts.collect()} == {"wait": 30, "delayed": 20}


def test_a_query_fails_on_a_loss_or_returns_a_gap_row(
    spark: SparkSession, broker_url: str, mail: Queue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    def run(on_loss: Any) -> None:
        events = bulltask.spark.stream_events(
            spark, "mail", on_loss=on_loss, max_events_per_trigger=None, url=broker_url
        )
        writer = events.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(tmp_path / "events")).awaitTermination()

    run("fail")
    before = redis_client.xlen(f"{BASE}events")
    add(mail, 10)
    redis_client.xtrim(f"{BASE}events", 5, approximate=False)
    with pytest.raises(PySparkException, match=r"\[BULLTASK_EVENTS_LOST\] queue=\{mail\} .* 15 events lost"):
        run("fail")
    run("gap")
    kinds = spark.read.parquet(str(tmp_path / "events")).groupBy("event").count().collect()
    written = {row["event"]: row["count"] for row in kinds}
    assert written.pop("bulltask.gap") == 1
    assert sum(written.values()) == before + 5


def test_invalid_arguments_are_rejected_before_anything_is_read(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="table jobs has no column 'nmae'; did you mean 'name'"):
        bulltask.spark.jobs(spark, columns=["nmae"])
    with pytest.raises(TypeError, match=r"unknown option 'uri'; known options are .*; did you mean 'url'\?"):
        bulltask.spark.events(spark, uri="redis://x")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="on_loss must be"):
        bulltask.spark.stream_events(spark, on_loss="ignore")  # type: ignore[arg-type]
