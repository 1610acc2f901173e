"""Tests of migrating the layout of Bull 1 and 2, and other tests that need no Bull library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from bulltask.errors import ConfigError, InvalidNameError, MigrationError
from bulltask.migrate import BullMigration, QueueLayout
from bulltask.migrate.inspection import MigrationOutcome, read_jobs
from bulltask.migrate.plan import JobCheck, MigrationOptions
from bulltask.queue import Queue
from bulltask.transport.call import BullKeys
from bulltask.transport.scripts.queue import MoveResult, convert_bull_job, move_bull_job
from tests.support.cluster_and_sentinel import routed

pytestmark = [pytest.mark.redis, pytest.mark.one_server]  # Bull's queues have no hash tag

ADDED_MS, DUE_MS = 1_500_000_000_000, 4_000_000_000_000
TRACE = 'Error: no "x"\\n    at file.js:1'


@pytest.fixture
def queue(broker_url: str) -> Iterator[Queue]:
    """bulltask's queue ``mail``, ``bull:{mail}``."""
    with Queue("mail", broker_url) as queue:
        yield queue


def add_bull_1_job(client: redis.Redis, job_id: str, **fields: Any) -> None:
    """Store a job as Bull 1 does: without a name, with the attempts in the hash."""
    hash_: dict[str, Any] = {
        "data": f'{{"n": {job_id}}}',
        "opts": "{}",
        "progress": 0,
        "delay": 0,
        "timestamp": ADDED_MS + int(job_id),
        "attempts": 1,
        "attemptsMade": 0,
        "stacktrace": "null",
        "returnvalue": "null",
    }
    client.hset(f"bull:mail:{job_id}", mapping=hash_ | fields)


def fill_bull_1_queue(client: redis.Redis) -> None:
    """Fill Bull 1's queue ``mail``: completed and failed are sets, scores in delayed are ms times 4096 plus the id."""
    for job_id in ("1", "2"):
        add_bull_1_job(client, job_id, returnvalue=f'{{"ok":{job_id}}}', progress=1)
    client.sadd("bull:mail:completed", "2", "1")
    add_bull_1_job(
        client,
        "3",
        attempts=3,
        attemptsMade=3,
        opts='{"attempts":3,"backoff":5}',
        stacktrace=f'["{TRACE}"]'.replace('"x"', '\\"x\\"'),
    )
    client.sadd("bull:mail:failed", "3")
    for job_id in ("4", "5"):
        add_bull_1_job(client, job_id)
        client.lpush("bull:mail:wait", job_id)
    add_bull_1_job(client, "6", delay=DUE_MS - ADDED_MS)
    client.zadd("bull:mail:delayed", {"6": DUE_MS * 4096 + 6})
    client.set("bull:mail:id", 6)


def test_the_layout_of_bull_1_is_recognized_and_moved(queue: Queue, redis_client: redis.Redis) -> None:
    fill_bull_1_queue(redis_client)
    migration = BullMigration(queue)
    plan = migration.plan()
    assert (plan.layout, plan.total, plan.outcome.notes) == (QueueLayout.BULL_1, 6, {"unnamed": 6})
    report = migration.run()
    assert (report.complete, report.target_after, sum(report.after.values())) == (True, 6, 0)
    assert report.outcome.moved == {"completed": 2, "failed": 1, "waiting": 2, "delayed": 1}
    done, failed, delayed = (queue.get_job(job_id) for job_id in ("2", "3", "6"))
    assert done is not None
    assert failed is not None
    assert delayed is not None
    assert (done.name, done.data, done.returnvalue, done.attempts_made) == ("__default__", {"n": 2}, {"ok": 2}, 1)
    assert (failed.failed_reason, failed.attempts_made, failed.opts) == (
        'no "x"',
        3,
        {"attempts": 3, "backoff": {"type": "fixed", "delay": 5}},
    )
    assert redis_client.zrange("bull:{mail}:completed", 0, -1, withscores=True) == [
        ("1", ADDED_MS + 1),
        ("2", ADDED_MS + 2),
    ]
    assert redis_client.zscore("bull:{mail}:delayed", "6") == DUE_MS * 4096 + 6
    assert redis_client.lrange("bull:{mail}:wait", 0, -1) == ["5", "4"]
    assert redis_client.get("bull:{mail}:id") == "6"
    waiting = redis_client.hgetall("bull:{mail}:4")
    assert not {"attempts", "attemptsMade", "stacktrace", "returnvalue"} & waiting.keys()


