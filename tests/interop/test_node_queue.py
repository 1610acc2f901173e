"""Node's Queue manages a queue that bulltask's workers consume: counts, workers, pause, limits, retries."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue, recorded_ids
from tests.interop.node_bridge import NodeError
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]


def test_node_counts_bulltask_jobs_in_every_state(any_mail: InteropQueue) -> None:
    any_mail.worker()
    for _ in range(2):
        any_mail.send("echo").get(timeout=60)
    failed = any_mail.send("fail", error="ValueError")
    running = any_mail.send("hold", gate="gate")
    any_mail.wait_for_start(running.id)
    for options in ({}, {}, {}, {"countdown": 60}, {"priority": 1}, {"priority": 2}):
        any_mail.send("echo", options=options)
    counts = {"waiting": 3, "active": 1, "delayed": 1, "prioritized": 2, "completed": 2, "failed": 1}
    assert any_mail.counts() == counts
    assert any_mail.call("getFailed")[0]["id"] == failed.id
    assert [job["id"] for job in any_mail.call("getActive")] == [running.id]
    assert len(any_mail.call("getJobs", ["wait", "prioritized", "delayed"])) == 6
    any_mail.call("pause")
    del counts["waiting"]
    assert any_mail.counts() == {**counts, "paused": 3}


def test_node_lists_bulltask_workers(any_mail: InteropQueue) -> None:
    assert any_mail.call("getWorkers") == []
    first = any_mail.worker(worker_name="mailer", children=2)
    second = any_mail.worker()

    def workers() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = any_mail.call("getWorkers")
        return rows if len(rows) == 2 else []

    ids = [worker.wait_for_line("Worker started")[0]["worker_id"] for worker in (first, second)]
    assert ids[0].startswith("mailer@")
    # One row for each worker, however many children it has.
    rows = {row["rawname"].partition(":w:")[2]: row for row in wait_until(workers)}
    assert sorted(rows) == sorted(ids)
    assert rows[ids[0]]["addr"].startswith("127.0.0.1:")
    assert {row["name"] for row in rows.values()} == {any_mail.name}
    first.stop()
    second.send(signal.SIGKILL)
    wait_until(lambda: any_mail.call("getWorkersCount") == 0)
    assert any_mail.node.call("queue.getWorkers", queue="another") == []


def test_node_and_bulltask_export_the_same_prometheus_metrics(any_mail: InteropQueue) -> None:
    any_mail.worker()
    any_mail.send("echo").get(timeout=60)
    any_mail.app.queue("mail").pause()
    for options in ({}, {}, {"countdown": 60}, {"priority": 3}):
        any_mail.send("echo", options=options)
    from_node = any_mail.call("exportPrometheusMetrics", {"env": "test"})
    from_bulltask = any_mail.app.queue("mail").export_prometheus_metrics({"env": "test"})
    assert sorted(from_node.splitlines()) == sorted(from_bulltask.splitlines())
    assert f'bullmq_job_count{{queue="{any_mail.name}", state="paused", env="test"}} 2' in from_node.splitlines()


def test_pausing_in_node_stops_a_bulltask_worker_and_resuming_wakes_it(any_mail: InteropQueue) -> None:
    any_mail.worker(drain_delay=60)  # only the marker can wake it
    any_mail.send("echo").get(timeout=60)
    any_mail.call("pause")
    jobs = [any_mail.send("echo").id, any_mail.add("echo"), any_mail.send("echo", options={"priority": 3}).id]
    assert any_mail.counts() == {"completed": 1, "paused": 2, "prioritized": 1}
    any_mail.listen()
    any_mail.call("resume")
    for job in jobs:
        any_mail.wait_for_event("completed", job)


def test_a_running_job_ends_when_node_pauses_the_queue_and_the_next_waits(mail: InteropQueue) -> None:
    mail.worker()
    running = mail.send("hold", gate="gate")
    mail.wait_for_start(running.id)
    waiting = mail.send("echo")
    mail.call("pause")
    mail.open_gate()
    assert running.get(timeout=60) == "gate"
    assert mail.counts() == {"completed": 1, "paused": 1}
    mail.call("resume")
    waiting.get(timeout=60)


def test_a_retry_in_a_paused_queue_waits_until_it_is_resumed(mail: InteropQueue) -> None:
    mail.worker(drain_delay=0.2)  # BullMQ's pause removes the marker, so only the timeout wakes the worker
    mail.listen()
    mail.call("pause")
    job = mail.sender(task_retry_backoff=0.05).send_task("fail_until", kwargs={"attempt": 2})
    mail.call("resume")
    mail.wait_for_event("delayed", job.id)
    mail.call("pause")
    mail.wait_for_event("waiting", job.id, prev="delayed")
    assert mail.counts() == {"paused": 1}
    mail.call("resume")
    assert job.get(timeout=60) == 1


def test_a_global_concurrency_set_by_node_limits_bulltask_workers(mail: InteropQueue) -> None:
    mail.call("setGlobalConcurrency", 1)
    mail.worker(children=2)
    mail.worker(children=1)
    jobs = [mail.send("hold", gate="gate") for _ in range(4)]
    for job in jobs:
        mail.wait_for_start(job.id)
        assert mail.counts()["active"] == 1
        mail.open_gate()
    for job in jobs:
        job.get(timeout=60)
    assert max_concurrency(mail) == 1
    mail.call("removeGlobalConcurrency")
    more = [mail.send("hold", gate="more") for _ in range(3)]
    for job in more:
        mail.wait_for_start(job.id)
    assert mail.counts()["active"] == 3
    for _ in more:
        mail.open_gate("more")
    for job in more:
        job.get(timeout=60)


def test_a_bulltask_worker_starts_a_job_soon_after_a_node_worker_closes(mail: InteropQueue) -> None:
    """Nothing wakes the bulltask worker: Node's last job fetches none, and BullMQ sets no marker when a job ends."""
    mail.call("setGlobalConcurrency", 1)
    node_worker = mail.node_worker("sleep", {"ms": 2_000})
    first = mail.add("echo")
    mail.stream.wait_for(timeout=60, event="active", jobId=first)
    mail.worker(drain_delay=60)
    wait_until(
        lambda: any("b" in client["flags"] for client in mail.redis.client_list()),
        60.0,
        "a child that waits for the concurrency limit",
    )
    second = mail.send("echo")
    mail.node.call("worker.close", worker=node_worker)
    second.get(timeout=60)
    ended, started = mail.node_job(first)["finishedOn"], mail.node_job(second.id)["processedOn"]
    assert started - ended <= scale_to_load(1_500)


