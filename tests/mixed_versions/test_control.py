"""Operations on a queue by one client that affect jobs and workers of the other."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bulltask.errors import QueueActiveError
from bulltask.queue import FlowJob, QueueEvents
from bulltask.queue import events as types
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue, recorded_ids
from tests.interop.node_bridge import NodeError
from tests.mixed_versions.conftest import Clients
from tests.mixed_versions.page import NEWEST_5, NEWEST_6, PINNED
from tests.support.manual_worker import ManualWorker

pytestmark = [pytest.mark.interop, pytest.mark.process]

CHANGED = "update the table in docs/reference/mixed-versions.md"


def wait_for_fetch(side: InteropQueue) -> None:
    """Wait until a worker of at most two children has fetched, and received the reply.

    A child pops the marker just before it fetches. When it pops another marker, it has received the reply.
    """
    for _ in range(3):
        side.redis.zadd(side.keys.marker, {"0": 0})
        wait_until(lambda: not side.redis.exists(side.keys.marker))


def test_a_pause_by_bullmq_stops_a_bulltask_worker(mail: InteropQueue, documented: str) -> None:
    mail.worker(children=2)
    mail.send("echo", value=0).get(timeout=60)
    mail.call("pause")
    jobs = [mail.send("echo", value=1), mail.result(mail.add("echo", {"value": 1}))]
    wait_for_fetch(mail)
    assert mail.counts()["completed"] == 1
    assert mail.redis.llen(mail.keys.wait) + mail.redis.llen(mail.keys.paused) == 2
    mail.call("resume")
    assert [job.get(timeout=60) for job in jobs] == [1, 1]
    assert documented == "safe"


def test_a_pause_by_bulltask_stops_a_bullmq_worker(mail: InteropQueue, documented: str) -> None:
    mail.node_worker("echo")
    mail.send("echo", value=0).get(timeout=60)
    with mail.app.queue("mail") as queue:
        queue.pause()
        jobs = [mail.send("echo", value=1), mail.result(mail.add("echo", {"value": 1}))]
        wait_for_fetch(mail)
        assert mail.redis.zcard(mail.keys.completed) == 1
        assert mail.redis.llen(mail.keys.wait) + mail.redis.llen(mail.keys.paused) == 2
        queue.resume()
    assert [job.get(timeout=60) for job in jobs] == [{"value": 1}] * 2
    assert documented == "safe"


def test_bullmq_counts_the_jobs_of_a_queue_that_bulltask_has_paused(mail: InteropQueue, documented: str) -> None:
    with mail.app.queue("mail") as queue:
        queue.pause()
        mail.send("echo")
        assert queue.count() == 1
    assert mail.call("isPaused")
    counted = sum(mail.counts().values())
    assert {1: "safe", 0: "differs"}[counted] == documented, CHANGED
    assert mail.call("getPrioritizedCount") == 0


def test_global_limits_apply_to_workers_of_both_clients(mail: InteropQueue, documented: str) -> None:
    manual_workers = [ManualWorker(mail.app._broker, mail.keys) for _ in range(2)]
    jobs = [mail.add("echo", {"n": n}) for n in range(4)]
    mail.call("setGlobalConcurrency", 1)
    assert [manual_worker.acquire() for manual_worker in manual_workers] == [jobs[0], ""]
    manual_workers[0].finish(jobs[0])
    mail.call("removeGlobalConcurrency")
    mail.call("setGlobalRateLimit", 1, 60_000)
    assert [manual_worker.acquire() for manual_worker in manual_workers] == [jobs[1], ""]
    manual_workers[0].finish(jobs[1])
    with mail.app.queue("mail") as queue:
        queue.remove_global_rate_limit()
        queue.remove_rate_limit_key()
        queue.set_global_concurrency(1)
        assert manual_workers[0].acquire() == jobs[2]
        mail.node_worker("echo", {}, concurrency=5)
        wait_for_fetch(mail)
        assert mail.redis.lrange(mail.keys.active, 0, -1) == [jobs[2]]
        assert mail.call("isMaxed")
        manual_workers[0].finish(jobs[2])
        queue.remove_global_concurrency()
        mail.redis.zadd(mail.keys.marker, {"0": 0})
        mail.node_result(jobs[3])
        queue.set_global_rate_limit(1, 60)
        more = [mail.send("echo") for _ in range(2)]
        more[0].get(timeout=60)
        assert 0 < mail.call("getRateLimitTtl") <= 60_000
        assert mail.redis.lrange(mail.keys.wait, 0, -1) == [more[1].id]
    for manual_worker in manual_workers:
        manual_worker.close()
    assert documented == "safe"


def test_a_bulltask_listener_receives_events_of_a_bullmq_worker(mail: InteropQueue, documented: str) -> None:
    with QueueEvents("mail", broker=lambda: mail.app._broker) as events:
        job = mail.add("echo", {"to": "ä"}, delay=30)
        mail.node_worker("progress", {"steps": [50]})
        received: list[types.QueueEvent] = []
        while not received or not isinstance(received[-1], types.Completed):
            event = events.next(10)
            assert event is not None, received
            received.append(event)
        mail.call("pause")
        mail.call("resume")
        while not isinstance(received[-1], types.Resumed):
            event = events.next(10)
            assert event is not None, received
            received.append(event)
    names = [event.event for event in received if isinstance(event, types.JobEvent) and event.job_id == job]
    assert names == ["added", "delayed", "waiting", "active", "progress", "completed"]
    assert documented == "safe"


def test_a_bullmq_listener_receives_events_of_a_bulltask_worker(mail: InteropQueue, documented: str) -> None:
    mail.listen()
    mail.worker()
    job = mail.send("report", options={"countdown": 0.03}, steps=[50, {"at": "ä"}]).id
    failing = mail.send("fail", error="PermanentError").id
    with mail.app.queue("mail") as queue:
        mail.wait_for_event("completed", job)
        mail.wait_for_event("failed", failing, failedReason="it failed")
        queue.pause()
        queue.resume()
    mail.wait_for_event("resumed")
    names = [found["event"] for found in mail.node.events() if found["args"].get("jobId") == job]
    assert names == ["added", "delayed", "waiting", "active", "progress", "progress", "completed"]
    assert mail.node.events("events.error") == []
    assert documented == "safe"


def test_both_clients_list_all_workers(mail: InteropQueue, documented: str) -> None:
    mail.worker(children=2).wait_for_line("Worker started")
    mail.node_worker("echo", {}, name="bullmq")
    with mail.app.queue("mail") as queue:
        wait_until(lambda: queue.get_workers_count() == 2, what="both workers")
        wait_until(lambda: len(mail.call("getWorkers")) == 2, what="both workers")
    assert any(row["rawname"].endswith(":w:bullmq") for row in mail.call("getWorkers"))
    assert documented == "safe"


def fill(mail: InteropQueue) -> dict[str, str]:
    """Add bulltask jobs in each state, with all kinds of keys that a job can have; return the ids by state."""
    manual_worker = ManualWorker(mail.app._broker, mail.keys)
    ids: dict[str, str] = {}
    with mail.app.queue("mail") as queue, mail.app.flows() as flows:
        queue.add("a")
        job = queue.get_job(ids.setdefault("completed", manual_worker.complete()))
        assert job is not None
        job.log("a line")
        queue.add("a", attempts=1)
        ids["failed"] = manual_worker.fail()
        queue.add("a", deduplication="owned")
        ids["active"] = manual_worker.acquire()
        ids["delayed"] = queue.add("a", delay=60).id
        ids["prioritized"] = queue.add("a", priority=3).id
        queue.schedulers.upsert("hourly", every=3600)
        queue.schedulers.upsert("at:three:of:clocks", cron="0 3 * * *")
        ids["waiting-children"] = flows.add(FlowJob("a", "mail", {}, {}, [FlowJob("a", "mail")])).job.id
        ids["waiting"] = queue.add("a", job_id="with:two:colons").id
    manual_worker.close()
    return ids


def test_remove_orphaned_jobs_keeps_bulltask_jobs(mail: InteropQueue, documented: str) -> None:
    """``removeOrphanedJobs`` deletes unknown keys with the queue's prefix; bulltask's additional keys have another."""
    ids = fill(mail)
    worker = mail.worker()
    worker.wait_for_line("Worker started")
    worker.stop()
    before = set(mail.redis.keys("*"))
    assert mail.call("removeOrphanedJobs") == 0
    assert set(mail.redis.keys("*")) == before
    for state, job in ids.items():
        assert mail.node_job(job)["name"] == "a", state
    assert documented == "safe"


def test_remove_orphaned_jobs_deletes_the_metrics_of_failed_jobs(mail: InteropQueue, documented: str) -> None:
    """BullMQ mistakes the key ``metrics:failed`` for the ``failed`` key of a job with the id ``metrics``."""
    mail.node_worker("fail", {}, metrics={"maxDataPoints": 15})
    for _ in range(2):
        mail.add("a")
    key = f"{mail.keys.base}metrics:failed"
    wait_until(lambda: mail.redis.exists(key))
    wait_until(lambda: mail.redis.zcard(mail.keys.failed) == 2)
    mail.call("removeOrphanedJobs")
    assert ("safe" if mail.redis.exists(key) else "differs") == documented, CHANGED


def test_remove_orphaned_jobs_deletes_jobs_that_a_resume_has_lost(
    mail: InteropQueue, documented: str, clients: Clients
) -> None:
    """As T1: the hash of a job that a resume has lost exists until ``removeOrphanedJobs`` is called."""
    pinned = clients[PINNED]
    pinned.call("queue.call", queue=mail.name, method="pause", args=[])
    pinned.call("queue.add", queue=mail.name, name="a", data={}, opts={})
    mail.redis.lpush(mail.keys.wait, lost := mail.send("echo").id)  # where a client of BullMQ 6 adds jobs
    mail.redis.lrem(mail.keys.paused, 0, lost)
    pinned.call("queue.call", queue=mail.name, method="resume", args=[])
    assert mail.redis.exists(mail.keys.job(lost))
    assert mail.call("removeOrphanedJobs") == 1
    seen = "safe" if mail.redis.exists(mail.keys.job(lost)) else "unsafe"
    assert seen == documented, CHANGED


def test_jobs_are_drained_and_cleaned_by_the_other_client(mail: InteropQueue, documented: str) -> None:
    manual_worker = ManualWorker(mail.app._broker, mail.keys)
    with mail.app.queue("mail") as queue:
        by_bulltask = queue.add("a").id
        assert manual_worker.complete() == by_bulltask
        assert mail.call("clean", 0, 100, "completed") == [by_bulltask]
        by_bullmq = mail.add("a")
        assert manual_worker.complete() == by_bullmq
        assert list(queue.clean(0, 100, "completed")) == [by_bullmq]
        for drain in (lambda: mail.call("drain", True), lambda: queue.drain(delayed=True)):
            mail.add("a", delay=60_000)
            queue.add("a", priority=1)
            mail.add("a")
            drain()
            assert queue.count() == 0
            assert mail.redis.keys(f"{mail.keys.base}*-*-*") == [], "hashes of jobs"
    manual_worker.close()
    assert documented == "safe"


def test_bulltask_drains_a_queue_that_bullmq_has_paused(mail: InteropQueue, documented: str) -> None:
    mail.add("a")
    mail.call("pause")
    mail.add("a")
    with mail.app.queue("mail") as queue:
        queue.add("a")
        queue.drain()
        queue.resume()
        assert queue.count() == 0
    assert documented == "safe"


def test_a_paused_queue_is_obliterated_by_the_other_client(mail: InteropQueue, documented: str) -> None:
    with mail.app.queue("mail") as queue:
        mail.add("a")
        queue.pause()
        queue.add("a")
        mail.add("a")
        mail.call("obliterate", {"force": False})
        assert mail.redis.keys(f"{mail.keys.base}*") == []

        mail.add("a")
        mail.call("pause")
        mail.add("a")
        queue.add("a")
        manual_worker = ManualWorker(mail.app._broker, mail.keys)
        queue.resume()
        manual_worker.acquire()
        mail.call("pause")
        with pytest.raises(QueueActiveError):
            queue.obliterate()
        with pytest.raises(NodeError, match="active"):
            mail.call("obliterate", {"force": False})
        queue.obliterate(force=True)
        manual_worker.close()
    remaining = {key.removeprefix(mail.keys.base) for key in mail.redis.keys(f"{mail.keys.base}*")}
    assert remaining == set()
    assert documented == "safe"


def test_the_version_in_meta_is_written_by_bullmq_and_kept_by_bulltask(
    mail: InteropQueue, documented: str, version: str
) -> None:
    """``meta.version`` is the version of the last Node.js ``Queue``; bulltask does not overwrite it."""
    mail.call("count")
    wait_until(lambda: mail.redis.hget(mail.keys.meta, "version") == f"bullmq:{version}")
    mail.redis.hset(mail.keys.meta, "opts.maxLenEvents", "77")
    mail.send("echo")
    mail.worker().wait_for_line("Worker started")
    with mail.app.queue("mail") as queue:
        assert queue.get_meta() == {"version": f"bullmq:{version}", "opts.maxLenEvents": "77"}
    assert documented == "safe"


def test_a_fleet_of_all_versions_loses_no_job_and_runs_none_twice(
    clients: Clients, broker_url: str, mail: InteropQueue, documented: str, tmp_path: Path
) -> None:
    file, each = str(tmp_path / "runs"), 100
    mail.worker(children=2)
    kinds: list[dict[str, Any]] = [{}, {"priority": 3}, {"delay": 150}, {"lifo": True}, {"attempts": 3}]
    versions = [PINNED, NEWEST_5, NEWEST_6]

    def send_with_bullmq(version: str) -> list[str]:
        jobs = [{"name": "record", "data": {"file": file}, "opts": kinds[n % 5]} for n in range(each)]
        return [job["id"] for job in clients[version].call("queue.addBulk", queue=mail.name, jobs=jobs)]

    def send_with_bulltask() -> list[str]:
        calls = [mail.app.tasks["record"].s(file).set(priority=n % 3 + 1) for n in range(each)]
        return [job.id for job in mail.app.send_many(calls)]

    for version in versions:
        options = {"concurrency": 4}
        clients[version].call("worker.start", queue=mail.name, processor="record", args={"file": file}, opts=options)
    with ThreadPoolExecutor() as threads:
        sending = [
            threads.submit(send_with_bulltask),
            *(threads.submit(send_with_bullmq, version) for version in versions),
        ]
        sent = [job for part in sending for job in part.result()]
    wait_until(lambda: mail.redis.zcard(mail.keys.completed) >= 4 * each, 30, "all jobs")
    assert Counter(recorded_ids(file)) == Counter(sent), "each id exactly once"
    assert documented == "safe"
