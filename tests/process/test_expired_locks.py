"""Locks that expire while their worker is running, as in a long Redis outage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.queue import AddOptions
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio

from bulltask.errors import RescheduleJob, PermanentError, RateLimitQueue, TransientError, WaitForChildren, ReleaseJob


def end(task, how):
    if task.request.attempts_started > 1:
        return how
    match how:
        case "fails":
            raise PermanentError("as requested")
        case "is retried immediately" | "is retried later":
            raise TransientError("as requested")
        case "is delayed":
            raise RescheduleJob(0.01)
        case "is released":
            raise ReleaseJob
        case "limits its queue":
            raise RateLimitQueue(0.01)
        case "waits for children":
            quick.apply_async(parent=task.request, countdown=0.3)  # after the parent waits
            raise WaitForChildren
    return how


@app.task(bind=True, name="sync")
def sync(self, how):
    record("start", job=self.request.id)
    wait_at(self.request.id)
    return end(self, how)


@app.task(bind=True, name="async")
async def async_(self, how):
    record("start", job=self.request.id)
    await asyncio.to_thread(wait_at, self.request.id)
    return end(self, how)
"""

RUNS = {
    "completes": 1,
    "fails": 1,
    "is retried immediately": 2,
    "is retried later": 2,
    "is delayed": 2,
    "is released": 2,
    "limits its queue": 2,
    "waits for children": 2,
}


@pytest.mark.every_topology
@pytest.mark.parametrize("task", ["sync", "async"])
def test_every_outcome_is_written_even_if_the_lock_has_expired(harness: WorkerHarness, task: str) -> None:
    worker = harness.worker(TASKS, children=1, settings={"lock_duration": 60, "stalled_interval": 600})
    for how, runs in RUNS.items():
        job = add(harness, task, how)
        harness.wait_for_start(job)
        assert harness.redis.delete(harness.keys.lock(job.id)) == 1
        harness.open_gate(job.id, runs)
        harness.wait_for_event("failed" if how == "fails" else "completed", job, timeout=20)
        assert harness.start_count(job) == runs, how
    assert worker.logged("Lock lost") == []
    assert worker.stop() == 0


# Renewed as late as possible, so that children finish jobs before the supervisor has reacquired the locks.
SHORT_LOCK = {"lock_duration": 1, "lock_renew_time": 0.9, "stalled_interval": 1, "worker_async_concurrency": 10}


def hold_and_end(harness: WorkerHarness, workers: int, cause_outage: Callable[[], object]) -> list[AsyncResult[Any]]:
    """Run async jobs and a sync job in each child, and let them finish after a call of ``cause_outage``."""
    jobs = [add(harness, task, "completes") for task in ["async"] * 6 + ["sync"] * workers]
    for job in jobs:
        harness.wait_for_start(job)
    cause_outage()
    for job in jobs:
        harness.open_gate(job.id)
    return jobs


def assert_each_ran_once(harness: WorkerHarness, jobs: list[AsyncResult[Any]], workers: list[Worker]) -> None:
    assert [job.get(timeout=60) for job in jobs] == ["completes"] * len(jobs)
    assert [harness.start_count(job) for job in jobs] == [1] * len(jobs)
    for worker in workers:
        assert worker.logged("Lock lost") == worker.logged("Job stalled") == []
        assert len(worker.logged("Heartbeat failed")) <= 1, "one line for each queue and outage"
        assert worker.stop() == 0


def test_jobs_that_finish_in_an_outage_longer_than_their_locks_are_not_run_again(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory(appendonly=True)
    harness = harness_on(server.url)
    workers = [harness.worker(TASKS, children=1, settings=SHORT_LOCK) for _ in range(2)]

    def cause_outage() -> None:
        harness.redis.sadd(
            harness.keys.stalled, *harness.redis.lrange(harness.keys.active, 0, -1)
        )  # as after a stalled check
        server.kill()

    jobs = hold_and_end(harness, len(workers), cause_outage)
    for worker in workers:
        worker.wait_for_line("Redis reconnecting", attempt=4)  # after about two seconds
    server.restart()
    assert_each_ran_once(harness, jobs, workers)


def test_jobs_that_finish_while_redis_is_read_only_are_not_run_again(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    worker = harness.worker(TASKS, via=proxy, children=1, settings=SHORT_LOCK)
    read_only = "READONLY You can't write against a read only replica."
    jobs = hold_and_end(harness, 1, lambda: proxy.inject_error(read_only, None, match="evalsha"))
    locks = [harness.keys.lock(job.id) for job in jobs]
    wait_until(lambda: not harness.redis.exists(*locks), 60, "the expiry of the locks")
    proxy.pass_all()
    assert_each_ran_once(harness, jobs, [worker])


def add(harness: WorkerHarness, task: str, how: str) -> AsyncResult[Any]:
    options: AddOptions = {"attempts": 2}
    if how == "is retried later":
        options["backoff"] = 0.01
    return harness.app.result(harness.app.queue("default").add(task, {"how": how}, **options).id)
