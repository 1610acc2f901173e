"""``bulltask migrate-bull`` that is refused, killed, cut off, or run where it should not be: nothing is lost."""

from __future__ import annotations

import json
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
from bulltask.migrate.outcome import SkipReason
from bulltask.testing.flaky import FlakyProxy
from tests.interop.bull_bridge import BullBridge
from tests.interop.migrating import Migrating

pytestmark = [pytest.mark.interop, pytest.mark.process]

HOUR_MS = 3_600_000
COMMAND = str(Path(sys.executable).with_name("bulltask"))


@pytest.fixture
def second_bull(migrating: Migrating) -> Iterator[BullBridge]:
    """Bull in a process that may be killed."""
    with BullBridge.to(migrating.url, package="bull") as bull:
        yield bull


def fill(migrating: Migrating, count: int) -> list[str]:
    """Add jobs of every kind; return the ids of those that wait, next ones first."""
    jobs = []
    for number in range(count):
        kinds: list[dict[str, Any]] = [
            {},
            {"delay": HOUR_MS + number},
            {"priority": 1 + number % 5},
            {"jobId": f"id-{number}"},
        ]
        jobs.append({"name": "n", "data": {"number": number}, "opts": kinds[number % 4]})
    migrating.bull.calls(["addBulk", jobs])
    return migrating.all_ids()


def numbers(migrating: Migrating, name: str) -> list[int]:
    """What is in the data of a queue's jobs: each job has a number of its own."""
    return [json.loads(migrating.hash(job, name)["data"])["number"] for job in migrating.ids(name)]


def test_a_dry_run_changes_nothing_and_prints_the_plan(migrating: Migrating) -> None:
    fill(migrating, 8)
    migrating.bull.calls(["add", "tick", {}, {"repeat": {"every": 60_000}}], ["pause"])
    before = migrating.dump()
    done = migrating.command()
    assert (done.returncode, done.stderr) == (0, "")
    assert "Bull 3 or 4, paused" in done.stdout
    for line in ("  delayed              3", "6 would be", "3 would be", "repeatable 'tick:::60000' -> job scheduler"):
        assert line.replace("would be", "would be converted: " if migrating.in_place else "would become ").rstrip() in (
            done.stdout
        )
    assert "Dry run: nothing was changed" in done.stdout
    assert migrating.dump() == before


def test_the_command_prints_a_report_whose_counts_add_up(migrating: Migrating) -> None:
    ids = fill(migrating, 40)
    done = migrating.command("--execute")
    assert (done.returncode, migrating.all_ids()) == (0, ids)
    assert "Migrated 40 jobs" in done.stdout
    if migrating.in_place:
        assert "bull:mail: 40 jobs before, 40 after" in done.stdout
    else:
        assert "bull:mail: 40 jobs before, 0 after" in done.stdout
        assert "bull:{mail}: 0 jobs before, 40 after" in done.stdout
        assert migrating.redis.keys("bull:mail:*") == ["bull:mail:id"]


@pytest.mark.parametrize("after", [1, 350, 700, 1_000])
def test_a_killed_migration_can_be_repeated_without_lost_or_duplicate_jobs(
    migrating: Migrating, after: int, wait: Callable[..., Any]
) -> None:
    ids = fill(migrating, 1_500)

    def done() -> int:
        if not migrating.in_place:
            return 1_500 - len(migrating.ids("mail"))
        return sum("timestamp" not in migrating.hash(job)["opts"] for job in ids[::100]) * 100

    with FlakyProxy("127.0.0.1", int(migrating.url.rsplit(":", 1)[1].split("/")[0])) as proxy:
        proxy.latency(0.04)  # so that the moment is met
        with migrating.start("--execute", url=f"redis://127.0.0.1:{proxy.port}/0") as process:
            wait(lambda: done() >= after or process.poll() is not None, 60, f"{after} moved jobs")
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert 0 < done() < 1_500, "it was killed too early or too late"
    assert migrating.all_ids() == ids
    assert migrating.command("--execute").returncode == 0
    assert migrating.all_ids() == ids
    assert sorted(numbers(migrating, migrating.name)) == list(range(1_500))
    assert migrating.counts() == {"waiting": 750, "delayed": 375, "prioritized": 375}
    waiting = migrating.redis.lrange(f"bull:{migrating.name}:wait", 0, -1)[::-1]
    assert [int(migrating.hash(job, migrating.name)["data"][10:-1]) for job in waiting] == [
        number for number in range(1_500) if number % 4 in {0, 3}
    ]


