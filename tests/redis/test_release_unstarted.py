"""The script that releases a prefetched job."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from bulltask import App
from bulltask.errors import JobStateError, LockMismatchError, LockMissingError
from bulltask.transport.scripts.move import release_unstarted


def test_a_released_job_is_next_and_its_start_does_not_count(app: App, redis_client: redis.Redis) -> None:
    keys = app._broker.keys("default")
    redis_client.hset(keys.job("1"), mapping={"name": "send", "ats": 2})
    redis_client.set(f"{keys.job('1')}:lock", "token")
    redis_client.lpush(keys.active, "1")
    redis_client.lpush(keys.wait, "2")
    app._broker.pool.run(release_unstarted(keys, "1", "token"))
    assert redis_client.lrange(keys.wait, 0, -1) == ["2", "1"]
    assert redis_client.hget(keys.job("1"), "ats") == "1"
    assert redis_client.exists(keys.marker)
    entries: Any = redis_client.xrange(keys.events)
    assert [fields for _, fields in entries] == [
        {"event": "released", "jobId": "1"},
        {"event": "waiting", "jobId": "1", "prev": "active"},
    ]


@pytest.mark.parametrize("holder", [None, "another token"])
def test_a_job_whose_lock_is_lost_is_not_released(app: App, redis_client: redis.Redis, holder: str | None) -> None:
    keys = app._broker.keys("default")
    redis_client.hset(keys.job("1"), mapping={"name": "send", "ats": 2})
    if holder is not None:
        redis_client.set(f"{keys.job('1')}:lock", holder)
    redis_client.lpush(keys.active, "1")
    with pytest.raises(LockMissingError if holder is None else LockMismatchError):
        app._broker.pool.run(release_unstarted(keys, "1", "token"))
    assert (redis_client.hget(keys.job("1"), "ats"), redis_client.exists(keys.events)) == ("2", 0)


def test_a_job_whose_key_is_not_a_hash_stays_active_until_the_stalled_check(
    app: App, redis_client: redis.Redis
) -> None:
    keys = app._broker.keys("default")
    redis_client.rpush(keys.job("1"), "not a hash")
    redis_client.set(f"{keys.job('1')}:lock", "token")
    redis_client.lpush(keys.active, "1")
    with pytest.raises(JobStateError):
        app._broker.pool.run(release_unstarted(keys, "1", "token"))
    assert redis_client.lrange(keys.active, 0, -1) == ["1"]
