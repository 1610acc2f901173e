"""Tests of manual processing; tests/interop/differential compares its effect in Redis with Node's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any, cast

import pytest
import redis

from bulltask import App
from bulltask.errors import (
    BrokerUnavailableError,
    ConfigError,
    DecodeError,
    EncodeError,
    LockMismatchError,
    LockMissingError,
    PendingChildrenError,
    PermanentError,
    Retry,
    TransientError,
)
from bulltask.jobs.clock import mono_ms
from bulltask.jobs.fields import REASON_CHARS
from bulltask.jobs.names import JobState
from bulltask.queue import AsyncQueue, Job, Queue
from bulltask.testing.worker import wait_until
from tests.conftest import ServerFactory
from tests.support.machine_load import scale_to_load

pytestmark = pytest.mark.redis


@pytest.fixture
def other(broker_url: str) -> Iterator[Queue]:
    """The same queue through another object, for another thread."""
    with Queue("mail", broker_url) as other:
        yield other


def acquire(queue: Queue, token: str = "t", **options: Any) -> Job:
    job = queue.get_next_job(token, **options)
    assert job is not None
    return job


def int_of(text: str) -> int:
    raise ValueError(text)


def is_blocked(client: redis.Redis) -> bool:
    clients: Any = client.client_list()
    return any("b" in entry["flags"] for entry in clients)


def test_the_next_job_is_acquired_and_locked(queue: Queue, redis_client: redis.Redis) -> None:
    assert queue.get_next_job("t") is None
    added = queue.add("send", {"to": "ann"}, priority=1)
    job = acquire(queue, lock_duration=5, worker="me")
    assert (job.id, job.data, job.token, job.processed_by) == (added.id, {"to": "ann"}, "t", "me")
    assert job.attempts_started == 1
    assert job.is_active()
    assert redis_client.get(f"{added.key}:lock") == "t"
    assert 4_000 < int(redis_client.pttl(f"{added.key}:lock")) <= 5_000
    assert queue.get_next_job("t") is None


def test_the_worker_name_is_stored_only_if_it_is_given(queue: Queue, redis_client: redis.Redis) -> None:
    queue.add("a")
    queue.add("b")
    first = acquire(queue)
    second = first.move_to_completed(1, fetch_next=True)
    assert second is not None
    assert first.processed_by is second.processed_by is None
    assert not redis_client.hexists(second.key, "pb")


def test_the_lock_duration_defaults_to_the_setting(queue: Queue, redis_client: redis.Redis) -> None:
    queue.add("a")
    assert 20_000 < int(redis_client.pttl(f"{acquire(queue).key}:lock")) <= 30_000


@pytest.mark.parametrize("token", ["", "0"])
def test_get_next_job_rejects_an_invalid_token(queue: Queue, token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        queue.get_next_job(token)


def test_get_next_job_rejects_a_lock_duration_of_zero(queue: Queue) -> None:
    with pytest.raises(ConfigError, match="lock_duration"):
        queue.get_next_job("t", lock_duration=0)


@pytest.mark.every_topology
@pytest.mark.parametrize("timeout", [60, None])
def test_waiting_for_a_job_ends_when_one_is_added(
    queue: Queue, other: Queue, redis_client: redis.Redis, timeout: int | None
) -> None:
    def add() -> None:
        wait_until(lambda: is_blocked(redis_client), 30, "the wait for a marker")
        other.add("late")

    adding = threading.Thread(target=add)
    adding.start()
    job = queue.get_next_job("t", timeout=timeout)
    adding.join()
    assert job is not None
    assert job.name == "late"


def test_waiting_for_a_job_ends_when_a_delayed_one_is_due(queue: Queue) -> None:
    queue.add("late", delay=0.3)
    started_ms = mono_ms()
    assert acquire(queue, timeout=60).name == "late"
    assert mono_ms() - started_ms < 30_000


@pytest.mark.every_topology
def test_a_wait_that_times_out_restores_the_marker(queue: Queue, redis_client: redis.Redis) -> None:
    queue.add("late", delay=3600)
    marker = redis_client.zrange(f"{queue.qualified_name}:marker", 0, -1, withscores=True)
    started_ms = mono_ms()
    assert queue.get_next_job("t", timeout=0.1) is None
    assert mono_ms() - started_ms >= 100
    assert marker
    assert redis_client.zrange(f"{queue.qualified_name}:marker", 0, -1, withscores=True) == marker


def test_get_next_job_waits_for_the_end_of_a_rate_limit(queue: Queue) -> None:
    queue.set_global_rate_limit(1, 0.2)
    queue.add("a")
    queue.add("b")
    acquire(queue)
    assert queue.get_next_job("t") is None
    assert acquire(queue, timeout=60).name == "b"


def test_completing_a_job_can_return_the_next_one(queue: Queue) -> None:
    first, second = queue.add("a"), queue.add("b")
    job = acquire(queue, "mine", worker="me")
    following = job.move_to_completed({"n": 1}, fetch_next=True)
    assert following is not None
    assert (following.id, following.token, following.processed_by) == (second.id, "mine", "me")
    assert (job.returnvalue, job.attempts_made, job.finished_ms is None) == ({"n": 1}, 1, False)
    assert following.move_to_completed(None, fetch_next=True) is None
    assert first.wait_until_finished(5) == {"n": 1}
    assert (first.get_state(), second.get_state()) == (JobState.COMPLETED, JobState.COMPLETED)


def test_the_next_job_is_acquired_only_if_requested(queue: Queue) -> None:
    queue.add("a")
    second = queue.add("b")
    assert acquire(queue).move_to_completed(1) is None
    assert second.is_waiting()


@pytest.mark.every_topology
def test_a_failed_job_is_retried_until_no_attempts_are_left(queue: Queue) -> None:
    added = queue.add("a", attempts=3, backoff={"type": "fixed", "delay": 3600})
    job = acquire(queue)
    with pytest.raises(ValueError, match="nö") as caught:
        int_of("nö")
    assert job.move_to_failed(caught.value, fetch_next=True) is None
    assert (job.failed_reason, job.attempts_made, job.delay_ms) == ("nö", 1, 3_600_000)
    assert "in int_of" in job.stacktrace[0]
    assert added.is_delayed()
    added.promote()
    acquire(queue).move_to_failed("again")
    added.promote()
    last = acquire(queue)
    last.move_to_failed("the last failure")
    assert added.is_failed()
    added.refresh()
    assert (added.attempts_made, added.failed_reason, len(added.stacktrace)) == (3, "the last failure", 1)
    assert (last.stacktrace, last.finished_ms) == (added.stacktrace, added.finished_ms)


@pytest.mark.parametrize("error", [1_000_000 * "x", ValueError(1_000_000 * "x")], ids=["text", "exception"])
def test_a_long_failure_reason_is_truncated(queue: Queue, redis_client: redis.Redis, error: Exception | str) -> None:
    queue.add("a", attempts=1)
    job = acquire(queue)
    job.move_to_failed(error)
    stored: Any = redis_client.hgetall(queue.context.keys.job(job.id))
    events: Any = redis_client.xrange(queue.context.keys.events)
    emitted = [fields["failedReason"] for _, fields in events if fields["event"] == "failed"]
    assert [stored["failedReason"]] == emitted == [job.failed_reason]
    assert len(emitted[0]) == REASON_CHARS
    assert len(stored["stacktrace"]) < 2 * REASON_CHARS


@pytest.mark.parametrize(
    ("error", "options", "delay_ms"),
    [
        ("no", {"countdown": 60}, 60_000),
        ("no", {"countdown": timedelta(hours=2)}, 7_200_000),
        (ValueError("no"), {"countdown": 0.5}, 500),
        (ValueError("no"), {"countdown": 0}, 0),
        (TransientError("no", retry_after=90), {}, 90_000),
        (TransientError("no", retry_after=1), {}, 10_000),
        (TransientError("no", retry_after=90), {"countdown": 5}, 5_000),
        (Retry(delay_ms=70_000), {}, 70_000),
        (Retry(delay_ms=70_000, exc=ValueError("no")), {"countdown": 5}, 5_000),
        (Retry(), {}, 10_000),
    ],
)
def test_countdown_and_error_override_the_backoff_of_a_retry(
    queue: Queue, redis_client: redis.Redis, error: BaseException | str, options: dict[str, Any], delay_ms: int
) -> None:
    added = queue.add("a", attempts=3, backoff=10)
    job = acquire(queue)
    before_ms = int(queue.context.broker.clock.now_ms())
    assert job.move_to_failed(error, **options) is None
    assert (job.delay_ms, job.attempts_made) == (delay_ms, 1)
    if delay_ms:
        due_ms = float(cast(Any, redis_client.zscore(queue.context.keys.delayed, added.id))) / 4096
        assert before_ms + delay_ms <= due_ms + 1 < before_ms + delay_ms + scale_to_load(5_000)
    else:
        assert added.is_waiting()
    added.refresh()
    assert (added.attempts_made, added.failed_reason) == (1, job.failed_reason)


def test_a_countdown_adds_no_attempt(queue: Queue) -> None:
    first, second = queue.add("a", attempts=1), queue.add("b", attempts=5)
    acquire(queue).move_to_failed("no", countdown=60)
    assert first.is_failed()
    acquire(queue).move_to_failed(Retry(max_retries=0, exc=ValueError("enough")))
    assert second.is_failed()
    second.refresh()
    assert second.failed_reason == "enough"


def test_a_requested_retry_has_the_jobs_limit_for_requests(queue: Queue, broker_url: str) -> None:
    with closing(App("sender", broker_url, task_max_retries=0, task_max_explicit_retries=1)) as app:
        app.send_task("a", queue="mail")
    for attempt in (1, 2):
        job = acquire(queue)
        job.move_to_failed(Retry(delay_ms=0, exc=ValueError("again")))
        assert (job.attempts_made, job.is_failed()) == (attempt, attempt == 2)


def test_attempts_in_another_queue_count_toward_the_maximum(queue: Queue, redis_client: redis.Redis) -> None:
    added, keys = queue.add("a", attempts=3), queue.context.keys
    moved = {"attempts": 3, "bulltask": {"v": 1, "retries": 1}}
    redis_client.hset(keys.job(added.id), "opts", json.dumps(moved))
    for attempt in (1, 2):
        job = acquire(queue)
        job.move_to_failed("no")
        assert (job.attempts_made, job.is_failed()) == (attempt, attempt == 2)
    events: Any = redis_client.xrange(keys.events)
    assert [fields["attemptsMade"] for _, fields in events if fields["event"] == "retries-exhausted"] == ["2"]


@pytest.mark.parametrize("countdown", [-1, "60", float("nan")])
def test_an_invalid_countdown_leaves_the_job_active(queue: Queue, countdown: Any) -> None:
    queue.add("a", attempts=2)
    job = acquire(queue)
    with pytest.raises(ConfigError, match="countdown must be"):
        job.move_to_failed("no", countdown=countdown)
    assert job.is_active()


def test_a_job_without_a_backoff_is_retried_immediately(queue: Queue) -> None:
    added = queue.add("a", attempts=2, backoff=None)
    acquire(queue).move_to_failed("no")
    assert added.is_waiting()


@pytest.mark.parametrize("kind", ["permanent", "discarded"])
def test_a_permanent_error_is_not_retried(queue: Queue, kind: str) -> None:
    added, following = queue.add("a", attempts=5), queue.add("b")
    job = acquire(queue)
    if kind == "discarded":
        job.discard()
    next_job = job.move_to_failed(PermanentError("no") if kind == "permanent" else "no", fetch_next=True)
    assert (next_job and next_job.id) == following.id
    assert added.is_failed()


def test_a_value_that_cannot_be_encoded_leaves_the_job_active(queue: Queue) -> None:
    queue.add("a")
    job = acquire(queue)
    with pytest.raises(EncodeError, match=f"return value of job {job.id}"):
        job.move_to_completed(float("nan"))
    assert job.is_active()


def test_a_malformed_backoff_is_reported_before_anything_is_written(queue: Queue, redis_client: redis.Redis) -> None:
    added = queue.add("a", attempts=2)
    redis_client.hset(added.key, "opts", '{"attempts":2,"backoff":{"type":"fixed","delay":"x"}}')
    job = acquire(queue)
    with pytest.raises(DecodeError, match="backoff"):
        job.move_to_failed("no")
    assert job.is_active()


@pytest.mark.parametrize("ending", ["move_to_completed", "move_to_failed", "move_to_delayed", "move_to_wait"])
def test_only_the_holder_of_the_lock_can_finish_the_job(queue: Queue, redis_client: redis.Redis, ending: str) -> None:
    queue.add("a")
    job = acquire(queue)
    arguments = [] if ending == "move_to_wait" else [1 if ending == "move_to_delayed" else "x"]
    with pytest.raises(LockMismatchError):
        getattr(job, ending)(*arguments, "foreign")
    redis_client.delete(f"{job.key}:lock")
    with pytest.raises(LockMissingError):
        getattr(job, ending)(*arguments)


def test_finishing_a_job_that_was_only_read_requires_the_token(queue: Queue) -> None:
    added = queue.add("a")
    acquire(queue, "mine")
    read = queue.get_job(added.id)
    assert read is not None
    with pytest.raises(ConfigError, match="pass the token"):
        read.move_to_completed(1)
    read.move_to_completed(1, "mine")
    assert added.is_completed()


def test_delaying_or_releasing_a_job_counts_no_attempt(queue: Queue) -> None:
    added = queue.add("a")
    job = acquire(queue)
    job.move_to_delayed(3600)
    assert (added.is_delayed(), job.delay_ms) == (True, 3_600_000)
    added.promote()
    acquire(queue).move_to_wait()
    assert added.is_waiting()
    added.refresh()
    assert (added.attempts_made, added.attempts_started) == (0, 2)


@pytest.mark.every_topology
def test_a_job_waits_for_its_children(queue: Queue) -> None:
    parent = queue.add("parent")
    job = acquire(queue, "p")
    assert job.move_to_waiting_children() is False
    child = queue.add("child", parent={"id": parent.id, "queue": queue.qualified_name})
    with pytest.raises(PendingChildrenError):
        job.move_to_completed(1)
    assert job.move_to_waiting_children() is True
    assert parent.is_waiting_children()
    acquire(queue, "c").move_to_completed("child's result")
    job = acquire(queue, "p2")
    assert (job.id, job.get_children_values()) == (parent.id, {child.key: "child's result"})


def test_acquiring_a_schedulers_job_adds_the_next_one(queue: Queue) -> None:
    queue.schedulers.upsert("s", name="tick", every=3600)
    job = acquire(queue)
    assert job.scheduler_id == "s"
    assert queue.schedulers.get("s").iterations == 2  # type: ignore[union-attr]
    following = queue.get_jobs("delayed")
    assert [next_job.scheduler_id for next_job in following] == ["s"]
    job.refresh()
    assert job.next_iteration_id == following[0].id


def test_the_job_of_a_scheduler_with_a_malformed_rule_is_delayed(queue: Queue, redis_client: redis.Redis) -> None:
    queue.schedulers.upsert("s", name="tick", every=3600)
    added = queue.get_jobs("waiting")[0]
    redis_client.hset(added.key, "opts", '{"repeat":{"every":"x"}}')
    with pytest.raises(DecodeError, match=r"opts\.repeat"):
        queue.get_next_job("t")
    assert added.is_delayed()


@pytest.mark.every_topology
def test_jobs_whose_lock_expired_wait_again(queue: Queue, redis_client: redis.Redis) -> None:
    added, throttle = queue.add("a"), f"{queue.qualified_name}:stalled-check"
    acquire(queue)
    assert queue.check_stalled() == []
    redis_client.delete(throttle, f"{added.key}:lock")
    assert queue.check_stalled() == [added.id]
    assert added.is_waiting()
    acquire(queue)
    redis_client.delete(throttle)
    queue.check_stalled()
    redis_client.delete(throttle, f"{added.key}:lock")
    assert queue.check_stalled(max_stalled_count=1) == [added.id]
    following = queue.add("b")
    assert acquire(queue).id == following.id
    added.refresh()
    assert (added.failed_reason, added.is_failed()) == ("job stalled more than allowable limit", True)
    assert queue.get_next_job("t") is None


def test_a_negative_max_stalled_count_is_rejected(queue: Queue) -> None:
    with pytest.raises(ConfigError, match="max_stalled_count"):
        queue.check_stalled(-1)


def test_limiter_and_metrics_settings_apply_to_manual_processing(broker_url: str) -> None:
    options: Any = {"metrics_max_data_points": 10, "limiter": {"max": 2, "duration": 60}, "result_expires": None}
    with Queue("mail", broker_url, remove_on_complete=1, remove_on_fail=1, **options) as queue:
        for _ in range(2):
            queue.add("a", attempts=1)
        acquire(queue).move_to_completed(1)
        acquire(queue).move_to_failed("no")
        assert min(queue.get_metrics("completed").previous_ms, queue.get_metrics("failed").previous_ms) > 0
        queue.add("a")
        assert queue.get_next_job("t") is None
        assert queue.get_rate_limit_ttl(2) > 0
        queue.remove_rate_limit_key()
        acquire(queue).move_to_completed(1)
        assert queue.get_job_counts("completed", "failed") == {"completed": 1, "failed": 1}


def test_a_cancelled_wait_closes_its_connection(broker_url: str, redis_client: redis.Redis) -> None:
    async def cancel() -> None:
        async with AsyncQueue("mail", broker_url) as queue:
            await queue.wait_until_ready()
            before = connections(redis_client)
            waiting = asyncio.create_task(queue.get_next_job("t", timeout=60))
            await asyncio.to_thread(wait_until, lambda: is_blocked(redis_client), 30, "the wait for a marker")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(wait_until, lambda: connections(redis_client) == before, 30, "its connection's end")
            await queue.add("a")
            job = await queue.get_next_job("t")
            assert job is not None

    asyncio.run(cancel())


def connections(client: redis.Redis) -> set[str]:
    return {row["id"] for row in client.client_list()}


def test_a_lost_server_raises_broker_unavailable(server_factory: ServerFactory) -> None:
    server = server_factory()
    with Queue("mail", server.url) as queue:
        queue.wait_until_ready()
        server.stop()
        with pytest.raises(BrokerUnavailableError):
            queue.get_next_job("t", timeout=60)
        with pytest.raises(BrokerUnavailableError):
            queue.wait_until_ready()


def test_retention_settings_of_a_worker_apply_to_manual_processing(broker_url: str, redis_client: redis.Redis) -> None:
    settings: dict[str, Any] = {
        "limiter": "2/h",
        "remove_on_complete": 1,
        "remove_on_fail": True,
        "metrics_max_data_points": 60,
    }
    with Queue("mail", broker_url, result_expires=None, **settings) as queue:
        first, second, third, _ = (queue.add("n", attempts=1) for _ in range(4))
        job = acquire(queue)
        assert job.id == first.id
        following = job.move_to_completed(None, fetch_next=True)
        assert following is not None
        following.move_to_completed(None)
        assert redis_client.zrange("bull:{mail}:completed", 0, -1) == [second.id]
        assert queue.get_next_job("t") is None, "two jobs were acquired in this hour"
        assert queue.get_metrics("completed").count == 2
        queue.remove_rate_limit_key()
        last = acquire(queue)
        assert last.id == third.id
        last.move_to_failed("no")
        assert queue.get_job(third.id) is None
        assert queue.get_metrics("failed").count == 1
