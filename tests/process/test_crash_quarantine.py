"""A child with many jobs crashes: the job that causes the crash is identified, and the others do not fail."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterable, Iterator, Sequence

import pytest

from bulltask import App, AsyncResult
from bulltask.events import Bus, CrashLimitReached
from bulltask.lua import loader
from bulltask.transport.call import FetchedJob
from bulltask.transport.scripts.move import FetchOptions, move_to_active
from bulltask.worker.broker_backoff import EXTRA_CRASHES, ReconnectBackoff
from bulltask.worker.recovery import JobsOfDeadChild, Recovery
from tests.support.flaky_proxy import FlakyProxy
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio

running = set()

@app.task(bind=True, name="nap")
async def nap(self, seconds):
    running.add(self.request.id)
    record("start", job=self.request.id, others=len(running) - 1)
    await asyncio.sleep(seconds)
    running.discard(self.request.id)
    return seconds

@app.task(bind=True, name="poison")
async def poison(self):
    record("start", job=self.request.id, others=len(running))
    await asyncio.sleep(0.02)
    os.kill(os.getpid(), 9)

@app.task(bind=True, name="poison_sync")
def poison_sync(self):
    record("start", job=self.request.id, others=len(running))
    os.kill(os.getpid(), 9)
"""

LONG_LOCK = {"lock_duration": 30, "max_crashes": 2}


def send_naps(harness: WorkerHarness, count: int, seconds: float = 0.1) -> list[AsyncResult[float]]:
    return [harness.app.send_task("nap", kwargs={"seconds": seconds}) for _ in range(count)]


def all_completed(jobs: Sequence[AsyncResult[float]], seconds: float = 0.1) -> bool:
    return all(job.get(timeout=60) == seconds for job in jobs)


@pytest.mark.parametrize(("poison", "method"), [("poison", "fork"), ("poison_sync", "fork"), ("poison", "spawn")])
def test_one_poison_pill_among_fifty_jobs_crashes_three_times_and_only_it_fails(
    harness: WorkerHarness, poison: str, method: str
) -> None:
    before, bad, after = send_naps(harness, 25), harness.app.send_task(poison), send_naps(harness, 25)
    worker = harness.worker(TASKS, children=1, settings={**LONG_LOCK, "worker_start_method": method})
    reason = harness.wait_for_event("failed", bad)["failedReason"]
    assert all_completed([*before, *after])

    assert "SIGKILL" in reason
    assert "max_crashes" in reason
    deaths = len(worker.logged("Child died"))
    others_running = [int(start["others"]) for start in harness.journal.all(what="start", job=bad.id)]
    starts = max(harness.start_count(job) for job in (*before, *after))
    harness.report(deaths=deaths, jobs_with_the_poison_pill=others_running, max_starts_of_other_jobs=starts)
    assert deaths in (2, 3), "one with many jobs, one with a few, one alone: never more than max_crashes + 1"
    # The other jobs may have finished before the second crash. Then the poison pill was alone, so it fails.
    assert others_running[-1] == 0 or deaths == 2
    assert others_running[1] < 10
    assert starts <= 3
    assert worker.stop() == 0


def test_three_poison_pills_among_fifty_jobs_crash_at_most_three_times_each(harness: WorkerHarness) -> None:
    good = send_naps(harness, 25)
    bad = [harness.app.send_task("poison") for _ in range(3)]
    good += send_naps(harness, 25)
    worker = harness.worker(TASKS, children=2, settings=LONG_LOCK)
    for job in bad:
        assert "SIGKILL" in harness.wait_for_event("failed", job, timeout=40)["failedReason"]
    assert all_completed(good)
    deaths = len(worker.logged("Child died"))
    harness.report(deaths=deaths)
    assert 3 <= deaths <= 3 * 3
    assert worker.stop() == 0


def test_one_crash_of_a_child_with_twenty_jobs_fails_none_and_each_runs_once_more(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1, settings={"lock_duration": 30, "max_crashes": 1})
    jobs = send_naps(harness, 20, 0.5)
    harness.journal.wait_for(20, what="start")
    os.kill(worker.children[0], signal.SIGKILL)
    assert all_completed(jobs, 0.5)
    assert {harness.start_count(job) for job in jobs} == {2}
    assert worker.logged("Crash limit reached") == []