def test_bull_1_is_recognized_by_its_jobs_if_none_has_finished(queue: Queue, redis_client: redis.Redis) -> None:
    add_bull_1_job(redis_client, "1")
    redis_client.lpush("bull:mail:wait", "1")
    assert BullMigration(queue).plan().layout is QueueLayout.BULL_1


def test_an_in_place_migration_rejects_the_sets_of_bull_1(broker_url: str, redis_client: redis.Redis) -> None:
    fill_bull_1_queue(redis_client)
    before = {key: redis_client.type(key) for key in redis_client.keys("*")}
    with Queue("mail", broker_url, queue_hash_tag=False) as queue:
        with pytest.raises(MigrationError, match="sets of Bull 1 and 2"):
            BullMigration(queue).run()
        assert {key: redis_client.type(key) for key in redis_client.keys("*")} == before
        with Queue("new", broker_url, queue_hash_tag=False) as other:
            assert BullMigration(other, "mail").run().complete


def test_a_limit_also_applies_to_sets(queue: Queue, redis_client: redis.Redis) -> None:
    fill_bull_1_queue(redis_client)
    report = BullMigration(queue, states=("completed",), limit=1).run()
    assert (report.outcome.moved, redis_client.smembers("bull:mail:completed")) == ({"completed": 1}, {"2"})
    assert BullMigration(queue).run().complete


def test_the_plan_for_a_missing_queue_is_empty(queue: Queue) -> None:
    plan = BullMigration(queue).plan()
    assert (plan.layout, plan.total, plan.blockers) == (QueueLayout.EMPTY, 0, [])


