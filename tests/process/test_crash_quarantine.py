"""A child with many jobs crashes: the job that causes it is found, and the others do not fail."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterable, Iterator, Sequence

import pytest

from bulltask import App, AsyncResult
from bulltask.events import Bus, JobCrashed
from bulltask.lua import loader
from bulltask.testing.flaky import FlakyProxy
from bulltask.transport.scripts.move import FetchOptions, move_to_active
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.quarantine import UNSEEN_CRASHES
from bulltask.worker.supervisor.recovery import OrphanedJobs, Recovery
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import asyncio

running = set()

@app.task(bind=True, name="nap")
async def nap(self, seconds):
    running.add(self.request.id)
    record("start", job=self.request.id, beside=len(running) - 1)
    await asyncio.sleep(seconds)
    running.discard(self.request.id)
    return seconds

@app.task(bind=True, name="poison")
async def poison(self):
    record("start", job=self.request.id, beside=len(running))
    await asyncio.sleep(0.02)
    os.kill(os.getpid(), 9)

@app.task(bind=True, name="poison_sync")
def poison_sync(self):
    record("start", job=self.request.id, beside=len(running))
    os.kill(os.getpid(), 9)
"""

PATIENT = {"lock_duration": 30, "max_crashes": 2}


def naps(harness: WorkerHarness, count: int, seconds: float = 0.1) -> list[AsyncResult[float]]:
    return [harness.app.send_task("nap", kwargs={"seconds": seconds}) for _ in range(count)]


def all_completed(jobs: Sequence[AsyncResult[float]], seconds: float = 0.1) -> bool:
    return all(job.get(timeout=60) == seconds for job in jobs)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("poison", ["poison", "poison_sync"])
def test_one_poisoned_job_among_fifty_dies_three_times_and_fails_alone(
    harness: WorkerHarness, poison: str, method: str
) -> None:
    before, bad, after = naps(harness, 25), harness.app.send_task(poison), naps(harness, 25)
    worker = harness.worker(TASKS, children=1, settings={**PATIENT, "worker_start_method": method})
    reason = harness.wait_for_event("failed", bad)["failedReason"]
    assert all_completed([*before, *after])

    assert "SIGKILL" in reason
    assert "max_crashes" in reason
    deaths = len(worker.logged("Child died"))
    beside = [int(start["beside"]) for start in harness.journal.all(what="start", job=bad.id)]
    starts = max(harness.start_count(job) for job in (*before, *after))
    harness.report(deaths=deaths, jobs_beside_the_poison=beside, most_starts_of_an_innocent=starts)
    assert deaths == 3, "one in company, one in small company, one alone: never more than max_crashes + 1"
    assert beside[-1] == 0
    assert beside[1] < 10
    assert starts <= 3
    assert worker.stop() == 0


def test_three_poisoned_jobs_among_fifty_die_three_times_each_at_most(harness: WorkerHarness) -> None:
    good = naps(harness, 25)
    bad = [harness.app.send_task("poison") for _ in range(3)]
    good += naps(harness, 25)
    worker = harness.worker(TASKS, children=2, settings=PATIENT)
    for job in bad:
        assert "SIGKILL" in harness.wait_for_event("failed", job, timeout=40)["failedReason"]
    assert all_completed(good)
    deaths = len(worker.logged("Child died"))
    harness.report(deaths=deaths)
    assert 3 <= deaths <= 3 * 3
    assert worker.stop() == 0


def test_one_death_of_a_child_with_twenty_jobs_fails_none_and_each_runs_once_more(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1, settings={"lock_duration": 30, "max_crashes": 1})
    jobs = naps(harness, 20, 0.5)
    harness.journal.wait_for(20, what="start")
    os.kill(worker.children[0], signal.SIGKILL)
    assert all_completed(jobs, 0.5)
    assert {harness.start_count(job) for job in jobs} == {2}
    assert worker.logged("Job crashed") == []


