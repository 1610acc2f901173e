"""Each row of docs/reference/differences.md describes an actual difference, in full."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bulltask.errors import ConfigError, ParentNotFoundError
from bulltask.queue import FlowJob, FlowProducer, Queue
from tests.interop.differential.intended_differences import META
from tests.interop.differential.pair import HOUR, START_MS, Outcome, Pair
from tests.interop.differential.state import TTL_UNIT_MS
from tests.interop.differential.test_scripts import acquire, add, complete, do, every, fail, scheduled
from tests.interop.node_bridge import NodeBridge
from tests.support.programs import ROOT
from tests.support.streams import ROUND_TRIP_MS, server_ms

pytestmark = [pytest.mark.interop, pytest.mark.redis]

PAGE = ROOT / "docs" / "reference" / "differences.md"
ELSEWHERE = {
    "test_keep_last_if_active_adds_the_stored_job_as_bullmq_does": "tests/mixed_versions/test_structures.py",
    "test_node_sees_a_revoked_waiting_job_as_failed_and_can_retry_it": "tests/interop/test_revoke.py",
    "test_retry_jobs_leaves_revoked_jobs_failed": "tests/redis/test_revoke.py",
    "test_a_failed_child_is_retried_and_its_parent_waits_for_it": "tests/redis/test_job_methods.py",
    "test_a_parent_waits_for_new_children_even_if_its_first_child_has_completed": "tests/redis/test_flow_add.py",
    "test_a_scheduled_job_that_kills_its_worker_fails": "tests/process/test_dead_supervisor.py",
    "test_a_deduplication_id_whose_owner_no_longer_exists_is_free": "tests/redis/test_queue_options.py",
    "test_failed_jobs_are_removed_after_a_week_unless_a_setting_keeps_them": "tests/redis/test_piled_up_jobs.py",
    "test_a_failed_child_is_kept_while_its_parent_waits_for_it": "tests/redis/test_piled_up_jobs.py",
    "test_a_job_that_finishes_removes_at_most_a_hundred_old_jobs": "tests/redis/test_piled_up_jobs.py",
    "test_clean_finds_old_jobs_behind_thousands_that_stay": "tests/redis/test_piled_up_jobs.py",
    "test_drain_keeps_the_next_iterations_of_thousands_of_schedulers": "tests/redis/test_piled_up_jobs.py",
}
"""Rows that are tested in the module of their feature."""
UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


def both(outcome: Outcome, *path: str) -> tuple[Any, Any]:
    """Return a part of both states, Node's first."""
    values = []
    for state in (outcome.node_state, outcome.bulltask_state):
        value: Any = state
        for name in path:
            value = value.get(name) if value is not None else None
        values.append(value)
    return values[0], values[1]


def opts(outcome: Outcome, job: str = "#1") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the stored options of a job on both sides."""
    node_value, bulltask_value = both(outcome, job, "value", "opts")
    return node_value, bulltask_value


@pytest.fixture
def defaults(session_node: NodeBridge, broker_url: str) -> Any:
    """A queue with bulltask's default settings."""
    with Queue("defaults", broker_url) as queue:
        yield queue


def test_default_job_options_differ(pair: Pair, defaults: Queue) -> None:
    node_value = opts(pair.run([add()], intended=False))[0]
    job = defaults.add("a")
    bulltask_value = json.loads(str(pair.redis.hget(f"{defaults.qualified_name}:{job.id}", "opts")))
    assert node_value == {"attempts": 0}
    assert bulltask_value == {
        "attempts": 3,
        "backoff": {"type": "exponential", "delay": 1000, "jitter": 0.2, "maxDelay": 3_600_000},
        "removeOnComplete": {"age": 86_400},
        "bulltask": {"v": 1},
    }


def test_every_job_has_an_option_named_bulltask(pair: Pair) -> None:
    node_value, bulltask_value = opts(pair.run([add()], intended=False))
    assert bulltask_value.pop("bulltask") == {"v": 1}
    assert node_value == bulltask_value


