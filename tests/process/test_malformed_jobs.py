"""A real worker on a queue with malformed jobs that no client of BullMQ writes."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from bulltask.observe.events import shorten
from bulltask.observe.log import NAME_CHARS
from bulltask.testing.worker import wait_until
from bulltask.transport.call import QueueKeys
from tests.support.malformed_jobs import MalformedJob, malformed_job, store
from tests.support.server_clients import client_of
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
@app.task(name="work")
def work(**_):
    return "done"

@app.task(name="awork")
async def awork(**_):
    return "done"
"""
JOBS = 300
STATES = ("wait", "wait", "prioritized", "delayed", "active")


def fill(redis_client: Any, keys: QueueKeys, rng: random.Random) -> tuple[list[MalformedJob], list[bytes]]:
    """Add malformed jobs to the queue, each followed by a valid one."""
    now_ms = int(time.time() * 1_000) - 1_000
    malformed, good = [], []
    for number in range(JOBS):
        task = rng.choice(["work", "awork"])
        malformed.append(malformed_job(rng, number, task, now_ms))
        store(redis_client, keys, malformed[-1], now_ms)
        valid = MalformedJob(b"good-%d" % number, rng.choice(STATES))
        valid.fields = {"name": task, "data": "{}", "opts": "{}", "timestamp": str(now_ms)}
        store(redis_client, keys, valid, now_ms)
        good.append(valid.id)
    return malformed, good


class Outcomes:
    """The outcomes of the jobs of a queue."""

    def __init__(self, redis_client: Any, keys: QueueKeys) -> None:
        self._redis, self._keys = redis_client, keys
        self._first_due = int(time.time() * 1_000) * 4096

    def unfinished(self) -> list[bytes]:
        """Return the jobs that wait, are active, or are delayed but were due at the start."""
        keys, pipe = self._keys, self._redis.pipeline()
        pipe.lrange(keys.wait, 0, -1).lrange(keys.active, 0, -1).zrange(keys.prioritized, 0, -1)
        pipe.zrangebyscore(keys.delayed, 0, self._first_due)
        return [job for found in pipe.execute() for job in found]

    def members(self, state: str) -> set[bytes]:
        """Return the jobs in the sorted set of a state."""
        return set(self._redis.zrange(getattr(self._keys, state), 0, -1))

    def with_event(self, *events: str) -> set[bytes]:
        """Return the jobs with one of these events in the event stream."""
        names = {event.encode() for event in events}
        found = self._redis.xrange(self._keys.events)
        return {fields[b"jobId"] for _, fields in found if fields[b"event"] in names}


def test_every_malformed_job_fails_with_a_reason_and_every_valid_job_completes(
    harness: WorkerHarness, rng: random.Random
) -> None:
    raw = client_of(harness.url)
    raw.hset(harness.keys.meta, "opts.maxLenEvents", 1_000_000)
    malformed, good = fill(raw, harness.keys, rng)
    settings = {"stalled_interval": 1, "incompatible_timeout": 0, "lock_duration": 5, "log_level": "warning"}
    worker = harness.worker(TASKS, children=2, settings=settings)
    outcomes = Outcomes(raw, harness.keys)
    wait_until(lambda: not outcomes.unfinished(), 60, "the outcomes of all jobs")

    def unsettled() -> list[tuple[str, list[str]]]:
        # An iteration whose successor cannot be added is delayed and retried, as in Node. A job with pending child jobs
        # is retried until it has no more attempts, which may be billions, and with its own backoff, which may be years.
        lines = worker.logged("Scheduling failed") + worker.logged("Job retried")
        logged, delayed = {line["job_id"] for line in lines}, outcomes.members("delayed")
        retried = {id_ for id_ in delayed if shorten(id_.decode("utf-8", "surrogateescape"), NAME_CHARS) in logged}
        settled = outcomes.with_event("completed", "failed") | retried
        return [(job.state, job.defects) for job in malformed if job.id not in settled]

    # The log is a moment behind Redis, and an iteration that is retried is not always in ``delayed``.
    wait_until(lambda: unsettled() == [], 10, "outcomes or log lines of all jobs")
    assert set(good) <= outcomes.with_event("completed")
    assert all(raw.hget(harness.keys.base.encode() + job, "failedReason") for job in outcomes.members("failed"))
    for event in ("Child died", "Supervisor service failed", "Lock lost", "Redis error reply"):
        assert worker.logged(event) == []
    assert worker.stop() == 0
    raw.close()


@pytest.mark.parametrize("task", ["work", "awork"])
def test_a_malformed_job_fails_that_was_fetched_with_the_outcome_of_the_job_before_it(
    harness: WorkerHarness, task: str
) -> None:
    raw = client_of(harness.url)
    for number in range(20):
        raw.hset(harness.keys.job(f"good-{number}"), mapping={"name": task, "data": "{}", "opts": "{}", "timestamp": 1})
        raw.set(harness.keys.job(f"bad-{number}"), "not a hash")
        raw.lpush(harness.keys.wait, f"good-{number}", f"bad-{number}")
    worker = harness.worker(TASKS, children=1, settings={"lock_duration": 5})
    outcomes = Outcomes(raw, harness.keys)
    wait_until(lambda: not outcomes.unfinished(), 10, "the outcomes of all jobs")
    assert len(outcomes.with_event("failed")) == len(outcomes.with_event("completed")) == 20
    assert worker.stop() == 0
    raw.close()
