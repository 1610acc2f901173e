"""A Redis Cluster node, a Sentinel or a missing database raises a clear error immediately, and nothing is stored."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog

from bulltask import App
from bulltask.errors import BrokerConfigError
from bulltask.observe.bus import Bus
from bulltask.queue import FlowJob, Queue, QueueEvents
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.run import StartupCheck
from bulltask.worker.slots import ExitCode
from tests.conftest import ServerFactory
from tests.support.cluster_and_sentinel import sentinel

pytestmark = pytest.mark.redis

KINDS = {
    "cluster": r"127\.0\.0\.1:(\d+)/0 is a node of a Redis Cluster\. Set broker_url to redis\+cluster://127\.0\.0\.1:\1,",
    "sentinel": r"127\.0\.0\.1:\d+/0 is a Redis Sentinel, which stores no jobs",
    "sentinel's database": r"127\.0\.0\.1:\d+/1 is a Redis Sentinel, which stores no jobs",
    "database": r"127\.0\.0\.1:\d+/99 has no such database",
}
USES: list[Callable[[App], Any]] = [
    lambda app: app.send_task("work"),
    lambda app: app.flows().add(FlowJob("work", "mail")),
    lambda app: app.queue("mail").add("work", {}),
    lambda app: app.queue("mail").get_job_counts(),
    lambda app: app.result("1").get(timeout=60),
    lambda app: app.result("1").state,
]
ASYNC_USES: list[Callable[[App], Awaitable[Any]]] = [
    lambda app: app.asend_task("work"),
    lambda app: app.aqueue("mail").add("work", {}),
    lambda app: app.aqueue("mail").get_job_counts(),
    lambda app: app.result("1").aget(timeout=60),
]


@pytest.fixture(params=KINDS)
def unsupported_server(request: pytest.FixtureRequest, server_factory: ServerFactory, tmp_path: Path) -> Any:
    """The URL of a server that bulltask does not support, and the expected error."""
    with ExitStack() as stack:
        if request.param == "cluster":
            url = request.getfixturevalue("cluster_url")
            stack.callback(assert_empty, url)
        elif request.param == "database":
            url = server_factory().url.removesuffix("0") + "99"
        else:
            url = stack.enter_context(sentinel(tmp_path))
            url = url if request.param == "sentinel" else url.removesuffix("0") + "1"
        yield url, KINDS[request.param]


def assert_empty(url: str) -> None:
    with redis.Redis.from_url(url) as plain:
        assert plain.keys("*") == []


def test_sending_and_reading_raise_a_config_error(unsupported_server: tuple[str, str]) -> None:
    url, message = unsupported_server
    app = App("shop", url)
    for use in USES:
        with pytest.raises(BrokerConfigError, match=message):
            use(app)
    with pytest.raises(BrokerConfigError, match=message), QueueEvents("mail", url) as events:
        next(iter(events))
    app.close()


async def test_sending_and_reading_with_asyncio_raise_a_config_error(unsupported_server: tuple[str, str]) -> None:
    url, message = unsupported_server
    app = App("shop", url)
    for use in ASYNC_USES:
        with pytest.raises(BrokerConfigError, match=message):
            await use(app)
    await app.aclose()


def test_a_worker_logs_the_error_and_does_not_start(unsupported_server: tuple[str, str]) -> None:
    url, message = unsupported_server
    app = App("shop", url)
    broker, config = app._broker, app._config
    client = broker.client()
    with structlog.testing.capture_logs() as lines:
        logger = structlog.get_logger()
        startup_check = StartupCheck(client, [broker.keys("mail")], config, logger, ReconnectBackoff(Bus(), config))
        assert startup_check.run(lambda _: None, lambda: True) is ExitCode.BROKER_UNUSABLE
    (line,) = lines
    assert line["log_level"] == "error"
    with pytest.raises(BrokerConfigError, match=message):
        raise BrokerConfigError(line["error"])
    client.close()
    app.close()


def test_a_server_without_the_hello_command_is_supported(server_factory: ServerFactory) -> None:
    server = server_factory(extra=["--rename-command", "HELLO", "HELLO-UNKNOWN"])
    with Queue("mail", server.url) as queue:
        queue.add("work", {})
        assert queue.get_waiting_count() == 1
