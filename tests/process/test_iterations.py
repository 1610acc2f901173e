"""An iteration is delayed with an increasing backoff if the next one cannot be added; other jobs continue."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.lua import loader
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


def send_iteration(harness: WorkerHarness, rule: object) -> AsyncResult[None]:
    """Return a job like the iterations of a scheduler, with this rule in its options."""
    job: AsyncResult[None] = harness.app.send_task("quick", countdown=0.3)
    options = json.loads(harness.field(job, "opts"))
    changed: Any = {"rjk": "nightly", "opts": json.dumps({**options, "repeat": rule, "repeatJobKey": "nightly"})}
    harness.redis.hset(harness.keys.job(job.id), mapping=changed)
    return job


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (None, "no repeat options"),
        ({"count": 1}, "either a pattern or an interval"),
        ({"pattern": "whenever", "count": 1}, "cron pattern 'whenever'"),
        ({"pattern": "* * * * *", "tz": "Europe/Atlantis"}, "unknown tz 'Europe/Atlantis'"),
        ({"every": "often"}, "every is not a number"),
        ({"pattern": "* * * * *", "endDate": "never"}, "endDate is not a date"),
        ({"pattern": "* * * * *", "startDate": 1e300}, ""),
    ],
)
def test_an_iteration_with_an_invalid_rule_is_delayed_and_other_jobs_continue(
    harness: WorkerHarness, rule: object, message: str
) -> None:
    worker = harness.worker(children=1)
    job = send_iteration(harness, rule)
    line = worker.wait_for_line("Scheduling failed", job_id=job.id)[0]
    assert message in line["error"]
    assert (line["scheduler"], line["delay"]) == ("nightly", 2.0)
    assert harness.field(job, "atm") is None
    assert harness.start_count(job) == 0
    harness.app.send_task("quick").get(timeout=60)  # the child continues with other jobs


def test_the_delay_grows_and_the_job_runs_when_its_scheduler_is_corrected(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1)
    job = send_iteration(harness, {"pattern": "whenever", "count": 1})
    delays = [line["delay"] for line in worker.wait_for_line("Scheduling failed", count=2, job_id=job.id)]
    assert delays == [2.0, 4.0]
    options = json.loads(harness.field(job, "opts"))
    harness.redis.hset(harness.keys.job(job.id), "opts", json.dumps({**options, "repeat": {"every": 1000}}))
    job.get(timeout=60)
    assert harness.start_count(job) == 1


def test_an_iteration_is_delayed_when_redis_replies_with_an_error(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1)
    harness.redis.set(harness.keys.repeat, "not a sorted set")
    job = send_iteration(harness, {"every": 1000, "count": 1})
    line = worker.wait_for_line("Scheduling failed", job_id=job.id)[0]
    assert "WRONGTYPE" in line["error"]
    harness.redis.delete(harness.keys.repeat)
    job.get(timeout=60)


def test_an_iteration_of_a_removed_scheduler_runs_and_adds_no_next_iteration(harness: WorkerHarness) -> None:
    harness.worker(children=1)
    job = send_iteration(harness, {"every": 1000, "count": 1})
    job.get(timeout=60)
    assert harness.redis.zcard(harness.keys.delayed) == 0


def test_a_job_with_repeat_options_but_without_a_scheduler_runs_once(harness: WorkerHarness) -> None:
    harness.worker(children=1)
    job: AsyncResult[None] = harness.app.send_task("quick", countdown=0.3)
    options = json.loads(harness.field(job, "opts"))
    harness.redis.hset(harness.keys.job(job.id), "opts", json.dumps({**options, "repeat": {"every": 1000}}))
    job.get(timeout=60)
    assert harness.redis.zcard(harness.keys.delayed) == 0


@pytest.mark.parametrize("lost", ["the reply", "the call"])
def test_the_next_iteration_is_added_once_when_redis_fails_meanwhile(harness: WorkerHarness, lost: str) -> None:
    proxy = harness.proxy()
    worker = harness.worker(via=proxy, children=1)
    harness.app.send_task("quick").get(timeout=60)
    sha = loader.official_script("updateJobScheduler").sha
    if lost == "the reply":
        proxy.drop_replies(1, match=sha)
    else:
        proxy.inject_error("READONLY You can't write against a read only replica.", match=sha)
    job = send_iteration(harness, {"every": 100_000, "count": 1})
    harness.redis.zadd(harness.keys.repeat, {"nightly": 1})
    harness.redis.hset(f"{harness.keys.repeat}:nightly", mapping={"name": "quick", "every": 100_000, "ic": 1})
    # Only the id makes the job the scheduler's current iteration.
    harness.redis.rename(harness.keys.job(job.id), harness.keys.job("repeat:nightly:1"))
    harness.redis.zadd(harness.keys.delayed, {"repeat:nightly:1": 1})
    harness.redis.zrem(harness.keys.delayed, job.id)
    harness.redis.zadd(harness.keys.marker, {"0": 0})
    harness.app.result("repeat:nightly:1").get(timeout=60)
    worker.wait_for_line("Redis reconnected" if lost == "the reply" else "Redis recovered")
    assert (proxy.dropped, proxy.injected) == ((1, 0) if lost == "the reply" else (0, 1))
    assert harness.redis.hget(f"{harness.keys.repeat}:nightly", "ic") == "2"
    assert harness.redis.zcard(harness.keys.delayed) == 1
