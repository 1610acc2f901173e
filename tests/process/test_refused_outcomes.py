"""Outcomes that Redis does not take, and the jobs that travelled with them."""

from __future__ import annotations

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


def test_a_job_that_came_with_a_refused_outcome_from_another_queue_runs_at_once(harness: WorkerHarness) -> None:
    # One child of two queues: finishing a job of one travels with fetching a job of the other.
    worker = harness.worker(children=1, options=["-Q", "default,other"], settings={"lock_duration": 30})
    victim = harness.hold()
    harness.wait_for_start(victim)
    following = harness.app.send_task("quick", queue="other")
    harness.redis.set(harness.keys.lock(victim.id), "another worker's")
    harness.open_gate()

    harness.wait_for_start(following, timeout=20)
    assert following.get(timeout=20) is None
    assert worker.wait_for_line("Lock lost")[0]["job_id"] == victim.id
    assert harness.start_count(following) == 1
    assert harness.redis.llen(harness.keys_of("other").active) == 0
    assert worker.stop() == 0
