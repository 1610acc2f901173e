"""Outcomes that Redis does not take, and the jobs that travelled with them."""

from __future__ import annotations

import pytest

from tests.support.stage import Stage

pytestmark = pytest.mark.process


def test_a_job_that_came_with_a_refused_outcome_from_another_queue_runs_at_once(stage: Stage) -> None:
    # One child of two queues: finishing a job of one travels with fetching a job of the other.
    worker = stage.worker(children=1, options=["-Q", "default,other"], settings={"lock_duration": 30})
    victim = stage.hold()
    stage.started(victim)
    following = stage.app.send_task("quick", queue="other")
    stage.redis.set(stage.keys.lock(victim.id), "another worker's")
    stage.open_gate()

    stage.started(following, timeout=20)
    assert following.get(timeout=20) is None
    assert worker.wait_for_line("Lock lost")[0]["job_id"] == victim.id
    assert stage.starts(following) == 1
    assert stage.redis.llen(stage.keys_of("other").active) == 0
    assert worker.stop() == 0