def test_a_global_rate_limit_set_by_node_limits_bulltask_workers(mail: InteropQueue) -> None:
    mail.call("setGlobalRateLimit", 2, 400)
    mail.worker(children=2)
    jobs = [mail.send("echo") for _ in range(6)]
    for job in jobs:
        job.get(timeout=60)
    starts = sorted(mail.node_job(job.id)["processedOn"] for job in jobs)
    # Each window begins with the first start in it; the clocks of two children differ by a millisecond or so.
    assert all(later - earlier >= 390 for earlier, later in zip(starts, starts[2:], strict=False)), starts
    assert starts[-1] - starts[0] < scale_to_load(3_000)


def test_a_manual_rate_limit_set_by_node_stops_a_bulltask_worker(mail: InteropQueue) -> None:
    mail.call("setGlobalRateLimit", 1_000, 1)  # BullMQ checks the limit only if a maximum is set
    mail.worker()
    mail.send("echo").get(timeout=60)
    mail.call("rateLimit", 500)
    job = mail.send("echo")
    job.get(timeout=60)
    seen = mail.node_job(job.id)
    assert 400 <= seen["processedOn"] - seen["timestamp"] < 10_000


def test_the_limiter_of_a_node_worker_does_not_limit_a_bulltask_worker(mail: InteropQueue) -> None:
    mail.node_worker("echo", limiter={"max": 1, "duration": 60_000})
    mail.listen()
    first = mail.add("echo", {"value": 1})
    mail.wait_for_event("completed", first)
    mail.worker()
    assert mail.send("echo", value=2).get(timeout=60) == 2, "the limit is in no key that bulltask's worker reads"