def test_a_suspect_waits_until_its_child_is_empty_and_keeps_its_lock_meanwhile(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1, settings={"lock_duration": 1, "max_crashes": 1, "stalled_interval": 1})
    jobs = naps(harness, 3, 2.5)
    harness.journal.wait_for(3, what="start")
    os.kill(worker.children[0], signal.SIGKILL)
    assert all_completed(jobs, 2.5)
    assert {harness.start_count(job) for job in jobs} == {2}, "a lock that ran out would have made another start"
    alone = [harness.journal.all(what="start", job=job.id)[1]["beside"] for job in jobs]
    assert alone == ["0", "0", "0"]
    assert harness.events.all(event="stalled") == []


def test_others_run_beside_each_other_again_when_the_suspects_are_done(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1, settings={"lock_duration": 30, "max_crashes": 1})
    suspects = naps(harness, 2, 0.3)
    harness.journal.wait_for(2, what="start")
    os.kill(worker.children[0], signal.SIGKILL)
    others = naps(harness, 20, 0.3)
    assert all_completed([*suspects, *others], 0.3)
    assert max(int(harness.wait_for_start(job)["beside"]) for job in others) >= 10
    assert worker.stop() == 0


class Taken:
    """Jobs that a test takes as a child does, and whose child then dies."""

    def __init__(self, app: App) -> None:
        self._app, self._client, self._keys = app, app.broker.client(), app.broker.keys("default")
        self._client.connect()
        self._tokens = (f"token-{number}" for number in itertools.count())
        self.crashed: list[JobCrashed] = []
        bus = Bus()
        bus.subscribe(JobCrashed, self.crashed.append)
        backoff = ReconnectBackoff(bus, app.config)
        self.recovery = Recovery([self._keys], self._client, app.broker.clock, app.config, bus, backoff)

    def take(self, count: int) -> dict[str, str]:
        """Take jobs; token by job."""
        taken = {}
        for token in itertools.islice(self._tokens, count):
            claim = FetchOptions(token, 30_000, "by hand")
            taken[self._client.run(move_to_active(self._keys, claim, self._app.now_ms())).job_id] = token
        return taken

    def die(self, tokens: Iterable[str], running: Iterable[str]) -> int:
        """Have the child that took them die; return in how many rounds its jobs were settled."""
        self.recovery.recover(OrphanedJobs(tuple(tokens), frozenset(running), 0, "SIGKILL", intentional=False))
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
def taken(harness: WorkerHarness, proxy: FlakyProxy) -> Iterator[Taken]:
    app = harness.sender(f"redis://{proxy.host}:{proxy.port}/0", max_crashes=1, broker_reconnect_delay=0.01)
    made = Taken(app)
    yield made
    made.close()


def test_a_job_that_kills_whoever_takes_it_fails_although_it_is_never_alone(
    harness: WorkerHarness, taken: Taken
) -> None:
    jobs = [harness.app.send_task("nap") for _ in range(3)]
    for crash in range(1 + UNSEEN_CRASHES):
        assert taken.crashed == [], f"after {crash} crashes"
        tokens = taken.take(3)
        taken.die(tokens.values(), [token for job_id, token in tokens.items() if job_id != jobs[0].id])
    assert [event.job_id for event in taken.crashed] == [jobs[0].id]
    assert "SIGKILL" in jobs[0].snapshot().failed_reason
    assert set(harness.redis.lrange(harness.keys.wait, 0, -1)) == {job.id for job in jobs[1:]}


def test_a_connection_that_breaks_again_and_again_leaves_no_last_orphan_to_blame(
    harness: WorkerHarness, taken: Taken, proxy: FlakyProxy
) -> None:
    jobs = [harness.app.send_task("nap") for _ in range(20)]
    tokens = taken.take(20).values()
    proxy.drop_replies(19, match=loader.official("moveJobFromActiveToWait").sha)
    rounds = taken.die(tokens, tokens)
    harness.report(rounds=rounds)
    assert rounds == 20, "one job was settled in each"
    assert taken.crashed == []
    assert set(harness.redis.lrange(harness.keys.wait, 0, -1)) == {job.id for job in jobs}
    assert harness.redis.llen(harness.keys.active) == 0
