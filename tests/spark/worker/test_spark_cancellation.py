"""Revoking a job, or reaching its time limit, also cancels its Spark jobs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bulltask import TaskRevokedError
from tests.support.processes import has_exited
from tests.support.worker import Worker, wait_until_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = [
    pytest.mark.extended,
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.process,
    pytest.mark.timeout(600),
]

TIMEOUT_S = 150.0
LIMIT_S = 25  # time for Spark's processes to start on a busy machine


def spark_tasks(harness: WorkerHarness, gate: str) -> list[int]:
    """Wait until both Spark tasks of a job wait at a gate; return their process ids."""
    return [int(entry["pid"]) for entry in harness.journal.wait_for(2, TIMEOUT_S, what="on spark", gate=gate)]


def test_revoking_and_soft_limits_keep_the_jvm_and_a_hard_limit_kills_it(
    harness: WorkerHarness, spark_worker: Callable[..., Worker]
) -> None:
    worker = spark_worker()
    revoked = harness.app.send_task("work_long", kwargs={"gate": "never"})
    start = harness.wait_for_start(revoked, 1, TIMEOUT_S)
    jvm, child = int(start["jvm"]), int(start["child"])
    tasks = spark_tasks(harness, "never")
    assert revoked.revoke(terminate=True) == "terminating"
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=TIMEOUT_S)
    harness.report(spark_tasks_gone_s=round(max(wait_until_exited(pid, 60) for pid in tasks), 2))
    assert harness.start_count(revoked) == 1, "a revoked job is not retried"
    assert not harness.redis.exists(harness.keys.revoked)

    soft = harness.app.send_task("work_long", kwargs={"gate": "soft"}, soft_time_limit=LIMIT_S, max_retries=0)
    tasks = spark_tasks(harness, "soft")
    reason = harness.wait_for_event("failed", soft, timeout=TIMEOUT_S)["failedReason"]
    assert reason == f"task work_long ran longer than its soft time limit of {LIMIT_S} s"
    for pid in tasks:
        wait_until_exited(pid, 60)
    # Several calls, because an interrupted connection to the JVM could return the reply to an earlier call.
    for numbers, total in ((10, 45), (1000, 499_500), (100, 4_950)):
        result = harness.app.send_task("add_up", kwargs={"numbers": numbers}).get(timeout=TIMEOUT_S)
        assert (result["total"], result["jvm"], result["child"]) == (total, jvm, child)
    assert not worker.logged("Child killed")

    hard = harness.app.send_task("work_long", kwargs={"gate": "hard"}, time_limit=LIMIT_S, max_retries=0)
    tasks = spark_tasks(harness, "hard")
    reason = harness.wait_for_event("failed", hard, timeout=TIMEOUT_S)["failedReason"]
    assert reason == f"task work_long ran longer than its time limit of {LIMIT_S} s and its child was killed"
    for pid in (child, jvm, *tasks):
        wait_until_exited(pid, 60)
    assert has_exited(jvm)
    assert worker.wait_for_line("Child killed", pid=child, reason="hard_limit")
