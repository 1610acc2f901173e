"""A job scheduler whose next job is missing continues: a worker's check adds the job again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY

import pytest
import redis

from bulltask.jobs.schedules import Scheduler
from bulltask.queue import Queue
from bulltask.queue.schedulers import restore_iterations
from bulltask.transport.call import QueueKeys

RULES: dict[str, dict[str, Any]] = {"interval": {"every": 3600}, "pattern": {"cron": "0 3 * * *", "tz": "UTC"}}
HOUR_MS = 3_600_000


@pytest.fixture
def queue(broker_url: str) -> Iterator[Queue]:
    with Queue("mail", broker_url) as queue:
        queue.context.connect()
        yield queue


@pytest.fixture(params=sorted(RULES))
def scheduler(request: pytest.FixtureRequest, queue: Queue) -> Scheduler:
    """A scheduler whose next job is delayed."""
    start: dict[str, Any] = {"start": datetime.now(UTC) + timedelta(hours=2)} if request.param == "interval" else {}
    return upsert(queue, **RULES[request.param], **start, data={"n": 1.5}, options={"attempts": 7})


def upsert(queue: Queue, scheduler_id: str = "beat", **arguments: Any) -> Scheduler:
    stored = queue.schedulers.upsert(scheduler_id, **arguments)
    assert stored is not None
    return stored


def restore(queue: Queue, *, later_ms: int = 0) -> list[str]:
    """Check the queue's schedulers as a worker does; return the ids of those whose job was missing."""
    operation = restore_iterations(queue.context.keys, "0", queue.context.now_ms() + later_ms, UTC)
    cursor, restored = queue.context.run(operation)
    assert cursor == "0"
    return restored


def lose(client: redis.Redis, keys: QueueKeys, job_id: str, loss: str) -> None:
    if loss != "hash":
        assert client.zrem(keys.delayed, job_id)
    if loss != "id":
        assert client.delete(keys.job(job_id))


def finish(client: redis.Redis, queue: Queue, job_id: str, *, kept: bool) -> None:
    """Run a scheduler's job as a worker does that does not add the next one."""
    keys = queue.context.keys
    job = queue.get_job(job_id)
    assert job is not None
    job.promote()
    assert client.lrem(keys.wait, 1, job_id)
    if kept:
        client.hset(keys.job(job_id), "finishedOn", queue.context.now_ms())
        client.zadd(keys.completed, {job_id: queue.context.now_ms()})
    else:
        client.delete(keys.job(job_id))


@pytest.mark.every_topology
@pytest.mark.parametrize("loss", ["hash", "id", "both"])
def test_a_lost_job_is_added_again_for_the_same_time(
    queue: Queue, redis_client: redis.Redis, scheduler: Scheduler, loss: str
) -> None:
    stored: Any = redis_client.hgetall(queue.context.keys.scheduler("beat"))
    lose(redis_client, queue.context.keys, scheduler.next_job_id, loss)
    assert restore(queue) == ["beat"]
    assert queue.schedulers.get("beat") == scheduler
    assert redis_client.hgetall(queue.context.keys.scheduler("beat")) == {**stored, "opts": ANY}  # in any order
    job = queue.get_job(scheduler.next_job_id)
    assert job is not None
    assert (job.get_state(), job.data, job.opts["attempts"], job.scheduler_id) == ("delayed", {"n": 1.5}, 7, "beat")
    assert restore(queue) == []


@pytest.mark.parametrize("kept", [True, False])
def test_a_schedule_continues_after_a_job_that_added_no_next_one(
    queue: Queue, redis_client: redis.Redis, scheduler: Scheduler, kept: bool
) -> None:
    finish(redis_client, queue, scheduler.next_job_id, kept=kept)
    later_ms = scheduler.next_ms + 1000 - queue.context.now_ms()
    assert restore(queue, later_ms=later_ms) == ["beat"]
    after = queue.schedulers.get("beat")
    assert after is not None
    assert after.next_ms == scheduler.next_ms + (HOUR_MS if scheduler.every_ms else 24 * HOUR_MS)
    assert queue.get_job_state(after.next_job_id) == "delayed"
    assert restore(queue, later_ms=later_ms) == []


