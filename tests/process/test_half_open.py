"""The way to Redis breaks in the ways that TCP does not tell of."""

from __future__ import annotations

import pytest

from tests.support.pace import at_this_pace
from tests.support.stage import Stage
from tests.support.streams import server_ms

pytestmark = pytest.mark.process

TIMEOUT_MS = 1000
IMPATIENT = {"redis_socket_timeout": TIMEOUT_MS / 1000, "drain_delay": 0.2, "lock_duration": 30}


def test_an_idle_worker_whose_connections_are_half_open_takes_jobs_again_within_its_timeout(stage: Stage) -> None:
    proxy = stage.proxy()
    worker = stage.worker(via=proxy, children=2, settings=IMPATIENT)
    stage.app.send_task("quick").get(timeout=60)
    stage.wait_until_idle(2)

    proxy.freeze()
    frozen_ms = server_ms(stage.redis)
    jobs = [stage.app.send_task("quick") for _ in range(4)]
    took_ms = [stage.became("active", job).ms - frozen_ms for job in jobs]
    stage.note(active_after_ms=took_ms, timeout_ms=TIMEOUT_MS)

    assert max(took_ms) <= TIMEOUT_MS + at_this_pace(1000)
    for job in jobs:
        job.get(timeout=60)
    assert [stage.starts(job) for job in jobs] == [1, 1, 1, 1]
    assert stage.events.all(event="stalled") == []
    assert worker.stop() == 0


def test_a_worker_whose_connections_become_half_open_in_mid_job_settles_it_and_goes_on_within_its_timeout(
    stage: Stage,
) -> None:
    proxy = stage.proxy()
    worker = stage.worker(via=proxy, children=1, settings=IMPATIENT)
    first = stage.hold()
    stage.started(first)
    following = stage.app.send_task("quick")

    proxy.freeze()
    stage.open_gate()
    ended_ms = stage.journal.wait_for(what="end", job=first.id)[0].ms
    settled_ms = stage.became("completed", first).ms - ended_ms
    active_ms = stage.became("active", following).ms - ended_ms
    stage.note(settled_after_ms=settled_ms, next_active_after_ms=active_ms, timeout_ms=TIMEOUT_MS)

    assert max(settled_ms, active_ms) <= TIMEOUT_MS + at_this_pace(1000)
    assert first.get(timeout=60) == "gate"
    following.get(timeout=60)
    assert (stage.starts(first), stage.starts(following)) == (1, 1)
    assert worker.stop() == 0


def test_a_worker_keeps_its_locks_through_a_half_open_connection(stage: Stage) -> None:
    proxy = stage.proxy()
    short = {"lock_duration": 3, "stalled_interval": 1}
    stage.worker(via=proxy, children=1, settings={**IMPATIENT, **short})
    job = stage.hold()
    stage.started(job)
    stage.worker(children=1, settings=short)  # it would take the job if the lock were lost
    later = stage.app.send_task("quick", countdown=5)  # runs when two locks would have run out

    proxy.freeze()
    later.get(timeout=60)
    assert stage.starts(job) == 1
    assert stage.events.all(event="stalled") == []
    stage.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
