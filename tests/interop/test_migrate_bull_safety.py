"""``bulltask migrate-bull`` loses no job if it is rejected, killed, disconnected or run by mistake."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bulltask.errors import BrokerOutOfMemoryError, BrokerUnavailableError, MigrationError
from bulltask.migrate import BullMigration, QueueLayout
from bulltask.migrate.inspection import SkipReason
from tests.interop.bull_bridge import BullBridge
from tests.interop.migration_harness import MigrationHarness
from tests.support.flaky_proxy import FlakyProxy

pytestmark = [pytest.mark.interop, pytest.mark.process]

HOUR_MS = 3_600_000
COMMAND = str(Path(sys.executable).with_name("bulltask"))


@pytest.fixture
def second_bull(migration: MigrationHarness) -> Iterator[BullBridge]:
    """Bull in a process that may be killed."""
    with BullBridge.to(migration.url, package="bull") as bull:
        yield bull


def fill(migration: MigrationHarness, count: int) -> list[str]:
    """Add jobs of every kind; return the sorted ids."""
    jobs = []
    for number in range(count):
        kinds: list[dict[str, Any]] = [
            {},
            {"delay": HOUR_MS + number},
            {"priority": 1 + number % 5},
            {"jobId": f"id-{number}"},
        ]
        jobs.append({"name": "n", "data": {"number": number}, "opts": kinds[number % 4]})
    migration.bull.calls(["addBulk", jobs])
    return migration.all_ids()


def numbers(migration: MigrationHarness, name: str) -> list[int]:
    """Return the numbers in the data of a queue's jobs; each job has a different number."""
    return [json.loads(fields["data"])["number"] for fields in migration.hashes(migration.ids(name), name)]


def test_a_dry_run_changes_nothing_and_prints_the_plan(migration: MigrationHarness) -> None:
    fill(migration, 8)
    migration.bull.calls(["add", "tick", {}, {"repeat": {"every": 60_000}}], ["pause"])
    before = migration.dump()
    completed = migration.command()
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "Bull 3 or 4, paused" in completed.stdout
    for line in ("  delayed              3", "6 would be", "3 would be", "repeatable 'tick:::60000' -> job scheduler"):
        assert line.replace("would be", "would be converted: " if migration.in_place else "would become ").rstrip() in (
            completed.stdout
        )
    assert "Dry run: nothing was changed" in completed.stdout
    assert migration.dump() == before


def test_the_command_prints_a_report_whose_counts_add_up(migration: MigrationHarness) -> None:
    ids = fill(migration, 40)
    completed = migration.command("--yes")
    assert (completed.returncode, migration.all_ids()) == (0, ids)
    assert "Migrated 40 jobs" in completed.stdout
    if migration.in_place:
        assert "bull:mail: 40 jobs before, 40 after" in completed.stdout
    else:
        assert "bull:mail: 40 jobs before, 0 after" in completed.stdout
        assert "bull:{mail}: 0 jobs before, 40 after" in completed.stdout
        assert migration.redis.keys("bull:mail:*") == ["bull:mail:id"]


@pytest.mark.extended
@pytest.mark.parametrize("moment", ["at its first job", "at a random job"])
def test_a_killed_migration_can_be_repeated_without_lost_or_duplicate_jobs(
    migration: MigrationHarness, moment: str, rng: random.Random, wait: Callable[..., Any]
) -> None:
    ids, after = fill(migration, 1_500), 1 if moment == "at its first job" else rng.randrange(2, 1_001)

    def done() -> int:
        if not migration.in_place:
            return 1_500 - len(migration.ids("mail"))
        return sum("timestamp" not in fields["opts"] for fields in migration.hashes(ids[::100])) * 100

    with FlakyProxy("127.0.0.1", int(migration.url.rsplit(":", 1)[1].split("/")[0])) as proxy:
        proxy.latency(0.04)  # slow enough to be killed in the middle
        with migration.start("--yes", url=f"redis://127.0.0.1:{proxy.port}/0") as process:
            wait(lambda: done() >= after or process.poll() is not None, 60, f"{after} moved jobs")
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert 0 < done() < 1_500, "it was killed too early or too late"
    assert migration.all_ids() == ids
    assert migration.command("--yes").returncode == 0
    assert migration.all_ids() == ids
    assert sorted(numbers(migration, migration.name)) == list(range(1_500))
    assert migration.counts() == {"waiting": 750, "delayed": 375, "prioritized": 375}
    waiting = migration.redis.lrange(f"bull:{migration.name}:wait", 0, -1)[::-1]
    assert [int(fields["data"][10:-1]) for fields in migration.hashes(waiting, migration.name)] == [
        number for number in range(1_500) if number % 4 in {0, 3}
    ]