def test_the_source_queue_may_have_another_prefix(queue: Queue, redis_client: redis.Redis) -> None:
    redis_client.hset(
        "old:mail:1", mapping={"name": "n", "data": "{}", "opts": '{"attempts":1,"delay":0,"timestamp":5}'}
    )
    redis_client.lpush("old:mail:wait", "1")
    assert BullMigration(queue).plan().layout is QueueLayout.EMPTY
    assert BullMigration(queue, source_prefix="old").run().outcome.moved == {"waiting": 1}
    assert redis_client.hget("bull:{mail}:1", "timestamp") == "5"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"states": ("waitin",)}, ConfigError, "waiting, delayed, completed, failed, not 'waitin'"),
        ({"limit": 0}, ConfigError, "limit must be 1 or more"),
        ({"id_prefix": "a:b"}, ConfigError, "id_prefix 'a:b' has a ':'"),
        ({"default_name": ""}, InvalidNameError, "task name"),
        ({"dry": True}, TypeError, "dry"),
    ],
)
def test_invalid_migration_options_are_rejected(
    queue: Queue, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        BullMigration(queue, **options)


def test_an_in_place_migration_rejects_an_id_prefix(broker_url: str) -> None:
    with Queue("mail", broker_url, queue_hash_tag=False) as queue, pytest.raises(ConfigError, match="in place"):
        BullMigration(queue, id_prefix="old-")


@pytest.mark.slow
def test_on_a_cluster_both_queues_must_be_in_one_slot(cluster_url: str) -> None:
    with (
        redis.Redis.from_url(cluster_url, decode_responses=True) as plain,
        Queue("mail", routed(cluster_url)) as queue,
    ):
        opts = '{"attempts":1,"delay":0,"timestamp":5}'
        for prefix in ("bull:mail", "old:{mail}"):
            plain.hset(f"{prefix}:1", mapping={"name": "n", "data": "{}", "opts": opts})
            plain.lpush(f"{prefix}:wait", "1")
        with pytest.raises(MigrationError, match=r"only within a slot, and bull:mail and bull:\{mail\}"):
            BullMigration(queue).run()
        assert plain.lrange("bull:mail:wait", 0, -1) == ["1"]
        assert BullMigration(queue, "{mail}", source_prefix="old").run().outcome.moved == {"waiting": 1}
        assert plain.lrange("bull:{mail}:wait", 0, -1) == ["1"]


CONCURRENT_CHANGES: dict[MoveResult, list[list[str]]] = {
    MoveResult.GONE: [["LREM", "bull:mail:wait", "0", "2"], ["LPUSH", "bull:mail:active", "2"]],
    MoveResult.NO_HASH: [["DEL", "bull:mail:2"]],
    MoveResult.LOCKED: [["SET", "bull:mail:2:lock", "token"]],
    MoveResult.CHANGED: [["HSET", "bull:mail:2", "attemptsMade", "1"]],
    MoveResult.ID_TAKEN: [["HSET", "bull:{mail}:2", "name", "another"]],
}


@pytest.mark.parametrize(
    ("expected", "in_place"),
    [
        *((expected, False) for expected in (MoveResult.DONE, *CONCURRENT_CHANGES)),
        *(
            (expected, True)
            for expected in (MoveResult.DONE, *CONCURRENT_CHANGES)
            if expected is not MoveResult.ID_TAKEN
        ),
    ],
)
def test_a_job_that_has_changed_since_it_was_read_is_not_moved(
    queue: Queue, redis_client: redis.Redis, expected: MoveResult, in_place: bool
) -> None:
    opts = '{"attempts":1,"delay":0,"timestamp":5}'
    for job_id in ("1", "2", "3"):
        redis_client.hset(f"bull:mail:{job_id}", mapping={"name": "n", "data": "{}", "opts": opts, "timestamp": "5"})
        redis_client.lpush("bull:mail:wait", job_id)
    source = BullKeys("bull", "mail")
    with queue.context.broker.pool.client() as client:
        [job] = read_jobs(client, source, "wait", [("2", "")])
        change = JobCheck(MigrationOptions(), bull_only=False, outcome=MigrationOutcome()).change(job)
        assert change is not None
        for command in CONCURRENT_CHANGES.get(expected, []):
            redis_client.execute_command(*command)
        before = {key: redis_client.type(key) for key in redis_client.keys("*")}, redis_client.hgetall("bull:mail:2")
        call = convert_bull_job(source, change[0]) if in_place else move_bull_job(source, queue.context.keys, change[0])
        assert client.run(call) is expected
    after = {key: redis_client.type(key) for key in redis_client.keys("*")}, redis_client.hgetall("bull:mail:2")
    assert (before == after) is (expected is not MoveResult.DONE)
    assert redis_client.lrange("bull:mail:wait", 0, -1) == (
        ["3", "1"] if expected is MoveResult.GONE or (expected is MoveResult.DONE and not in_place) else ["3", "2", "1"]
    )


def test_options_that_change_are_read_again(queue: Queue, redis_client: redis.Redis) -> None:
    """The script compares the options too, so a job whose options Bull has changed is not moved with the old ones."""
    old = '{"attempts":1,"delay":0,"timestamp":5}'
    redis_client.hset("bull:mail:1", mapping={"name": "n", "data": "{}", "opts": old, "timestamp": "5"})
    redis_client.lpush("bull:mail:wait", "1")
    source = BullKeys("bull", "mail")
    with queue.context.broker.pool.client() as client:
        [job] = read_jobs(client, source, "wait", [("1", "")])
        change = JobCheck(MigrationOptions(), bull_only=False, outcome=MigrationOutcome()).change(job)
        assert change is not None
        redis_client.hset("bull:mail:1", "opts", old.replace("1", "7"))
        assert client.run(move_bull_job(source, queue.context.keys, change[0])) is MoveResult.CHANGED
    assert BullMigration(queue).run().complete
    assert redis_client.hget("bull:{mail}:1", "opts") == '{"attempts":7}'


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_a_migration_wakes_waiting_workers(
    broker_url: str, redis_client: redis.Redis, in_place: bool, paused: bool
) -> None:
    opts = '{"attempts":1,"delay":0,"timestamp":5}'
    for job_id in ("1", "2"):
        redis_client.hset(f"bull:mail:{job_id}", mapping={"name": "n", "data": "{}", "opts": opts, "timestamp": "5"})
    redis_client.lpush("bull:mail:paused" if paused else "bull:mail:wait", "1")
    redis_client.zadd("bull:mail:delayed", {"2": DUE_MS * 4096 + 2})
    if paused:
        redis_client.set("bull:mail:meta-paused", "1")
    with Queue("mail", broker_url, queue_hash_tag=not in_place) as queue:
        assert BullMigration(queue, "mail").run().complete
        assert queue.is_paused() is paused
    base = "bull:mail" if in_place else "bull:{mail}"
    marker: Any = redis_client.zrange(f"{base}:marker", 0, -1, withscores=True)
    due = dict(marker)
    assert due == {"1": DUE_MS} | ({} if paused else {"0": 0})
    assert redis_client.hget(f"{base}:meta", "paused") == ("1" if paused else None)
    assert redis_client.exists("bull:mail:meta-paused") == (paused and not in_place)
