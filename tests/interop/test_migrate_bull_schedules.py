"""Repeatable jobs of the real Bull become job schedulers, which add the next iterations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.interop.migration_harness import MigrationHarness

pytestmark = [pytest.mark.interop, pytest.mark.process]

YEARLY = "0 0 5 1 1 *"


def repeat(migration: MigrationHarness, name: str, data: object, rule: dict[str, Any], **opts: Any) -> str:
    """Add a repeatable job with Bull; return the id of the next job."""
    return migration.bull.add(name, data, repeat=rule, **opts)


def schedulers(migration: MigrationHarness) -> dict[str, dict[str, Any]]:
    """Return Node's job schedulers by the name of their jobs."""
    return {scheduler["name"]: scheduler for scheduler in migration.call("getJobSchedulers")}


def test_patterns_and_intervals_keep_their_next_run(migration: MigrationHarness) -> None:
    yearly = repeat(migration, "yearly", {"to": "x"}, {"cron": YEARLY, "tz": "Europe/Berlin", "limit": 9}, attempts=4)
    hourly = repeat(migration, "hourly", {}, {"every": 3_600_000}, jobId="mine", priority=2)
    next_ms = {name: int(job.rpartition(":")[2]) for name, job in (("yearly", yearly), ("hourly", hourly))}
    report = migration.migrate()
    assert (report.complete, len(report.schedulers), report.outcome.moved) == (True, 2, {"delayed": 2})
    by_name = schedulers(migration)
    assert {name: scheduler["next"] for name, scheduler in by_name.items()} == next_ms
    assert (by_name["yearly"]["pattern"], by_name["yearly"]["tz"], by_name["yearly"]["limit"]) == (
        YEARLY,
        "Europe/Berlin",
        9,
    )
    assert by_name["yearly"]["template"] == {"data": {"to": "x"}, "opts": {"attempts": 4}}
    assert by_name["hourly"]["every"] == 3_600_000
    assert by_name["hourly"]["key"].startswith("mine-")
    assert migration.counts() == {"delayed": 2}
    assert not [job for job in migration.all_ids() if job in {yearly, hourly}]
    if not migration.in_place:
        assert migration.redis.keys("bull:mail:*") == ["bull:mail:id"]


def test_a_pattern_without_a_time_zone_gets_the_apps_time_zone(migration: MigrationHarness) -> None:
    repeat(migration, "yearly", {}, {"cron": YEARLY})
    migration.migrate()
    assert schedulers(migration)["yearly"]["tz"] == "UTC"


def test_a_migrated_schedule_runs_in_a_node_worker_up_to_bulls_limit(
    migration: MigrationHarness, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    repeat(migration, "tick", {}, {"every": 700, "limit": 5})
    migration.bull.work(1)
    by_bull = migration.redis.zrange("bull:mail:completed", 0, -1)  # one, or two on a slow machine
    migration.migrate()
    run_ids = migration.run_all(tmp_path / "ran")
    left = 5 - len(by_bull)
    wait(lambda: len(run_ids()) == left and not migration.counts().get("delayed"), 60, f"{left} jobs")
    at_ms = [int(job.rpartition(":")[2]) for job in [*by_bull, *run_ids()]]
    # An interval continues from the current time: a slow machine may skip a run, but none runs twice.
    assert all(later > earlier for earlier, later in pairwise(at_ms))
    assert all(moment % 700 == 0 for moment in at_ms)


def test_a_repeatable_whose_next_job_is_already_waiting_runs_it_and_continues(
    migration: MigrationHarness, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    job = repeat(migration, "tick", {}, {"every": 800})
    # Like Bull's timer; a job that is already due when it is added waits immediately.
    if migration.redis.zrem("bull:mail:delayed", job):
        migration.redis.lpush("bull:mail:wait", job)
    assert migration.migrate().complete
    assert job in migration.ids(migration.name)
    run_ids = migration.run_all(tmp_path / "ran")
    wait(lambda: len(run_ids()) >= 3, 60, "three jobs")
    assert run_ids()[0] == job
    assert len(set(run_ids())) == len(run_ids())


def test_an_unconvertible_repeatable_is_listed_with_a_call_for_a_scheduler(
    migration: MigrationHarness,
) -> None:
    gone = repeat(migration, "gone", {}, {"cron": YEARLY, "tz": "Asia/Tokyo"})
    migration.redis.delete(f"bull:mail:{gone}")
    migration.redis.zrem("bull:mail:delayed", gone)
    [repeatable] = migration.bull_migration().plan().repeatables
    assert "its next iteration, which contains the data and options, is missing" in repeatable.problem
    assert repeatable.manual.startswith(
        f"app.queue('mail').schedulers.upsert('{repeatable.scheduler_id}', cron='{YEARLY}'"
    )
    assert "tz='Asia/Tokyo', name='gone'" in repeatable.manual
    done = migration.command("--yes")
    assert (done.returncode, repeatable.manual in done.stdout) == (4, True)
    assert migration.redis.zcard("bull:mail:repeat") == 1


def test_repeatables_are_skipped_if_delayed_jobs_are_not_selected(migration: MigrationHarness) -> None:
    repeat(migration, "tick", {}, {"every": 3_600_000})
    report = migration.migrate(states=("waiting",))
    assert (report.schedulers, [repeatable.problem for repeatable in report.repeatables_skipped]) == (
        [],
        ["delayed jobs are not selected (--states)"],
    )
    assert migration.migrate().complete


def test_a_repeated_migration_does_not_create_a_scheduler_again(migration: MigrationHarness) -> None:
    job = repeat(migration, "tick", {}, {"every": 3_600_000})
    key = migration.redis.zrange("bull:mail:repeat", 0, -1)[0]
    hash_, score = migration.hash(job), migration.redis.zscore("bull:mail:delayed", job)
    migration.migrate()
    before = schedulers(migration)
    # A Bull process that is still running might add them again.
    migration.redis.hset(f"bull:mail:{job}", mapping=hash_)
    migration.redis.zadd("bull:mail:delayed", {job: score})
    migration.redis.zadd("bull:mail:repeat", {key: int(job.rpartition(":")[2])})
    assert migration.migrate().complete
    assert schedulers(migration) == before
    assert migration.counts() == {"delayed": 1}


def test_a_repeatable_job_that_has_ended_creates_no_scheduler(migration: MigrationHarness) -> None:
    repeat(migration, "tick", {}, {"every": 300, "limit": 1})
    migration.bull.work(1)
    report = migration.migrate()
    assert (report.complete, report.schedulers, report.outcome.moved) == (True, [], {"completed": 1})
    assert schedulers(migration) == {}
    assert migration.redis.exists("bull:mail:repeat") == 0


def test_a_repeatable_beyond_the_limit_is_listed_without_a_call_that_creates_its_scheduler(
    migration: MigrationHarness,
) -> None:
    repeat(migration, "yearly", {}, {"cron": YEARLY})
    repeat(migration, "hourly", {}, {"every": 3_600_000})
    done = migration.command("--yes", "--limit", "1")
    assert " skipped: the limit was reached" in done.stdout
    assert "manually" not in done.stdout
