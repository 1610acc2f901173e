"""A worker's warnings before it starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from bulltask.config.settings import Settings
from bulltask.errors import BrokerError, BrokerNotReadyError
from bulltask.events import Bus, Event, RedisErrorReply, RedisRecovered
from bulltask.transport.call import QueueKeys
from bulltask.worker import run
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.slots import ExitCode

KEYS = QueueKeys("bull", "{mail}", "mail")


class Server:
    """A fake server with the settings that a test chooses."""

    version: tuple[int, ...] = (7, 2, 4)
    eviction = "noeviction"
    safe_url = "redis://localhost:6379"
    max_clients: int | None = None
    connected = 0
    waiting: dict[str, int]
    described = "bullmq:5.62.0"

    def __init__(self) -> None:
        self.waiting = {}
        self.errors: list[BrokerError] = []

    def run_many(self, calls: list[Any]) -> list[Any]:
        if self.errors:
            raise self.errors.pop()
        return [None for _ in calls]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    fake = Server()
    monkeypatch.setattr(run, "read_server_settings", lambda _: fake)
    monkeypatch.setattr(run, "check_permissions", lambda *_: None)
    monkeypatch.setattr(
        run, "count_unfinished_jobs", lambda _, queues: [fake.waiting.get(keys.base, 0) for keys in queues]
    )
    monkeypatch.setattr(run, "read_queue_versions", lambda _, queues: [fake.described for _ in queues])
    return fake


def warnings(server: Any, keys: QueueKeys = KEYS, **settings: Any) -> list[SimpleNamespace]:
    config = Settings(settings, {}).freeze()
    with capture_logs() as lines:
        check = run.StartupCheck(server, [keys], config, structlog.get_logger(), ReconnectBackoff(Bus(), config))
        assert check.run(lambda _: None, lambda: False) is None
    return [SimpleNamespace(**line) for line in lines if line["log_level"] == "warning"]


def test_a_redis_before_6_2_is_reported(server: Server) -> None:
    server.version = (6, 2, 0)
    assert warnings(server) == []
    server.version = (6, 1, 9)
    assert [line.version for line in warnings(server)] == ["6.1.9"]


def test_a_redis_version_may_have_only_two_numbers(server: Server) -> None:
    server.version = (6, 2)
    assert warnings(server) == []


def test_jobs_under_the_other_form_of_the_queue_name_are_reported(server: Server) -> None:
    server.waiting = {"bull:mail:": 3, "bull:{mail}:": 5}
    (line,) = warnings(server)
    assert (line.processed, line.other, line.jobs) == ("bull:{mail}:", "bull:mail:", 3)
    (line,) = warnings(server, QueueKeys("bull", "mail", "mail"), queue_hash_tag=False)
    assert (line.processed, line.other, line.jobs) == ("bull:mail:", "bull:{mail}:", 5)


def test_a_worker_does_not_start_if_it_would_shut_other_clients_out(server: Server) -> None:
    server.max_clients, server.connected = 20, 10
    client: Any = server
    config, bus = Settings({}, {}).freeze(), Bus()
    with capture_logs() as lines:
        for connections, code in ((10, None), (11, ExitCode.BROKER_UNUSABLE)):
            backoff = ReconnectBackoff(bus, config)
            check = run.StartupCheck(client, [KEYS], config, structlog.get_logger(), backoff, connections)
            assert check.run(lambda _: None, lambda: False) is code
    assert "needs 11 connections" in lines[-1]["error"]
    assert "allows 20 (maxclients), and 10 clients are connected" in lines[-1]["error"]


def test_an_eviction_policy_is_reported(server: Server) -> None:
    server.eviction = "allkeys-lru"
    assert [line.maxmemory_policy for line in warnings(server)] == ["allkeys-lru"]


@pytest.mark.parametrize(("described", "count"), [("bullmq:5.99.0", 0), ("bullmq:6.0.0", 1), ("bullmq:10.1.0", 1)])
def test_a_queue_used_by_bullmq_6_is_reported(server: Server, described: str, count: int) -> None:
    server.described = described
    assert len(warnings(server)) == count


@pytest.mark.parametrize(("renew", "count"), [(15, 0), (15.1, 1)])
def test_a_lock_renew_time_above_half_the_lock_duration_is_reported(server: Server, renew: float, count: int) -> None:
    lines = warnings(server, lock_duration=30, lock_renew_time=renew)
    assert [(line.lock_renew_time, line.lock_duration) for line in lines] == [(renew, 30)] * count


def test_a_successful_check_after_an_error_ends_the_outage(server: Server) -> None:
    server.errors.append(BrokerNotReadyError("LOADING"))
    bus, emitted, config = Bus(), list[Event](), Settings({}, {}).freeze()
    bus.subscribe(Event, emitted.append)
    client: Any = server
    check = run.StartupCheck(client, [KEYS], config, structlog.get_logger(), ReconnectBackoff(bus, config))
    pauses: list[float] = []
    assert check.run(pauses.append, lambda: False) is None
    assert len(pauses) == 1
    assert [type(event) for event in emitted] == [RedisErrorReply, RedisRecovered]