def test_a_missing_job_whose_time_has_passed_is_not_run_late_but_the_next_one_on_time(
    queue: Queue, redis_client: redis.Redis, scheduler: Scheduler
) -> None:
    lose(redis_client, queue.context.keys, scheduler.next_job_id, "both")
    period_ms = HOUR_MS if scheduler.every_ms else 24 * HOUR_MS
    assert restore(queue, later_ms=scheduler.next_ms + 5 * period_ms // 2 - queue.context.now_ms()) == ["beat"]
    after = queue.schedulers.get("beat")
    assert after is not None
    assert after.next_ms == scheduler.next_ms + 3 * period_ms


@pytest.mark.parametrize("state", ["delayed", "waiting", "prioritized", "paused", "active"])
def test_a_scheduler_whose_job_exists_is_not_changed(queue: Queue, redis_client: redis.Redis, state: str) -> None:
    options: Any = {"priority": 3} if state == "prioritized" else {}
    scheduler = upsert(queue, every=3600, start=datetime.now(UTC) + timedelta(hours=2), options=options)
    if state == "paused":
        queue.pause()
    if state != "delayed":
        job = queue.get_job(scheduler.next_job_id)
        assert job is not None
        job.promote()
    if state == "active":
        redis_client.lmove(queue.context.keys.wait, queue.context.keys.active)
    for later_ms in (0, 5 * HOUR_MS):
        assert restore(queue, later_ms=later_ms) == []
    assert queue.schedulers.get("beat") == scheduler


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("limit", [{"limit": 1}, {"end": datetime.now(UTC) + timedelta(minutes=90)}])
def test_a_schedule_that_has_ended_does_not_start_again(
    queue: Queue, redis_client: redis.Redis, limit: dict[str, Any], kept: bool
) -> None:
    scheduler = upsert(queue, every=3600, **limit)
    assert redis_client.lrem(queue.context.keys.wait, 1, scheduler.next_job_id)
    if kept:
        redis_client.hset(queue.context.keys.job(scheduler.next_job_id), "finishedOn", 1)
    else:
        redis_client.delete(queue.context.keys.job(scheduler.next_job_id))
    assert restore(queue, later_ms=2 * HOUR_MS) == []


def test_an_earlier_job_of_the_schedule_that_waits_for_a_retry_stays(queue: Queue, redis_client: redis.Redis) -> None:
    scheduler = upsert(queue, every=3600, start=datetime.now(UTC) + timedelta(hours=2))
    keys = queue.context.keys
    earlier = f"repeat:beat:{scheduler.next_ms - HOUR_MS}"
    redis_client.copy(keys.job(scheduler.next_job_id), keys.job(earlier))
    redis_client.zadd(keys.delayed, {earlier: (scheduler.next_ms + 5) * 4096})
    lose(redis_client, keys, scheduler.next_job_id, "both")
    assert restore(queue) == ["beat"]
    assert queue.schedulers.get("beat") == scheduler
    assert redis_client.zrange(keys.delayed, 0, -1) == [scheduler.next_job_id, earlier]


def test_malformed_schedulers_and_repeatable_jobs_of_old_versions_are_not_changed(
    queue: Queue, redis_client: redis.Redis
) -> None:
    keys = queue.context.keys
    malformed: list[Any] = [
        {"name": "n", "every": "60000"},
        {"ic": 1},
        {"ic": 1, "pattern": "x"},
        {"ic": 1, "pattern": "* * * * *", "tz": "?"},
    ]
    for number, fields in enumerate(malformed):
        redis_client.zadd(keys.repeat, {f"s{number}": 5})
        redis_client.hset(keys.scheduler(f"s{number}"), mapping=fields)
    redis_client.zadd(keys.repeat, {"no-hash": 5})
    assert restore(queue) == []
    assert redis_client.zcard(keys.repeat) == 5
    assert redis_client.zcard(keys.delayed) == 0