def test_a_quarantined_job_waits_until_its_child_is_empty_and_keeps_its_lock(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1, settings={"lock_duration": 1, "max_crashes": 1, "stalled_interval": 1})
    jobs = send_naps(harness, 3, 2.5)
    harness.journal.wait_for(3, what="start")
    os.kill(worker.children[0], signal.SIGKILL)
    assert all_completed(jobs, 2.5)
    assert {harness.start_count(job) for job in jobs} == {2}, "an expired lock would have caused another start"
    alone = [harness.journal.all(what="start", job=job.id)[1]["others"] for job in jobs]
    assert alone == ["0", "0", "0"]
    assert harness.events.all(event="stalled") == []


def test_jobs_run_concurrently_again_when_the_quarantined_jobs_are_done(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1, settings={"lock_duration": 30, "max_crashes": 1})
    quarantined = send_naps(harness, 2, 0.3)
    harness.journal.wait_for(2, what="start")
    os.kill(worker.children[0], signal.SIGKILL)
    others = send_naps(harness, 20, 0.3)
    assert all_completed([*quarantined, *others], 0.3)
    assert max(int(harness.wait_for_start(job)["others"]) for job in others) >= 10
    assert worker.stop() == 0


class DyingChild:
    """A child that acquires jobs and then dies, simulated in the test."""

    def __init__(self, app: App) -> None:
        self._app, self._client, self._keys = app, app._broker.client(), app._broker.keys("default")
        self._client.connect()
        self._tokens = (f"token-{number}" for number in itertools.count())
        self.crashed: list[CrashLimitReached] = []
        bus = Bus()
        bus.subscribe(CrashLimitReached, self.crashed.append)
        backoff = ReconnectBackoff(bus, app._config)
        self.recovery = Recovery([self._keys], self._client, app._broker.clock, app._config, bus, backoff)

    def acquire(self, count: int) -> dict[str, str]:
        """Acquire jobs; return the token of each."""
        acquired = {}
        for token in itertools.islice(self._tokens, count):
            options = FetchOptions(token, 30_000, "manual")
            fetched = self._client.run(move_to_active(self._keys, options, self._app._now_ms()))
            assert isinstance(fetched, FetchedJob)
            acquired[fetched.job_id] = token
        return acquired

    def die(self, tokens: Iterable[str], running: Iterable[str]) -> int:
        """Let the child die; return the number of rounds until its jobs were recovered."""
        self.recovery.recover(JobsOfDeadChild(tuple(tokens), frozenset(running), 0, "SIGKILL", intentional=False))
        rounds = 1
        while self.recovery.pending:
            self.recovery.tick(0, 0)
            rounds += 1
        return rounds

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def proxy(harness: WorkerHarness) -> FlakyProxy:
    return harness.proxy()


@pytest.fixture
def dying_child(harness: WorkerHarness, proxy: FlakyProxy) -> Iterator[DyingChild]:
    app = harness.sender(f"redis://{proxy.host}:{proxy.port}/0", max_crashes=1, broker_reconnect_delay=0.01)
    child = DyingChild(app)
    yield child
    child.close()


def test_a_poison_pill_fails_even_if_it_never_runs_alone(harness: WorkerHarness, dying_child: DyingChild) -> None:
    jobs = [harness.app.send_task("nap") for _ in range(3)]
    for crash in range(1 + EXTRA_CRASHES):
        assert dying_child.crashed == [], f"after {crash} crashes"
        tokens = dying_child.acquire(3)
        dying_child.die(tokens.values(), [token for job_id, token in tokens.items() if job_id != jobs[0].id])
    assert [event.job_id for event in dying_child.crashed] == [jobs[0].id]
    assert "SIGKILL" in jobs[0].snapshot().failed_reason
    assert set(harness.redis.lrange(harness.keys.wait, 0, -1)) == {job.id for job in jobs[1:]}


def test_jobs_of_a_dead_child_do_not_fail_when_the_connection_breaks_repeatedly(
    harness: WorkerHarness, dying_child: DyingChild, proxy: FlakyProxy
) -> None:
    jobs = [harness.app.send_task("nap") for _ in range(20)]
    tokens = dying_child.acquire(20).values()
    proxy.drop_replies(19, match=loader.official_script("moveJobFromActiveToWait").sha)
    rounds = dying_child.die(tokens, tokens)
    harness.report(rounds=rounds)
    assert rounds == 20, "one job was recovered in each round"
    assert dying_child.crashed == []
    assert set(harness.redis.lrange(harness.keys.wait, 0, -1)) == {job.id for job in jobs}
    assert harness.redis.llen(harness.keys.active) == 0
