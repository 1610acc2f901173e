"""Queues that the real Bull has filled, migrated, and then used by the official BullMQ and by bulltask."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bulltask.migrate.outcome import SkipReason
from tests.interop.bull_bridge import BullBridge
from tests.interop.migrating import Migrating
from tests.interop.node_bridge import NodeBridge
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.process]

HOUR_MS = 3_600_000


@pytest.fixture(params=["bull", "bull-3"])
def either_bull(request: pytest.FixtureRequest, migrating: Migrating, session_bull: BullBridge) -> Iterator[Migrating]:
    """The same with Bull 4, and with Bull 3."""
    if request.param == "bull":
        yield migrating
        return
    with BullBridge.to(migrating.url, package="bull-3") as bull:
        migrating.bull = bull
        yield migrating


def test_finished_jobs_keep_their_fields_of_bull(either_bull: Migrating) -> None:
    bull = either_bull.bull
    done = bull.add("send", {"value": {"to": "ü", "n": [1, None]}, "log": "sent", "progress": {"done": 3}}, attempts=4)
    failed = bull.add("send", {"fail": 'no "x"'}, attempts=3, backoff={"type": "fixed", "delay": 20}, removeOnFail=9)
    bull.work(4)
    before = {job: either_bull.hash(job) for job in (done, failed)}
    report = either_bull.migrate()
    assert report.complete
    assert report.outcome.moved == {"completed": 1, "failed": 1}
    seen = {job: either_bull.seen(job) for job in (done, failed)}
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
    wanted = {"attempts": 3, "backoff": {"type": "fixed", "delay": 20}, "removeOnFail": 9}
    assert seen[failed]["opts"].items() >= wanted.items()
    # As migrated jobs are known by it, and as it stops Node's workers from counting.
    assert not {"attemptsMade", "retriedOn"} & either_bull.hash(failed, either_bull.name).keys()


def test_failed_jobs_are_retried_by_node(migrating: Migrating) -> None:
    failed = migrating.bull.add("send", {"fail": "no"}, attempts=2, backoff=30)
    migrating.bull.work(2)
    migrating.migrate()
    migrating.node.call("job.call", queue=migrating.name, job=failed, method="retry", args=[])
    assert migrating.seen(failed)["state"] == "waiting"
    migrating.node.call("worker.start", queue=migrating.name, processor="echo")
    assert migrating.node.call("job.waitUntilFinished", queue=migrating.name, job=failed) == {"fail": "no"}


def test_a_job_that_waits_for_a_retry_keeps_its_remaining_attempts(migrating: Migrating) -> None:
    job = migrating.bull.add("send", {"fail": "no"}, attempts=3, backoff={"type": "fixed", "delay": 400})
    migrating.bull.work(1)
    migrating.migrate()
    seen = migrating.seen(job)
    assert (seen["state"], seen["attemptsMade"]) == ("delayed", 1)
    assert 400 <= seen["delay"] < 400 + scale_to_load(1_000)  # from when it was taken
    migrating.node.call("worker.start", queue=migrating.name, processor="fail")
    with pytest.raises(Exception, match="it failed"):
        migrating.node.call("job.waitUntilFinished", queue=migrating.name, job=job)
    assert migrating.seen(job)["attemptsMade"] == 3


def test_jobs_run_in_bulls_order_and_without_priority_first(
    either_bull: Migrating, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    add = either_bull.bull.add
    first, second = add("n"), add("n")
    lifo = add("n", lifo=True)
    low, high, low_too, high_too = (add("n", priority=priority) for priority in (7, 2, 7, 2))
    assert either_bull.migration().plan().warnings  # Bull runs those with a priority first
    assert either_bull.migrate().outcome.moved == {"waiting": 7}
    assert either_bull.counts() == {"waiting": 3, "prioritized": 4}
    ran = either_bull.run_all(tmp_path / "ran")
    wait(lambda: len(ran()) == 7, 60, "seven jobs")
    assert ran() == [lifo, first, second, high, high_too, low, low_too]


@pytest.mark.parametrize("migrating", ["moved"], indirect=True)  # in place there is one queue
def test_migrated_jobs_run_after_existing_and_before_later_jobs(
    migrating: Migrating, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    had = migrating.app.queue("mail").add("n", {}).id
    bulls = [migrating.bull.add("n") for _ in range(3)]
    migrating.migrate()
    later = migrating.app.queue("mail").add("n", {}).id
    ran = migrating.run_all(tmp_path / "ran")
    wait(lambda: len(ran()) == 5, 60, "five jobs")
    assert ran() == [had, *bulls, later]


def test_delayed_jobs_keep_their_time_after_a_migration(migrating: Migrating, tmp_path: Path) -> None:
    soon, later = migrating.bull.calls(
        ["add", "n", {}, {"delay": 1_500}], ["add", "n", {}, {"delay": HOUR_MS, "priority": 3}]
    )
    due_ms = int(migrating.hash(soon)["timestamp"]) + 1_500
    migrating.migrate()
    assert migrating.counts() == {"delayed": 2}
    migrating.run_all(tmp_path / "ran")
    migrating.node.call("job.waitUntilFinished", queue=migrating.name, job=soon)
    assert 0 <= migrating.seen(soon)["processedOn"] - due_ms < scale_to_load(2_000)
    migrating.node.call("job.call", queue=migrating.name, job=later, method="promote", args=[])
    migrating.node.call("job.waitUntilFinished", queue=migrating.name, job=later)
    assert migrating.seen(later)["opts"]["priority"] == 3


def test_node_generates_new_ids_after_a_migration(migrating: Migrating) -> None:
    migrating.bull.calls(*[["add", "n", {}] for _ in range(5)], ["add", "n", {}, {"jobId": "41"}])
    migrating.migrate()
    made = migrating.node.call("queue.add", queue=migrating.name, name="n", data={})["id"]
    assert made == "42"
    assert sorted(migrating.all_ids(), key=int) == ["1", "2", "3", "4", "5", "41", "42"]


def test_bulltasks_worker_runs_migrated_jobs(migrating: Migrating, tmp_path: Path) -> None:
    from tests.support.worker import Worker  # noqa: PLC0415 - one test only

    waiting = migrating.bull.add("echo", {"value": "from Bull"})
    unnamed = str(migrating.bull.calls(["add", {"value": 7}])[0])
    migrating.migrate(default_name="echo")
    worker = Worker(
        tmp_path / "worker",
        "@app.task(name='echo')\ndef echo(value):\n    return value\n",
        options=["-Q", "mail"],
        settings={"broker_url": migrating.url, "queue_hash_tag": not migrating.in_place},
    )
    try:
        assert migrating.app.result(waiting, "mail").get(timeout=60) == "from Bull"
        assert migrating.app.result(unnamed, "mail").get(timeout=60) == 7
    finally:
        worker.close()


def test_a_paused_queue_stays_paused_until_it_is_resumed(
    either_bull: Migrating, tmp_path: Path, wait: Callable[..., Any]
) -> None:
    either_bull.bull.calls(["add", "n", {}], ["pause"], ["add", "n", {}], ["add", "n", {}, {"priority": 1}])
    plan = either_bull.migration().plan()
    assert (plan.info.paused, plan.pauses) == (True, not either_bull.in_place)
    either_bull.migrate()
    assert either_bull.counts() == {"paused": 2, "prioritized": 1}
    ran = either_bull.run_all(tmp_path / "ran")
    either_bull.call("resume")
    wait(lambda: len(ran()) == 3, 60, "three jobs")
    assert ran() == ["1", "2", "3"]


def test_debounced_jobs_are_deduplicated(migrating: Migrating) -> None:
    job = migrating.bull.add("n", {}, delay=HOUR_MS, debounce={"id": "once", "ttl": HOUR_MS})
    migrating.migrate()
    assert migrating.call("getDeduplicationJobId", "once") == job
    again = migrating.node.call(
        "queue.add", queue=migrating.name, name="n", data={}, opts={"deduplication": {"id": "once", "ttl": HOUR_MS}}
    )
    assert again["id"] == job
    assert migrating.redis.pttl(f"bull:{migrating.name}:de:once") > HOUR_MS - 60_000


def test_options_that_bullmq_does_not_support_are_reported(migrating: Migrating) -> None:
    migrating.bull.calls(
        ["add", "n", {}, {"timeout": 50}],
        ["add", "n", {}, {"backoff": {"type": "mine"}, "attempts": 2}],
        ["add", "n", {}, {"backoff": {"type": "exponential", "delay": 9}, "priority": 3_000_000}],
        ["add", {}],
    )
    notes = migrating.migration().plan().outcome.notes
    assert notes == {"timeout": 1, "custom backoff": 1, "exponential": 1, "priority": 1, "unnamed": 1}
    migrating.migrate()
    assert migrating.seen("1")["opts"]["timeout"] == 50
    assert migrating.seen("3")["priority"] == 2**21 - 1


def test_malformed_jobs_are_not_migrated(migrating: Migrating) -> None:
    good, bad_data, bad_opts, gone = (migrating.bull.add("n") for _ in range(4))
    migrating.redis.hset(f"bull:mail:{bad_data}", "data", "{")
    migrating.redis.hset(f"bull:mail:{bad_opts}", "opts", "nonsense")
    migrating.redis.delete(f"bull:mail:{gone}")
    report = migrating.migrate()
    assert (
        report.outcome.skipped.items()
        >= {SkipReason.MALFORMED: [bad_data, bad_opts], SkipReason.NO_HASH: [gone]}.items()
    )
    assert (report.complete, report.outcome.moved) == (False, {"waiting": 1})
    assert migrating.seen(good)["state"] == "waiting"
    assert migrating.redis.lrange("bull:mail:wait", 0, -1)[:3] == [gone, bad_opts, bad_data]


def test_bull_continues_after_a_dry_run(migrating: Migrating) -> None:
    migrating.bull.calls(["add", "n", {}, {"priority": 2}], ["add", "n", {}, {"delay": 1}], ["add", "n", {}])
    migrating.migration().plan()
    migrating.bull.work(3)
    assert migrating.redis.zcard("bull:mail:completed") == 3


def test_states_and_limit_restrict_a_migration(migrating: Migrating) -> None:
    migrating.bull.calls(*[["add", "n", {}] for _ in range(5)], *[["add", "n", {}, {"delay": HOUR_MS}]] * 2)
    report = migrating.migrate(states=("waiting",), limit=2)
    assert (report.outcome.moved, report.complete) == ({"waiting": 2}, False)
    assert migrating.migrate(states=("waiting",)).outcome.moved == {"waiting": 3}
    assert migrating.migrate().outcome.moved == {"delayed": 2}


@pytest.mark.parametrize("migrating", ["moved"], indirect=True)  # in place no job changes its state
def test_jobs_that_are_new_in_the_target_emit_events(migrating: Migrating, session_node: NodeBridge) -> None:
    session_node.call("events.start", queue=migrating.name)
    waits = migrating.bull.add("n")
    delayed = migrating.bull.add("n", delay=HOUR_MS)
    migrating.bull.calls(["add", "n", {}, {"jobId": "late"}])
    migrating.migrate()
    session_node.wait_event("waiting", lambda args: args["jobId"] == "late")
    due = session_node.wait_event("delayed", lambda args: args["jobId"] == delayed)["delay"]
    assert abs(int(due) - time.time() * 1000 - HOUR_MS) < 60_000
    assert session_node.wait_event("added", lambda args: args["jobId"] == waits)["name"] == "n"
