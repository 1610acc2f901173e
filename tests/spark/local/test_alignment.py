"""Queues of unlike traffic under one watermark: read in step by time, none of their events comes too late."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from bulltask.spark import stream_events

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

BEGIN = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MINUTES = 30
EVENTS = {"often": 36_000, "seldom": 3_600}
"""Ten to one."""

Counts = dict[tuple[str, datetime], int]
"""Events of a queue in a minute."""

Emitted = Callable[..., tuple[Counts, int]]


@pytest.fixture
def added(redis_client: redis.Redis) -> Counts:
    """Add the events of half an hour."""
    chance, begin_ms = random.Random(7), int(BEGIN.timestamp() * 1000)
    found = Counter[tuple[str, datetime]]()
    for queue, count in EVENTS.items():
        times = sorted(chance.sample(range(begin_ms, begin_ms + MINUTES * 60_000), count))
        with redis_client.pipeline(transaction=False) as pipe:
            for ms in times:
                pipe.xadd(f"bull:{{{queue}}}:events", {"event": "stalled", "jobId": "1"}, id=f"{ms}-0")
            pipe.execute()
        found.update((queue, BEGIN + (ms - begin_ms) // 60_000 * MINUTE) for ms in times)
    return dict(found)


@pytest.fixture
def emitted(spark: SparkSession, broker_url: str, tmp_path: Path) -> Emitted:
    """Count each minute's events in a stream with a watermark of one minute; also return the number of batches."""

    def run(name: str, **options: Any) -> tuple[Counts, int]:
        events = stream_events(spark, list(EVENTS), url=broker_url, **options)
        minutes = events.withWatermark("event_at", "1 minute").groupBy(fn.window("event_at", "1 minute"), "queue")
        counts = minutes.count().select("queue", fn.unix_seconds("window.start").alias("began"), "count")
        stream = counts.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / f"{name}-checkpoint"))
        query = stream.trigger(availableNow=True).start(str(tmp_path / name))
        query.awaitTermination()
        rows = spark.read.parquet(str(tmp_path / name)).collect()
        found = {(row.queue, datetime.fromtimestamp(row.began, UTC)): row["count"] for row in rows}
        assert len(found) == len(rows), "each minute is closed once"
        return found, sum(bool(progress.numInputRows) for progress in query.recentProgress)

    return run


def test_minutes_of_many_batches_are_those_of_one_and_without_alignment_many_events_come_too_late(
    added: Counts, emitted: Emitted
) -> None:
    at_once, one = emitted("at-once", max_events_per_trigger=None)
    in_step, several = emitted("in-step", max_events_per_trigger=10_000)
    apart, _ = emitted("apart", max_events_per_trigger=10_000, align=False)

    assert (one, several) == (1, 5)
    assert in_step == at_once
    # The last event is in the last minute, so the watermark has passed the end of the last but two.
    assert in_step == {key: count for key, count in added.items() if key[1] < BEGIN + (MINUTES - 2) * MINUTE}
    assert sum(apart.values()) < sum(in_step.values()) * 0.6
