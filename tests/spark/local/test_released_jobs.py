"""The lake counts the attempts that Redis counts, also if workers give jobs back before they start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from bulltask.lake.tables import ATTEMPTS, JOBS, TASK_MINUTE, Table
from bulltask.spark import Pipeline
from bulltask.spark.gold import build_gold
from bulltask.spark.lake_tables import latest, read_table
from bulltask.testing.worker import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(300)]

TASKS = """
import asyncio
import time


@app.task(name="sync")
def sync():
    time.sleep(0.02)


@app.task(name="async")
async def asynchronous():
    await asyncio.sleep(0.001)


@app.task(name="limited", rate_limit="20/s")
def limited():
    pass


@app.task(bind=True, name="flaky", autoretry_for=(ValueError,), max_retries=1, default_retry_delay=0)
def flaky(self):
    if self.request.attempts_started == 1:
        raise ValueError("once")
"""
NAMES = [*["limited"] * 6, *["flaky"] * 10, *["sync", "async"] * 150]


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    started = WorkerHarness(broker_url, tmp_path, record_property)
    yield started
    started.close()


def run_jobs(harness: WorkerHarness) -> dict[str, dict[str, str]]:
    """Run sync and async jobs in one queue, beside some that are throttled or retried; return their hashes."""
    jobs = [harness.app.send_task(name).id for name in NAMES]
    harness.worker(TASKS, children=2)
    wait_until(lambda: harness.redis.zcard(harness.keys.completed) == len(jobs), 120, "all jobs")
    replies: Any = [harness.redis.hgetall(harness.keys.job(job_id)) for job_id in jobs]
    return dict(zip(jobs, replies, strict=True))


def rows_of(pipeline: Pipeline, table: Table) -> dict[str, list[dict[str, Any]]]:
    """Return the latest rows of a silver table, by job."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in latest(read_table(pipeline.spark, pipeline.lake, table), table).collect():
        rows.setdefault(row["job_id"], []).append(row.asDict())
    return rows


@pytest.mark.extended
def test_attempts_in_the_lake_are_those_of_redis_although_workers_release_jobs(
    spark: SparkSession, broker_url: str, tmp_path: Path, harness: WorkerHarness
) -> None:
    first_day = datetime.now(UTC).date()
    hashes = run_jobs(harness)
    pipeline = Pipeline(spark, tmp_path / "lake", url=broker_url)
    pipeline.run(available_now=True).awaitTermination()
    jobs, attempts = rows_of(pipeline, JOBS), rows_of(pipeline, ATTEMPTS)
    assert jobs.keys() == attempts.keys() == hashes.keys()

    released, started, names = 0, 0, set[str]()
    for job_id, stored in hashes.items():
        (job,), ats = jobs[job_id], int(stored["ats"])
        assert job["attempt_count"] == ats, (job, attempts[job_id])
        by_number = {row["attempt"]: row for row in attempts[job_id]}
        releases = [row for row in by_number.values() if row["outcome"] == "released"]
        assert sorted(by_number) == [*range(-len(releases), 0), *range(1, ats + 1)]
        counted = [row for row in by_number.values() if row["outcome"] in {"completed", "failed", "requeued"}]
        assert len(counted) == int(stored["atm"])
        assert all(row["attempt"] < 0 and row["started_at"] is row["run_ms"] is None for row in releases)
        assert job["first_started_at"] == by_number[1]["started_at"] is not None
        released, started = released + len(releases), started + ats
        names.update(job["name"] for _ in releases)
    entries: Any = harness.redis.xrange(harness.keys.events)
    assert released == sum(fields["event"] == "released" for _, fields in entries)
    assert names >= {"sync", "limited"}, "the worker has released nothing"
    harness.report(jobs=len(jobs), attempts=started, released=released)

    build_gold(spark, pipeline.lake, sorted({first_day, datetime.now(UTC).date()}))
    minutes = read_table(spark, pipeline.lake, TASK_MINUTE).collect()
    totals = {name: sum(row[name] for row in minutes) for name in ("started", "completed", "requeued", "released")}
    retried = sum(name == "flaky" for name in NAMES)
    assert totals == {"started": started, "completed": len(jobs), "requeued": retried, "released": released}
    assert {row["name"] for row in minutes if row["wasted_ms"]} <= {"flaky"}
