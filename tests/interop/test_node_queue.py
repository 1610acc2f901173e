"""Node's Queue as an operator uses it, on a queue that our workers serve: counts, workers, pause, limits, retry."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from bulltask.testing.wait import wait_until
from tests.interop.node_bridge import NodeError
from tests.interop.side_by_side import SideBySide, ran
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]


def test_node_counts_bulltask_jobs_in_every_state(either: SideBySide) -> None:
    either.worker()
    for _ in range(2):
        either.send("echo").get(timeout=60)
    failed = either.send("fail", error="ValueError")
    running = either.send("hold", gate="gate")
    either.started(running.id)
    for options in ({}, {}, {}, {"countdown": 60}, {"priority": 1}, {"priority": 2}):
        either.send("echo", options=options)
    counts = {"waiting": 3, "active": 1, "delayed": 1, "prioritized": 2, "completed": 2, "failed": 1}
    assert either.counts() == counts
    assert either.call("getFailed")[0]["id"] == failed.id
    assert [job["id"] for job in either.call("getActive")] == [running.id]
    assert len(either.call("getJobs", ["wait", "prioritized", "delayed"])) == 6
    either.call("pause")
    del counts["waiting"]
    assert either.counts() == {**counts, "paused": 3}


def test_node_lists_bulltasks_workers(either: SideBySide) -> None:
    assert either.call("getWorkers") == []
    first = either.worker(worker_name="mailer", children=2)
    second = either.worker()

    def workers() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = either.call("getWorkers")
        return found if len(found) == 2 else []

    ids = [worker.wait_for_line("Worker started")[0]["worker_id"] for worker in (first, second)]
    assert ids[0].startswith("mailer@")
    # One row for each worker, however many children it has.
    rows = {row["rawname"].partition(":w:")[2]: row for row in wait_until(workers)}
    assert sorted(rows) == sorted(ids)
    assert rows[ids[0]]["addr"].startswith("127.0.0.1:")
    assert {row["name"] for row in rows.values()} == {either.name}
    first.stop()
    second.send(signal.SIGKILL)
    wait_until(lambda: either.call("getWorkersCount") == 0)
    assert either.node.call("queue.getWorkers", queue="another") == []


def test_node_and_bulltask_export_the_same_prometheus_metrics(either: SideBySide) -> None:
    either.worker()
    either.send("echo").get(timeout=60)
    either.app.queue("mail").pause()
    for options in ({}, {}, {"countdown": 60}, {"priority": 3}):
        either.send("echo", options=options)
    theirs = either.call("exportPrometheusMetrics", {"env": "test"})
    ours = either.app.queue("mail").export_prometheus_metrics({"env": "test"})
    assert sorted(theirs.splitlines()) == sorted(ours.splitlines())
    assert f'bullmq_job_count{{queue="{either.name}", state="paused", env="test"}} 2' in theirs.splitlines()


def test_nodes_pause_stops_a_bulltask_worker_and_resume_wakes_it(either: SideBySide) -> None:
    either.worker(drain_delay=60)  # only the marker can wake it
    either.send("echo").get(timeout=60)
    either.call("pause")
    jobs = [either.send("echo").id, either.add("echo"), either.send("echo", options={"priority": 3}).id]
    assert either.counts() == {"completed": 1, "paused": 2, "prioritized": 1}
    either.listen()
    either.call("resume")
    for job in jobs:
        either.wait_for_event("completed", job)


def test_a_running_job_ends_after_nodes_pause_and_the_next_job_waits(mail: SideBySide) -> None:
    mail.worker()
    running = mail.send("hold", gate="gate")
    mail.started(running.id)
    waiting = mail.send("echo")
    mail.call("pause")
    mail.open_gate()
    assert running.get(timeout=60) == "gate"
    assert mail.counts() == {"completed": 1, "paused": 1}
    mail.call("resume")
    waiting.get(timeout=60)


def test_a_retry_in_a_paused_queue_waits_until_it_is_resumed(mail: SideBySide) -> None:
    mail.worker(drain_delay=0.2)  # BullMQ's pause takes the marker away, so nothing but time wakes the worker
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


def test_nodes_global_concurrency_limits_bulltasks_workers(mail: SideBySide) -> None:
    mail.call("setGlobalConcurrency", 1)
    mail.worker(children=2)
    mail.worker(children=1)
    jobs = [mail.send("hold", gate="gate") for _ in range(4)]
    for job in jobs:
        mail.started(job.id)
        assert mail.counts()["active"] == 1
        mail.open_gate()
    for job in jobs:
        job.get(timeout=60)
    assert most_at_once(mail) == 1
    mail.call("removeGlobalConcurrency")
    more = [mail.send("hold", gate="more") for _ in range(3)]
    for job in more:
        mail.started(job.id)
    assert mail.counts()["active"] == 3
    for _ in more:
        mail.open_gate("more")
    for job in more:
        job.get(timeout=60)


def test_a_bulltask_worker_starts_a_job_soon_after_a_node_worker_closes(mail: SideBySide) -> None:
    """Node tells nobody: its last job asks for no other, and BullMQ sets no marker when a job ends."""
    mail.call("setGlobalConcurrency", 1)
    theirs = mail.node_worker("sleep", {"ms": 2_000})
    first = mail.add("echo")
    mail.stream.wait_for(timeout=60, event="active", jobId=first)
    mail.worker(drain_delay=60)
    wait_until(lambda: any("b" in client["flags"] for client in mail.redis.client_list()), 60.0, "a refused child")
    second = mail.send("echo")
    mail.node.call("worker.close", worker=theirs)
    second.get(timeout=60)
    ended, started = mail.seen(first)["finishedOn"], mail.seen(second.id)["processedOn"]
    assert started - ended <= scale_to_load(1_500)


def test_nodes_global_rate_limit_limits_bulltasks_workers(mail: SideBySide) -> None:
    mail.call("setGlobalRateLimit", 2, 400)
    mail.worker(children=2)
    jobs = [mail.send("echo") for _ in range(6)]
    for job in jobs:
        job.get(timeout=60)
    starts = sorted(mail.seen(job.id)["processedOn"] for job in jobs)
    # Each window begins with the first start in it; the clocks of two children differ by a millisecond or so.
    assert all(later - earlier >= 390 for earlier, later in zip(starts, starts[2:], strict=False)), starts
    assert starts[-1] - starts[0] < scale_to_load(3_000)


def test_a_manual_rate_limit_of_node_stops_a_bulltask_worker(mail: SideBySide) -> None:
    mail.call("setGlobalRateLimit", 1_000, 1)  # BullMQ looks at the limit only where some maximum is set
    mail.worker()
    mail.send("echo").get(timeout=60)
    mail.call("rateLimit", 500)
    job = mail.send("echo")
    job.get(timeout=60)
    seen = mail.seen(job.id)
    assert 400 <= seen["processedOn"] - seen["timestamp"] < 10_000


def test_the_limiter_of_a_node_worker_does_not_limit_a_bulltask_worker(mail: SideBySide) -> None:
    mail.node_worker("echo", limiter={"max": 1, "duration": 60_000})
    mail.listen()
    first = mail.add("echo", {"value": 1})
    mail.wait_for_event("completed", first)
    mail.worker()
    assert mail.send("echo", value=2).get(timeout=60) == 2, "the limit is in no key that our worker could see"


def test_a_failed_bulltask_job_that_node_retries_runs_again(mail: SideBySide) -> None:
    mail.worker()
    mail.listen()
    job = mail.sender(task_max_retries=0).send_task("fail_until", kwargs={"attempt": 2})
    mail.wait_for_event("failed", job.id)
    mail.job_call(job.id, "retry")
    mail.wait_for_event("completed", job.id)
    seen = mail.seen(job.id)
    assert (seen["state"], seen["returnvalue"], seen["attemptsMade"]) == ("completed", 1, 2)
    assert seen["failedReason"] is None


def test_a_completed_bulltask_job_that_node_retries_runs_again(mail: SideBySide, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.worker()
    job = mail.send("record", file=file)
    job.get(timeout=60)
    mail.listen()
    mail.job_call(job.id, "retry", "completed")
    mail.wait_for_event("completed", job.id)
    assert ran(file) == [job.id, job.id]


def test_a_delayed_bulltask_job_that_node_promotes_runs_immediately(mail: SideBySide) -> None:
    mail.worker(drain_delay=60)
    job = mail.send("echo", options={"countdown": 3600}, value=1)
    mail.job_call(job.id, "promote")
    assert job.get(timeout=60) == 1


def test_a_delay_that_node_changes_is_applied(mail: SideBySide) -> None:
    mail.worker(drain_delay=60)
    job = mail.send("echo", options={"countdown": 3600}, value=1)
    mail.job_call(job.id, "changeDelay", 50)
    assert job.get(timeout=60) == 1


def test_a_priority_that_node_changes_is_applied(mail: SideBySide, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    jobs = [mail.send("record", options={"priority": 5}, file=file) for _ in range(3)]
    mail.job_call(jobs[2].id, "changePriority", {"priority": 1})
    mail.worker()
    jobs[1].get(timeout=60)
    assert ran(file) == [jobs[2].id, jobs[0].id, jobs[1].id]


def test_a_task_receives_the_data_that_node_changed(mail: SideBySide) -> None:
    job = mail.send("echo", value=1)
    mail.job_call(job.id, "updateData", {"value": 2})
    mail.worker()
    assert job.get(timeout=60) == 2


def test_a_bulltask_job_that_node_removes_does_not_run(mail: SideBySide, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.listen()
    removed, kept = (mail.send("record", file=file) for _ in range(2))
    mail.job_call(removed.id, "remove")
    mail.worker()
    kept.get(timeout=60)
    assert mail.wait_for_event("removed", removed.id)["prev"] == "wait"
    assert ran(file) == [kept.id]


def test_node_cannot_remove_a_job_that_runs_in_bulltask(mail: SideBySide) -> None:
    mail.worker()
    job = mail.send("hold", gate="gate")
    mail.started(job.id)
    with pytest.raises(NodeError, match="locked by another worker"):
        mail.job_call(job.id, "remove")
    mail.open_gate()
    assert job.get(timeout=60) == "gate"


def test_node_drains_a_bulltask_queue(mail: SideBySide) -> None:
    for options in ({}, {"priority": 1}, {"countdown": 60}):
        mail.send("echo", options=options)
    mail.call("drain")
    assert mail.counts() == {"delayed": 1}
    mail.call("drain", True)
    assert mail.counts() == {}


def test_node_cleans_and_obliterates_a_bulltask_queue(mail: SideBySide) -> None:
    mail.worker()
    jobs = [mail.send("echo").id for _ in range(3)]
    for job in jobs:
        mail.finished(job)
    assert sorted(mail.call("clean", 0, 100, "completed")) == sorted(jobs)
    mail.send("echo", options={"countdown": 60})
    mail.call("obliterate", {"force": True})
    assert mail.counts() == {}
    assert mail.redis.keys(f"{mail.keys.base}*") == []
    assert mail.send("echo", value=1).get(timeout=60) == 1, "the queue can be used again"


def most_at_once(side: SideBySide) -> int:
    """How many jobs of the task ``hold`` were running at the same time, at most."""
    running = most = 0
    for entry in side.journal.all():
        running += 1 if entry["what"] == "start" else -1
        most = max(most, running)
    return most
