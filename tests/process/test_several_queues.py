"""A worker that consumes several queues, with and without limits."""

from __future__ import annotations

import pytest

from bulltask import AsyncResult
from tests.support.machine_load import scale_to_load
from tests.support.streams import server_ms
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


def send(harness: WorkerHarness, queue: str, count: int) -> list[AsyncResult[None]]:
    return [harness.app.send_task("quick", queue=queue) for _ in range(count)]


def test_a_long_queue_does_not_starve_another_queue(harness: WorkerHarness) -> None:
    full, few = send(harness, "full", 300), send(harness, "few", 10)
    harness.worker(children=1, options=["-Q", "full,few"])
    for job in (*full, *few):
        job.get(timeout=60)
    order = [entry["job"] for entry in harness.journal.all(what="start")]
    positions = [order.index(job.id) for job in few]
    harness.report(positions_of_the_few=positions)
    assert max(positions) <= 2 * len(few)
    assert len(order) == len(set(order)) == 310


def test_a_job_added_to_an_empty_queue_runs_soon_while_another_queue_is_long(harness: WorkerHarness) -> None:
    harness.worker(children=1, options=["-Q", "full,few"])
    full = send(harness, "full", 2000)
    harness.journal.wait_for(50, what="start")
    late = send(harness, "few", 1)[0]
    added_ms = harness.stream(harness.url, harness.keys_of("few").events).wait_for(event="added", jobId=late.id)[0].ms
    started_ms = harness.wait_for_start(late).ms
    harness.report(
        started_after_ms=started_ms - added_ms, still_waiting=harness.redis.llen(harness.keys_of("full").wait)
    )
    assert started_ms - added_ms <= scale_to_load(500)
    full[-1].get(timeout=60)


@pytest.mark.every_topology
def test_a_worker_reports_jobs_that_were_left_in_a_renamed_queue(harness: WorkerHarness) -> None:
    old = [harness.worker(children=1, options=["-Q", "emails,reports,empty"]) for _ in range(2)]
    for worker in old:
        worker.wait_for_line("Child started")
    harness.app.send_task("quick", queue="emails", countdown=3600)
    harness.app.send_task("quick", queue="reports", countdown=3600)
    old[0].stop()
    beside = harness.worker(children=1, options=["-Q", "mail"])  # the other worker still consumes the queue
    beside.wait_for_line("Child started")
    assert beside.warnings() == []
    old[1].stop()
    new = harness.worker(children=1, options=["-Q", "mail,reports"])
    line = new.wait_for_line("No worker consumes a queue that contains jobs")[0]
    assert (line["queue"], line["jobs"]) == ("emails", 1)
    new.wait_for_line("Child started")
    assert len(new.warnings()) == 1


@pytest.mark.every_topology
def test_a_job_in_any_queue_wakes_an_idle_worker(harness: WorkerHarness) -> None:
    harness.worker(children=1, options=["-Q", "a,b,c"], settings={"drain_delay": 30})
    harness.wait_until_idle(1, queue="a")
    for queue in ("c", "a", "b", "c"):
        assert send(harness, queue, 1)[0].get(timeout=20) is None


def test_a_worker_respects_a_global_rate_limit_set_by_bullmq(harness: WorkerHarness) -> None:
    # As after setGlobalRateLimit(5, 1000).
    harness.redis.hset(harness.keys.meta, mapping={"max": 5, "duration": 1000})
    worker = harness.worker(children=2)
    jobs = send(harness, "default", 15)
    for job in jobs:
        job.get(timeout=60)
    starts = sorted(entry.ms for entry in harness.events.all(event="active"))
    windows = [starts[5 * part + 4 + 1] - starts[5 * part] for part in range(2)]
    harness.report(first_of_each_five_after_the_last_ms=windows, in_all_ms=starts[-1] - starts[0])
    assert min(windows) >= 950
    assert starts[-1] - starts[0] <= scale_to_load(3000)
    assert worker.warnings() == []


def test_a_manual_rate_limit_stops_only_its_queue_until_it_expires(harness: WorkerHarness) -> None:
    limited = harness.keys_of("limited")
    worker = harness.worker(children=1, options=["-Q", "limited,free"], settings={"drain_delay": 30})
    harness.wait_until_idle(1, queue="limited")
    # As after rateLimit(1500), which takes effect only if the queue has a maximum.
    harness.redis.hset(limited.meta, mapping={"max": 1000, "duration": 1000})
    harness.redis.set(limited.limiter, 2**53 - 1, px=1500)
    ends_ms = server_ms(harness.redis) + 1500
    held_back = send(harness, "limited", 3)
    free = send(harness, "free", 20)
    for job in free:
        job.get(timeout=60)
    assert [harness.start_count(job) for job in held_back] == [0, 0, 0]
    late = harness.app.send_task("quick", queue="free")
    assert late.get(timeout=1) is None, "a limited queue does not delay jobs of the other"
    after_ms = [harness.wait_for_start(job).ms - ends_ms for job in held_back]
    harness.report(started_after_the_limit_ms=after_ms)
    assert all(-20 <= ms <= scale_to_load(200) for ms in after_ms)
    assert worker.warnings() == []


@pytest.mark.every_topology
def test_jobs_of_a_paused_queue_run_when_it_is_resumed(harness: WorkerHarness) -> None:
    # As after Node's queue.pause() and queue.resume() of an empty queue.
    harness.redis.hset(harness.keys.meta, "paused", 1)
    worker = harness.worker(children=1, options=["-Q", "default,free"], settings={"drain_delay": 1})
    paused = send(harness, "default", 2)
    free = send(harness, "free", 5)
    for job in free:
        job.get(timeout=60)
    assert [harness.start_count(job) for job in paused] == [0, 0]
    harness.redis.rename(harness.keys.paused, harness.keys.wait)
    harness.redis.hdel(harness.keys.meta, "paused")
    harness.redis.zadd(harness.keys.marker, {"0": 0})
    for job in paused:
        job.get(timeout=60)
    assert worker.warnings() == []
