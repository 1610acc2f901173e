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
from bulltask.worker.exit_codes import ExitCode
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

PATIENCE = 120.0

StartWorker = Callable[..., Worker]


def progress_of(harness: WorkerHarness, job: AsyncResult[Any]) -> list[Any]:
    """The job's progress events, oldest first."""
    return [json.loads(entry["data"]) for entry in harness.events.all(event="progress", jobId=job.id)]


def on_spark(harness: WorkerHarness, gate: str, count: int) -> list[Entry]:
    """Wait until so many of Spark's own tasks wait at the gate."""
    return harness.journal.wait_for(count, PATIENCE, what="on spark", gate=gate)


def run_long(harness: WorkerHarness, gate: str) -> AsyncResult[Any]:
    return harness.app.send_task("work_long", kwargs={"gate": gate})


def wait_for_run(
    harness: WorkerHarness, job: AsyncResult[Any], gate: str, time: int = 1
) -> tuple[dict[str, int], list[int]]:
    """Wait until the job's ``time``-th run waits in Spark's tasks; the processes, and those of Spark's tasks."""
    start = harness.wait_for_start(job, time, PATIENCE)
    at_gate = on_spark(harness, gate, 2 * time)[-2:]
    return {name: int(start[name]) for name in ("jvm", "child")}, [int(entry["pid"]) for entry in at_gate]


def test_a_task_has_its_childs_session_and_its_job_reports_progress_while_its_lock_is_held(
    harness: WorkerHarness, spark_worker: StartWorker
) -> None:
    worker = spark_worker()
    first = harness.app.send_task("add_up", kwargs={"numbers": 1000})
    found = first.get(timeout=PATIENCE)
    jvm = found["jvm"]
    assert found["total"] == 499_500
    assert found["group"] == first.id
    assert found["supervisor"] == worker.pid
    assert parent_of(jvm) == found["child"] != worker.pid
    assert os.getpgid(jvm) == jvm, "Ctrl-Z in the worker's terminal does not stop it"
    assert found["sigint"] == "bulltask.worker.child.main", "Spark's own handler is not left behind"

    last = progress_of(harness, first)[-1]
    assert last == {"progress": 100.0, "stages": 2, "stages_done": 2, "tasks": 5, "tasks_done": 5}
    assert json.loads(harness.field(first, "progress")) == last

    stopped = harness.app.send_task("stop_it")
    assert stopped.get(timeout=PATIENCE) == "stopped"
    assert progress_of(harness, stopped) == ["nearly"], "what a task says itself stays"

    again = harness.app.send_task("add_up", kwargs={"numbers": 10}).get(timeout=PATIENCE)
    assert (again["total"], again["jvm"], again["child"]) == (45, jvm, found["child"])
    assert not [line for line in worker.warnings() if "threads" in line["event"]], "it was forked"

    lost = run_long(harness, "lost")
    _, tasks = wait_for_run(harness, lost, "lost")
    harness.redis.set(harness.keys.lock(lost.id), "another worker's")
    for pid in tasks:
        wait_until_exited(pid, 60)
    worker.wait_for_line("Lock lost", timeout=60, job_id=lost.id)

    worker.send(signal.SIGTERM)
    wait_until_exited(found["child"], PATIENCE)
    assert has_exited(jvm), "the child waits for its JVM"
    assert worker.wait(PATIENCE) == ExitCode.OK


def test_a_job_runs_again_when_its_child_or_jvm_dies_and_is_released_at_a_deadline_and_no_jvm_is_left(
    harness: WorkerHarness, spark_worker: StartWorker
) -> None:
    worker = spark_worker(shutdown_timeout=0.5)
    job = run_long(harness, "crashes")
    first, tasks = wait_for_run(harness, job, "crashes")
    os.kill(first["child"], signal.SIGKILL)
    harness.report(jvm_gone_s=round(max(wait_until_exited(pid, 30) for pid in [first["jvm"], *tasks]), 2))

    second, tasks = wait_for_run(harness, job, "crashes", 2)
    assert harness.field(job, "atm") in {None, "0"}, "the run that was cut off is no attempt"
    os.kill(second["jvm"], signal.SIGKILL)
    for pid in (second["child"], *tasks):
        wait_until_exited(pid, 30)

    third, _ = wait_for_run(harness, job, "crashes", 3)
    assert len({run[name] for run in (first, second, third) for name in run}) == 6
    assert "the JVM of this child has ended (signal 9)" in harness.field(job, "stacktrace")
    harness.open_gate("crashes", 2)
    assert job.get(timeout=PATIENCE) == 2

    cut_off = run_long(harness, "cut off")
    last, tasks = wait_for_run(harness, cut_off, "cut off")
    assert last == third
    assert worker.stop(PATIENCE) == ExitCode.OK
    harness.report(jvm_gone_after_stop_s=round(max(wait_until_exited(pid, 30) for pid in [last["jvm"], *tasks]), 2))
    assert harness.redis.lrange(harness.keys.wait, 0, -1) == [cut_off.id]
    assert harness.field(cut_off, "atm") in {None, "0"}


def test_without_java_a_job_fails_once_and_says_what_to_install(harness: WorkerHarness, tmp_path: Path) -> None:
    source = """
    @app.task(spark=True, name="count", max_retries=3)
    def count():
        return "never"
    """
    worker = harness.worker(source, children=1, environ={"JAVA_HOME": str(tmp_path)})
    said = f"JAVA_HOME={tmp_path} has no bin/java: set it to a JRE, 17 or newer"
    worker.wait_for_line("Tasks with spark=True will fail in this worker", tasks=["count"], error=said)
    job = harness.app.send_task("count")
    with pytest.raises(PermanentError, match=re.escape(said)):
        job.get(timeout=PATIENCE)
    assert harness.field(job, "atm") == "1"
