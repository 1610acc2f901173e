"""A child and a supervisor fail jobs whose hash is not as BullMQ writes it, and continue with others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bulltask import App
from bulltask.events import (
    Bus,
    CrashLimitReached,
    Event,
    JobCompleted,
    JobRecovered,
    LockLost,
    MalformedJobFailed,
    RedisErrorReply,
    SchedulingFailed,
)
from bulltask.jobs.clock import mono_ms
from bulltask.transport.call import QueueKeys
from bulltask.transport.client import Client
from bulltask.transport.scripts.move import FetchOptions, move_to_active
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.locks import StalledCheck
from bulltask.worker.recovery import JobsOfDeadChild, Recovery
from tests.support.in_process_child import Child

pytestmark = pytest.mark.redis

Put = Callable[..., str]
StalledCheckRun = Callable[[], None]


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("tested", broker_url, max_crashes=1)
    yield app
    app.close()


@pytest.fixture
def keys(app: App) -> QueueKeys:
    return app._broker.keys("mail")


@pytest.fixture
def put(redis_client: Any, keys: QueueKeys) -> Put:
    """Add a job after the others, with these fields in its hash, or with another value instead of the hash."""

    def add(job_id: str, /, value: str = "", **fields: object) -> str:
        if value:
            redis_client.set(keys.job(job_id), value)
        else:
            plain = {"name": "task", "data": "{}", "opts": "{}", "timestamp": 1}
            redis_client.hset(keys.job(job_id), mapping={**plain, **fields})
        redis_client.lpush(keys.wait, job_id)
        return job_id

    return add


@pytest.fixture
def child(app: App, bus: Bus) -> Iterator[Child]:
    app.task(name="task")(lambda **_: "done")
    child = Child(app, ["mail"], bus)
    yield child
    child.close()


@pytest.fixture
def recover(app: App, keys: QueueKeys, client: Client, bus: Bus) -> Callable[..., int]:
    """Recover the jobs of a dead child, like a supervisor; return how many could not be recovered."""

    def settle(*tokens: str) -> int:
        recovery = Recovery([keys], client, app._broker.clock, app._config, bus, ReconnectBackoff(bus, app._config))
        recovery.recover(JobsOfDeadChild(tokens, frozenset(tokens), mono_ms(), "SIGKILL", intentional=False))
        return recovery.pending

    return settle


@pytest.fixture
def acquire(app: App, keys: QueueKeys, client: Client, put: Put) -> Callable[..., str]:
    """Add a job and acquire it, like a child that then dies; return its token."""

    def add_and_acquire(job_id: str, **fields: object) -> str:
        put(job_id, **fields)
        token = f"token-{job_id}"
        client.run(move_to_active(keys, FetchOptions(token, 30_000, "dead"), app._now_ms()))
        return token

    return add_and_acquire


@pytest.fixture
def check_stalled_jobs(app: App, keys: QueueKeys, client: Client, redis_client: Any) -> StalledCheckRun:
    """Run the stalled check once; a job stalls when two checks find it."""

    def check() -> None:
        redis_client.delete(keys.stalled_check)
        StalledCheck(
            app._broker, [keys], lambda _index: True, client, Bus(), ReconnectBackoff(Bus(), app._config)
        ).tick(0, 0)

    return check


def first_field(value: object) -> str:
    """Return the first field, which names a test's case."""
    return next(iter(value)) if isinstance(value, dict) else ""


def events_of(emitted: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in emitted if isinstance(event, kind)]


# --- the supervisor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opts",
    [
        {"attempts": 1.7976931348623157e308},
        {"attempts": -(2**64)},
        {"removeOnFail": {"age": 2**64}},
        {"removeOnFail": {"count": 2**80, "age": 1e300}},
        {"removeOnFail": 10**400},
        {"stackTraceLimit": 2**70, "kl": 2**70},
    ],
    ids=lambda opts: json.dumps(opts)[:40],
)
def test_a_supervisor_fails_a_job_with_huge_numbers_in_its_options(
    app: App, emitted: list[Event], acquire: Callable[..., str], recover: Callable[..., int], opts: dict[str, Any]
) -> None:
    assert recover(acquire("large", opts=json.dumps(opts))) == 0
    assert [event.job_id for event in events_of(emitted, CrashLimitReached)] == ["large"]
    assert app.queue("mail").get_job_counts("failed", "active") == {"failed": 1, "active": 0}


