"""The own script ``addKept``, where tests/hazard does not come: it acts once, and leaves alone what is not its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from bulltask.queue import Queue
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.add import add_kept_job

pytestmark = pytest.mark.redis

NOW_MS = 1_800_000_000_000
KEYS = QueueKeys("bull", "{mail}", "mail")
AddKept = Callable[[], str]


@pytest.fixture
def add_kept(broker_url: str) -> Iterator[AddKept]:
    """Call the script as if the job ``first`` had ended."""
    with Queue("mail", broker_url) as queue, queue.context.broker.pool.client() as client:
        yield lambda: client.run(add_kept_job(KEYS, "d", "first", NOW_MS))


def keep(redis_client: redis.Redis, job_id: str = "second", **fields: Any) -> None:
    """Store a kept job, as BullMQ 5.81's add scripts do."""
    opts = {"attempts": 0, "de": {"id": "d", "keepLastIfActive": True}, **fields.pop("opts", {})}
    mapping: Any = {"name": "a", "data": '{"n":[]}', "opts": json.dumps(opts), "jid": job_id, **fields}
    redis_client.hset(KEYS.kept("d"), mapping=mapping)


def test_without_a_kept_job_nothing_happens(redis_client: redis.Redis, add_kept: AddKept) -> None:
    assert add_kept() == ""
    assert redis_client.keys("*") == []


def test_a_kept_job_is_added_once(redis_client: redis.Redis, add_kept: AddKept) -> None:
    keep(redis_client)
    assert [add_kept(), add_kept()] == ["second", ""]
    assert redis_client.lrange(KEYS.wait, 0, -1) == ["second"]
    assert redis_client.hget(KEYS.job("second"), "data") == '{"n":[]}'
    assert redis_client.get(KEYS.deduplication("d")) == "second"
    assert redis_client.zrange(KEYS.marker, 0, -1, withscores=True) == [("0", 0.0)]
    assert not redis_client.exists(KEYS.kept("d"))


@pytest.mark.parametrize("used", ["the deduplication id", "the job's own id"])
def test_a_kept_job_is_not_added_if_its_id_or_deduplication_id_is_used(
    redis_client: redis.Redis, add_kept: AddKept, used: str
) -> None:
    keep(redis_client)
    if used == "the deduplication id":
        redis_client.set(KEYS.deduplication("d"), "other")
    else:
        redis_client.hset(KEYS.job("second"), "name", "another")
    before = set(redis_client.keys("*"))
    assert add_kept() == ""
    assert set(redis_client.keys("*")) == before
    assert redis_client.exists(KEYS.kept("d"))


def test_a_kept_job_of_a_paused_queue_is_added_without_a_marker(redis_client: redis.Redis, add_kept: AddKept) -> None:
    redis_client.hset(KEYS.meta, "paused", 1)
    keep(redis_client)
    assert add_kept() == "second"
    assert redis_client.lrange(KEYS.paused, 0, -1) == ["second"]
    assert not redis_client.exists(KEYS.wait, KEYS.marker)


def test_a_kept_job_is_added_without_a_marker_at_the_global_concurrency(
    redis_client: redis.Redis, add_kept: AddKept
) -> None:
    redis_client.hset(KEYS.meta, "concurrency", 1)
    redis_client.lpush(KEYS.active, "third")
    keep(redis_client)
    assert add_kept() == "second"
    assert not redis_client.exists(KEYS.marker)


def test_lifo_and_delay_of_a_kept_job_are_applied(redis_client: redis.Redis, add_kept: AddKept) -> None:
    redis_client.lpush(KEYS.wait, "waiting")
    keep(redis_client, opts={"lifo": True})
    add_kept()
    assert redis_client.lrange(KEYS.wait, 0, -1) == ["waiting", "second"]

    redis_client.delete(KEYS.deduplication("d"))
    due = (NOW_MS + 500) * 4096
    redis_client.zadd(KEYS.delayed, {"early": due - 4096, "same": due + 3})
    keep(redis_client, "late", opts={"delay": 500})
    assert add_kept() == "late"
    assert redis_client.zscore(KEYS.delayed, "late") == due + 4
    assert redis_client.zscore(KEYS.marker, "1") == NOW_MS + 499


def test_a_kept_child_is_linked_to_its_parent_again(redis_client: redis.Redis, add_kept: AddKept) -> None:
    parent = KEYS.job("parent")
    keep(redis_client, pk=parent, pd='{"id":"parent"}', pdk=f"{parent}:dependencies", rjk="hourly")
    assert add_kept() == "second"
    assert redis_client.smembers(f"{parent}:dependencies") == {KEYS.job("second")}
    stored = redis_client.hmget(KEYS.job("second"), "parentKey", "parent", "rjk", "deid")
    assert stored == [parent, '{"id":"parent"}', "hourly", "d"]