def test_a_lost_reply_loses_no_job(migration: MigrationHarness) -> None:
    ids = fill(migration, 500)
    with FlakyProxy("127.0.0.1", int(migration.url.rsplit(":", 1)[1].split("/")[0])) as proxy:
        app_url = f"redis://127.0.0.1:{proxy.port}/0"
        queue = type(migration.app)("cut", app_url, queue_hash_tag=not migration.in_place).queue("mail")
        plan = BullMigration(queue, "mail").plan()
        proxy.drop_replies(1, match="EVALSHA")
        with pytest.raises(BrokerUnavailableError):
            BullMigration(queue, "mail").run(plan)
    assert migration.all_ids() == ids
    assert migration.migrate().complete
    assert migration.all_ids() == ids


def test_a_migration_that_a_full_redis_stopped_can_be_completed(migration: MigrationHarness) -> None:
    ids = fill(migration, 300)
    plan = migration.bull_migration().plan()
    try:
        migration.redis.config_set("maxmemory", "1mb")
        with pytest.raises(BrokerOutOfMemoryError):
            migration.bull_migration().run(plan)
    finally:
        migration.redis.config_set("maxmemory", "0")
    assert migration.all_ids() == ids
    assert migration.migrate().complete
    assert migration.all_ids() == ids


def test_a_second_migration_changes_nothing(migration: MigrationHarness) -> None:
    fill(migration, 20)
    migration.bull.calls(["add", "tick", {}, {"repeat": {"every": 60_000}}])
    assert migration.migrate().complete
    before = migration.dump()
    completed = migration.command("--yes")
    assert completed.returncode == (3 if migration.in_place else 0)
    assert ("may have been migrated before" if migration.in_place else "Nothing to migrate") in (
        completed.stdout + completed.stderr
    )
    assert migration.dump() == before


def test_a_migration_rejects_a_bullmq_queue(migration: MigrationHarness) -> None:
    add = [["queue.add", {"delay": HOUR_MS}], ["queue.add", {"priority": 3}], ["queue.add", {"timestamp": 5}]]
    for _, opts in add:
        migration.node.call("queue.add", queue="mail", name="n", data={}, opts=opts)
    migration.node.call("worker.start", queue="mail", processor="fail")
    failed = migration.node.call("queue.add", queue="mail", name="n", data={})["id"]
    with pytest.raises(Exception, match="it failed"):
        migration.node.call("job.waitUntilFinished", queue="mail", job=failed)
    migration.node.reset()
    before = migration.dump("bull:mail:*")
    completed = migration.command("--yes")
    assert (completed.returncode, migration.dump("bull:mail:*")) == (3, before)
    assert "bull:mail is a BullMQ queue without Bull jobs" in completed.stderr
    with pytest.raises(MigrationError, match="BullMQ queue without Bull jobs"):
        migration.migrate(force=True)


def test_only_bulls_jobs_of_a_mixed_queue_are_migrated(migration: MigrationHarness) -> None:
    bulls = [migration.bull.add("n", priority=priority) for priority in (0, 4)]
    bullmq_jobs = [
        migration.node.call("queue.add", queue="mail", name="n", data={}, opts={"jobId": f"bullmq_jobs-{n}", **opts})[
            "id"
        ]
        for n, opts in enumerate([{}, {"priority": 2}, {"delay": HOUR_MS}, {"timestamp": 77}])
    ]
    before = {job: migration.hash(job) for job in bullmq_jobs}
    plan = migration.bull_migration().plan()
    assert plan.layout is QueueLayout.MIXED
    report = migration.migrate()
    assert (report.outcome.moved, report.complete) == ({"waiting": 2}, True)
    assert {job: migration.hash(job) for job in bullmq_jobs} == before
    assert set(bullmq_jobs) <= set(migration.ids("mail"))
    assert {migration.node_job(job)["state"] for job in bulls} == {"waiting", "prioritized"}


def test_connected_workers_prevent_a_migration(migration: MigrationHarness, second_bull: BullBridge) -> None:
    migration.bull.add("n")
    held = second_bull.hold()
    waiting = migration.bull.add("n")
    before = migration.dump("bull:mail:[0-9]")
    completed = migration.command("--yes")
    assert (completed.returncode, migration.dump("bull:mail:[0-9]")) == (3, before)
    assert "workers of bull:mail seem to be connected" in completed.stderr
    report = migration.migrate(force=True)
    assert (report.outcome.moved, report.outcome.skipped[SkipReason.ACTIVE]) == ({"waiting": 1}, [held])
    assert migration.redis.lrange("bull:mail:active", 0, -1) == [held]
    assert migration.node_job(waiting)["state"] == "waiting"


