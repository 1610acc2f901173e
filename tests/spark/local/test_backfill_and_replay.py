"""Backfills of gaps and replays of finished jobs, with a real session."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bulltask.errors import ConfigError
from bulltask.lake.reader import find_gaps
from bulltask.lake.tables import ATTEMPTS, JOBS, SNAPSHOTS
from bulltask.queue import Queue
from bulltask.spark.lake_tables import latest, read_table
from bulltask.spark.pipeline import Pipeline
from bulltask.spark.repair import BackfillResult, backfill, snapshot
from bulltask.spark.replay import ReplayResult, ReplaySelection, replay
from tests.support.lake import LakeBuilder
from tests.support.manual_worker import ManualWorker

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

HOUR = timedelta(hours=1)


@pytest.fixture
def source(broker_url: str) -> Mapping[str, str]:
    return {"url": broker_url, "queue": "*"}


@pytest.fixture
def builder(tmp_path: Path) -> LakeBuilder:
    return LakeBuilder(tmp_path)


def now() -> datetime:
    return datetime.now(UTC)


def add(queue: Queue, *ids: str, **options: Any) -> None:
    for job_id in ids:
        queue.add("send", {"to": job_id, "n": 1.5, "list": []}, job_id=job_id, **options)


def jobs_of(spark: SparkSession, builder: LakeBuilder) -> list[dict[str, Any]]:
    return [row.asDict() for row in latest(read_table(spark, builder.lake, JOBS), JOBS).collect()]


def gap(since: datetime) -> Mapping[str, Any]:
    return {
        "last_id_before": "1-0", "first_id_after": "9-0", "lost": 40, "exact": True, "loss_reason": "trimmed",
        "last_at_before": since, "first_at_after": now(), "detected_at": now(),
    }  # fmt: skip


@pytest.fixture
def known_incarnations(
    spark: SparkSession, builder: LakeBuilder, queue: Queue, manual_worker: ManualWorker, source: Mapping[str, str],
    redis_client: redis.Redis,
) -> Mapping[str, str]:  # fmt: skip
    """Seven jobs finished within a gap, one of which is only in a snapshot; two were added before the gap."""
    start = now()
    add(queue, "known", "open", "hidden", "broken", "gone", "early", "again", "waiting")
    for _ in range(3):
        manual_worker.complete({"done": True})
    assert manual_worker.fail("no such user 'x9'") == "broken"
    assert [manual_worker.complete(), manual_worker.complete(), manual_worker.complete()] == ["gone", "early", "again"]
    snapshot(spark, builder.lake, source)
    queue.remove("gone")
    redis_client.hset("bull:{mail}:early", "finishedOn", int((start - HOUR).timestamp() * 1000))
    redis_client.zadd("bull:{mail}:completed", {"early": int((start - HOUR).timestamp() * 1000)})
    builder.gaps([gap(start)])
    incarnations = {"open": start, "again": start - 3 * HOUR}
    ids = {job_id: f"{int(at.timestamp() * 1000)}-0" for job_id, at in incarnations.items()}
    builder.events(
        [{"event_id": incarnation, "event": "added", "job_id": job_id} for job_id, incarnation in ids.items()]
    )
    # Jobs derived from events: a complete job; an open job that timed out; an earlier incarnation of a reused id.
    builder.jobs(
        [
            {"job_id": "known", "incarnation": "7-7", "name": "send", "state": "completed", "finished_at": now()},
            {"job_id": "open", "incarnation": ids["open"], "name": "send", "state": "active", "as_of": start},
            {"job_id": "again", "incarnation": ids["again"], "state": "completed", "finished_at": start - 2 * HOUR},
        ]
    )
    return ids


def test_a_backfill_writes_each_job_of_a_gap_that_is_in_redis_or_a_snapshot(
    spark: SparkSession, builder: LakeBuilder, known_incarnations: Mapping[str, str], source: Mapping[str, str]
) -> None:
    opened, old = known_incarnations["open"], known_incarnations["again"]

    def fill() -> BackfillResult:
        return backfill(spark, builder.lake, source, since=now() - HOUR, until=now() + HOUR)

    result = fill()
    assert (result.gaps, result.lost, result.examined, result.jobs, result.backfilled_gaps) == (1, 40, 6, 5, 1)
    rows = jobs_of(spark, builder)
    incarnations = {(row["job_id"], row["incarnation"]): (row["state"], row["source"]) for row in rows}
    assert len(rows) == 7
    assert incarnations == {
        ("known", "7-7"): ("completed", "events"),
        ("open", opened): ("completed", "snapshot"),
        ("hidden", None): ("completed", "snapshot"),
        ("broken", None): ("failed", "snapshot"),
        ("gone", None): ("completed", "snapshot"),
        ("again", old): ("completed", "events"),
        ("again", None): ("completed", "snapshot"),
    }
    [broken] = [row for row in rows if row["job_id"] == "broken"]
    assert (broken["queue"], broken["name"], broken["attempt_count"], broken["stalls"]) == ("mail", "send", 1, 0)
    assert (broken["failed_reason"], broken["error_fingerprint"]) == ("no such user 'x9'", "no such user #")
    assert broken["data_bytes"] == len(json.dumps({"to": "broken", "n": 1.5, "list": []}, separators=(",", ":")))
    attempts = read_table(spark, builder.lake, ATTEMPTS).where("job_id = 'broken'").collect()
    assert [(row["attempt"], row["outcome"], row["source"], row["queued_at"]) for row in attempts] == [
        (1, "failed", "snapshot", None)
    ]
    assert attempts[0]["run_ms"] >= 0
    assert fill().jobs == 0, "a second backfill finds nothing new"
    assert [gap.backfilled_jobs for gap in find_gaps(builder.lake)] == [5]
    assert len(jobs_of(spark, builder)) == 7


def test_an_outcome_in_an_old_snapshot_does_not_supersede_later_events(
    spark: SparkSession, builder: LakeBuilder, queue: Queue, manual_worker: ManualWorker, source: Mapping[str, str]
) -> None:
    """Each job completed within the gap and was retried manually; only events have its later state."""
    start, later = now(), now() + timedelta(minutes=5)
    ids = [f"{state} {history}" for state in ("failed", "removed", "waiting") for history in ("complete", "truncated")]
    add(queue, *ids)
    for _ in ids:
        manual_worker.complete()
    snapshot(spark, builder.lake, source)
    for job_id in ids:
        queue.remove(job_id)
    builder.gaps([gap(start)])
    incarnations = {
        job_id: f"{int(start.timestamp() * 1000)}-{n}" for n, job_id in enumerate(ids) if "complete" in job_id
    }
    builder.events(
        [{"event_id": incarnation, "event": "added", "job_id": job_id} for job_id, incarnation in incarnations.items()]
    )
    states = {job_id: job_id.partition(" ")[0] for job_id in ids}
    ends = {"failed": later, "removed": None, "waiting": None}
    builder.jobs(
        {
            "job_id": job_id,
            "incarnation": incarnations.get(job_id),
            "state": state,
            "finished_at": ends[state],
            "as_of": later,
        }
        for job_id, state in states.items()
    )
    result = backfill(spark, builder.lake, source, since=now() - HOUR, until=now() + HOUR)
    assert {row["job_id"]: row["state"] for row in jobs_of(spark, builder)} == states
    assert result.jobs == 0


def test_each_backfilled_job_is_counted_for_the_first_possible_gap(
    spark: SparkSession, builder: LakeBuilder, queue: Queue, manual_worker: ManualWorker, source: Mapping[str, str],
    redis_client: redis.Redis,
) -> None:  # fmt: skip
    """Two gaps begin at the same id, as in a recreated stream, but were detected at different times."""
    add(queue, "old", "new-1", "new-2", "new-3")
    for _ in range(4):
        manual_worker.complete()
    an_hour_ago = int((now() - HOUR).timestamp() * 1000)
    redis_client.hset("bull:{mail}:old", "finishedOn", an_hour_ago)
    redis_client.zadd("bull:{mail}:completed", {"old": an_hour_ago})
    lost = {"last_id_before": "0-0", "lost": 40, "exact": True, "loss_reason": "trimmed"}
    for until in (now() - HOUR / 2, now()):
        builder.gaps(
            [{**lost, "first_id_after": f"{int(until.timestamp())}-0", "first_at_after": until, "detected_at": until}]
        )
    result = backfill(spark, builder.lake, source, since=now() - 2 * HOUR, until=now() + HOUR)
    assert (result.gaps, result.jobs, result.backfilled_gaps) == (2, 4, 2)
    assert [gap.backfilled_jobs for gap in find_gaps(builder.lake)] == [1, 3]
    rows = Pipeline(spark, builder.root).gaps().orderBy("detected_at").collect()
    assert [row["backfilled_jobs"] for row in rows] == [1, 3]


def test_a_backfill_without_gaps_writes_nothing(
    spark: SparkSession, builder: LakeBuilder, source: Mapping[str, str]
) -> None:
    builder.gaps([gap(now() - HOUR)])
    result = backfill(spark, builder.lake, source, since=now() + HOUR, until=now() + 2 * HOUR)
    assert (result.gaps, result.jobs) == (0, 0)
    assert builder.lake.open(SNAPSHOTS) is None
    with pytest.raises(ConfigError, match="must be later than since"):
        backfill(spark, builder.lake, source, since=now(), until=now() - HOUR)


def test_a_snapshot_can_be_restricted_by_state_and_time(
    spark: SparkSession, builder: LakeBuilder, queue: Queue, manual_worker: ManualWorker, source: Mapping[str, str]
) -> None:
    add(queue, "a", "b", "c")
    manual_worker.complete(7)
    assert snapshot(spark, builder.lake, source, states=["waiting", "completed"]) == 3
    assert snapshot(spark, builder.lake, source, since=now() + HOUR) == 0
    assert snapshot(spark, builder.lake, source, since=now() - HOUR) == 1
    rows = read_table(spark, builder.lake, SNAPSHOTS).orderBy(F.desc("snapshot_at")).limit(1).collect()
    assert [(row["id"], row["return_value"], row["state"], row["queue"]) for row in rows] == [
        ("a", "7", "completed", "mail")
    ]


Replay = Callable[..., ReplayResult]


@pytest.fixture
def failed(
    spark: SparkSession, builder: LakeBuilder, queue: Queue, manual_worker: ManualWorker, source: Mapping[str, str]
) -> Replay:
    """Six failed jobs: three are in Redis, one in a snapshot, one is lost, and one was retried manually."""
    add(queue, "r1", "r2", priority=5, attempts=2, backoff={"type": "fixed", "delay": 1000})
    add(queue, "r3", "kept", "lost", "open")
    ids = [manual_worker.fail(f"no {n}") for n in range(6)]
    assert sorted(ids) == sorted(["r1", "r2", "r3", "kept", "lost", "open"])
    finished, created = now(), now()
    builder.jobs(
        [
            {"job_id": job_id, "incarnation": f"{n}-1", "name": "send", "state": "failed", "created_at": created,
             "finished_at": finished, "error_fingerprint": "no #", "failed_reason": f"no {n}"}
            for n, job_id in enumerate(ids)
        ]
        + [{"job_id": "fine", "incarnation": "9-1", "name": "send", "state": "completed", "finished_at": finished}]
    )  # fmt: skip
    queue.remove("lost")
    snapshot(spark, builder.lake, source)
    queue.remove("kept")
    job = queue.get_job("open")
    assert job is not None
    job.retry()
    assert manual_worker.acquire() == "open"

    def run(where: str = "state = 'failed'", **options: Any) -> ReplayResult:
        dry_run = options.pop("dry_run", False)
        return replay(spark, builder.lake, source, ReplaySelection(where, **options), dry_run=dry_run)

    return run


def test_a_replay_sends_each_job_once_with_its_options_and_data(
    failed: Replay, queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    preview = failed(dry_run=True)
    assert (preview.selected, preview.ready, preview.open_again, preview.unknown, preview.unknown_ids) == (
        6, 4, 1, 1, ["mail/lost"],
    )  # fmt: skip
    assert {row["job_id"] for row in preview.sample} == {"r1", "r2", "r3", "kept"}
    assert redis_client.zcard("bull:{mail}:prioritized") == redis_client.llen("bull:{mail}:wait") == 0
    first = failed()
    assert (first.added, first.duplicates, first.unknown) == (4, 0, 1)
    waiting = [
        str(job_id) for job_id in redis_client.lrange("bull:{mail}:wait", 0, -1) if not str(job_id).startswith("0:")
    ]
    prioritized = [str(job_id) for job_id in redis_client.zrange("bull:{mail}:prioritized", 0, -1)]
    assert (len(waiting), len(prioritized)) == (2, 2)
    assert all(job_id.startswith("s") and len(job_id) == 25 for job_id in waiting + prioritized)
    for job_id in prioritized:
        stored: Any = redis_client.hgetall(f"bull:{{mail}}:{job_id}")
        opts = json.loads(stored["opts"])
        assert (opts["priority"], opts["attempts"], opts["backoff"]["delay"], opts["jobId"]) == (
            5,
            2,
            1_000_000,
            job_id,
        )
        assert json.loads(stored["data"])["to"] in {"r1", "r2"}
        assert '"n":1.5,"list":[]' in stored["data"]
    second = failed()
    assert (second.added, second.duplicates) == (0, 4)
    for _ in range(4):
        manual_worker.complete()
    redis_client.delete(*[f"bull:{{mail}}:{job_id}" for job_id in waiting + prioritized])
    assert failed(where="state   = 'failed'").added == 0, "removed jobs must not be added again"


def test_a_replay_can_be_restricted_by_condition_queue_and_limit(failed: Replay) -> None:
    assert failed("job_id IN ('r1', 'fine')", dry_run=True).selected == 2
    assert failed("job_id IN ('r1', 'fine') AND state = 'failed'", dry_run=True).selected == 1
    assert failed(queue="other").selected == 0
    assert failed(limit=1).added == 1
    with pytest.raises(ConfigError, match=r"is invalid for silver\.jobs.*nothing_like_it"):
        failed("nothing_like_it = 1")
    with pytest.raises(ConfigError, match=r"is invalid for silver\.jobs"):
        failed("state = = 1")
