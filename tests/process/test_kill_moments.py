"""A child is killed while it acquires a job, runs it or writes its outcome, and at random times."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from bulltask.lua import wrappers
from bulltask.lua.loader import Script
from bulltask.transport.scripts.move import CRASHES
from bulltask.worker.slots import ID_BYTES
from tests.support.flaky_proxy import FlakyProxy
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

LONG_LOCK = {"lock_duration": 30, "drain_delay": 30}
SHORT = """
import asyncio

@app.task(bind=True, name="short_async")
async def short_async(self, number):
    record("start", job=self.request.id)
    await asyncio.sleep(number / 1_000_000)

@app.task(bind=True, name="short")
def short(self, number):
    record("start", job=self.request.id)
    return sum(range(number))
"""


def lose_one_reply_of(script: Script, proxy: FlakyProxy) -> None:
    """Drop the reply to the next call of the script, and freeze its connection."""
    proxy.drop_replies(1, match=script.sha, then="freeze")


def start_warm_worker(harness: WorkerHarness, via: FlakyProxy) -> int:
    """Start a worker, let it run one job, and wait until it is idle; return its child."""
    worker = harness.worker(via=via, children=1, settings=LONG_LOCK)
    harness.app.send_task("quick").get(timeout=60)
    harness.wait_until_idle(1)
    return worker.children[0]


def test_a_child_killed_before_it_receives_its_job_leaves_no_active_job(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    child = start_warm_worker(harness, proxy)
    lose_one_reply_of(wrappers.fetching("fetchNow"), proxy)
    job = harness.app.send_task("quick")
    proxy.wait_for(lambda proxy: proxy.dropped == 1)
    assert harness.redis.lrange(harness.keys.active, 0, -1) == [job.id]
    assert harness.start_count(job) == 0

    os.kill(child, signal.SIGKILL)
    assert job.get(timeout=20) is None
    assert harness.start_count(job) == 1
    assert harness.redis.llen(harness.keys.active) == 0


def test_a_child_killed_after_writing_the_outcome_repeats_and_loses_no_job(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    child = start_warm_worker(harness, proxy)
    first = harness.hold()
    harness.wait_for_start(first)
    following = harness.app.send_task("quick")
    lose_one_reply_of(wrappers.with_guard("moveToFinished", "promotionGuard"), proxy)
    harness.open_gate()
    proxy.wait_for(lambda proxy: proxy.dropped == 1)
    assert harness.redis.lrange(harness.keys.active, 0, -1) == [following.id], (
        "it was acquired when the first one finished"
    )

    os.kill(child, signal.SIGKILL)
    assert following.get(timeout=20) is None
    assert first.get(timeout=60) == "gate"
    assert (harness.start_count(first), harness.start_count(following)) == (1, 1)
    assert (harness.field(following, CRASHES), harness.field(following, "ats")) == (None, "1"), "it had not started"
    assert len(harness.events.all(event="completed", jobId=first.id)) == 1


def test_the_job_of_a_child_killed_before_writing_the_outcome_runs_once_more(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    child = start_warm_worker(harness, proxy)
    job = harness.hold()
    harness.wait_for_start(job)
    proxy.blackhole()
    harness.open_gate("gate", 2)
    harness.journal.wait_for(what="end", job=job.id)
    os.kill(child, signal.SIGKILL)
    proxy.pass_all()

    assert job.get(timeout=20) == "gate"
    assert harness.start_count(job) <= 2, "once more if the supervisor was faster than the outcome"
    assert len(harness.events.all(event="completed", jobId=job.id)) == 1
    assert harness.redis.llen(harness.keys.active) == 0


def test_a_child_that_receives_its_job_after_the_lock_expired_does_not_run_it(
    harness: WorkerHarness,
) -> None:
    proxy = harness.proxy()
    short = {"lock_duration": 1, "stalled_interval": 1, "drain_delay": 30}
    worker = harness.worker(via=proxy, children=1, settings=short)
    harness.app.send_task("quick").get(timeout=60)
    harness.wait_until_idle(1)
    proxy.latency(0.5)
    job = harness.app.send_task("quick")
    harness.wait_for_event("active", job)  # the child has not received the reply yet
    child = worker.children[0]
    os.kill(child, signal.SIGSTOP)
    harness.worker(children=1, settings=short)
    harness.wait_for_event("completed", job)

    proxy.pass_all()
    os.kill(child, signal.SIGCONT)
    harness.app.send_task("quick").get(timeout=60)
    assert worker.stop() == 0
    assert harness.start_count(job) == 1


def test_a_job_whose_id_is_longer_than_a_slot_keeps_its_lock_and_is_recovered(harness: WorkerHarness) -> None:
    @harness.app.task(name="hold")
    def hold(gate: str) -> None:
        """Only the signature is needed to build the job."""

    worker = harness.worker(children=2, settings={"lock_duration": 1, "stalled_interval": 1})
    long_id = replace(hold.s("gate").job(), id="x" * 2 * ID_BYTES)  # only other clients create such ids
    job = harness.app.send_many([long_id])[0]
    child = harness.wait_for_start(job)["pid"]
    harness.app.send_task("quick", countdown=3).get(timeout=60)  # after three lock durations
    assert harness.start_count(job) == 1
    os.kill(int(child), signal.SIGKILL)
    harness.wait_for_start(job, 2)
    harness.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
    assert harness.events.all(event="stalled") == []
    assert worker.stop() == 0


@pytest.mark.every_topology
def test_children_killed_at_random_times_lose_no_job_and_repeat_at_most_one_each(
    harness: WorkerHarness, rng: random.Random
) -> None:
    worker = harness.worker(SHORT, children=4, settings={"lock_duration": 30, "max_crashes": 50})
    calls = [harness.app.send_task("short", kwargs={"number": 10})]
    harness.wait_for_start(calls[0])
    kills = 0
    for _ in range(25):
        calls += [harness.app.send_task("short", kwargs={"number": rng.randrange(20_000)}) for _ in range(20)]
        harness.journal.wait_for(len(harness.journal.seen) + rng.randrange(15), what="start")
        if children := worker.children:
            with suppress(ProcessLookupError):  # killed in the previous round, and removed since
                os.kill(rng.choice(children), signal.SIGKILL)
                kills += 1
    for call in calls:
        call.get(timeout=60)

    starts = Counter(entry["job"] for entry in harness.journal.all(what="start"))
    again = sum(starts.values()) - len(calls)
    harness.report(jobs=len(calls), kills=kills, repeated=again)
    assert set(starts) == {call.id for call in calls}
    assert again <= kills
    assert harness.redis.llen(harness.keys.active) == 0
    assert harness.events.all(event="stalled") == []
    assert worker.stop() == 0
    assert len(worker.logged("Child died")) <= kills


def test_children_with_many_async_jobs_killed_at_random_times_lose_none(
    harness: WorkerHarness, rng: random.Random
) -> None:
    settings = {"lock_duration": 30, "max_crashes": 50, "worker_async_concurrency": 20}
    worker = harness.worker(SHORT, children=3, settings=settings)
    calls = [harness.app.send_task("short", kwargs={"number": 10})]
    harness.wait_for_start(calls[0])
    for _ in range(12):
        for name in ("short_async", "short_async", "short_async", "short"):
            calls += [harness.app.send_task(name, kwargs={"number": rng.randrange(20_000)}) for _ in range(10)]
        harness.journal.wait_for(len(harness.journal.seen) + rng.randrange(30), what="start")
        if children := worker.children:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(children), signal.SIGKILL)
    for call in calls:
        call.get(timeout=60)

    starts = Counter(entry["job"] for entry in harness.journal.all(what="start"))
    harness.report(jobs=len(calls), repeated=sum(starts.values()) - len(calls))
    assert set(starts) == {call.id for call in calls}
    assert harness.redis.llen(harness.keys.active) == 0
    assert harness.events.all(event="stalled") == []
    assert worker.stop() == 0
