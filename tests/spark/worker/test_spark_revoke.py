"""A revoked job's work on Spark is cancelled, and its child's session serves the next one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bulltask import TaskRevokedError
from tests.support.worker import Worker, wait_until_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.process,
    pytest.mark.timeout(400),
]

PATIENCE = 120.0


def test_what_a_revoked_job_does_on_spark_ends_and_the_next_task_works_in_the_same_jvm(
    harness: WorkerHarness, spark_worker: Callable[..., Worker]
) -> None:
    worker = spark_worker()
    job = harness.app.send_task("work_long", kwargs={"gate": "never"})
    run = harness.wait_for_start(job, 1, PATIENCE)
    tasks = [int(entry["pid"]) for entry in harness.journal.wait_for(2, PATIENCE, what="on spark", gate="never")]

    assert job.revoke(terminate=True) == "terminating"
    with pytest.raises(TaskRevokedError):
        job.get(timeout=PATIENCE)
    harness.report(spark_tasks_gone_s=round(max(wait_until_exited(pid, 60) for pid in tasks), 2))
    after = harness.app.send_task("add_up", kwargs={"numbers": 1000}).get(timeout=PATIENCE)
    assert (after["total"], after["jvm"], after["child"]) == (499_500, int(run["jvm"]), int(run["child"]))
    assert harness.start_count(job) == 1, "it has an attempt left, which is not made"
    assert not harness.redis.exists(harness.keys.revoked)
    assert worker.stop(PATIENCE) == 0
