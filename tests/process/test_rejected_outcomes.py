"""Outcomes that Redis rejects, and the jobs that were fetched in the same call."""

from __future__ import annotations

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


def test_a_job_runs_even_if_the_outcome_of_the_previous_job_was_rejected(harness: WorkerHarness) -> None:
    # One child consumes two queues: it finishes a job of one and fetches a job of the other in one round trip.
    worker = harness.worker(children=1, options=["-Q", "default,other"], settings={"lock_duration": 30})
    lost = harness.hold()
    harness.wait_for_start(lost)
    following = harness.app.send_task("quick", queue="other")
    harness.redis.set(harness.keys.lock(lost.id), "another worker's")
    harness.open_gate()

    harness.wait_for_start(following, timeout=20)
    assert following.get(timeout=20) is None
    assert worker.wait_for_line("Lock lost")[0]["job_id"] == lost.id
    assert harness.start_count(following) == 1
    assert harness.redis.llen(harness.keys_of("other").active) == 0
    assert worker.stop() == 0
