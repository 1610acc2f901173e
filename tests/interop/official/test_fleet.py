"""Workers of the official Python client and bulltask share a queue, and run the jobs of killed workers."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bulltask.testing.worker import wait_until
from bulltask.transport.call import known_queues, queue_consumers
from tests.interop.interop_queue import InteropQueue, recorded_ids
from tests.interop.official.bridge import OfficialPython
from tests.interop.official.versions import FIXED_IN_3, SAME_IN_3
from tests.support.streams import server_ms

pytestmark = [pytest.mark.interop, pytest.mark.process]

JOBS = 1_200
BULK = 150
STALLS = {"lockDuration": 1_000, "stalledInterval": 1_000}
KINDS: list[dict[str, Any]] = [{}, {"priority": 3}, {}, {"delay": 150}, {"lifo": True}]


def send_official(side: InteropQueue, file: str) -> list[str]:
    """Send half of the jobs with the official ``addBulk``: plain, with priority, delayed, lifo; return their ids."""
    jobs = [
        {"name": "record", "data": {"file": file}, "opts": {"attempts": 3, **KINDS[n % 5]}} for n in range(JOBS // 2)
    ]
    ids: list[str] = []
    for start in range(0, len(jobs), BULK):
        ids += [job["id"] for job in side.call("addBulk", jobs[start : start + BULK])]
    return ids


def send_bulltask(side: InteropQueue, file: str) -> list[str]:
    """Send the other half with ``app.send_many``, of the same kinds; return their ids."""
    task: Any = side.app.tasks["record"]
    kinds = [{"countdown": 0.15} if "delay" in kind else kind for kind in KINDS]
    calls = [task.s(file).set(**kinds[n % 5]) for n in range(JOBS // 2)]
    ids: list[str] = []
    for start in range(0, len(calls), BULK):
        ids += [job.id for job in side.app.send_many(calls[start : start + BULK])]
    return ids


def test_a_mixed_fleet_runs_each_of_1200_jobs_once(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    with ExitStack() as stack:
        bulltask_workers = [mail.worker(children=1) for _ in range(2)]
        officials = [stack.enter_context(OfficialPython.to(mail.url)) for _ in range(2)]
        for worker in bulltask_workers:
            worker.wait_for_line("Child started")
        for official in officials:
            official.call(
                "worker.start", queue=mail.name, processor="record", args={"file": file}, opts={"concurrency": 4}
            )
        with ThreadPoolExecutor() as threads:
            halves = [threads.submit(send, mail, file) for send in (send_official, send_bulltask)]
            sent = [job_id for half in halves for job_id in half.result()]
        wait_until(lambda: mail.redis.zcard(mail.keys.completed) >= JOBS, 60, f"{JOBS} completed")
        assert len(set(sent)) == JOBS
        assert mail.counts() == {"completed": JOBS}
        assert Counter(recorded_ids(file)) == Counter(sent), "each id exactly once"
        runs = Counter(int(line.split()[1]) for line in Path(file).read_text().splitlines())
        processes = {pid for worker in bulltask_workers for pid in worker.children} | {
            official.pid for official in officials
        }
        assert runs.keys() == processes, "every process of both kinds has run some"
        assert [worker.warnings() for worker in bulltask_workers] == [[], []]
        assert [official.events("worker.error") for official in officials] == [[], []]
    with mail.redis.pipeline(transaction=False) as pipeline:
        for job_id in sent:
            pipeline.hmget(mail.keys.job(job_id), "atm", "ats", "stc", "failedReason")
        assert Counter(map(tuple, pipeline.execute())) == {("1", "1", None, None): JOBS}
    states = {key for key in mail.redis.keys("*") if key.startswith((mail.keys.worker(""), mail.keys.workers))}
    left = {key.removeprefix(mail.keys.base) for key in mail.redis.keys("*")} - {
        *sent,
        *states,
        known_queues("bull"),
        queue_consumers("bull", "tested"),
        mail.keys.task_rates,
    }
    assert left <= {"completed", "events", "id", "marker", "meta", "pc", "stalled-check"}, left


@pytest.mark.parametrize("sent_by", ["bulltask", "official"])
def test_a_bulltask_worker_runs_the_jobs_of_a_killed_official_worker(mail: InteropQueue, sent_by: str) -> None:
    jobs = [
        mail.send("echo", value=n).id if sent_by == "bulltask" else mail.add("echo", {"value": n}) for n in range(3)
    ]
    with OfficialPython.to(mail.url) as doomed:
        opts = {"concurrency": 3, **STALLS}
        doomed.call("worker.start", queue=mail.name, processor="sleep", args={"ms": 60_000}, opts=opts)
        for job in jobs:
            doomed.wait_event("start", lambda args, job=job: args["jobId"] == job)  # type: ignore[misc]
        os.kill(doomed.pid, signal.SIGKILL)
    mail.worker(stalled_interval=1)
    for n, job in enumerate(jobs):
        assert mail.result(job).get(timeout=60) == n
        mail.stream.wait_for(event="stalled", jobId=job)
        seen = mail.node_job(job)
        assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)


@pytest.mark.parametrize("sent_by", ["bulltask", "official"])
def test_an_official_worker_runs_the_job_of_a_killed_bulltask_worker(mail: InteropQueue, sent_by: str) -> None:
    worker = mail.worker(lock_duration=1, stalled_interval=1)
    job = mail.send("hold", gate="gate").id if sent_by == "bulltask" else mail.add("hold", {"gate": "gate"})
    mail.wait_for_start(job)
    worker.send(signal.SIGKILL)  # its children die with it
    worker.wait()
    mail.node_worker("echo", {}, **STALLS)
    assert mail.result(job).get(timeout=60) == {"gate": "gate"}
    mail.stream.wait_for(event="stalled", jobId=job)
    seen = mail.node_job(job)
    assert (seen["stalledCounter"], seen["attemptsMade"], seen["attemptsStarted"]) == (1, 1, 2)


def test_a_job_that_stalled_too_many_times_fails_in_an_official_worker(mail: InteropQueue) -> None:
    """Both workers check whether BullMQ has marked the job to fail; only the official one then raises an error."""
    job = mail.send("hold", gate="gate")
    worker = mail.worker(lock_duration=1, stalled_interval=1)
    mail.wait_for_start(job.id)
    worker.send(signal.SIGKILL)
    worker.wait()
    mail.node_worker("echo", {}, **STALLS, maxStalledCount=0)
    mail.stream.wait_for(event="failed", jobId=job.id)
    assert "job stalled more than allowable limit" in mail.redis.hget(mail.keys.job(job.id), "failedReason")
    assert mail.send("echo").get(timeout=60) == {}, "the official worker continues"


def test_an_official_worker_does_not_run_a_job_that_blocks_a_bulltask_child(mail: InteropQueue) -> None:
    mail.worker(lock_duration=1, stalled_interval=1)
    job = mail.send("spin", seconds=4)
    mail.stream.wait_for(event="active", jobId=job.id)
    mail.node_worker("echo", {}, **STALLS)
    assert job.get(timeout=60) == "spun"
    assert mail.stream.all(event="stalled") == []


@SAME_IN_3
def test_a_job_that_blocks_an_official_workers_event_loop_runs_twice(mail: InteropQueue, tmp_path: Path) -> None:
    """The official worker renews locks on the loop that runs jobs: a job that blocks it longer loses its lock."""
    done = tmp_path / "done"
    mail.node_worker("block", {"until": str(done)}, **STALLS)
    job = mail.send("echo", value="bulltask")
    mail.node.wait_event("start", lambda args: args["jobId"] == job.id)
    mail.worker(stalled_interval=1)
    mail.stream.wait_for(event="stalled", jobId=job.id)
    assert job.get(timeout=60) == "bulltask", "a second attempt while the first is still running"
    done.touch()
    # The outcome of the first attempt is rejected.
    mail.node.wait_event("worker.error", lambda args: "Missing lock" in args["message"], timeout=20)
    assert mail.node_job(job.id)["attemptsStarted"] == 2
    assert job.get(timeout=60) == "bulltask"


@SAME_IN_3
def test_a_job_stalls_after_a_forced_close_of_an_official_worker(mail: InteropQueue) -> None:
    """bulltask's worker releases running jobs in a cold shutdown, so that they can start again immediately."""
    official_worker = mail.node_worker("sleep", {"ms": 60_000}, **STALLS)
    job = mail.send("echo", value=1)
    mail.node.wait_event("start")
    mail.node.call("worker.call", worker=official_worker, method="close", args=[True])
    assert mail.counts() == {"active": 1}
    worker = mail.worker(stalled_interval=1)
    assert job.get(timeout=60) == 1
    assert int(mail.redis.hget(mail.keys.job(job.id), "stc")) == 1

    held = mail.send("hold", gate="gate")
    mail.wait_for_start(held.id)
    worker.send(signal.SIGQUIT)
    assert worker.wait() == 0
    assert mail.counts() == {"completed": 1, "waiting": 1}