def test_a_job_that_cannot_be_settled_does_not_block_other_jobs_of_its_child(
    keys: QueueKeys, emitted: list[Event], acquire: Callable[..., str], recover: Callable[..., int], redis_client: Any
) -> None:
    tokens = [acquire(job_id) for job_id in ("text", "sound")]
    redis_client.delete(keys.job("text"))
    redis_client.set(keys.job("text"), "not a hash")
    assert recover(*tokens) == 0
    assert [event.job_id for event in events_of(emitted, MalformedJobFailed)] == ["text"]
    assert [event.job_id for event in events_of(emitted, JobRecovered)] == ["sound"]
    assert redis_client.lrange(keys.wait, 0, -1) == ["sound"]
    assert redis_client.llen(keys.active) == 0


# --- the child --------------------------------------------------------------------------------------------------------


def test_malformed_jobs_fail_and_the_job_after_them_is_acquired(
    keys: QueueKeys, put: Put, child: Child, emitted: list[Event], redis_client: Any
) -> None:
    malformed = [
        put(f"bad-{number}", ats=value) for number, value in enumerate(["many", "1.5", str(2**63 - 1), "", "01"])
    ]
    put("text", value="not a hash")
    put("sound")
    (slot,) = child.pool.take_reserved(1)
    acquired = child.fetcher.acquire(slot)
    assert acquired is not None
    assert acquired.job.id == "sound"
    assert [event.job_id for event in events_of(emitted, MalformedJobFailed)] == [*malformed, "text"]
    assert events_of(emitted, RedisErrorReply) == []
    assert sorted(redis_client.zrange(keys.failed, 0, -1)) == malformed
    assert "hash value is not an integer" in redis_client.hget(keys.job("bad-0"), "failedReason")
    assert {redis_client.hget(keys.job(job), "atm") for job in malformed} == {"1"}
    assert redis_client.lrange(keys.active, 0, -1) == ["sound"]
    failures = [entry for _, entry in redis_client.xrange(keys.events) if entry["event"] == "failed"]
    assert [entry["jobId"] for entry in failures] == [*malformed, "text"]
    assert all("malformed job: " in entry["failedReason"] for entry in failures)
    assert redis_client.get(keys.job("text")) == "not a hash"


def test_no_job_fails_because_of_an_error_of_its_queue(
    keys: QueueKeys, put: Put, child: Child, emitted: list[Event], redis_client: Any
) -> None:
    put("sound")
    redis_client.set(keys.marker, "not a sorted set")
    assert child.run_waiting() == 0
    assert events_of(emitted, MalformedJobFailed) == []
    assert [event.queue for event in events_of(emitted, RedisErrorReply)] == ["mail"]
    assert redis_client.lrange(keys.wait, 0, -1) == ["sound"]
    assert redis_client.llen(keys.active) == redis_client.zcard(keys.failed) == 0


def test_a_job_completes_even_if_the_next_job_is_malformed(
    keys: QueueKeys, put: Put, child: Child, emitted: list[Event], redis_client: Any
) -> None:
    put("first")
    put("second", ats="many")
    put("third")
    assert child.run_waiting() == 2
    assert [event.job_id for event in events_of(emitted, JobCompleted)] == ["first", "third"]
    assert [event.job_id for event in events_of(emitted, MalformedJobFailed)] == ["second"]
    assert events_of(emitted, LockLost) == []
    assert redis_client.zrange(keys.failed, 0, -1) == ["second"]
    assert redis_client.llen(keys.active) == 0