def test_active_jobs_are_migrated_only_with_recover_active_and_without_a_lock(
    migration: MigrationHarness, second_bull: BullBridge
) -> None:
    job = migration.bull.add("n", {"value": 3})
    assert second_bull.hold() == job
    second_bull.close()
    locked = migration.migrate(recover_active=True)
    assert (locked.outcome.skipped, locked.complete) == ({SkipReason.ACTIVE: [job]}, False)
    assert migration.command("--yes").returncode == 4
    migration.redis.delete(f"bull:mail:{job}:lock")  # as if it had expired
    assert migration.migrate().outcome.skipped == {SkipReason.ACTIVE: [job]}
    assert migration.migrate(recover_active=True).outcome.moved == {"recovered": 1}
    assert migration.node_job(job)["state"] == "waiting"
    migration.node.call("worker.start", queue=migration.name, processor="echo")
    assert migration.node.call("job.waitUntilFinished", queue=migration.name, job=job) == {"value": 3}


@pytest.mark.parametrize("migration", ["moved"], indirect=True)  # in place there is one queue
def test_ids_that_exist_in_the_target_are_not_overwritten(migration: MigrationHarness) -> None:
    migration.node.call("queue.add", queue="{mail}", name="own", data={"own": 1})
    bulls = [migration.bull.add("n", {"n": number}) for number in range(2)]
    plan = migration.bull_migration().plan()
    assert plan.outcome.skipped == {SkipReason.ID_TAKEN: ["1"]}
    report = migration.migrate()
    assert (report.outcome.skipped, report.outcome.moved) == ({SkipReason.ID_TAKEN: ["1"]}, {"waiting": 1})
    assert (migration.node_job("1")["name"], migration.ids("mail")) == ("own", ["1"])
    assert migration.migrate(id_prefix="bull-").complete
    assert migration.node_job("bull-1")["data"] == {"n": 0}
    assert bulls == ["1", "2"]


def test_jobs_whose_ids_equal_names_of_bullmq_keys_are_skipped(migration: MigrationHarness) -> None:
    for name in ("events", "marker", "prioritized", "meta"):
        migration.bull.add("n", jobId=name)
    migration.bull.add("n", priority=1)
    plan = migration.bull_migration().plan()
    assert (plan.layout, plan.outcome.skipped) == (
        QueueLayout.BULL,
        {SkipReason.RESERVED: ["events", "marker", "prioritized", "meta"]},
    )
    if migration.in_place:
        before = migration.dump()
        with pytest.raises(MigrationError, match="names of BullMQ keys"):
            migration.migrate()
        assert migration.dump() == before
    else:
        assert migration.migrate(id_prefix="bull-").outcome.moved == {"waiting": 5}


def test_jobs_that_bull_adds_after_a_migration_are_migrated_by_the_next(migration: MigrationHarness) -> None:
    first = migration.bull.add("n")
    migration.migrate()
    late, urgent = migration.bull.add("n"), migration.bull.add("n", priority=1)
    assert migration.migrate().outcome.moved == {"waiting": 2}
    assert sorted(migration.ids(migration.name)) == sorted([first, late, urgent])
    assert migration.counts() == {"waiting": 2, "prioritized": 1}


@pytest.mark.parametrize("migration", ["moved"], indirect=True)  # in place, Bull's worker would acquire it
def test_each_job_is_run_or_moved_while_a_bull_worker_runs(
    migration: MigrationHarness, second_bull: BullBridge
) -> None:
    migration.bull.calls(["addBulk", [{"name": "n", "data": {"number": n, "fail": "no"}} for n in range(1_000)]])
    ids = migration.all_ids()
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(second_bull.work, 100)
        report = migration.migrate(force=True)
        for _ in range(5):
            if report.after["wait"] == 0:
                break
            report = migration.migrate(force=True)  # the worker's jobs have ended meanwhile
        if not working.done():
            migration.bull.calls(["addBulk", [{"name": "late", "data": {"number": -1}}] * 200])
        working.result(timeout=20)
    assert sorted(set(migration.all_ids())) == sorted(migration.all_ids())
    assert set(ids) <= set(migration.all_ids())


def test_the_command_accepts_an_app_and_a_target_queue(migration: MigrationHarness, tmp_path: Path) -> None:
    tag = not migration.in_place
    (tmp_path / "plain.py").write_text(f"from bulltask import App\n\napp = App('plain', queue_hash_tag={tag})\n")
    migration.bull.calls(["add", {"unnamed": True}], prefix="old")
    args = ["--workdir", str(tmp_path), "migrate-bull", "mail", "-A", "plain:app", "-b", migration.url]
    options = ["--to", "other", "--bull-prefix", "old", "--default-name", "mail.send", "--yes"]
    completed = subprocess.run([COMMAND, *args, *options], capture_output=True, text=True, check=False, timeout=40)
    assert (completed.returncode, completed.stderr) == (0, "")
    name = "{other}" if tag else "other"
    assert migration.hash("1", name)["name"] == "mail.send"
    assert f"BullMQ queue  bull:{name}\n" in completed.stdout
    assert "old:mail: 1 jobs before, 0 after" in completed.stdout
