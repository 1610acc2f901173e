"""Shutdown of a worker: signals, running jobs, and released jobs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from bulltask import AsyncResult
from bulltask.lua import wrappers
from bulltask.testing.worker import RedisServer
from bulltask.transport.scripts.move import CRASHES
from tests.support.machine_load import scale_to_load
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

SHORT = """
@app.task(bind=True, name="short")
def short(self, number):
    record("start", job=self.request.id)
    return sum(range(number))
"""
GRACE_S = 0.5
FAREWELL = """
import threading
from bulltask import signals

@signals.worker_shutdown.connect
def says_goodbye(**_):
    threading.Event().wait()
"""


def send_term_twice(worker: Worker) -> None:
    worker.send(signal.SIGTERM)
    worker.wait_for_line("Worker stopping", mode="warm")
    worker.send(signal.SIGTERM)


def send_quit(worker: Worker) -> None:
    worker.send(signal.SIGQUIT)


def assert_released(harness: WorkerHarness, job: AsyncResult[str]) -> None:
    """Check that the job was released without a counted attempt and completes in another worker."""
    assert harness.redis.lrange(harness.keys.wait, 0, -1) == [job.id]
    assert harness.redis.llen(harness.keys.active) == 0
    assert not harness.redis.exists(harness.keys.lock(job.id))
    assert harness.field(job, "atm") in {None, "0"}, "the attempt does not count"
    assert harness.field(job, "stc") is None, "no stall is counted"
    assert harness.field(job, CRASHES) is None, "no crash is counted"
    harness.worker(children=1)
    harness.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
    assert harness.field(job, "atm") == "1"
    assert harness.start_count(job) == 2


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_term_waits_for_running_jobs_and_acquires_no_more(harness: WorkerHarness, start_method: str) -> None:
    worker = harness.worker(children=2, settings={"worker_start_method": start_method})
    running = [harness.hold(), harness.hold()]
    for job in running:
        harness.wait_for_start(job)
    waiting = harness.app.send_task("quick")
    worker.send(signal.SIGTERM)
    assert worker.wait_for_line("Worker stopping")[0] | {"mode": "warm", "running": 2} == worker.lines[-1]
    harness.open_gate("gate", 2)

    assert worker.wait() == 0
    assert [job.get(timeout=60) for job in running] == ["gate", "gate"]
    assert [harness.start_count(job) for job in running] == [1, 1]
    assert harness.redis.lrange(harness.keys.wait, 0, -1) == [waiting.id]
    assert harness.start_count(waiting) == 0
    (started,), (stopped,) = worker.logged("Worker started"), worker.logged("Worker stopped")
    between = datetime.fromisoformat(stopped["timestamp"]) - datetime.fromisoformat(started["timestamp"])
    assert stopped["uptime"] == pytest.approx(between.total_seconds(), abs=scale_to_load(0.5))


@pytest.mark.every_topology
def test_running_jobs_are_released_at_the_shutdown_timeout(harness: WorkerHarness) -> None:
    settings = {"shutdown_timeout": GRACE_S, "shutdown_notice": 0, "max_crashes": 1}
    worker = harness.worker(children=1, settings=settings)
    job = harness.hold()
    harness.wait_for_start(job)
    stopped = time.monotonic()
    assert worker.stop() == 0
    took_s = time.monotonic() - stopped
    harness.report(exit_after_s=round(took_s, 3), grace_s=GRACE_S)
    assert GRACE_S <= took_s <= GRACE_S + scale_to_load(2)  # the job itself would not finish
    assert worker.logged("Job released", job_id=job.id, task="hold")
    assert_released(harness, job)


INTERRUPTED = """
import asyncio
import threading


@app.task(bind=True, name="sync")
def sync(self, gate, returns=False):
    record("start", job=self.request.id)
    try:
        for _ in range(100_000):  # in a thread, the exception is raised between two waits
            journal().blpop("nothing", 0.05)
    except Exception:
        record("swallowed")
    except BaseException as exc:
        if returns:
            return gate
        raise
    finally:
        record("cleaned", job=self.request.id)


@app.task(bind=True, name="asynchronous")
async def asynchronous(self, gate, returns=False):
    record("start", job=self.request.id)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        if returns:
            return gate
        raise
    finally:
        await asyncio.sleep(0)
        record("cleaned", job=self.request.id)


@app.task(batch=3, name="batch")
def batch(jobs):
    try:
        sync.function(jobs[0], "gate")
    finally:
        for job in jobs[1:]:
            record("cleaned", job=job.request.id)


@app.task(bind=True, name="polite")
def polite(self, gate):
    record("start", job=self.request.id, stopping=str(self.stopping))
    while not self.stopping:
        journal().blpop("nothing", 0.05)
    return gate
