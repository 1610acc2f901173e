"""Cases of the script ``addDeferred`` that tests/mixed_versions does not cover."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from bulltask.queue import Queue
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.add import add_deferred_duplicate

pytestmark = pytest.mark.redis

NOW_MS = 1_800_000_000_000
KEYS = QueueKeys("bull", "{mail}", "mail")
Add = Callable[[], str]


@pytest.fixture
def add(broker_url: str) -> Iterator[Add]:
    """Call the script as if the job ``first`` had ended."""
    with Queue("mail", broker_url) as queue, queue.context.broker.pool.client() as client:
        yield lambda: client.run(add_deferred_duplicate(KEYS, "d", "first", NOW_MS))


def defer(redis_client: redis.Redis, job_id: str = "second", **fields: Any) -> None:
    """Store a deferred duplicate, as BullMQ 5.81's add scripts do."""
    opts = {"attempts": 0, "de": {"id": "d", "keepLastIfActive": True}, **fields.pop("opts", {})}
    mapping: Any = {"name": "a", "data": '{"n":[]}', "opts": json.dumps(opts), "jid": job_id, **fields}
    redis_client.hset(KEYS.deferred("d"), mapping=mapping)


def test_without_a_deferred_duplicate_nothing_is_added(redis_client: redis.Redis, add: Add) -> None:
    assert add() == ""
    assert redis_client.keys("*") == []


def test_a_deferred_duplicate_is_added_once(redis_client: redis.Redis, add: Add) -> None:
    defer(redis_client)
    assert [add(), add()] == ["second", ""]
    assert redis_client.lrange(KEYS.wait, 0, -1) == ["second"]
    assert redis_client.hget(KEYS.job("second"), "data") == '{"n":[]}'
    assert redis_client.get(KEYS.deduplication("d")) == "second"
    assert redis_client.zrange(KEYS.marker, 0, -1, withscores=True) == [("0", 0.0)]
    assert not redis_client.exists(KEYS.deferred("d"))


@pytest.mark.parametrize("used", ["the deduplication id", "the job's own id"])
def test_a_deferred_duplicate_is_not_added_if_its_id_or_deduplication_id_is_used(
    redis_client: redis.Redis, add: Add, used: str
) -> None:
    defer(redis_client)
    if used == "the deduplication id":
        redis_client.set(KEYS.deduplication("d"), "other")
    else:
        redis_client.hset(KEYS.job("second"), "name", "another")
    before = set(redis_client.keys("*"))
    assert add() == ""
    assert set(redis_client.keys("*")) == before
    assert redis_client.exists(KEYS.deferred("d"))


def test_a_deferred_duplicate_is_added_to_a_paused_queue_without_a_marker(redis_client: redis.Redis, add: Add) -> None:
    redis_client.hset(KEYS.meta, "paused", 1)
    defer(redis_client)
    assert add() == "second"
    assert redis_client.lrange(KEYS.paused, 0, -1) == ["second"]
    assert not redis_client.exists(KEYS.wait, KEYS.marker)


def test_a_deferred_duplicate_is_added_without_a_marker_at_the_global_concurrency(
    redis_client: redis.Redis, add: Add
) -> None:
    redis_client.hset(KEYS.meta, "concurrency", 1)
    redis_client.lpush(KEYS.active, "third")
    defer(redis_client)
    assert add() == "second"
    assert not redis_client.exists(KEYS.marker)


def test_lifo_and_delay_of_a_deferred_duplicate_are_applied(redis_client: redis.Redis, add: Add) -> None:
    redis_client.lpush(KEYS.wait, "waiting")
    defer(redis_client, opts={"lifo": True})
    add()
    assert redis_client.lrange(KEYS.wait, 0, -1) == ["waiting", "second"]

    redis_client.delete(KEYS.deduplication("d"))
    due = (NOW_MS + 500) * 4096
    redis_client.zadd(KEYS.delayed, {"early": due - 4096, "same": due + 3})
    defer(redis_client, "late", opts={"delay": 500})
    assert add() == "late"
    assert redis_client.zscore(KEYS.delayed, "late") == due + 4
    assert redis_client.zscore(KEYS.marker, "1") == NOW_MS + 499


def test_a_deferred_child_is_linked_to_its_parent_again(redis_client: redis.Redis, add: Add) -> None:
    parent = KEYS.job("parent")
    defer(redis_client, pk=parent, pd='{"id":"parent"}', pdk=f"{parent}:dependencies", rjk="hourly")
    assert add() == "second"
    assert redis_client.smembers(f"{parent}:dependencies") == {KEYS.job("second")}
    stored = redis_client.hmget(KEYS.job("second"), "parentKey", "parent", "rjk", "deid")
    assert stored == [parent, '{"id":"parent"}', "hourly", "d"]