def test_job_ids_are_unique_and_sorted(pair: Pair) -> None:
    with Queue("ids", pair.url) as queue:
        ids = [queue.add("a").id for _ in range(3)]
        assert all(UUID7.fullmatch(job_id) for job_id in ids)
        assert ids == sorted(ids)
        queue.obliterate()
        assert queue.add("a").id not in ids
    assert both(pair.run([add(), add()]), "id", "value") == ("2", "2")  # the counter is still incremented


def test_queue_metadata_is_written_with_the_first_job(pair: Pair) -> None:
    node_value, bulltask_value = both(pair.run([do("is_maxed")], intended=False), "meta", "value")
    assert (node_value, bulltask_value) == (META, None)
    node_value, bulltask_value = both(pair.run([add()], intended=False), "meta", "value")
    assert node_value == bulltask_value == META
    with Queue("old", pair.url, queue_hash_tag=False) as queue:
        pair.redis.hset("bull:old:meta", mapping={"version": "bullmq:5.81.5", "opts.maxLenEvents": "7"})
        queue.add("a")
        assert queue.get_meta() == {"version": "bullmq:5.81.5", "opts.maxLenEvents": "7"}


def test_resume_merges_wait_and_paused(pair: Pair) -> None:
    """A client of BullMQ 6 adds to ``wait`` while the queue is paused; Node's resume would overwrite the list."""
    steps = [do("pause"), add(), do("flag_off"), add(), do("flag_on"), do("resume")]
    outcome = pair.run(steps)
    assert both(outcome, "wait", "value") == (["#1"], ["#2", "#1"])
    assert both(outcome, "#2", "type") == ("hash", "hash")  # Node's job is in no list


def test_an_expired_lock_is_reacquired_when_it_is_renewed(pair: Pair) -> None:
    """Node reports the lock as lost while the job continues; bulltask reacquires it."""
    held = [add(), add(), acquire("t0"), acquire("t1")]
    same = pair.run([*held, do("check_stalled"), do("extend_locks", ms=2 * TTL_UNIT_MS)])
    assert not same.report()
    outcome = pair.run([*held, do("expire_lock", held=0), do("extend_locks", ms=2 * TTL_UNIT_MS)])
    assert (outcome.node_results[-1], outcome.bulltask_results[-1]) == ({"ok": [0]}, {"ok": []})
    node_value, bulltask_value = both(outcome, "#1:lock")
    assert (node_value, bulltask_value["value"], bulltask_value["ttl"]) == (None, "t0", 2 * TTL_UNIT_MS)
    outcome.bulltask_state.pop("#1:lock")
    assert outcome.node_state == outcome.bulltask_state


def test_removing_a_missing_parent_dependency_returns_false(pair: Pair, session_node: NodeBridge) -> None:
    outcome = pair.run([add(), do("remove_dependency", job=0)])
    assert not outcome.report()
    assert outcome.bulltask_results[-1] == {"ok": False}
    job = session_node.call("queue.add", queue="alone", name="a", data={}, opts={})
    with pytest.raises(Exception, match="Missing key for parent job"):
        session_node.call("job.call", queue="alone", job=job["id"], method="removeChildDependency")


def test_a_job_frees_a_deduplication_id_only_if_it_owns_it(pair: Pair) -> None:
    """``removeDeduplicationKey`` came with 5.65: a job frees the id only if it owns it."""
    with Queue("dedup", pair.url) as queue:
        first = queue.add("a", deduplication="d", job_id="first")
        assert first.remove_deduplication_key()
        queue.add("a", deduplication="d", job_id="second")
        before = queue.get_deduplication_job_id("d")
        assert not first.remove_deduplication_key()
        assert before == queue.get_deduplication_job_id("d") == "second"
    key = {"id": "d"}
    assert not pair.run([add(deduplication=key), do("remove_dedup", id="d"), add(deduplication=key)]).report()


def test_errors_that_are_not_transient_are_not_retried(pair: Pair) -> None:
    """An error that is not known to be transient fails a bulltask job; Node retries all errors."""
    steps = [add(attempts=2), acquire(), fail(kind="ValueError")]
    outcome = pair.run(steps)
    assert both(outcome, "failed", "value") == (None, [["#1", START_MS + 2000]])
    assert both(outcome, "wait", "value") == (["#1"], None)


