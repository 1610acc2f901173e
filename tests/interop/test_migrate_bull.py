"""Queues of the real Bull are migrated, and then used by the official BullMQ and by bulltask."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bulltask.migrate.inspection import SkipReason
from tests.interop.bull_bridge import BullBridge
from tests.interop.migration_harness import MigrationHarness
from tests.interop.node_bridge import NodeBridge
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]

HOUR_MS = 3_600_000


@pytest.fixture(params=["bull", "bull-3"])
def any_bull(
    request: pytest.FixtureRequest, migration: MigrationHarness, session_bull: BullBridge
) -> Iterator[MigrationHarness]:
    """The migration harness with Bull 4, and in a second run with Bull 3."""
    if request.param == "bull":
        yield migration
        return
    with BullBridge.to(migration.url, package="bull-3") as bull:
        migration.bull = bull
        yield migration


def test_finished_jobs_keep_the_fields_that_bull_stored(any_bull: MigrationHarness) -> None:
    bull = any_bull.bull
    done = bull.add("send", {"value": {"to": "ü", "n": [1, None]}, "log": "sent", "progress": {"done": 3}}, attempts=4)
    failed = bull.add("send", {"fail": 'no "x"'}, attempts=3, backoff={"type": "fixed", "delay": 20}, removeOnFail=9)
    bull.work(4)
    before = {job: any_bull.hash(job) for job in (done, failed)}
    report = any_bull.migrate()
    assert report.complete
    assert report.outcome.moved == {"completed": 1, "failed": 1}
    seen = {job: any_bull.node_job(job) for job in (done, failed)}
    for job, was in before.items():
        now = seen[job]
        assert (now["name"], now["data"]) == (was["name"], json.loads(was["data"]))
        for field in ("timestamp", "processedOn", "finishedOn"):
            assert now[field] == int(was[field]), field
    assert (seen[done]["state"], seen[done]["returnvalue"]) == ("completed", {"to": "ü", "n": [1, None]})
    assert (seen[done]["progress"], seen[done]["logs"], seen[done]["attemptsMade"]) == ({"done": 3}, ["sent"], 1)
    assert (seen[failed]["state"], seen[failed]["failedReason"]) == ("failed", 'no "x"')
    assert seen[failed]["stacktrace"] == json.loads(before[failed]["stacktrace"])
    assert len(seen[failed]["stacktrace"]) == seen[failed]["attemptsMade"] == seen[failed]["attemptsStarted"] == 3
    expected = {"attempts": 3, "backoff": {"type": "fixed", "delay": 20}, "removeOnFail": 9}
    assert seen[failed]["opts"].items() >= expected.items()
    # These fields mark jobs that were not migrated, and would stop Node's workers from counting attempts.
    assert not {"attemptsMade", "retriedOn"} & any_bull.hash(failed, any_bull.name).keys()


def test_failed_jobs_are_retried_by_node(migration: MigrationHarness) -> None:
    failed = migration.bull.add("send", {"fail": "no"}, attempts=2, backoff=30)
    migration.bull.work(2)
    migration.migrate()
    migration.node.call("job.call", queue=migration.name, job=failed, method="retry", args=[])
    assert migration.node_job(failed)["state"] == "waiting"
    migration.node.call("worker.start", queue=migration.name, processor="echo")
    assert migration.node.call("job.waitUntilFinished", queue=migration.name, job=failed) == {"fail": "no"}


def test_a_job_that_waits_for_a_retry_keeps_its_remaining_attempts(migration: MigrationHarness) -> None:
    job = migration.bull.add("send", {"fail": "no"}, attempts=3, backoff={"type": "fixed", "delay": 400})
    migration.bull.work(1)
    migration.migrate()
    seen = migration.node_job(job)
    assert (seen["state"], seen["attemptsMade"]) == ("delayed", 1)
    assert 400 <= seen["delay"] < 400 + scale_to_load(1_000)  # counted from the failure
    migration.node.call("worker.start", queue=migration.name, processor="fail")
    with pytest.raises(Exception, match="it failed"):
        migration.node.call("job.waitUntilFinished", queue=migration.name, job=job)
    assert migration.node_job(job)["attemptsMade"] == 3


def test_migrated_jobs_run_in_bulls_order_but_those_without_priority_first(
    any_bull: MigrationHarness, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    add = any_bull.bull.add
    first, second = add("n"), add("n")
    lifo = add("n", lifo=True)
    low, high, low_too, high_too = (add("n", priority=priority) for priority in (7, 2, 7, 2))
    assert any_bull.bull_migration().plan().warnings  # Bull runs those with a priority first
    assert any_bull.migrate().outcome.moved == {"waiting": 7}
    assert any_bull.counts() == {"waiting": 3, "prioritized": 4}
    run_ids = any_bull.run_all(tmp_path / "ran")
    wait(lambda: len(run_ids()) == 7, 60, "seven jobs")
    assert run_ids() == [lifo, first, second, high, high_too, low, low_too]


@pytest.mark.parametrize("migration", ["moved"], indirect=True)  # in place there is one queue
def test_migrated_jobs_run_after_existing_and_before_later_jobs(
    migration: MigrationHarness, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    had = migration.app.queue("mail").add("n", {}).id
    bulls = [migration.bull.add("n") for _ in range(3)]
    migration.migrate()
    later = migration.app.queue("mail").add("n", {}).id
    run_ids = migration.run_all(tmp_path / "ran")
    wait(lambda: len(run_ids()) == 5, 60, "five jobs")
    assert run_ids() == [had, *bulls, later]


def test_delayed_jobs_keep_their_time_after_a_migration(migration: MigrationHarness, tmp_path: Path) -> None:
    soon, later = migration.bull.calls(
        ["add", "n", {}, {"delay": 1_500}], ["add", "n", {}, {"delay": HOUR_MS, "priority": 3}]
    )
    due_ms = int(migration.hash(soon)["timestamp"]) + 1_500
    migration.migrate()
    assert migration.counts() == {"delayed": 2}
    migration.run_all(tmp_path / "ran")
    migration.node.call("job.waitUntilFinished", queue=migration.name, job=soon)
    assert 0 <= migration.node_job(soon)["processedOn"] - due_ms < scale_to_load(2_000)
    migration.node.call("job.call", queue=migration.name, job=later, method="promote", args=[])
    migration.node.call("job.waitUntilFinished", queue=migration.name, job=later)
    assert migration.node_job(later)["opts"]["priority"] == 3


def test_node_generates_new_ids_after_a_migration(migration: MigrationHarness) -> None:
    migration.bull.calls(*[["add", "n", {}] for _ in range(5)], ["add", "n", {}, {"jobId": "41"}])
    migration.migrate()
    new_id = migration.node.call("queue.add", queue=migration.name, name="n", data={})["id"]
    assert new_id == "42"
    assert sorted(migration.all_ids(), key=int) == ["1", "2", "3", "4", "5", "41", "42"]


def test_a_bulltask_worker_runs_migrated_jobs(migration: MigrationHarness, tmp_path: Path) -> None:
    from tests.support.worker import Worker  # noqa: PLC0415 - one test only

    waiting = migration.bull.add("echo", {"value": "from Bull"})
    unnamed = str(migration.bull.calls(["add", {"value": 7}])[0])
    migration.migrate(default_name="echo")
    worker = Worker(
        tmp_path / "worker",
        "@app.task(name='echo')\ndef echo(value):\n    return value\n",
        options=["-Q", "mail"],
        settings={"broker_url": migration.url, "queue_hash_tag": not migration.in_place},
    )
    try:
        assert migration.app.result(waiting, "mail").get(timeout=60) == "from Bull"
        assert migration.app.result(unnamed, "mail").get(timeout=60) == 7
    finally:
        worker.close()


def test_a_paused_queue_stays_paused_until_it_is_resumed(
    any_bull: MigrationHarness, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    any_bull.bull.calls(["add", "n", {}], ["pause"], ["add", "n", {}], ["add", "n", {}, {"priority": 1}])
    plan = any_bull.bull_migration().plan()
    assert (plan.info.paused, plan.pauses) == (True, not any_bull.in_place)
    any_bull.migrate()
    assert any_bull.counts() == {"paused": 2, "prioritized": 1}
    run_ids = any_bull.run_all(tmp_path / "ran")
    any_bull.call("resume")
    wait(lambda: len(run_ids()) == 3, 60, "three jobs")
    assert run_ids() == ["1", "2", "3"]


def test_debounced_jobs_are_deduplicated(migration: MigrationHarness) -> None:
    job = migration.bull.add("n", {}, delay=HOUR_MS, debounce={"id": "once", "ttl": HOUR_MS})
    migration.migrate()
    assert migration.call("getDeduplicationJobId", "once") == job
    again = migration.node.call(
        "queue.add", queue=migration.name, name="n", data={}, opts={"deduplication": {"id": "once", "ttl": HOUR_MS}}
    )
    assert again["id"] == job
    assert migration.redis.pttl(f"bull:{migration.name}:de:once") > HOUR_MS - 60_000


def test_options_that_bullmq_does_not_support_are_reported(migration: MigrationHarness) -> None:
    migration.bull.calls(
        ["add", "n", {}, {"timeout": 50}],
        ["add", "n", {}, {"backoff": {"type": "mine"}, "attempts": 2}],
        ["add", "n", {}, {"backoff": {"type": "exponential", "delay": 9}, "priority": 3_000_000}],
        ["add", {}],
    )
    notes = migration.bull_migration().plan().outcome.notes
    assert notes == {"timeout": 1, "custom backoff": 1, "exponential": 1, "priority": 1, "unnamed": 1}
    migration.migrate()
    assert migration.node_job("1")["opts"]["timeout"] == 50
    assert migration.node_job("3")["priority"] == 2**21 - 1


def test_malformed_jobs_are_not_migrated(migration: MigrationHarness) -> None:
    good, bad_data, bad_opts, gone = (migration.bull.add("n") for _ in range(4))
    migration.redis.hset(f"bull:mail:{bad_data}", "data", "{")
    migration.redis.hset(f"bull:mail:{bad_opts}", "opts", "nonsense")
    migration.redis.delete(f"bull:mail:{gone}")
    report = migration.migrate()
    assert (
        report.outcome.skipped.items()
        >= {SkipReason.MALFORMED: [bad_data, bad_opts], SkipReason.NO_HASH: [gone]}.items()
    )
    assert (report.complete, report.outcome.moved) == (False, {"waiting": 1})
    assert migration.node_job(good)["state"] == "waiting"
    assert migration.redis.lrange("bull:mail:wait", 0, -1)[:3] == [gone, bad_opts, bad_data]


def test_bull_continues_after_a_dry_run(migration: MigrationHarness) -> None:
    migration.bull.calls(["add", "n", {}, {"priority": 2}], ["add", "n", {}, {"delay": 1}], ["add", "n", {}])
    migration.bull_migration().plan()
    migration.bull.work(3)
    assert migration.redis.zcard("bull:mail:completed") == 3


def test_states_and_limit_restrict_a_migration(migration: MigrationHarness) -> None:
    migration.bull.calls(*[["add", "n", {}] for _ in range(5)], *[["add", "n", {}, {"delay": HOUR_MS}]] * 2)
    report = migration.migrate(states=("waiting",), limit=2)
    assert (report.outcome.moved, report.complete) == ({"waiting": 2}, False)
    assert migration.migrate(states=("waiting",)).outcome.moved == {"waiting": 3}
    assert migration.migrate().outcome.moved == {"delayed": 2}


@pytest.mark.parametrize("migration", ["moved"], indirect=True)  # in place no job changes its state
def test_jobs_that_are_new_in_the_target_emit_events(migration: MigrationHarness, session_node: NodeBridge) -> None:
    session_node.call("events.start", queue=migration.name)
    waits = migration.bull.add("n")
    delayed = migration.bull.add("n", delay=HOUR_MS)
    migration.bull.calls(["add", "n", {}, {"jobId": "late"}])
    migration.migrate()
    session_node.wait_event("waiting", lambda args: args["jobId"] == "late")
    due = session_node.wait_event("delayed", lambda args: args["jobId"] == delayed)["delay"]
    assert abs(int(due) - time.time() * 1000 - HOUR_MS) < 60_000
    assert session_node.wait_event("added", lambda args: args["jobId"] == waits)["name"] == "n"