def test_a_lost_reply_loses_no_job(migrating: Migrating) -> None:
    ids = fill(migrating, 500)
    with FlakyProxy("127.0.0.1", int(migrating.url.rsplit(":", 1)[1].split("/")[0])) as proxy:
        app_url = f"redis://127.0.0.1:{proxy.port}/0"
        queue = type(migrating.app)("cut", app_url, queue_hash_tag=not migrating.in_place).queue("mail")
        plan = BullMigration(queue, "mail").plan()
        proxy.drop_replies(1, match="EVALSHA")
        with pytest.raises(BrokerUnavailableError):
            BullMigration(queue, "mail").run(plan)
    assert migrating.all_ids() == ids
    assert migrating.migrate().complete
    assert migrating.all_ids() == ids


def test_a_migration_that_a_full_redis_stopped_can_be_completed(migrating: Migrating) -> None:
    ids = fill(migrating, 300)
    plan = migrating.migration().plan()
    try:
        migrating.redis.config_set("maxmemory", "1mb")
        with pytest.raises(BrokerOutOfMemoryError):
            migrating.migration().run(plan)
    finally:
        migrating.redis.config_set("maxmemory", "0")
    assert migrating.all_ids() == ids
    assert migrating.migrate().complete
    assert migrating.all_ids() == ids


def test_a_second_migration_changes_nothing(migrating: Migrating) -> None:
    fill(migrating, 20)
    migrating.bull.calls(["add", "tick", {}, {"repeat": {"every": 60_000}}])
    assert migrating.migrate().complete
    before = migrating.dump()
    done = migrating.command("--execute")
    assert done.returncode == (3 if migrating.in_place else 0)
    assert ("may have been migrated before" if migrating.in_place else "Nothing to migrate") in (
        done.stdout + done.stderr
    )
    assert migrating.dump() == before


def test_a_migration_rejects_a_bullmq_queue(migrating: Migrating) -> None:
    add = [["queue.add", {"delay": HOUR_MS}], ["queue.add", {"priority": 3}], ["queue.add", {"timestamp": 5}]]
    for _, opts in add:
        migrating.node.call("queue.add", queue="mail", name="n", data={}, opts=opts)
    migrating.node.call("worker.start", queue="mail", processor="fail")
    failed = migrating.node.call("queue.add", queue="mail", name="n", data={})["id"]
    with pytest.raises(Exception, match="it failed"):
        migrating.node.call("job.waitUntilFinished", queue="mail", job=failed)
    migrating.node.reset()
    before = migrating.dump("bull:mail:*")
    done = migrating.command("--execute")
    assert (done.returncode, migrating.dump("bull:mail:*")) == (3, before)
    assert "bull:mail is a BullMQ queue without Bull jobs" in done.stderr
    with pytest.raises(MigrationError, match="BullMQ queue without Bull jobs"):
        migrating.migrate(force=True)


def test_only_bulls_jobs_of_a_mixed_queue_are_migrated(migrating: Migrating) -> None:
    bulls = [migrating.bull.add("n", priority=priority) for priority in (0, 4)]
    own = [
        migrating.node.call("queue.add", queue="mail", name="n", data={}, opts={"jobId": f"own-{n}", **opts})["id"]
        for n, opts in enumerate([{}, {"priority": 2}, {"delay": HOUR_MS}, {"timestamp": 77}])
    ]
    before = {job: migrating.hash(job) for job in own}
    plan = migrating.migration().plan()
    assert plan.layout is QueueLayout.MIXED
    report = migrating.migrate()
    assert (report.outcome.moved, report.complete) == ({"waiting": 2}, True)
    assert {job: migrating.hash(job) for job in own} == before
    assert set(own) <= set(migrating.ids("mail"))
    assert {migrating.seen(job)["state"] for job in bulls} == {"waiting", "prioritized"}


def test_connected_workers_prevent_a_migration(migrating: Migrating, second_bull: BullBridge) -> None:
    migrating.bull.add("n")
    held = second_bull.hold()
    waiting = migrating.bull.add("n")
    before = migrating.dump("bull:mail:[0-9]")
    done = migrating.command("--execute")
    assert (done.returncode, migrating.dump("bull:mail:[0-9]")) == (3, before)
    assert "workers of bull:mail seem to be connected" in done.stderr
    report = migrating.migrate(force=True)
    assert (report.outcome.moved, report.outcome.skipped[SkipReason.ACTIVE]) == ({"waiting": 1}, [held])
    assert migrating.redis.lrange("bull:mail:active", 0, -1) == [held]
    assert migrating.seen(waiting)["state"] == "waiting"


