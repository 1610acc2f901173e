"""A real worker among jobs as no client of BullMQ writes them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import redis

from bulltask.testing.wait import wait_until
from bulltask.transport.keys import QueueKeys
from tests.support.malformed_jobs import MalformedJob, malformed_job, store
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
    """Put malformed jobs into the queue, a good one behind each."""
    now_ms = int(time.time() * 1_000) - 1_000
    malformed, good = [], []
    for number in range(JOBS):
        task = rng.choice(["work", "awork"])
        malformed.append(malformed_job(rng, number, task, now_ms))
        store(redis_client, keys, malformed[-1], now_ms)
        sound = MalformedJob(b"good-%d" % number, rng.choice(STATES))
        sound.fields = {"name": task, "data": "{}", "opts": "{}", "timestamp": str(now_ms)}
        store(redis_client, keys, sound, now_ms)
        good.append(sound.id)
    return malformed, good


class Ends:
    """What became of the jobs of a queue."""

    def __init__(self, redis_client: Any, keys: QueueKeys) -> None:
        self._redis, self._keys = redis_client, keys
        self._first_due = int(time.time() * 1_000) * 4096

    def left(self) -> list[bytes]:
        """The jobs that wait, were due at first, or are active."""
        keys, pipe = self._keys, self._redis.pipeline()
        pipe.lrange(keys.wait, 0, -1).lrange(keys.active, 0, -1).zrange(keys.prioritized, 0, -1)
        pipe.zrangebyscore(keys.delayed, 0, self._first_due)
        return [job for found in pipe.execute() for job in found]

    def members(self, state: str) -> set[bytes]:
        """The jobs in the set of a state."""
        return set(self._redis.zrange(getattr(self._keys, state), 0, -1))

    def told(self, *events: str) -> set[bytes]:
        """The jobs of which listeners heard one of these events."""
        wanted = {event.encode() for event in events}
        found = self._redis.xrange(self._keys.events)
        return {fields[b"jobId"] for _, fields in found if fields[b"event"] in wanted}


def test_every_malformed_job_ends_with_a_reason_and_every_good_one_completes(
    harness: WorkerHarness, rng: random.Random
) -> None:
    raw = redis.Redis.from_url(harness.url)
    raw.hset(harness.keys.meta, "opts.maxLenEvents", 1_000_000)
    malformed, good = fill(raw, harness.keys, rng)
    settings = {"stalled_interval": 1, "task_unknown": "fail", "lock_duration": 5, "log_level": "warning"}
    worker = harness.worker(TASKS, children=2, settings=settings)
    ends = Ends(raw, harness.keys)
    wait_until(lambda: not ends.left(), 60, "no job that waits or is active")
    # A job of a series whose next one cannot be added is put off and tried again, as in Node.
    put_off = {line["job_id"].encode("utf-8", "surrogateescape") for line in worker.logged("Scheduling failed")}
    ended = ends.told("completed", "failed") | (ends.members("delayed") & put_off)
    assert [(job.state, job.defects) for job in malformed if job.id not in ended] == []
    assert set(good) <= ends.told("completed")
    assert all(raw.hget(harness.keys.base.encode() + job, "failedReason") for job in ends.members("failed"))
    for event in ("Child died", "Service failed", "Lock lost", "Redis error reply"):
        assert worker.logged(event) == []
    assert worker.stop() == 0
    raw.close()
