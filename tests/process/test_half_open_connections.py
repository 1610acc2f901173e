"""Half-open connections to Redis, which TCP does not report."""

from __future__ import annotations

import pytest

from tests.support.machine_load import scale_to_load
from tests.support.streams import server_ms
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TIMEOUT_MS = 1000
SHORT_TIMEOUT = {"redis_socket_timeout": TIMEOUT_MS / 1000, "drain_delay": 0.2, "lock_duration": 30}


def test_an_idle_worker_with_half_open_connections_reconnects_within_its_timeout(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    worker = harness.worker(via=proxy, children=2, settings=SHORT_TIMEOUT)
    harness.app.send_task("quick").get(timeout=60)
    harness.wait_until_idle(2)

    proxy.freeze()
    frozen_ms = server_ms(harness.redis)
    jobs = [harness.app.send_task("quick") for _ in range(4)]
    took_ms = [harness.wait_for_event("active", job).ms - frozen_ms for job in jobs]
    harness.report(active_after_ms=took_ms, timeout_ms=TIMEOUT_MS)

    assert max(took_ms) <= TIMEOUT_MS + scale_to_load(1000)
    for job in jobs:
        job.get(timeout=60)
    assert [harness.start_count(job) for job in jobs] == [1, 1, 1, 1]
    assert harness.events.all(event="stalled") == []
    assert worker.stop() == 0


def test_a_worker_finishes_a_job_within_its_timeout_if_connections_are_half_open(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    worker = harness.worker(via=proxy, children=1, settings=SHORT_TIMEOUT)
    first = harness.hold()
    harness.wait_for_start(first)
    following = harness.app.send_task("quick")

    proxy.freeze()
    harness.open_gate()
    ended_ms = harness.journal.wait_for(what="end", job=first.id)[0].ms
    settled_ms = harness.wait_for_event("completed", first).ms - ended_ms
    active_ms = harness.wait_for_event("active", following).ms - ended_ms
    harness.report(settled_after_ms=settled_ms, next_active_after_ms=active_ms, timeout_ms=TIMEOUT_MS)

    assert max(settled_ms, active_ms) <= TIMEOUT_MS + scale_to_load(1000)
    assert first.get(timeout=60) == "gate"
    following.get(timeout=60)
    assert (harness.start_count(first), harness.start_count(following)) == (1, 1)
    assert worker.stop() == 0


def test_a_worker_keeps_its_locks_through_a_half_open_connection(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    short = {"lock_duration": 3, "stalled_interval": 1}
    harness.worker(via=proxy, children=1, settings={**SHORT_TIMEOUT, **short})
    job = harness.hold()
    harness.wait_for_start(job)
    harness.worker(children=1, settings=short)  # would recover the job if its lock expired
    later = harness.app.send_task("quick", countdown=5)  # later than a lock and a stalled check

    proxy.freeze()
    later.get(timeout=60)
    assert harness.start_count(job) == 1
    assert harness.events.all(event="stalled") == []
    harness.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