def test_priorities_out_of_range_are_rejected(pair: Pair, defaults: Queue) -> None:
    node_value = pair.run([add(priority=2**21 - 1)])
    assert not node_value.report()
    with pytest.raises(ConfigError, match="priority"):
        defaults.add("a", priority=2**21)
    with pytest.raises(ConfigError, match="priority"):
        defaults.add("a", priority=-1)


def test_a_changed_scheduler_rule_applies_immediately(pair: Pair) -> None:
    """The scripts are those of 5.65.1, the oldest in a Python wheel: the new rule applies immediately."""
    outcome = pair.run([every(HOUR), acquire(), complete(), every(2 * HOUR)])
    assert both(outcome, "repeat", "value") == ([["s", START_MS + HOUR]], [["s", START_MS + 3000]])

    three, four = (dict[str, object](pattern=f"0 {hour} * * *", tz="UTC") for hour in (3, 4))
    outcome = pair.run([scheduled("p", three), scheduled("p", four)])
    midnight_ms = START_MS + 16 * HOUR  # START_MS is 08:00
    assert both(outcome, "repeat", "value") == ([["p", midnight_ms + 3 * HOUR]], [["p", midnight_ms + 4 * HOUR]])


def test_clean_stops_at_its_limit(pair: Pair, session_node: NodeBridge) -> None:
    with Queue("cleaned", pair.url) as queue:
        queue.add_bulk([{"name": "a", "data": {}, "options": {"delay": 60}} for _ in range(22_100)])
        assert len(queue.clean(0, 10_050, "delayed")) == 10_050
        args = [0, 10_050, "delayed"]
        assert len(session_node.call("queue.call", queue="{cleaned}", method="clean", args=args)) > 10_050


def test_logs_keep_the_newest_thousand_lines(pair: Pair, session_node: NodeBridge) -> None:
    with Queue("logged", pair.url) as queue:
        job = queue.add("a")
        pair.redis.rpush(f"{queue.qualified_name}:{job.id}:logs", *["line"] * 1_000)
        assert queue.add_job_log(job.id, "bulltask") == 1_000
        args = [job.id, "node"]
        assert session_node.call("queue.call", queue="{logged}", method="addJobLog", args=args) == 1_001


def test_invalid_flows_are_rejected(pair: Pair) -> None:
    leaf = FlowJob("leaf", "q", {}, {"job_id": "same"})
    with FlowProducer(pair.url) as flows:
        with pytest.raises(ConfigError, match="two jobs"):
            flows.add(FlowJob("root", "q", {}, {}, [leaf, leaf]))
        with pytest.raises(ConfigError, match="deduplicated"):
            flows.add(FlowJob("root", "q", {}, {}, [FlowJob("leaf", "q", {}, {"deduplication": "d"})]))
        assert pair.redis.keys("bull:{q}:*") == []
        with pytest.raises(ParentNotFoundError):
            flows.add(leaf, parent={"id": "gone", "queue": "q"})
        assert set(pair.redis.keys("bull:{q}:*")) <= {"bull:{q}:meta"}


def test_job_times_come_from_the_redis_servers_clock(pair: Pair, session_node: NodeBridge, defaults: Queue) -> None:
    """bulltask uses the time of Redis; Node uses that of its machine."""
    job = defaults.add("a")
    assert -ROUND_TRIP_MS <= server_ms(pair.redis) - job.timestamp_ms < 5_000
    outcome = pair.run([add()])  # Node's clock is set to a later time than the server's
    assert both(outcome, "#1", "value", "timestamp")[0] == str(START_MS)


def test_the_documentation_and_this_module_list_the_same_tests() -> None:
    named = set(re.findall(r"`(test_[a-z_]+)`", PAGE.read_text()))
    tests = set(re.findall(r"^def (test_[a-z_]+)\(", Path(__file__).read_text(), re.MULTILINE))
    tests.remove("test_the_documentation_and_this_module_list_the_same_tests")
    for name, file in ELSEWHERE.items():
        assert f"def {name}(" in (ROOT / file).read_text()
    assert named == tests | ELSEWHERE.keys()
