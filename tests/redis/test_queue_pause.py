"""Tests of pause and resume, including clients of BullMQ 6 on the same queue. Every test runs with both classes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from bulltask.queue import Queue
from bulltask.transport.scripts import queue as queue_scripts
from tests.support.manual_worker import ManualWorker

WAIT, PAUSED, META, MARKER, EVENTS = (
    f"bull:{{mail}}:{name}" for name in ("wait", "paused", "meta", "marker", "events")
)


def add(queue: Queue, *names: str) -> list[str]:
    return [job.id for job in queue.add_bulk([{"name": name, "options": {"job_id": name}} for name in names])]


def events(redis_client: redis.Redis) -> list[str]:
    entries: Any = redis_client.xrange(EVENTS)
    return [fields["event"] for _, fields in entries]


def test_no_job_is_acquired_from_a_paused_queue(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    add(queue, "a", "b")
    queue.pause()
    add(queue, "c")
    assert queue.is_paused()
    assert manual_worker.acquire() == ""
    assert queue.get_job_counts("waiting") == {"waiting": 0, "paused": 3}
    assert not redis_client.exists(MARKER)
    queue.resume()
    assert not queue.is_paused()
    assert redis_client.zscore(MARKER, "0") == 0
    assert [manual_worker.acquire() for _ in range(3)] == ["a", "b", "c"]
    assert [event for event in events(redis_client) if event in {"paused", "resumed"}] == ["paused", "resumed"]


@pytest.mark.every_topology
def test_pausing_twice_and_resuming_twice_loses_no_job(queue: Queue, manual_worker: ManualWorker) -> None:
    add(queue, "a")
    queue.pause()
    add(queue, "b")
    queue.pause()
    queue.resume()
    queue.resume()
    assert [manual_worker.acquire() for _ in range(3)] == ["a", "b", ""]


def test_resume_keeps_the_jobs_of_a_pause_that_only_set_the_flag(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    add(queue, "a", "b", "c")
    redis_client.hset(META, "paused", 1)  # BullMQ 6 only sets the flag
    redis_client.delete(MARKER)
    add(queue, "d", "e")
    queue.resume()
    assert [manual_worker.acquire() for _ in range(6)] == [
        "d",
        "e",
        "a",
        "b",
        "c",
        "",
    ]  # the order of BullMQ 6's own merge
    assert redis_client.exists(MARKER)


def test_resume_keeps_jobs_that_were_added_to_wait_during_a_pause(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    add(queue, "a", "b", "c")
    queue.pause()
    ids = add(queue, "d", "e")
    for job_id in ids:  # BullMQ 6 adds to wait even though the queue is paused
        redis_client.lrem(PAUSED, 1, job_id)
        redis_client.lpush(WAIT, job_id)
    queue.resume()
    assert [manual_worker.acquire() for _ in range(6)] == ["a", "b", "c", "d", "e", ""]


def test_pausing_again_keeps_jobs_that_were_added_to_wait(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    add(queue, "a", "b", "c")
    queue.pause()
    redis_client.lpush(WAIT, *add(queue, "d"))
    redis_client.lrem(PAUSED, 1, "d")
    queue.pause()
    assert redis_client.lrange(PAUSED, 0, -1) == ["d", "c", "b", "a"]
    assert not redis_client.exists(WAIT)
    queue.resume()
    assert [manual_worker.acquire() for _ in range(5)] == ["a", "b", "c", "d", ""]


def test_resume_wakes_workers_after_a_pause_that_only_set_the_flag(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    add(queue, "a")
    redis_client.hset(META, "paused", 1)
    redis_client.delete(MARKER)
    queue.resume()
    assert redis_client.zscore(MARKER, "0") == 0, "a sleeping worker must wake"
    assert manual_worker.acquire() == "a"


@pytest.mark.parametrize(("waiting", "held"), [(40, 7), (7, 40), (20, 20)])
def test_long_lists_are_merged_in_many_steps(
    queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, waiting: int, held: int
) -> None:
    monkeypatch.setattr(queue_scripts, "MAX_MOVED_PER_CALL", 3)
    redis_client.lpush(PAUSED, *[f"p{number}" for number in range(held)])
    redis_client.lpush(WAIT, *[f"w{number}" for number in range(waiting)])
    redis_client.hset(META, "paused", 1)
    queue.resume()
    merged: Any = redis_client.lrange(WAIT, 0, -1)
    assert merged[::-1] == [f"p{number}" for number in range(held)] + [f"w{number}" for number in range(waiting)]
    assert not redis_client.exists(PAUSED)


def test_jobs_that_are_added_during_a_resume_are_kept(
    queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_scripts, "MAX_MOVED_PER_CALL", 2)
    started = threading.Barrier(3)

    def add_jobs(name: str) -> None:
        with Queue("mail", queue.context.broker.config.broker_url) as other:
            started.wait()
            for number in range(150):
                other.add(name, job_id=f"{name}{number}")
                if number % 10 == 0:
                    redis_client.lpush(WAIT, f"v6-{name}{number}")

    threads = [threading.Thread(target=add_jobs, args=(name,)) for name in ("x", "y")]
    for thread in threads:
        thread.start()
    started.wait()
    while any(thread.is_alive() for thread in threads):
        queue.pause()
        queue.resume()
    for thread in threads:
        thread.join()
    queue.resume()
    ids: Any = redis_client.lrange(WAIT, 0, -1)
    assert len(ids) == len(set(ids)) == 2 * 150 + 2 * 15
    assert not redis_client.exists(PAUSED)


@pytest.mark.every_topology
def test_resuming_wakes_workers_for_prioritized_and_delayed_jobs(queue: Queue, redis_client: redis.Redis) -> None:
    queue.add("late", delay=3_600)
    queue.pause()
    queue.resume()
    due: Any = redis_client.zscore(MARKER, "1")
    assert due == pytest.approx(queue.context.now_ms() + 3_600_000, abs=30_000)
    queue.add("vip", priority=1)
    queue.pause()
    queue.resume()
    assert redis_client.zscore(MARKER, "0") == 0
