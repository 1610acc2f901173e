"""Revoking a job cancels its Spark jobs; the child's session stays usable."""

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

TIMEOUT_S = 120.0


def test_revoking_a_job_cancels_its_spark_jobs_and_keeps_the_jvm(
    harness: WorkerHarness, spark_worker: Callable[..., Worker]
) -> None:
    worker = spark_worker()
    job = harness.app.send_task("work_long", kwargs={"gate": "never"})
    run = harness.wait_for_start(job, 1, TIMEOUT_S)
    tasks = [int(entry["pid"]) for entry in harness.journal.wait_for(2, TIMEOUT_S, what="on spark", gate="never")]

    assert job.revoke(terminate=True) == "terminating"
    with pytest.raises(TaskRevokedError):
        job.get(timeout=TIMEOUT_S)
    harness.report(spark_tasks_gone_s=round(max(wait_until_exited(pid, 60) for pid in tasks), 2))
    after = harness.app.send_task("add_up", kwargs={"numbers": 1000}).get(timeout=TIMEOUT_S)
    assert (after["total"], after["jvm"], after["child"]) == (499_500, int(run["jvm"]), int(run["child"]))
    assert harness.start_count(job) == 1, "a revoked job is not retried"
    assert not harness.redis.exists(harness.keys.revoked)
    assert worker.stop(TIMEOUT_S) == 0
