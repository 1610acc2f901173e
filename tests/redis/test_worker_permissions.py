"""A worker whose Redis user (ACL) lacks a permission reports it before it acquires a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
import structlog

from bulltask import App
from bulltask.lua import loader
from bulltask.observe.bus import Bus
from bulltask.transport import permissions
from bulltask.transport.permissions import metrics_commands, role_grants, worker_commands
from bulltask.worker.beat import Beat, read_entries
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.fleet import QueueCheck
from bulltask.worker.run import StartupCheck
from bulltask.worker.slots import ExitCode
from bulltask.worker.supervisor import NamedConnections

pytestmark = [pytest.mark.redis, pytest.mark.one_server]


@pytest.fixture
def acl(redis_client: redis.Redis) -> Iterator[Any]:
    """A function that sets the permissions of the user ``worker``."""
    yield lambda *words: redis_client.execute_command("ACL SETUSER worker reset on >secret ~* &*", *words)
    redis_client.execute_command("ACL DELUSER worker")


def start(broker_url: str, **settings: Any) -> tuple[ExitCode | None, list[Any]]:
    """Run a worker's checks of Redis; return its exit code and the errors that it logs."""
    app = App("shop", broker_url.replace("://", "://worker:secret@"), **settings)
    client = app._broker.client()
    with structlog.testing.capture_logs() as lines:
        logger, backoff = structlog.get_logger(), ReconnectBackoff(Bus(), app._config)
        startup_check = StartupCheck(client, [app._broker.keys("mail")], app._config, logger, backoff)
        code = startup_check.run(lambda _: None, lambda: True)
    client.close()
    app.close()
    return code, [line["error"] for line in lines if line["log_level"] == "error"]


def test_each_forbidden_command_is_named(broker_url: str, redis_client: redis.Redis, acl: Any) -> None:
    acl("+@all")
    assert start(broker_url) == (None, [])
    for name in worker_commands():
        acl("+@all", f"-{name}")
        code, (error,) = start(broker_url)
        assert code is ExitCode.BROKER_UNUSABLE, name
        assert f"Grant them: ACL SETUSER worker +{name}" in error or f"Grant it: ACL SETUSER worker +{name}" in error
        assert "secret" not in error
    acl("+@all", "-zremrangebyscore", "-lpos", "-xtrim")
    assert "lpos, xtrim, zremrangebyscore. Grant them: ACL SETUSER worker +lpos +xtrim" in start(broker_url)[1][0]


def test_the_commands_for_metrics_are_needed_only_with_metrics(broker_url: str, acl: Any) -> None:
    assert metrics_commands() == ("lindex",)
    acl("+@all", "-lindex", "-rpop")
    assert start(broker_url) == (None, [])
    code, (error,) = start(broker_url, metrics_port=9_000)
    assert code is ExitCode.BROKER_UNUSABLE
    assert "Grant them: ACL SETUSER worker +lindex" in error


def test_the_permission_check_executes_no_command(broker_url: str, redis_client: redis.Redis, acl: Any) -> None:
    acl("+@all")
    start(broker_url)
    before: Any = redis_client.hgetall("bull:{mail}:meta")
    redis_client.config_resetstat()
    start(broker_url)
    stats: Any = redis_client.info("commandstats")
    assert stats["cmdstat_discard"]["calls"] == 1
    written = ("del", "lpush", "rpush", "zadd", "zrem", "zremrangebyscore", "ltrim", "xtrim", "set", "incr")
    assert sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in written) == 0
    assert redis_client.hgetall("bull:{mail}:meta") == before


def test_a_worker_starts_even_if_transactions_are_forbidden(
    broker_url: str, redis_client: redis.Redis, acl: Any
) -> None:
    for name in ("multi", "discard"):
        acl("+@all", f"-{name}")
        assert start(broker_url) == (None, [])
        assert redis_client.hget("bull:{mail}:meta", "version"), "the next command was executed"
        redis_client.delete("bull:{mail}:meta")


def test_the_commands_are_read_from_the_scripts() -> None:
    assert {"zremrangebyscore", "lpush", "rpush", "xadd", "hincrby", "bzpopmin", "expire", "zrank"} <= set(
        worker_commands()
    )
    assert {
        script.name for script in loader.all_scripts()
    } >= permissions._NOT_FOR_WORKERS | permissions._READERS | permissions._SENDERS


def test_the_keys_of_another_prefix_suffice_for_its_schedules_and_queues(
    broker_url: str, redis_client: redis.Redis, acl: Any
) -> None:
    acl(*role_grants(["worker"]).rules("shop"))
    schedule = {"nightly": {"task": "work", "schedule": 3600}}
    app = App("shop", broker_url.replace("://", "://worker:secret@"), prefix="shop", beat_schedule=schedule)
    with app._broker.pool.client() as client:
        client.connect()
        backoff = ReconnectBackoff(Bus(), app._config)
        beat = Beat(app, read_entries(app), client, backoff, structlog.get_logger())
        beat.tick(0, 0)
        QueueCheck(app, ["default"], "w", client, backoff, structlog.get_logger()).tick(0, 0)
    assert redis_client.hlen("bulltask:queue-consumers:shop:shop") == 2
    assert not backoff.is_active
    assert [scheduler.id for scheduler in App("reader", broker_url, prefix="shop").queue("default").schedulers.list()]
    app.close()


def test_a_worker_that_may_not_look_for_requests_does_not_report_an_outage(broker_url: str, acl: Any) -> None:
    acl("+@all", "resetkeys")
    app = App("shop", broker_url.replace("://", "://worker:secret@"))
    broker, backoff = app._broker, ReconnectBackoff(Bus(), app._config)
    connections = NamedConnections(broker.client, broker, ["mail"], "w", backoff)
    connections.has_requests = False
    connections.tick(0, 0)
    connections.close()
    assert not backoff.is_active
    assert connections.has_requests, "each service looks for its own requests"
    app.close()
