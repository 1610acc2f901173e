"""The server's clock is set while senders and workers are connected."""

from __future__ import annotations

import asyncio

import pytest
import redis

from bulltask import App
from bulltask.jobs.clock import ServerClock
from tests.support.streams import server_ms

pytestmark = [pytest.mark.redis, pytest.mark.one_server]


@pytest.mark.parametrize("changed_ms", [20_000, -3_600_000])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_first_job_after_a_change_has_the_new_time(
    app: App, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, changed_ms: int, is_async: bool
) -> None:
    changes: list[int] = []

    async def send() -> str:
        result = await app.asend_task("work", countdown=2) if is_async else app.send_task("work", countdown=2)
        return result.id

    async def send_twice() -> str:
        await send()
        age_reading(app._broker.clock, changed_ms)
        job_id = await send()
        await app.aclose()
        return job_id

    app._broker.clock.on_change = changes.append
    job_id = asyncio.run(send_twice())
    score = redis_client.zscore("bull:{default}:delayed", job_id)
    assert isinstance(score, float)
    assert abs(score // 4096 - server_ms(redis_client) - 2_000) < 1_000
    assert [round(change, -3) for change in changes] == [changed_ms]


def age_reading(clock: ServerClock, changed_ms: int) -> None:
    """Make the last reading one from before the server's clock was set, more than 5 s ago."""
    assert clock._offset_ms is not None
    clock._offset_ms -= changed_ms
    clock.due_at_ms = 0


def test_a_recent_reading_is_not_repeated(app: App, redis_client: redis.Redis) -> None:
    for _ in range(10):
        app.send_task("work")
    assert redis_client.info("commandstats")["cmdstat_time"]["calls"] >= 1
    before = redis_client.info("commandstats")["cmdstat_time"]["calls"]
    for _ in range(10):
        app.send_task("work")
    assert redis_client.info("commandstats")["cmdstat_time"]["calls"] == before
