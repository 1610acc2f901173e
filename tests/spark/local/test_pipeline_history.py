"""A lake with a gap, filled by the pipeline, a backfill and a replay, contains every finished job once."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from bulltask.errors import LakeError
from bulltask.lake.maintenance import maintain
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import batch_prefix
from bulltask.lake.tables import EVENTS, JOBS
from bulltask.queue import Queue
from bulltask.spark import Pipeline
from bulltask.spark.lake_tables import latest, read_table
from bulltask.spark.repair import build_silver
from tests.support.lake import LakeBuilder, at
from tests.support.manual_worker import ManualWorker

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(900)]

DAY = timedelta(days=1)


@pytest.fixture
def pipeline(spark: SparkSession, broker_url: str, tmp_path: Path) -> Pipeline:
    return Pipeline(spark, tmp_path / "lake", url=broker_url)


def feed(pipeline: Pipeline) -> None:
    pipeline.run(available_now=True).awaitTermination()


def jobs_in_lake(pipeline: Pipeline) -> list[tuple[str, str, str]]:
    rows = latest(read_table(pipeline.spark, pipeline.lake, JOBS), JOBS).collect()
    return sorted((row["job_id"], row["state"], row["source"]) for row in rows)


def run_jobs_over_a_gap(pipeline: Pipeline, queue: Queue, manual_worker: ManualWorker, client: redis.Redis) -> None:
    """Lose the last events of a2, all of b1 and b3, and the first events of b2; c1 comes after the gap."""

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


def test_backfill_and_pipeline_write_each_finished_job_once(
    pipeline: Pipeline, queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    run_jobs_over_a_gap(pipeline, queue, manual_worker, redis_client)
    from_events = [("a1", "completed", "events"), ("b2", "completed", "events"), ("c1", "completed", "events")]
    assert jobs_in_lake(pipeline) == from_events
    now = datetime.now(UTC)
    assert pipeline.backfill(since=now - DAY, until=now + DAY).jobs == 3
    from_snapshot = [("a2", "completed", "snapshot"), ("b1", "completed", "snapshot"), ("b3", "failed", "snapshot")]
    assert jobs_in_lake(pipeline) == sorted(from_events + from_snapshot)
    assert manual_worker.complete() == "late"
    feed(pipeline)
    finished = sorted([*from_events, *from_snapshot, ("late", "completed", "events")])
    assert jobs_in_lake(pipeline) == finished
    in_redis = {
        str(job_id)
        for state in ("completed", "failed")
        for job_id in redis_client.zrange(f"bull:{{mail}}:{state}", 0, -1)
    }
    assert {job_id for job_id, _, _ in finished} == in_redis
    damaged = pipeline.lake.open(JOBS)
    assert damaged is not None
    first = [file for file in damaged.files() if f"/{batch_prefix(1)}-" in file.path]
    pipeline.lake.commit(JOBS, [], replaced=first, since=damaged)
    assert len(jobs_in_lake(pipeline)) < len(finished)
    days = TableReader(pipeline.lake).days(EVENTS)
    build_silver(pipeline.spark, pipeline.lake, days, open_job_timeout=DAY)
    assert jobs_in_lake(pipeline) == finished
    merged = {result.table: result for result in maintain(pipeline.lake, today=(now + 2 * DAY).date())}
    assert (merged["silver.jobs"].files_after, jobs_in_lake(pipeline)) == (merged["silver.jobs"].merged_days, finished)
    [gap] = pipeline.gaps().collect()
    assert (gap["queue"], gap["loss_reason"], gap["backfilled_jobs"]) == ("mail", "trimmed", 3)
    status = pipeline.status()
    assert (status.lost, status.writer_pid, status.queues[0].lag_events) == (gap["lost"], None, 0)
    preview = pipeline.replay("state = 'failed'")
    assert (preview.selected, preview.ready, preview.added) == (1, 1, 0)
    assert pipeline.snapshot(["failed"]) == 1


def test_silver_is_not_rebuilt_for_a_day_with_expired_events(spark: SparkSession, tmp_path: Path) -> None:
    lake = LakeBuilder(tmp_path)
    lake.events([{"event_id": f"{int(at('2026-11-20 10:00').timestamp() * 1000)}-0", "event": "added", "job_id": "1"}])
    lake.jobs([{"job_id": "1", "state": "completed", "finished_at": at("2026-11-18 10:00")}])
    with pytest.raises(LakeError, match=r"2026-11-20 cannot be rebuilt.*begins with 2026-11-20"):
        build_silver(spark, lake.lake, [date(2026, 11, 20)], open_job_timeout=DAY)
    assert TableReader(lake.lake).days(JOBS) == [date(2026, 11, 18)]
