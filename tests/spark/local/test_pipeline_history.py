"""A lake over a gap: real jobs, the stream, a backfill, a replay; every job that is done is there once."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from bulltask.errors import LakeError
from bulltask.lake.tables import EVENTS, JOBS
from bulltask.queue import Queue
from bulltask.spark import Pipeline
from bulltask.spark.tables.lake_tables import latest, read_table
from bulltask.spark.tables.rebuild import build_silver
from tests.support.lake import LakeBuilder, at
from tests.support.manual_worker import ManualWorker

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(900)]

DAY = timedelta(days=1)


@pytest.fixture
def pipeline(spark: SparkSession, broker_url: str, tmp_path: Path) -> Pipeline:
    return Pipeline(spark, tmp_path / "lake", url=broker_url)


def feed(pipeline: Pipeline) -> None:
    pipeline.run(available_now=True).awaitTermination()


def known(pipeline: Pipeline) -> list[tuple[str, str, str]]:
    rows = latest(read_table(pipeline.spark, pipeline.layout, JOBS), JOBS).collect()
    return sorted((row["job_id"], row["state"], row["source"]) for row in rows)


def live_over_a_gap(pipeline: Pipeline, queue: Queue, manual_worker: ManualWorker, client: redis.Redis) -> None:
    """Lost: the end of a2, all of b1 and b3, the beginning of b2; c1 comes after the gap."""

    def add(*ids: str) -> None:
        for job_id in ids:
            queue.add("send", job_id, job_id=job_id)

    add("a1", "a2")
    manual_worker.complete()
    feed(pipeline)
    add("b1", "b2", "b3")
    assert [manual_worker.complete(), manual_worker.complete(), manual_worker.acquire()] == ["a2", "b1", "b2"]
    assert manual_worker.fail("no") == "b3"
    client.xtrim("bull:{mail}:events", maxlen=0, approximate=False)
    manual_worker.finish("b2")
    add("c1", "late")
    manual_worker.complete()
    feed(pipeline)


def test_a_backfill_writes_each_finished_job_once_and_later_events_agree(
    pipeline: Pipeline, queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    live_over_a_gap(pipeline, queue, manual_worker, redis_client)
    told = [("a1", "completed", "events"), ("b2", "completed", "events"), ("c1", "completed", "events")]
    assert known(pipeline) == told
    now = datetime.now(UTC)
    assert pipeline.backfill(since=now - DAY, until=now + DAY).jobs == 3
    hidden = [("a2", "completed", "snapshot"), ("b1", "completed", "snapshot"), ("b3", "failed", "snapshot")]
    assert known(pipeline) == sorted(told + hidden)
    assert manual_worker.complete() == "late"
    feed(pipeline)
    every = sorted([*told, *hidden, ("late", "completed", "events")])
    assert known(pipeline) == every
    in_redis = {
        str(one) for state in ("completed", "failed") for one in redis_client.zrange(f"bull:{{mail}}:{state}", 0, -1)
    }
    assert {job_id for job_id, _, _ in every} == in_redis
    lost = read_table(pipeline.spark, pipeline.layout, JOBS).where("job_id IN ('a1', 'late')").select("ingest_id")
    for row in lost.collect():
        pipeline.layout.remove(row["ingest_id"], [JOBS])
    assert len(known(pipeline)) < len(every)
    days = pipeline.layout.days(EVENTS)
    build_silver(pipeline.spark, pipeline.layout, days, max_open=DAY)
    assert known(pipeline) == every
    report = pipeline.compact("silver.jobs", before=(now + 2 * DAY).date())
    assert (report.files_after <= 1, known(pipeline)) == (True, every)
    [gap] = pipeline.gaps().collect()
    assert (gap["queue"], gap["reason"], gap["repaired_rows"]) == ("mail", "trimmed", 3)
    status = pipeline.status()
    assert (status.lost, status.writer_pid, status.queues[0].lag_events) == (gap["lost"], None, 0)
    shown = pipeline.replay("state = 'failed'")
    assert (shown.selected, shown.ready, shown.added) == (1, 1, 0)
    assert pipeline.snapshot(["failed"]) == 1


def test_silver_whose_events_have_expired_is_not_rebuilt(spark: SparkSession, tmp_path: Path) -> None:
    lake = LakeBuilder(tmp_path)
    lake.events([{"event_id": f"{int(at('2026-11-20 10:00').timestamp() * 1000)}-0", "event": "added", "job_id": "1"}])
    lake.jobs([{"job_id": "1", "state": "completed", "finished_at": at("2026-11-18 10:00")}])
    with pytest.raises(LakeError, match=r"2026-11-20 cannot be rebuilt.*begins with 2026-11-20"):
        build_silver(spark, lake.layout, [date(2026, 11, 20)], max_open=DAY)
    assert lake.layout.days(JOBS) == [date(2026, 11, 18)]
