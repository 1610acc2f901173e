"""Repeatable jobs of the real Bull become job schedulers, which go on where Bull has stopped."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.interop.migrating import Migrating

pytestmark = [pytest.mark.interop, pytest.mark.process]

YEARLY = "0 0 5 1 1 *"


def repeat(migrating: Migrating, name: str, data: object, rule: dict[str, Any], **opts: Any) -> str:
    """Have Bull repeat a job; return the id of the next one."""
    return migrating.bull.add(name, data, repeat=rule, **opts)


def schedulers(migrating: Migrating) -> dict[str, dict[str, Any]]:
    """Node's job schedulers by the name of their jobs."""
    return {scheduler["name"]: scheduler for scheduler in migrating.call("getJobSchedulers")}


def test_patterns_and_intervals_keep_their_next_run(migrating: Migrating) -> None:
    yearly = repeat(migrating, "yearly", {"to": "x"}, {"cron": YEARLY, "tz": "Europe/Berlin", "limit": 9}, attempts=4)
    hourly = repeat(migrating, "hourly", {}, {"every": 3_600_000}, jobId="mine", priority=2)
    next_ms = {name: int(job.rpartition(":")[2]) for name, job in (("yearly", yearly), ("hourly", hourly))}
    report = migrating.migrate()
    assert (report.complete, len(report.schedulers), report.outcome.moved) == (True, 2, {"delayed": 2})
    found = schedulers(migrating)
    assert {name: scheduler["next"] for name, scheduler in found.items()} == next_ms
    assert (found["yearly"]["pattern"], found["yearly"]["tz"], found["yearly"]["limit"]) == (YEARLY, "Europe/Berlin", 9)
    assert found["yearly"]["template"] == {"data": {"to": "x"}, "opts": {"attempts": 4}}
    assert found["hourly"]["every"] == 3_600_000
    assert found["hourly"]["key"].startswith("mine-")
    assert migrating.counts() == {"delayed": 2}
    assert not [job for job in migrating.all_ids() if job in {yearly, hourly}]
    if not migrating.in_place:
        assert migrating.redis.keys("bull:mail:*") == ["bull:mail:id"]


def test_a_pattern_without_a_time_zone_gets_that_of_the_app(migrating: Migrating) -> None:
    repeat(migrating, "yearly", {}, {"cron": YEARLY})
    migrating.migrate()
    assert schedulers(migrating)["yearly"]["tz"] == "UTC"


def test_a_series_continues_in_nodes_worker_up_to_bulls_limit(
    migrating: Migrating, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    repeat(migrating, "tick", {}, {"every": 700, "limit": 5})
    migrating.bull.work(1)
    by_bull = migrating.redis.zrange("bull:mail:completed", 0, -1)  # one, or two on a slow machine
    migrating.migrate()
    ran = migrating.run_all(tmp_path / "ran")
    left = 5 - len(by_bull)
    wait(lambda: len(ran()) == left and not migrating.counts().get("delayed"), 60, f"{left} jobs")
    at_ms = [int(job.rpartition(":")[2]) for job in [*by_bull, *ran()]]
    # An interval goes on from the moment at which it is; a slow machine leaves one out, and never has one twice.
    assert all(later > earlier for earlier, later in pairwise(at_ms))
    assert all(moment % 700 == 0 for moment in at_ms)


def test_a_repeatable_whose_next_job_already_waits_runs_it_and_continues(
    migrating: Migrating, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    job = repeat(migrating, "tick", {}, {"every": 800})
    # As Bull's timer does it; a job whose moment has come when it is added waits at once.
    if migrating.redis.zrem("bull:mail:delayed", job):
        migrating.redis.lpush("bull:mail:wait", job)
    assert migrating.migrate().complete
    assert job in migrating.ids(migrating.name)
    ran = migrating.run_all(tmp_path / "ran")
    wait(lambda: len(ran()) >= 3, 60, "three jobs")
    assert ran()[0] == job
    assert len(set(ran())) == len(ran())


def test_an_unconvertible_repeatable_is_listed_with_a_call_for_a_scheduler(
    migrating: Migrating,
) -> None:
    gone = repeat(migrating, "gone", {}, {"cron": YEARLY, "tz": "Asia/Tokyo"})
    migrating.redis.delete(f"bull:mail:{gone}")
    migrating.redis.zrem("bull:mail:delayed", gone)
    [one] = migrating.migration().plan().repeatables
    assert "its next job is missing" in one.problem
    assert one.manual.startswith(f"app.queue('mail').schedulers.upsert('{one.scheduler_id}', cron='{YEARLY}'")
    assert "tz='Asia/Tokyo', name='gone'" in one.manual
    done = migrating.command("--execute")
    assert (done.returncode, one.manual in done.stdout) == (4, True)
    assert migrating.redis.zcard("bull:mail:repeat") == 1


def test_repeatables_are_skipped_if_delayed_jobs_are_not_selected(migrating: Migrating) -> None:
    repeat(migrating, "tick", {}, {"every": 3_600_000})
    report = migrating.migrate(states=("waiting",))
    assert (report.schedulers, [one.problem for one in report.repeatables_skipped]) == (
        [],
        ["delayed jobs are not selected (--states)"],
    )
    assert migrating.migrate().complete


def test_a_repeated_migration_does_not_create_a_scheduler_again(migrating: Migrating) -> None:
    job = repeat(migrating, "tick", {}, {"every": 3_600_000})
    key = migrating.redis.zrange("bull:mail:repeat", 0, -1)[0]
    hash_, score = migrating.hash(job), migrating.redis.zscore("bull:mail:delayed", job)
    migrating.migrate()
    before = schedulers(migrating)
    # What a Bull that is still there might bring back.
    migrating.redis.hset(f"bull:mail:{job}", mapping=hash_)
    migrating.redis.zadd("bull:mail:delayed", {job: score})
    migrating.redis.zadd("bull:mail:repeat", {key: int(job.rpartition(":")[2])})
    assert migrating.migrate().complete
    assert schedulers(migrating) == before
    assert migrating.counts() == {"delayed": 1}


def test_a_finished_series_creates_no_scheduler(migrating: Migrating) -> None:
    repeat(migrating, "tick", {}, {"every": 300, "limit": 1})
    migrating.bull.work(1)
    report = migrating.migrate()
    assert (report.complete, report.schedulers, report.outcome.moved) == (True, [], {"completed": 1})
    assert schedulers(migrating) == {}
    assert migrating.redis.exists("bull:mail:repeat") == 0


def test_a_repeatable_beyond_the_limit_is_listed_without_a_call(migrating: Migrating) -> None:
    repeat(migrating, "yearly", {}, {"cron": YEARLY})
    repeat(migrating, "hourly", {}, {"every": 3_600_000})
    done = migrating.command("--execute", "--limit", "1")
    assert " skipped: the limit was reached" in done.stdout
    assert "manually" not in done.stdout