@pytest.mark.parametrize(
    "opts",
    [
        {"repeat": {"every": 0}, "repeatJobKey": "often"},
        {"repeat": {"every": -(2**70)}},
        {"repeat": {"every": 0.25}},
        {"repeat": {"pattern": "\ud800 * * * *", "tz": "\ud800"}},
        {"repeat": {"pattern": "* * * * *", "startDate": 1e300}, "prevMillis": 2**80},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("scheduler", [{}, {"rjk": "often"}], ids=["repeatable", "scheduler"])
def test_an_invalid_repeat_rule_delays_its_job_and_crashes_no_child(
    put: Put, child: Child, emitted: list[Event], scheduler: dict[str, str], opts: dict[str, Any]
) -> None:
    put("repeated", opts=json.dumps(opts), **scheduler)
    put("sound")
    assert child.run_waiting() == 2
    assert [event.job_id for event in events_of(emitted, JobCompleted)][-1:] == ["sound"]
    assert len(events_of(emitted, SchedulingFailed)) + len(events_of(emitted, JobCompleted)) == 2


def test_a_lone_surrogate_in_a_deduplication_id_is_encoded_as_node_encodes_it(
    keys: QueueKeys, put: Put, child: Child, emitted: list[Event], redis_client: Any
) -> None:
    redis_client.hset(
        keys.deferred("a\ufffd"), mapping={"name": "task", "data": "{}", "opts": '{"de":{"id":"a"}}', "jid": "deferred"}
    )
    put("first", opts='{"de": {"id": "a\\ud800"}}')
    assert child.run_waiting() + child.run_waiting() == 2
    assert [event.job_id for event in events_of(emitted, JobCompleted)] == ["first", "deferred"]


@pytest.mark.parametrize("kept", [{"age": "x", "count": None}, {"age": None}, {"count": "many"}, {"age": []}], ids=str)
def test_a_retention_limit_that_is_not_a_number_removes_nothing(
    keys: QueueKeys, put: Put, child: Child, redis_client: Any, kept: dict[str, Any]
) -> None:
    put("job", opts=json.dumps({"removeOnComplete": kept}))
    assert child.run_waiting() == 1
    assert redis_client.hget(keys.job("job"), "returnvalue") == '"done"'


@pytest.mark.parametrize("attempts_made", [2**53 - 1, 2**53])
def test_a_job_with_a_huge_number_of_attempts_whose_outcome_cannot_be_stored_is_not_lost(
    keys: QueueKeys, put: Put, child: Child, emitted: list[Event], redis_client: Any, attempts_made: int
) -> None:
    redis_client.rpush(f"{keys.base}de:once", "not an id")
    put("job", atm=attempts_made, deid="once", opts='{"de": {"id": "once"}}')
    assert child.run_waiting() == 1
    assert events_of(emitted, JobCompleted) == []
    assert redis_client.zrange(keys.failed, 0, -1) == ["job"]


def test_promoting_a_malformed_delayed_job_loses_no_other_job(
    keys: QueueKeys, put: Put, child: Child, emitted: list[Event], redis_client: Any
) -> None:
    # BullMQ's script removes all jobs that are due from `delayed`, and fails on the second one.
    jobs = [put("a"), put("b-nan", priority="-nan"), put("c-text", value="not a hash"), put("d"), put("e", priority=5)]
    redis_client.delete(keys.wait)
    redis_client.zadd(keys.delayed, {job_id: score for score, job_id in enumerate(jobs)})
    child.run_waiting()
    assert {event.job_id for event in events_of(emitted, JobCompleted)} == {"a", "b-nan", "d", "e"}
    (failures,) = [entry for _, entry in redis_client.xrange(keys.events) if entry["event"] == "failed"]
    assert (failures["jobId"], failures["prev"]) == ("c-text", "delayed")
    assert "malformed job: WRONGTYPE" in failures["failedReason"]


def test_a_malformed_stalled_job_is_not_lost_and_blocks_no_other_job(
    keys: QueueKeys,
    put: Put,
    child: Child,
    emitted: list[Event],
    redis_client: Any,
    check_stalled_jobs: StalledCheckRun,
) -> None:
    put("a-count", stc="many")
    put("b-opts", opts="{")
    put("c-list", opts="5")
    put("d-text", value="not a hash")
    put("e-lock")
    put("f-sound")
    redis_client.lpush(keys.lock("e-lock"), "not a lock")
    redis_client.rename(keys.wait, keys.active)
    check_stalled_jobs()
    check_stalled_jobs()
    child.run_waiting()
    assert redis_client.llen(keys.active) == 0
    assert {event.job_id for event in events_of(emitted, JobCompleted)} == {"a-count", "e-lock", "f-sound"}
    failures = {entry["jobId"] for _, entry in redis_client.xrange(keys.events) if entry["event"] == "failed"}
    assert failures == {"b-opts", "c-list", "d-text"}


def test_a_malformed_lock_does_not_prevent_recovery_of_a_dead_childs_jobs(
    keys: QueueKeys, acquire: Callable[..., str], recover: Callable[..., int], redis_client: Any
) -> None:
    redis_client.lpush(keys.active, "other")
    redis_client.lpush(keys.lock("other"), "not a lock")
    assert recover(acquire("mine")) == 0
    assert redis_client.lrange(keys.active, 0, -1) == ["other"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"atm": "many"}, "field atm of job bad is not a number: b'many'"),
        ({"atm": str(2**63 - 1)}, "field atm of job bad is not a number"),
        ({"priority": "nan"}, "field priority of job bad is not a number"),
        ({"opts": "[]"}, "field opts of job bad is not a JSON object"),
        ({"parent": "{"}, "field parent of job bad is not valid JSON"),
        ({"parent": '{"id":5,"queueKey":null}'}, "field parent of job bad has no id and queueKey"),
        ({"parent": "5"}, "field parent of job bad is not a JSON object"),
        ({"parent": "true"}, "field parent of job bad is not a JSON object"),
        ({"parent": "null"}, "field parent of job bad is not a JSON object"),
        ({"parentKey": "x" * 100_000}, "field parentKey of job bad is not a job's key"),
    ],
    ids=first_field,
)
def test_a_malformed_job_is_not_run_and_fails_with_the_reason(
    keys: QueueKeys, put: Put, child: Child, redis_client: Any, fields: dict[str, str], problem: str
) -> None:
    put("bad", **fields)
    assert child.run_waiting() == 1
    assert redis_client.zrange(keys.failed, 0, -1) == ["bad"]
    assert redis_client.hget(keys.job("bad"), "failedReason").startswith(problem)
    assert redis_client.llen(keys.active) == redis_client.exists(keys.lock("bad")) == 0


