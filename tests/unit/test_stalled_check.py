"""The stalled check, and the key that allows one check per interval."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from bulltask import App
from bulltask.events import Bus, RedisReconnected
from bulltask.transport.client_types import SyncClient
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.supervisor import stalled_check
from bulltask.worker.supervisor.stalled_check import StalledCheck

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("tested", broker_url, stalled_interval=10)
    yield app
    app.close()


@pytest.fixture
def client(app: App) -> Iterator[SyncClient]:
    client = app.broker.client()
    yield client
    client.close()


def test_a_stalled_check_does_not_prevent_the_next_check_of_the_worker(
    app: App, client: SyncClient, redis_client: redis.Redis
) -> None:
    bus, keys = Bus(), app.broker.keys("default")
    check = StalledCheck(app.broker, [keys], lambda _index: True, client, bus, ReconnectBackoff(bus, app.config))
    check.tick(0, 0)
    left_ms = redis_client.pttl(keys.stalled_check)
    assert isinstance(left_ms, int)
    assert 1_000 < left_ms <= 9_000 < check.interval_ms


def test_the_stalled_check_waits_five_seconds_after_a_long_outage(
    app: App, client: SyncClient, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 1_000
    monkeypatch.setattr(stalled_check, "mono_ms", lambda: now_ms)
    bus, keys = Bus(), app.broker.keys("default")
    check = StalledCheck(app.broker, [keys], lambda _index: True, client, bus, ReconnectBackoff(bus, app.config))
    bus.emit(RedisReconnected(1, app.config.lock_ms))
    now_ms += 4_999
    check.tick(0, 0)
    assert not redis_client.exists(keys.stalled_check)
    now_ms += 1
    check.tick(0, 0)
    assert redis_client.exists(keys.stalled_check)