"""
SOON = {"shutdown_timeout": 60, "shutdown_notice": 59.9, "max_crashes": 1, "max_releases": 1}


@pytest.mark.parametrize("task", ["sync", "sync in a thread", "asynchronous", "batch"])
def test_running_tasks_can_clean_up_before_they_are_released(harness: WorkerHarness, task: str) -> None:
    name, _, threads = task.partition(" ")
    pool = {"worker_pool": "threads"} if threads else {}
    several = 3 if name in {"asynchronous", "batch"} else 1
    jobs = [harness.app.send_task(name, kwargs={"gate": "gate"}) for _ in range(several)]
    for count in (1, 2):  # the second time, max_releases would be reached
        worker = harness.worker(INTERRUPTED, children=1, settings={**SOON, **pool})
        harness.journal.wait_for(count, what="start", job=jobs[0 if name == "batch" else -1].id)
        assert worker.stop() == 0
        assert {line["mode"] for line in worker.logged("Worker stopping")} == {"warm"}, "no child was killed"
        for job in jobs:
            worker.wait_for_line("Job released", job_id=job.id, reason="its worker is stopping")
            assert harness.journal.wait_for(count, what="cleaned", job=job.id)
            assert harness.field(job, "atm") in {None, "0"}, "the attempt does not count"
        waiting = harness.redis.lrange(harness.keys.wait, 0, -1)[::-1]
        # Async jobs are released as each ends its clean-up.
        assert (sorted(waiting) if name == "asynchronous" else waiting) == [job.id for job in jobs], "in their order"
        assert not harness.journal.all(what="swallowed")


@pytest.mark.parametrize("task", ["sync", "asynchronous", "polite"])
def test_a_task_that_ends_before_its_worker_completes_its_job(harness: WorkerHarness, task: str) -> None:
    settings = SOON if task != "polite" else {"shutdown_timeout": 60}
    worker = harness.worker(INTERRUPTED, children=1, settings=settings)
    returns = {} if task == "polite" else {"returns": True}
    job = harness.app.send_task(task, kwargs={"gate": "gate", **returns})
    assert harness.wait_for_start(job).fields.get("stopping", "False") == "False"
    assert worker.stop() == 0
    assert job.get(timeout=60) == "gate"
    assert harness.start_count(job) == 1


def test_a_released_prioritized_job_is_acquired_by_an_idle_worker_immediately(harness: WorkerHarness) -> None:
    stopping = harness.worker(children=1, settings={"drain_delay": 30})
    job = harness.hold(priority=5)
    harness.wait_for_start(job)
    harness.worker(children=1, settings={"drain_delay": 30})
    harness.wait_until_idle(1)
    harness.redis.script_flush()  # resent scripts run after commands that were sent after them
    stopping.send(signal.SIGQUIT)
    assert stopping.wait() == 0
    waiting = harness.events.wait_for(event="waiting", jobId=job.id, prev="active")[0]
    acquired_ms = harness.wait_for_event("active", job, 2).ms - waiting.ms
    harness.report(acquired_after_ms=acquired_ms)
    assert acquired_ms <= scale_to_load(1000)
    harness.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"


@pytest.mark.parametrize("stop", [send_term_twice, send_quit])
def test_a_second_term_or_quit_stops_the_worker_and_releases_its_job(harness: WorkerHarness, stop) -> None:
    worker = harness.worker(children=1, settings={"shutdown_timeout": 30, "max_crashes": 1})
    job = harness.hold()
    harness.wait_for_start(job)
    stop(worker)
    stopped = time.monotonic()
    assert worker.wait() == 0
    harness.report(exit_after_s=round(time.monotonic() - stopped, 3))
    assert time.monotonic() - stopped <= scale_to_load(1)
    assert_released(harness, job)


def test_ctrl_c_is_a_warm_shutdown_even_though_it_also_reaches_the_children(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2, new_group=True)
    job = harness.hold()
    harness.wait_for_start(job)
    os.killpg(worker.pid, signal.SIGINT)
    worker.wait_for_line("Worker stopping", mode="warm")
    harness.open_gate()
    assert worker.wait() == 0
    assert job.get(timeout=60) == "gate"
    assert harness.start_count(job) == 1
    assert worker.warnings() == []


def test_term_to_every_process_of_the_worker_is_a_warm_shutdown(harness: WorkerHarness) -> None:
    # systemd's default (KillMode=control-group) and `kill -- -PGID` signal the children too.
    worker = harness.worker(children=2, new_group=True)
    job = harness.hold()
    harness.wait_for_start(job)
    os.killpg(worker.pid, signal.SIGTERM)
    worker.wait_for_line("Worker stopping", mode="warm")
    harness.open_gate()
    assert worker.wait() == 0
    assert job.get(timeout=60) == "gate"
    assert harness.start_count(job) == 1
    assert worker.warnings() == []


def test_an_idle_worker_stops_immediately(harness: WorkerHarness) -> None:
    worker = harness.worker(children=4, settings={"drain_delay": 30})
    harness.wait_until_idle(4)
    stopped = time.monotonic()
    assert worker.stop() == 0
    harness.report(exit_after_s=round(time.monotonic() - stopped, 3))
    assert time.monotonic() - stopped <= scale_to_load(1)
    assert worker.warnings() == []


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_worker_stops_immediately_while_its_children_start(harness: WorkerHarness, start_method: str) -> None:
    for _ in range({"fork": 5, "spawn": 2}[start_method]):  # spawned children import everything anew
        worker = harness.worker(children=4, settings={"shutdown_timeout": 30, "worker_start_method": start_method})
        worker.wait_for_line("Worker started")
        stopped = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - stopped <= scale_to_load(2)
        assert worker.warnings() == []


def test_a_shutdown_releases_a_job_that_was_acquired_with_a_lost_reply(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    settings = {"lock_duration": 30, "broker_reconnect_delay": 5, "broker_reconnect_delay_max": 5}
    worker = harness.worker(via=proxy, children=1, settings=settings)
    harness.app.send_task("quick").get(timeout=60)  # loads the scripts
    first = harness.hold()
    harness.wait_for_start(first)
    following = harness.app.send_task("quick")
    proxy.drop_replies(1, match=wrappers.with_guard("moveToFinished", "promotionGuard").sha)
    harness.open_gate()
    proxy.wait_for(lambda proxy: proxy.dropped == 1)
    assert harness.redis.lrange(harness.keys.active, 0, -1) == [following.id], "acquired when the first one finished"

    assert worker.stop() == 0
    assert harness.redis.llen(harness.keys.active) == 0
    assert harness.redis.lrange(harness.keys.wait, 0, -1) == [following.id]
    assert first.get(timeout=60) == "gate"
    assert (harness.start_count(first), harness.start_count(following)) == (1, 0)


def _short(number: int) -> int:
    raise NotImplementedError("runs in the workers only")


@pytest.mark.timeout(180)
def test_shutdowns_at_random_times_leave_no_job_active_and_repeat_none(
    harness: WorkerHarness, rng: random.Random
) -> None:
    calls: list[AsyncResult[int]] = []
    exits, stranded = Counter[int](), 0
    short = harness.app.task(name="short")(_short)
    for _ in range(8):
        missing = 500 - harness.redis.llen(harness.keys.wait)
        calls += harness.app.send_many([short.s(rng.randrange(20_000)) for _ in range(missing)])
        pair = [harness.worker(SHORT, children=2, settings={"lock_duration": 30}) for _ in range(2)]
        for worker in pair:
            worker.wait_for_line("Worker started")
        seen = len(harness.journal.all(what="start"))
        harness.journal.wait_for(seen + rng.randrange(120), what="start")
        exits.update(worker.stop() for worker in pair)
        stranded += harness.redis.llen(harness.keys.active)
    assert stranded == 0
    harness.worker(SHORT, children=2)
    for call in calls:
        call.get(timeout=60)

    starts = Counter(entry["job"] for entry in harness.journal.all(what="start"))
    harness.report(jobs=len(calls), stops=exits.total(), stranded=stranded)
    assert exits == {0: 16}
    assert starts == dict.fromkeys([call.id for call in calls], 1)


@pytest.mark.parametrize("job", ["idle", "running"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["redis_killed", "redis_stopped"])
def test_a_stop_takes_at_most_a_second_more_than_the_shutdown_timeout_without_redis(
    harness_on: Callable[[str], WorkerHarness], tmp_path: Path, fault: signal.Signals, job: str
) -> None:
    """One deadline holds for the calls to Redis, the release of jobs, and the processes beside the children."""
    with RedisServer.start(tmp_path / "redis") as server:
        harness = harness_on(server.url)
        worker = harness.worker(FAREWELL, children=2, settings={"shutdown_timeout": GRACE_S, "metrics_port": 0})
        if job == "running":
            for held in (harness.hold(), harness.hold()):
                harness.wait_for_start(held)
        else:
            harness.wait_until_idle(2)
        os.kill(server.pid, fault)
        stopped = time.monotonic()
        assert worker.stop() == 0
        took_s = time.monotonic() - stopped
        harness.report(exit_after_s=round(took_s, 3))
        assert took_s <= scale_to_load(GRACE_S + 1)
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("handler", ["lambda *_: None", "signal.SIG_IGN"])
def test_a_task_that_replaces_the_sigterm_handler_does_not_delay_the_shutdown(
    harness: WorkerHarness, handler: str
) -> None:
    source = f"""
        import signal

        @app.task(bind=True, name="replaces")
        def replaces(self):
            signal.signal(signal.SIGTERM, {handler})
            record("start", job=self.request.id)
            wait_at("gate")
    """
    worker = harness.worker(source, children=1, settings={"shutdown_timeout": 30})
    harness.wait_for_start(harness.app.send_task("replaces"))
    next_job = harness.app.send_task("quick")
    worker.send(signal.SIGTERM)
    worker.wait_for_line("Worker stopping", mode="warm")
    started = time.monotonic()
    harness.open_gate()
    assert worker.wait() == 0
    assert time.monotonic() - started < 25
    assert not worker.logged("Child killed")
    assert harness.redis.lrange(harness.keys.wait, 0, -1) == [next_job.id]