def test_a_failed_bulltask_job_that_node_retries_runs_again(mail: InteropQueue) -> None:
    mail.worker()
    mail.listen()
    job = mail.sender(task_max_retries=0).send_task("fail_until", kwargs={"attempt": 2})
    mail.wait_for_event("failed", job.id)
    mail.job_call(job.id, "retry")
    mail.wait_for_event("completed", job.id)
    seen = mail.node_job(job.id)
    assert (seen["state"], seen["returnvalue"], seen["attemptsMade"]) == ("completed", 1, 2)
    assert seen["failedReason"] is None


def test_a_completed_bulltask_job_that_node_retries_runs_again(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.worker()
    job = mail.send("record", file=file)
    job.get(timeout=60)
    mail.listen()
    mail.job_call(job.id, "retry", "completed")
    mail.wait_for_event("completed", job.id)
    assert recorded_ids(file) == [job.id, job.id]


def test_a_delayed_bulltask_job_that_node_promotes_runs_immediately(mail: InteropQueue) -> None:
    mail.worker(drain_delay=60)
    job = mail.send("echo", options={"countdown": 3600}, value=1)
    mail.job_call(job.id, "promote")
    assert job.get(timeout=60) == 1


def test_a_delay_that_node_changes_is_applied(mail: InteropQueue) -> None:
    mail.worker(drain_delay=60)
    job = mail.send("echo", options={"countdown": 3600}, value=1)
    mail.job_call(job.id, "changeDelay", 50)
    assert job.get(timeout=60) == 1


def test_a_priority_that_node_changes_is_applied(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    jobs = [mail.send("record", options={"priority": 5}, file=file) for _ in range(3)]
    mail.job_call(jobs[2].id, "changePriority", {"priority": 1})
    mail.worker()
    jobs[1].get(timeout=60)
    assert recorded_ids(file) == [jobs[2].id, jobs[0].id, jobs[1].id]


def test_a_task_receives_the_data_that_node_changed(mail: InteropQueue) -> None:
    job = mail.send("echo", value=1)
    mail.job_call(job.id, "updateData", {"value": 2})
    mail.worker()
    assert job.get(timeout=60) == 2


def test_a_bulltask_job_that_node_removes_does_not_run(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.listen()
    removed, kept = (mail.send("record", file=file) for _ in range(2))
    mail.job_call(removed.id, "remove")
    mail.worker()
    kept.get(timeout=60)
    assert mail.wait_for_event("removed", removed.id)["prev"] == "wait"
    assert recorded_ids(file) == [kept.id]


def test_node_cannot_remove_a_job_that_a_bulltask_worker_runs(mail: InteropQueue) -> None:
    mail.worker()
    job = mail.send("hold", gate="gate")
    mail.wait_for_start(job.id)
    with pytest.raises(NodeError, match="locked by another worker"):
        mail.job_call(job.id, "remove")
    mail.open_gate()
    assert job.get(timeout=60) == "gate"


def test_node_drains_a_bulltask_queue(mail: InteropQueue) -> None:
    for options in ({}, {"priority": 1}, {"countdown": 60}):
        mail.send("echo", options=options)
    mail.call("drain")
    assert mail.counts() == {"delayed": 1}
    mail.call("drain", True)
    assert mail.counts() == {}


def test_node_cleans_and_obliterates_a_bulltask_queue(mail: InteropQueue) -> None:
    mail.worker()
    jobs = [mail.send("echo").id for _ in range(3)]
    for job in jobs:
        mail.node_result(job)
    assert sorted(mail.call("clean", 0, 100, "completed")) == sorted(jobs)
    mail.send("echo", options={"countdown": 60})
    mail.call("obliterate", {"force": True})
    assert mail.counts() == {}
    assert mail.redis.keys(f"{mail.keys.base}*") == []
    assert mail.send("echo", value=1).get(timeout=60) == 1, "the queue can be used again"


def max_concurrency(side: InteropQueue) -> int:
    """Return the maximum number of jobs of the task ``hold`` that ran at the same time."""
    running = peak = 0
    for entry in side.journal.all():
        running += 1 if entry["what"] == "start" else -1
        peak = max(peak, running)
    return peak
