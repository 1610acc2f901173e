"""A real worker among jobs as no client of BullMQ writes them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import redis

from bulltask.testing.wait import wait_until
from bulltask.transport.keys import QueueKeys
from tests.support.malformed import Malformed, malformed_job, store
from tests.support.stage import Stage

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
_PLACES = ("wait", "wait", "prioritized", "delayed", "active")


def fill(redis_client: Any, keys: QueueKeys, dice: random.Random) -> tuple[list[Malformed], list[bytes]]:
    """Put malformed jobs into the queue, a good one behind each."""
    now_ms = int(time.time() * 1_000) - 1_000
    malformed, good = [], []
    for number in range(JOBS):
        task = dice.choice(["work", "awork"])
        malformed.append(malformed_job(dice, number, task, now_ms))
        store(redis_client, keys, malformed[-1], now_ms)
        sound = Malformed(b"good-%d" % number, dice.choice(_PLACES))
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
        """The jobs that wait, are due or are active."""
        keys, pipe = self._keys, self._redis.pipeline()
        pipe.lrange(keys.wait, 0, -1).lrange(keys.active, 0, -1).zrange(keys.prioritized, 0, -1)
        pipe.zrangebyscore(keys.delayed, 0, self._first_due)
        return [job for found in pipe.execute() for job in found]

    def of(self, jobs: list[bytes]) -> dict[bytes, str]:
        """Where each of these jobs is: a state, or ``told`` when it is gone but listeners heard of its end."""
        told = {
            fields[b"jobId"]
            for _, fields in self._redis.xrange(self._keys.events)
            if fields[b"event"] in {b"completed", b"failed"}
        }
        found: dict[bytes, str] = {}
        for state in ("completed", "failed", "delayed"):
            pipe = self._redis.pipeline()
            for job in jobs:
                pipe.zscore(getattr(self._keys, state), job)
            found |= {job: state for job, score in zip(jobs, pipe.execute(), strict=True) if score is not None}
        return {job: found.get(job, "told" if job in told else "nowhere") for job in jobs}


def test_every_malformed_job_ends_with_a_reason_and_every_good_one_completes(stage: Stage, dice: random.Random) -> None:
    raw = redis.Redis.from_url(stage.url)
    raw.hset(stage.keys.meta, "opts.maxLenEvents", 1_000_000)
    malformed, good = fill(raw, stage.keys, dice)
    settings = {"stalled_interval": 1, "task_unknown": "fail", "lock_duration": 5, "log_level": "warning"}
    worker = stage.worker(TASKS, children=2, settings=settings)
    ends = Ends(raw, stage.keys)
    wait_until(lambda: not ends.left(), 20, "no job that waits or is active")
    put_off = {line["job_id"] for line in worker.logged("Scheduling failed")}
    became = ends.of([job.id for job in malformed])
    # A job of a series whose next one cannot be added is put off and tried again, as in Node.
    lost = [
        (became[job.id], job.place, job.wrong)
        for job in malformed
        if became[job.id] == "nowhere"
        or (became[job.id] == "delayed" and job.id.decode("utf-8", "surrogateescape") not in put_off)
    ]
    assert lost == []
    assert set(ends.of(good).values()) == {"completed"}
    failed = [job.id for job in malformed if became[job.id] == "failed"]
    assert all(raw.hget(stage.keys.base.encode() + job, "failedReason") for job in failed)
    for event in ("Child died", "Service failed", "Lock lost", "Redis refused"):
        assert worker.logged(event) == []
    assert worker.stop() == 0
    raw.close()
