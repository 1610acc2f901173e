"""Queues with different traffic share a watermark: if they are read aligned by time, none of their events are late."""

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
from pyspark.sql import functions as F

from bulltask.spark import stream_events

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

START = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MINUTES = 30
EVENTS = {"busy": 36_000, "quiet": 3_600}

Counts = dict[tuple[str, datetime], int]
"""The number of a queue's events in a minute."""

CountMinutes = Callable[..., tuple[Counts, int]]


@pytest.fixture
def added(redis_client: redis.Redis) -> Counts:
    """Add the events of half an hour."""
    rng, start_ms = random.Random(7), int(START.timestamp() * 1000)
    counts = Counter[tuple[str, datetime]]()
    for queue, count in EVENTS.items():
        times = sorted(rng.sample(range(start_ms, start_ms + MINUTES * 60_000), count))
        with redis_client.pipeline(transaction=False) as pipe:
            for ms in times:
                pipe.xadd(f"bull:{{{queue}}}:events", {"event": "stalled", "jobId": "1"}, id=f"{ms}-0")
            pipe.execute()
        counts.update((queue, START + (ms - start_ms) // 60_000 * MINUTE) for ms in times)
    return dict(counts)


@pytest.fixture
def count_minutes(spark: SparkSession, broker_url: str, tmp_path: Path) -> CountMinutes:
    """Count the events per minute with a watermark of one minute; return them and the number of batches."""

    def run(name: str, **options: Any) -> tuple[Counts, int]:
        events = stream_events(spark, list(EVENTS), url=broker_url, **options)
        minutes = events.withWatermark("event_at", "1 minute").groupBy(F.window("event_at", "1 minute"), "queue")
        counts = minutes.count().select("queue", F.unix_seconds("window.start").alias("since"), "count")
        writer = counts.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / f"{name}-checkpoint"))
        query = writer.trigger(availableNow=True).start(str(tmp_path / name))
        query.awaitTermination()
        rows = spark.read.parquet(str(tmp_path / name)).collect()
        emitted = {(row.queue, datetime.fromtimestamp(row.since, UTC)): row["count"] for row in rows}
        assert len(emitted) == len(rows), "a minute was emitted twice"
        return emitted, sum(bool(progress.numInputRows) for progress in query.recentProgress)

    return run


@pytest.mark.extended
def test_alignment_prevents_late_events_of_slower_queues(added: Counts, count_minutes: CountMinutes) -> None:
    single, single_batches = count_minutes("single", max_events_per_trigger=None)
    aligned, aligned_batches = count_minutes("aligned", max_events_per_trigger=10_000)
    unaligned, _ = count_minutes("unaligned", max_events_per_trigger=10_000, align=False)

    assert (single_batches, aligned_batches) == (1, 5)
    assert aligned == single
    # The last event is in the last minute, so the watermark has passed the end of all minutes except the last two.
    assert aligned == {key: count for key, count in added.items() if key[1] < START + (MINUTES - 2) * MINUTE}
    assert sum(unaligned.values()) < sum(aligned.values()) * 0.6
