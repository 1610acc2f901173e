"""Children that are replaced after a number of jobs, or because of their memory."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from bulltask.worker.slots import ExitCode
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

ASYNC_TASKS = """
import asyncio

@app.task(bind=True, name="aquick")
async def aquick(self):
    record("start", job=self.request.id)

@app.task(bind=True, name="ahold")
async def ahold(self, gate):
    record("start", job=self.request.id)
    await asyncio.to_thread(wait_at, gate)
"""


def jobs_per_child(harness: WorkerHarness) -> Counter[str]:
    return Counter(entry["pid"] for entry in harness.journal.all(what="start"))


# ---- max_tasks_per_child --------------------------------------------------------------------------------------------


# A child that is spawned imports everything anew, which takes half a CPU second.
@pytest.mark.parametrize(("method", "count"), [("fork", 40), ("spawn", 15)], ids=["fork", "spawn"])
def test_a_child_is_replaced_after_its_maximum_number_of_jobs_and_none_is_lost(
    harness: WorkerHarness, method: str, count: int
) -> None:
    worker = harness.worker(
        children=2,
        options=["--max-tasks-per-child", "5"],
        settings={"worker_start_method": method},
    )
    jobs = [harness.app.send_task("quick") for _ in range(count)]
    for job in jobs:
        job.get(timeout=60)
    assert [harness.start_count(job) for job in jobs] == [1] * count
    children = jobs_per_child(harness)
    assert max(children.values()) == 5
    assert len(children) >= count // 5
    worker.wait_for_line("Child exited", count=count // 5 - 1, reason="max_tasks_per_child")
    assert worker.logged("Child limit reached")[0]["limit"] == "max_tasks_per_child"
    assert worker.logged("Child limit reached")[0]["jobs"] == 5
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK


def test_children_that_reach_their_limit_within_a_second_are_replaced_without_a_pause(harness: WorkerHarness) -> None:
    harness.worker(children=1, settings={"worker_max_tasks_per_child": 1})
    jobs = [harness.app.send_task("quick") for _ in range(20)]
    for job in jobs:
        job.get(timeout=60)
    ran = harness.journal.all(what="start")
    took_ms = ran[-1].ms - ran[0].ms
    harness.report(ms_per_child=took_ms / 19)
    assert len(jobs_per_child(harness)) == 20
    assert took_ms < 10_000, "a child that crashes early is replaced after a second"


def test_a_child_at_its_limit_is_replaced_before_its_last_jobs_have_finished(harness: WorkerHarness) -> None:
    worker = harness.worker(ASYNC_TASKS, children=1, settings={"worker_max_tasks_per_child": 2})
    held = [harness.app.send_task("ahold", kwargs={"gate": "gate"}) for _ in range(2)]
    old = {harness.wait_for_start(job)["pid"] for job in held}
    assert len(old) == 1
    following = harness.app.send_task("aquick")
    assert following.get(timeout=60) is None
    assert harness.wait_for_start(following)["pid"] not in old
    assert worker.logged("Child exited") == []
    assert worker.logged("Child limit reached")[0]["running"] == 2
    harness.open_gate("gate", 2)
    for job in held:
        job.get(timeout=60)
    assert str(worker.wait_for_line("Child exited")[0]["pid"]) in old
    assert [harness.start_count(job) for job in held] == [1, 1]
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK


def test_a_shutdown_waits_for_the_last_jobs_of_a_child_at_its_limit(harness: WorkerHarness) -> None:
    worker = harness.worker(ASYNC_TASKS, children=1, settings={"worker_max_tasks_per_child": 1})
    held = harness.app.send_task("ahold", kwargs={"gate": "gate"})
    harness.wait_for_start(held)
    worker.wait_for_line("Child started", count=2)
    worker.send(signal.SIGTERM)
    worker.wait_for_line("Worker stopping", mode="warm")
    harness.open_gate()
    assert worker.wait() == ExitCode.OK
    assert held.snapshot().state == "completed"
    assert harness.start_count(held) == 1


def test_a_child_that_is_killed_after_it_has_reached_its_limit_has_crashed(harness: WorkerHarness) -> None:
    worker = harness.worker(ASYNC_TASKS, children=1, settings={"worker_max_tasks_per_child": 1})
    held = harness.app.send_task("ahold", kwargs={"gate": "gate"})
    first = harness.wait_for_start(held)["pid"]
    worker.wait_for_line("Child started", count=2)
    os.kill(int(first), signal.SIGKILL)
    assert harness.wait_for_start(held, 2)["pid"] != first
    assert worker.wait_for_line("Job recovered", job_id=held.id)[0]["crashes"] == 1
    harness.open_gate("gate", 2)
    assert held.get(timeout=60) is None
    events = [line["event"] for line in worker.lines if line.get("job_id") == held.id]
    assert events[:3] == ["Job started", "Job recovered", "Job started"]
    assert worker.stop() == ExitCode.OK


# ---- max_memory_per_child and the hard limit -------------------------------------------------------------------------

MEMORY_TASKS = """
import asyncio

