"""Tasks with ``spark=True`` in a real worker, with a real JVM."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bulltask import AsyncResult, PermanentError
from bulltask.worker.slots import ExitCode
from tests.support.processes import has_exited, parent_of
from tests.support.streams import Entry
from tests.support.worker import Worker, wait_until_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.process,
    pytest.mark.timeout(400),
]

TIMEOUT_S = 120.0

StartWorker = Callable[..., Worker]


def progress_of(harness: WorkerHarness, job: AsyncResult[Any]) -> list[Any]:
    """Return the progress events of a job, oldest first."""
    return [json.loads(entry["data"]) for entry in harness.events.all(event="progress", jobId=job.id)]


def wait_for_tasks(harness: WorkerHarness, gate: str, count: int) -> list[Entry]:
    """Wait until ``count`` Spark tasks wait at the gate."""
    return harness.journal.wait_for(count, TIMEOUT_S, what="on spark", gate=gate)


def run_long(harness: WorkerHarness, gate: str) -> AsyncResult[Any]:
    return harness.app.send_task("work_long", kwargs={"gate": gate})


def wait_for_run(
    harness: WorkerHarness, job: AsyncResult[Any], gate: str, time: int = 1
) -> tuple[dict[str, int], list[int]]:
    """Wait until the job's ``time``-th attempt waits in Spark's tasks; return its processes, and those of the tasks."""
    start = harness.wait_for_start(job, time, TIMEOUT_S)
    at_gate = wait_for_tasks(harness, gate, 2 * time)[-2:]
    return {name: int(start[name]) for name in ("jvm", "child")}, [int(entry["pid"]) for entry in at_gate]


def test_a_task_uses_the_childs_session_and_reports_progress(harness: WorkerHarness, spark_worker: StartWorker) -> None:
    worker = spark_worker()
    first = harness.app.send_task("add_up", kwargs={"numbers": 1000})
    result = first.get(timeout=TIMEOUT_S)
    jvm = result["jvm"]
    assert result["total"] == 499_500
    assert result["group"] == first.id
    assert result["supervisor"] == worker.pid
    assert parent_of(jvm) == result["child"] != worker.pid
    assert os.getpgid(jvm) == jvm, "the JVM would receive signals of the worker's terminal"
    assert result["sigint"] == "bulltask.worker.child", "Spark's signal handler was not replaced"

    last = progress_of(harness, first)[-1]
    assert last == {"progress": 100.0, "stages": 2, "stages_done": 2, "tasks": 5, "tasks_done": 5}
    assert json.loads(harness.field(first, "progress")) == last

    stopped = harness.app.send_task("stop_it")
    assert stopped.get(timeout=TIMEOUT_S) == "stopped"
    assert progress_of(harness, stopped) == ["nearly"], "progress reported by the task was overwritten"

    repeated = harness.app.send_task("add_up", kwargs={"numbers": 10}).get(timeout=TIMEOUT_S)
    assert (repeated["total"], repeated["jvm"], repeated["child"]) == (45, jvm, result["child"])
    assert not [line for line in worker.warnings() if "threads" in line["event"]], "the child was forked with threads"

    lost = run_long(harness, "lost")
    _, tasks = wait_for_run(harness, lost, "lost")
    harness.redis.set(harness.keys.lock(lost.id), "another worker's")
    for pid in tasks:
        wait_until_exited(pid, 60)
    worker.wait_for_line("Lock lost", timeout=60, job_id=lost.id)

    worker.send(signal.SIGTERM)
    wait_until_exited(result["child"], TIMEOUT_S)
    assert has_exited(jvm), "the child did not wait for its JVM"
    assert worker.wait(TIMEOUT_S) == ExitCode.OK


@pytest.mark.extended
def test_a_job_runs_again_after_its_child_or_jvm_was_killed(harness: WorkerHarness, spark_worker: StartWorker) -> None:
    worker = spark_worker(shutdown_timeout=0.5)
    job = run_long(harness, "crashes")
    first, tasks = wait_for_run(harness, job, "crashes")
    os.kill(first["child"], signal.SIGKILL)
    harness.report(jvm_gone_s=round(max(wait_until_exited(pid, 30) for pid in [first["jvm"], *tasks]), 2))

    second, tasks = wait_for_run(harness, job, "crashes", 2)
    assert harness.field(job, "atm") in {None, "0"}, "an interrupted attempt was counted"
    os.kill(second["jvm"], signal.SIGKILL)
    for pid in (second["child"], *tasks):
        wait_until_exited(pid, 30)

    third, _ = wait_for_run(harness, job, "crashes", 3)
    assert len({run[name] for run in (first, second, third) for name in run}) == 6
    assert "this child's JVM died (signal 9)" in harness.field(job, "stacktrace")
    harness.open_gate("crashes", 2)
    assert job.get(timeout=TIMEOUT_S) == 2

    interrupted = run_long(harness, "interrupted")
    last, tasks = wait_for_run(harness, interrupted, "interrupted")
    assert last == third
    assert worker.stop(TIMEOUT_S) == ExitCode.OK
    harness.report(jvm_gone_after_stop_s=round(max(wait_until_exited(pid, 30) for pid in [last["jvm"], *tasks]), 2))
    assert harness.redis.lrange(harness.keys.wait, 0, -1) == [interrupted.id]
    assert harness.field(interrupted, "atm") in {None, "0"}


def test_a_job_fails_without_java_with_advice_and_no_retry(harness: WorkerHarness, tmp_path: Path) -> None:
    source = """
    @app.task(spark=True, name="count", max_retries=3)
    def count():
        return "never"
    """
    worker = harness.worker(source, children=1, environ={"JAVA_HOME": str(tmp_path)})
    message = f"JAVA_HOME={tmp_path} has no bin/java: set it to a JRE, 17 or newer"
    worker.wait_for_line("Tasks with spark=True will fail in this worker", tasks=["count"], error=message)
    job = harness.app.send_task("count")
    with pytest.raises(PermanentError, match=re.escape(message)):
        job.get(timeout=TIMEOUT_S)
    assert harness.field(job, "atm") == "1"