def test_active_jobs_are_migrated_only_with_recover_active_and_without_lock(
    migrating: Migrating, second_bull: BullBridge
) -> None:
    job = migrating.bull.add("n", {"value": 3})
    assert second_bull.hold() == job
    second_bull.close()
    locked = migrating.migrate(recover_active=True)
    assert (locked.outcome.skipped, locked.complete) == ({SkipReason.ACTIVE: [job]}, False)
    assert migrating.command("--execute").returncode == 4
    migrating.redis.delete(f"bull:mail:{job}:lock")  # 30 seconds later
    assert migrating.migrate().outcome.skipped == {SkipReason.ACTIVE: [job]}
    assert migrating.migrate(recover_active=True).outcome.moved == {"recovered": 1}
    assert migrating.seen(job)["state"] == "waiting"
    migrating.node.call("worker.start", queue=migrating.name, processor="echo")
    assert migrating.node.call("job.waitUntilFinished", queue=migrating.name, job=job) == {"value": 3}


@pytest.mark.parametrize("migrating", ["moved"], indirect=True)  # in place there is one queue
def test_ids_that_exist_in_the_target_are_not_overwritten(migrating: Migrating) -> None:
    migrating.node.call("queue.add", queue="{mail}", name="own", data={"own": 1})
    bulls = [migrating.bull.add("n", {"n": number}) for number in range(2)]
    plan = migrating.migration().plan()
    assert plan.outcome.skipped == {SkipReason.ID_TAKEN: ["1"]}
    report = migrating.migrate()
    assert (report.outcome.skipped, report.outcome.moved) == ({SkipReason.ID_TAKEN: ["1"]}, {"waiting": 1})
    assert (migrating.seen("1")["name"], migrating.ids("mail")) == ("own", ["1"])
    assert migrating.migrate(id_prefix="bull-").complete
    assert migrating.seen("bull-1")["data"] == {"n": 0}
    assert bulls == ["1", "2"]


def test_jobs_whose_ids_are_names_of_bullmq_keys_are_skipped(migrating: Migrating) -> None:
    for name in ("events", "marker", "prioritized", "meta"):
        migrating.bull.add("n", jobId=name)
    migrating.bull.add("n", priority=1)
    plan = migrating.migration().plan()
    assert (plan.layout, plan.outcome.skipped) == (
        QueueLayout.BULL,
        {SkipReason.RESERVED: ["events", "marker", "prioritized", "meta"]},
    )
    if migrating.in_place:
        before = migrating.dump()
        with pytest.raises(MigrationError, match="names of BullMQ keys"):
            migrating.migrate()
        assert migrating.dump() == before
    else:
        assert migrating.migrate(id_prefix="bull-").outcome.moved == {"waiting": 5}


def test_jobs_that_bull_adds_after_a_migration_are_migrated_by_the_next(migrating: Migrating) -> None:
    first = migrating.bull.add("n")
    migrating.migrate()
    late, urgent = migrating.bull.add("n"), migrating.bull.add("n", priority=1)
    assert migrating.migrate().outcome.moved == {"waiting": 2}
    assert sorted(migrating.ids(migrating.name)) == sorted([first, late, urgent])
    assert migrating.counts() == {"waiting": 2, "prioritized": 1}


@pytest.mark.parametrize("migrating", ["moved"], indirect=True)  # in place Bull's worker would take it
def test_each_job_is_run_or_moved_while_a_bull_worker_runs(migrating: Migrating, second_bull: BullBridge) -> None:
    migrating.bull.calls(["addBulk", [{"name": "n", "data": {"number": n, "fail": "no"}} for n in range(1_000)]])
    ids = migrating.all_ids()
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(second_bull.work, 100)
        report = migrating.migrate(force=True)
        for _ in range(5):
            if report.after["wait"] == 0:
                break
            report = migrating.migrate(force=True)  # the worker's jobs ended meanwhile
        if not working.done():
            migrating.bull.calls(["addBulk", [{"name": "late", "data": {"number": -1}}] * 200])
        working.result(timeout=20)
    assert sorted(set(migrating.all_ids())) == sorted(migrating.all_ids())
    assert set(ids) <= set(migrating.all_ids())


def test_the_command_accepts_an_app_and_a_target_queue(migrating: Migrating, tmp_path: Path) -> None:
    tag = not migrating.in_place
    (tmp_path / "plain.py").write_text(f"from bulltask import App\n\napp = App('plain', queue_hash_tag={tag})\n")
    migrating.bull.calls(["add", {"unnamed": True}], prefix="old")
    words = ["--workdir", str(tmp_path), "migrate-bull", "mail", "-A", "plain:app", "-b", migrating.url]
    options = ["--to", "other", "--bull-prefix", "old", "--default-name", "mail.send", "--execute"]
    done = subprocess.run([COMMAND, *words, *options], capture_output=True, text=True, check=False, timeout=40)
    assert (done.returncode, done.stderr) == (0, "")
    name = "{other}" if tag else "other"
    assert migrating.hash("1", name)["name"] == "mail.send"
    assert f"BullMQ queue  bull:{name}\n" in done.stdout
    assert "old:mail: 1 jobs before, 0 after" in done.stdout
