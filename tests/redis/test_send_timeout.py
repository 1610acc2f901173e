"""A send takes no longer than ``broker_publish_timeout``, whatever Redis and the network do."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import pytest
import redis

import bulltask
from bulltask import App
from bulltask.errors import BrokerUnavailableError
from bulltask.testing.worker import RedisServer
from bulltask.transport.call import QueueKeys, command
from tests.support.flaky_proxy import FlakyProxy
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.redis, pytest.mark.slow]

LIBRARY = str(Path(bulltask.__file__).parent)
KEYS = QueueKeys("bull", "{default}", "default")
LIMIT_S = 1.0
LATE_S = 15.0
"""How late a send may end on a busy machine; without the limit it would take 41 s."""


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def app(proxy: FlakyProxy) -> Iterator[App]:
    """An app whose other timeouts have their defaults."""
    app = App("sender", f"redis://127.0.0.1:{proxy.port}/0", broker_publish_timeout=LIMIT_S)
    yield app
    app.close()


def time_failure(send: Callable[[], object]) -> tuple[float, str]:
    """Return how long a failing send took, and its error message."""
    started = time.monotonic()
    with pytest.raises(BrokerUnavailableError) as caught:
        send()
    return time.monotonic() - started, str(caught.value)


async def atime_failure(send: Awaitable[object]) -> tuple[float, str]:
    """:func:`time_failure` for asyncio."""
    started = time.monotonic()
    with pytest.raises(BrokerUnavailableError) as caught:
        await send
    return time.monotonic() - started, str(caught.value)


@pytest.mark.parametrize("connected", [True, False])
def test_a_send_times_out_if_redis_accepts_but_never_replies(app: App, proxy: FlakyProxy, *, connected: bool) -> None:
    if connected:
        app.send_task("work")
    proxy.blackhole()
    seconds, message = time_failure(lambda: app.send_task("work", job_id="invoice-5"))
    assert LIMIT_S * 0.9 < seconds < LIMIT_S + LATE_S
    assert "Gave up sending job invoice-5 after " in message
    assert "Redis may have stored it" in message


@pytest.mark.parametrize("connected", [True, False])
async def test_an_asyncio_send_times_out_if_redis_accepts_but_never_replies(
    app: App, proxy: FlakyProxy, *, connected: bool
) -> None:
    if connected:
        await app.asend_task("work")
    proxy.blackhole()
    sends = [atime_failure(app.asend_task("work", job_id=f"invoice-{number}")) for number in range(20)]
    for number, (seconds, message) in enumerate(await asyncio.gather(*sends)):
        assert LIMIT_S * 0.9 < seconds < LIMIT_S + LATE_S
        assert f"Gave up sending job invoice-{number}" in message
    await app.aclose()


def test_a_dead_connection_delays_a_send_by_half_its_limit(
    app: App, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    app.send_task("work")
    proxy.freeze()
    started = time.monotonic()
    sent = app.send_task("work")
    assert LIMIT_S / 2 * 0.9 < time.monotonic() - started < LIMIT_S + LATE_S
    assert redis_client.llen(KEYS.wait) == 2
    assert redis_client.exists(KEYS.job(sent.id))


async def test_a_dead_connection_delays_an_asyncio_send_by_half_its_limit(
    app: App, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    await app.asend_task("work")
    proxy.freeze()
    sent = await app.asend_task("work")
    assert redis_client.llen(KEYS.wait) == 2
    assert redis_client.exists(KEYS.job(sent.id))
    await app.aclose()


def test_a_job_whose_send_timed_out_is_stored_once_if_it_is_sent_again(
    app: App, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    app.send_task("work")
    proxy.drop_replies(match="evalsha", then="freeze")
    time_failure(lambda: app.send_task("work", job_id="invoice-5"))
    assert redis_client.exists(KEYS.job("invoice-5"))
    proxy.pass_all()
    assert app.send_task("work", job_id="invoice-5").id == "invoice-5"
    waiting: Any = redis_client.lrange(KEYS.wait, 0, -1)
    assert waiting.count("invoice-5") == 1


def test_the_limit_applies_to_each_round_trip_of_many_jobs(proxy: FlakyProxy, redis_client: redis.Redis) -> None:
    app = App("sender", f"redis://127.0.0.1:{proxy.port}/0", broker_publish_timeout=4)
    work = app.task(name="work")(lambda n: None)
    work.delay(0)
    proxy.latency(0.4)
    started = time.monotonic()
    work.delay_many([(n,) for n in range(5_001)])
    assert time.monotonic() - started > 4
    assert redis_client.llen(KEYS.wait) == 5_002
    app.close()


def test_the_error_for_a_bulk_send_names_the_first_and_the_last_job(app: App, proxy: FlakyProxy) -> None:
    work = app.task(name="work")(lambda n: None)
    calls = [work.s(n).set(job_id=f"n-{n}") for n in range(3)]
    proxy.blackhole()
    _, message = time_failure(lambda: app.send_many(calls))
    assert "Gave up sending 3 jobs, n-0 to n-2, after" in message


def test_without_publish_timeout_each_attempt_has_the_command_timeout(proxy: FlakyProxy) -> None:
    url = f"redis://127.0.0.1:{proxy.port}/0"
    app = App("sender", url, broker_publish_timeout=None, broker_publish_retries=2, redis_socket_timeout=0.3)
    app.send_task("work")
    proxy.blackhole()
    seconds, message = time_failure(lambda: app.send_task("work"))
    assert 0.9 * 0.9 < seconds < 0.9 + LATE_S
    assert "after 3 attempts;" in message
    app.close()


def test_the_limit_on_a_send_does_not_apply_to_the_next_call_on_its_connection(app: App, proxy: FlakyProxy) -> None:
    app.send_task("work")
    proxy.latency(LIMIT_S * 0.6)  # longer than an attempt to send may take, shorter than a command
    reply: Any = app._broker.pool.run(command("PING"))
    assert reply == b"PONG"
    assert proxy.connections == 1


@pytest.mark.parametrize("connected", [True, False])
def test_a_send_times_out_if_its_reply_arrives_byte_by_byte(app: App, proxy: FlakyProxy, *, connected: bool) -> None:
    if connected:
        app.send_task("work")
    proxy.bandwidth(10, replies_only=True)
    seconds, _ = time_failure(lambda: app.send_task("work"))
    assert LIMIT_S * 0.9 < seconds < LIMIT_S + scale_to_load(1)


@pytest.mark.parametrize("connected", [True, False])
def test_any_other_call_times_out_if_its_reply_arrives_byte_by_byte(proxy: FlakyProxy, *, connected: bool) -> None:
    url = f"redis://127.0.0.1:{proxy.port}/0"
    app = App("reader", url, redis_socket_timeout=0.5, redis_socket_connect_timeout=0.5)
    queue = app.queue("default")
    if connected:
        queue.get_job_counts()
    proxy.bandwidth(10, replies_only=True)
    seconds, _ = time_failure(queue.get_job_counts)
    assert seconds < 1 + scale_to_load(1)
    proxy.pass_all()
    assert queue.get_job_counts()["waiting"] == 0
    app.close()


def test_a_signal_handler_may_send_at_any_line_of_another_send(broker_url: str, redis_client: redis.Redis) -> None:
    app = App("sender", broker_url)
    sent: list[str] = []

    def handler(frame: FrameType, event: str, _: object) -> Any:  # runs between two lines, like a signal handler
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if event == "line":
            sent.append(app.send_task("handler").id)
        return handler

    def send() -> None:
        sys.settrace(handler)  # does not trace what the handler itself does
        sent.append(app.send_task("first").id)
        sent.append(app.send_task("second").id)

    thread = Thread(target=send, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), f"hung after {len(sent)} sends"
    waiting: Any = redis_client.lrange(KEYS.wait, 0, -1)
    assert sorted(waiting) == sorted(sent)
    app.close()


def test_the_error_for_a_closed_port_mentions_no_unknown_outcome() -> None:
    app = App("sender", "redis://127.0.0.1:1/0", broker_reconnect_delay=0.01)
    _, message = time_failure(lambda: app.send_task("work"))
    assert message.startswith("cannot connect to Redis at")
    assert "given up" not in message