_leaked = []

@app.task(bind=True, name="leak")
def leak(self, mib):
    record("start", job=self.request.id)
    _leaked.append(b"x" * (mib << 20))

@app.task(bind=True, name="aleak")
async def aleak(self, mib):
    record("start", job=self.request.id)
    _leaked.append(b"x" * (mib << 20))

@app.task(bind=True, name="eat")
def eat(self, mib, gate):
    record("start", job=self.request.id)
    eaten = b"x" * (mib << 20)
    wait_at(gate)

@app.task(bind=True, name="aeat")
async def aeat(self, mib, gate):
    record("start", job=self.request.id)
    eaten = b"x" * (mib << 20)
    await asyncio.to_thread(wait_at, gate)

@app.task(bind=True, name="ahold")
async def ahold(self, gate):
    record("start", job=self.request.id)
    await asyncio.to_thread(wait_at, gate)
"""


@pytest.mark.parametrize("task", ["leak", "aleak"])
def test_a_child_that_uses_too_much_memory_is_replaced_after_the_job(harness: WorkerHarness, task: str) -> None:
    worker = harness.worker(MEMORY_TASKS, children=1, options=["--max-memory-per-child", "300M"])
    harness.wait_until_idle(1)
    small, large = (harness.app.send_task(task, kwargs={"mib": mib}) for mib in (1, 300))
    assert (small.get(timeout=60), large.get(timeout=60)) == (None, None)
    worker.wait_for_line("Child started", count=2)
    following = harness.app.send_task("quick")
    assert following.get(timeout=60) is None
    before, after = harness.wait_for_start(large)["pid"], harness.wait_for_start(following)["pid"]
    assert harness.wait_for_start(small)["pid"] == before != after
    line = worker.wait_for_line("Child limit reached")[0]
    assert (line["limit"], line["jobs"]) == ("max_memory_per_child", 2)
    assert line["memory_kib"] > 300 * 1024
    assert str(worker.wait_for_line("Child exited", reason="max_memory_per_child")[0]["pid"]) == before
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK


def test_a_job_that_exceeds_the_hard_memory_limit_runs_again_and_then_fails(harness: WorkerHarness) -> None:
    worker = harness.worker(MEMORY_TASKS, children=2, options=["--hard-memory-limit", str(300 * 1024)])
    harness.wait_until_idle(2)
    other = harness.hold("other")
    harness.wait_for_start(other)
    greedy = harness.app.send_task("eat", kwargs={"mib": 300, "gate": "never"})
    failed = harness.wait_for_event("failed", greedy)
    assert "exceeded worker_hard_memory_limit, 300 MiB" in failed["failedReason"]
    assert "this was crash 2 of this job (max_crashes=2)" in failed["failedReason"]
    assert harness.start_count(greedy) == 2
    assert len(worker.wait_for_line("Child killed", count=2, reason="hard_memory_limit")) == 2
    harness.open_gate("other")
    assert other.get(timeout=60) == "other"
    assert harness.start_count(other) == 1
    assert worker.stop() == ExitCode.OK


def test_only_one_of_several_async_jobs_fails_at_the_hard_memory_limit(harness: WorkerHarness) -> None:
    harness.worker(MEMORY_TASKS, children=1, settings={"worker_hard_memory_limit": "300M"})
    others = [harness.app.send_task("ahold", kwargs={"gate": "others"}) for _ in range(3)]
    for job in others:
        harness.wait_for_start(job)
    greedy = harness.app.send_task("aeat", kwargs={"mib": 300, "gate": "never"})
    harness.wait_for_start(greedy)
    harness.open_gate("others", 30)
    for job in others:
        assert job.get(timeout=60) is None
    assert "worker_hard_memory_limit" in harness.wait_for_event("failed", greedy)["failedReason"]


def test_a_child_that_leaks_memory_is_replaced_before_it_reaches_the_hard_limit(harness: WorkerHarness) -> None:
    settings = {"worker_max_memory_per_child": "200M", "worker_hard_memory_limit": "400M", "max_crashes": 1}
    worker = harness.worker(MEMORY_TASKS, children=1, settings=settings)
    jobs = [harness.app.send_task("leak", kwargs={"mib": 60}) for _ in range(10)]
    for job in jobs:
        assert job.get(timeout=60) is None
    assert [harness.start_count(job) for job in jobs] == [1] * 10
    worker.wait_for_line("Child exited", count=2, reason="max_memory_per_child")
    assert worker.warnings() == []


def test_a_memory_limit_below_the_memory_of_a_new_child_is_logged_and_jobs_still_run(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1, settings={"worker_max_memory_per_child": 16 * 1024})
    jobs = [harness.app.send_task("quick") for _ in range(3)]
    for job in jobs:
        job.get(timeout=60)
    assert len(jobs_per_child(harness)) == 3
    line = worker.wait_for_line("A child exceeds this limit before its first job")[0]
    assert (line["setting"], line["level"]) == ("worker_max_memory_per_child", "warning")