@FIXED_IN_3
def test_an_idle_official_worker_stops_only_when_its_blocking_wait_ends(mail: InteropQueue) -> None:
    official_worker = mail.node_worker("echo", drainDelay=5)
    mail.send("echo").get(timeout=60)
    wait_until(lambda: waits_for_the_marker(mail), what="the official worker's wait")
    before_ms = server_ms(mail.redis)
    mail.node.call("worker.close", worker=official_worker, timeout=20)
    assert server_ms(mail.redis) - before_ms > 3_500

    worker = mail.worker(drain_delay=60)
    mail.send("echo").get(timeout=60)
    wait_until(lambda: waits_for_the_marker(mail), what="bulltask's wait")
    before_ms = server_ms(mail.redis)
    assert worker.stop() == 0
    assert server_ms(mail.redis) - before_ms < 20_000, "far less than 60 s, on a busy machine too"


def waits_for_the_marker(mail: InteropQueue) -> bool:
    return any(client["cmd"] == "bzpopmin" and "b" in client["flags"] for client in mail.redis.client_list())


@FIXED_IN_3
def test_pausing_an_official_worker_locally_has_no_effect(mail: InteropQueue, request: pytest.FixtureRequest) -> None:
    official_worker = mail.node_worker("echo", drainDelay=1)
    mail.send("echo").get(timeout=60)
    mail.node.call("worker.call", worker=official_worker, method="pause")
    version_2 = request.node.callspec.params["mail"] == "2"  # in 3.4.4 the job waits, which takes the whole timeout
    mail.stream.wait_for(timeout=60 if version_2 else 3, event="completed", jobId=mail.send("echo", value=2).id)
