"""Time limits of tasks with ``spark=True`` also end their Spark jobs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.processes import has_exited
from tests.support.worker import Worker, wait_until_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.process,
    pytest.mark.timeout(600),
]

TIMEOUT_S = 150.0
LIMIT_S = 25  # time for Spark's processes to start on a busy machine


def test_a_soft_limit_cancels_spark_jobs_and_a_hard_one_kills_the_jvm(
    harness: WorkerHarness, spark_worker: Callable[..., Worker]
) -> None:
    worker = spark_worker()
    before = harness.app.send_task("add_up", kwargs={"numbers": 1000}).get(timeout=TIMEOUT_S)

    soft = harness.app.send_task("work_long", kwargs={"gate": "soft"}, soft_time_limit=LIMIT_S, max_retries=0)
    tasks = [int(entry["pid"]) for entry in harness.journal.wait_for(2, TIMEOUT_S, what="on spark", gate="soft")]
    reason = harness.wait_for_event("failed", soft, timeout=TIMEOUT_S)["failedReason"]
    assert reason == f"task work_long ran longer than its soft time limit of {LIMIT_S} s"
    for pid in tasks:
        wait_until_exited(pid, 60)
    # Several calls, as an interrupted connection to the JVM could return the reply of an earlier call.
    for numbers, total in ((10, 45), (1000, 499_500), (100, 4_950)):
        after = harness.app.send_task("add_up", kwargs={"numbers": numbers}).get(timeout=TIMEOUT_S)
        assert (after["total"], after["jvm"], after["child"]) == (total, before["jvm"], before["child"])
    assert not worker.logged("Child killed")

    hard = harness.app.send_task("work_long", kwargs={"gate": "hard"}, time_limit=LIMIT_S, max_retries=0)
    tasks = [int(entry["pid"]) for entry in harness.journal.wait_for(2, TIMEOUT_S, what="on spark", gate="hard")]
    reason = harness.wait_for_event("failed", hard, timeout=TIMEOUT_S)["failedReason"]
    assert reason == f"task work_long ran longer than its time limit of {LIMIT_S} s and its child was killed"
    for pid in (before["child"], before["jvm"], *tasks):
        wait_until_exited(pid, 60)
    assert has_exited(before["jvm"])
    assert worker.wait_for_line("Child killed", pid=before["child"], reason="hard_limit")
