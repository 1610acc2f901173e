"""The stalled check, and the key that allows one check per interval."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import redis

from bulltask import App
from bulltask.events import Bus, RedisReconnected
from bulltask.transport.call import SyncClient
from bulltask.worker import locks
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.locks import StalledCheck
from tests.support.redis_cluster import Cluster

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("tested", broker_url, stalled_interval=10)
    yield app
    app.close()


@pytest.fixture
def client(app: App) -> Iterator[SyncClient]:
    client = app._broker.client()
    yield client
    client.close()


def test_a_stalled_check_does_not_prevent_the_next_check_of_the_worker(
    app: App, client: SyncClient, redis_client: redis.Redis
) -> None:
    bus, keys = Bus(), app._broker.keys("default")
    check = StalledCheck(app._broker, [keys], lambda _index: True, client, bus, ReconnectBackoff(bus, app._config))
    check.tick(0, 0)
    left_ms = redis_client.pttl(keys.stalled_check)
    assert isinstance(left_ms, int)
    assert 1_000 < left_ms <= 9_000 < check.interval_ms


def test_the_stalled_check_waits_five_seconds_after_a_long_outage(
    app: App, client: SyncClient, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 1_000
    monkeypatch.setattr(locks, "mono_ms", lambda: now_ms)
    bus, keys = Bus(), app._broker.keys("default")
    check = StalledCheck(app._broker, [keys], lambda _index: True, client, bus, ReconnectBackoff(bus, app._config))
    bus.emit(RedisReconnected(1, app._config.lock_ms))
    now_ms += 4_999
    check.tick(0, 0)
    assert not redis_client.exists(keys.stalled_check)
    now_ms += 1
    check.tick(0, 0)
    assert redis_client.exists(keys.stalled_check)


@pytest.mark.slow
def test_the_stalled_check_waits_five_seconds_after_an_outage_of_one_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = cluster.queues()[0]
    node, plain = cluster.servers[cluster.owner(cluster.slot(queue))], cluster.client_of(queue)
    now_ms = 1_000
    monkeypatch.setattr(locks, "mono_ms", lambda: now_ms)
    app = App("tested", cluster.broker_url, redis_socket_timeout=0.3)
    bus, keys, client = Bus(), app._broker.keys(queue), app._broker.client()
    check = StalledCheck(app._broker, [keys], lambda _index: True, client, bus, ReconnectBackoff(bus, app._config))
    job = app.queue(queue).add("held")
    check.tick(0, 0)
    os.kill(node.pid, signal.SIGSTOP)
    try:
        check.tick(0, 0)
    finally:
        os.kill(node.pid, signal.SIGCONT)
    plain.lmove(keys.wait, keys.active)
    plain.sadd(keys.stalled, job.id)  # the last check found it without a lock
    for waited_ms, is_active in ((0, True), (4_999, True), (1, False)):
        now_ms += waited_ms
        plain.delete(keys.stalled_check)
        check.tick(0, 0)
        assert (job.get_state() == "active") is is_active
    client.close()
    app.close()
