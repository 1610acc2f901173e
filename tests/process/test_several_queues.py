"""A worker of several queues, limits included."""

from __future__ import annotations

import pytest

from bulltask import AsyncResult
from tests.support.pace import at_this_pace
from tests.support.stage import Stage
from tests.support.streams import server_ms

pytestmark = pytest.mark.process


def send(stage: Stage, queue: str, count: int) -> list[AsyncResult[None]]:
    return [stage.app.send_task("quick", queue=queue) for _ in range(count)]


def test_a_full_queue_does_not_starve_another(stage: Stage) -> None:
    full, few = send(stage, "full", 300), send(stage, "few", 10)
    stage.worker(children=1, options=["-Q", "full,few"])
    for job in (*full, *few):
        job.get(timeout=60)
    order = [entry["job"] for entry in stage.journal.all(what="start")]
    places = [order.index(job.id) for job in few]
    stage.note(places_of_the_few=places)
    assert max(places) <= 2 * len(few)
    assert len(order) == len(set(order)) == 310


def test_jobs_that_come_to_an_empty_queue_while_another_is_full_run_soon(stage: Stage) -> None:
    stage.worker(children=1, options=["-Q", "full,few"])
    full = send(stage, "full", 2000)
    stage.journal.wait_for(50, what="start")
    late = send(stage, "few", 1)[0]
    added_ms = stage.stream(stage.url, stage.keys_of("few").events).wait_for(event="added", jobId=late.id)[0].ms
    started_ms = stage.started(late).ms
    stage.note(started_after_ms=started_ms - added_ms, still_waiting=stage.redis.llen(stage.keys_of("full").wait))
    assert started_ms - added_ms <= at_this_pace(500)
    full[-1].get(timeout=60)


def test_every_queue_of_an_idle_worker_wakes_it(stage: Stage) -> None:
    stage.worker(children=1, options=["-Q", "a,b,c"], settings={"drain_delay": 30})
    stage.wait_until_idle(1, queue="a")
    for queue in ("c", "a", "b", "c"):
        assert send(stage, queue, 1)[0].get(timeout=20) is None


def test_a_limit_that_node_has_set_on_the_queue_is_kept(stage: Stage) -> None:
    # As setGlobalRateLimit(5, 1000) does.
    stage.redis.hset(stage.keys.meta, mapping={"max": 5, "duration": 1000})
    worker = stage.worker(children=2)
    jobs = send(stage, "default", 15)
    for job in jobs:
        job.get(timeout=60)
    starts = sorted(entry.ms for entry in stage.events.all(event="active"))
    windows = [starts[5 * part + 4 + 1] - starts[5 * part] for part in range(2)]
    stage.note(first_of_each_five_after_the_last_ms=windows, in_all_ms=starts[-1] - starts[0])
    assert min(windows) >= 950
    assert starts[-1] - starts[0] <= at_this_pace(3000)
    assert worker.complaints() == []


def test_a_manual_limit_stops_the_queue_until_it_ends_and_the_other_queue_goes_on(stage: Stage) -> None:
    limited = stage.keys_of("limited")
    worker = stage.worker(children=1, options=["-Q", "limited,free"], settings={"drain_delay": 30})
    stage.wait_until_idle(1, queue="limited")
    # As rateLimit(1500) does; it is honoured where some maximum exists.
    stage.redis.hset(limited.meta, mapping={"max": 1000, "duration": 1000})
    stage.redis.set(limited.limiter, 2**53 - 1, px=1500)
    ends_ms = server_ms(stage.redis) + 1500
    held_back = send(stage, "limited", 3)
    free = send(stage, "free", 20)
    for job in free:
        job.get(timeout=60)
    assert [stage.starts(job) for job in held_back] == [0, 0, 0]
    late = stage.app.send_task("quick", queue="free")
    assert late.get(timeout=1) is None, "a limited queue keeps nobody from hearing of the other"
    after_ms = [stage.started(job).ms - ends_ms for job in held_back]
    stage.note(started_after_the_limit_ms=after_ms)
    assert all(-20 <= ms <= at_this_pace(200) for ms in after_ms)
    assert worker.complaints() == []


def test_a_paused_queue_is_left_alone_and_goes_on_when_it_is_resumed(stage: Stage) -> None:
    # What queue.pause() and queue.resume() of Node leave in Redis for an empty queue.
    stage.redis.hset(stage.keys.meta, "paused", 1)
    worker = stage.worker(children=1, options=["-Q", "default,free"], settings={"drain_delay": 1})
    paused = send(stage, "default", 2)
    free = send(stage, "free", 5)
    for job in free:
        job.get(timeout=60)
    assert [stage.starts(job) for job in paused] == [0, 0]
    stage.redis.rename(stage.keys.paused, stage.keys.wait)
    stage.redis.hdel(stage.keys.meta, "paused")
    stage.redis.zadd(stage.keys.marker, {"0": 0})
    for job in paused:
        job.get(timeout=60)
    assert worker.complaints() == []