@pytest.mark.parametrize("fields", [{"atm": "many"}, {"parentKey": "x" * 100_000}], ids=first_field)
def test_a_malformed_job_can_be_revoked(
    app: App, keys: QueueKeys, put: Put, redis_client: Any, fields: dict[str, str]
) -> None:
    put("bad", **fields)
    assert app.queue("mail").revoke("bad") == "revoked"
    assert redis_client.zrange(keys.failed, 0, -1) == ["bad"]
    assert redis_client.llen(keys.wait) == redis_client.llen(keys.active) == 0


def test_a_job_whose_lock_never_expires_does_not_stall(
    keys: QueueKeys, put: Put, check_stalled_jobs: StalledCheckRun, redis_client: Any
) -> None:
    redis_client.set(keys.lock(put("held")), "other-worker")
    redis_client.rename(keys.wait, keys.active)
    check_stalled_jobs()
    check_stalled_jobs()
    assert redis_client.lrange(keys.active, 0, -1) == ["held"]


@pytest.mark.parametrize(
    ("flag", "becomes"),
    [("fpof", "failed"), ("cpof", "completed"), ("idof", "completed"), ("rdof", "completed"), ("", "waiting_children")],
)
def test_a_malformed_child_job_affects_its_parent_as_its_options_require(
    keys: QueueKeys, put: Put, child: Child, redis_client: Any, flag: str, becomes: str
) -> None:
    put("parent")
    redis_client.delete(keys.wait)
    redis_client.zadd(keys.waiting_children, {"parent": 1})
    redis_client.sadd(keys.dependencies("parent"), keys.job("bad"))
    link = {"id": "parent", "queueKey": keys.base[:-1], **({flag: True} if flag else {})}
    put("bad", ats="many", parent=json.dumps(link), parentKey=keys.job("parent"))
    child.run_waiting()
    child.run_waiting()
    assert redis_client.zrange(getattr(keys, becomes), 0, -1)[-1:] == ["parent"]
    assert "bad" in redis_client.zrange(keys.failed, 0, -1)


def test_a_malformed_job_does_not_count_for_the_global_concurrency(
    app: App, keys: QueueKeys, put: Put, child: Child, emitted: list[Event], redis_client: Any
) -> None:
    queue = app.queue("mail")
    queue.set_global_concurrency(1)
    for number in range(3):
        put(f"bad-{number}", ats="many")
    put("sound")
    queue.pause()
    assert child.run_waiting() == 0
    assert redis_client.llen(keys.paused) == 4
    queue.resume()
    assert child.run_waiting() == 1
    assert [event.job_id for event in events_of(emitted, JobCompleted)] == ["sound"]


def test_a_malformed_job_in_another_queue_does_not_lose_an_outcome(
    app: App, keys: QueueKeys, put: Put, bus: Bus, emitted: list[Event], redis_client: Any
) -> None:
    app.task(name="task")(lambda **_: "done")
    other = app._broker.keys("other")
    redis_client.hset(other.job("bad"), mapping={"name": "task", "ats": "many"})
    redis_client.lpush(other.wait, "bad")
    put("sound")
    child = Child(app, ["mail", "other"], bus)
    child.run_waiting()
    child.close()
    assert [event.job_id for event in events_of(emitted, JobCompleted)] == ["sound"]
    assert [(event.queue, event.job_id) for event in events_of(emitted, MalformedJobFailed)] == [("other", "bad")]
    assert redis_client.llen(other.active) == redis_client.llen(keys.active) == 0
    assert redis_client.zrange(other.failed, 0, -1) == ["bad"]
