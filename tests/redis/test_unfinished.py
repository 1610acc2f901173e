"""What ``ResultTimeoutError`` says about a job that has not finished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from bulltask import App, AsyncResult, group
from bulltask.errors import ResultTimeoutError
from bulltask.testing import RedisServer
from bulltask.transport.call import Call, command
from bulltask.transport.scripts.move import FetchOptions, move_to_active

pytestmark = pytest.mark.redis

Connect = Callable[[str], None]
WAIT_S = 0.5


@pytest.fixture
def connect_worker(app: App) -> Iterator[Connect]:
    """Open connections with the names of workers, by which BullMQ recognizes them."""
    with ExitStack() as stack:

        def connect(queue: str) -> None:
            keys = app._broker.keys(queue)
            client = app._broker.client(keys.client_name("worker@host"))
            stack.callback(client.close)
            client.connect()
            client.run(command("EXISTS", keys.probe))  # in a cluster, on the node that has the queue

        yield connect


def paused(app: App, _: Connect) -> AsyncResult[Any]:
    app.queue("default").pause()
    return app.send_task("shop.add")


def acquired(app: App, _: Connect) -> AsyncResult[Any]:
    sent = app.send_task("shop.add")
    with app._broker.pool.client() as client:
        client.connect()
        now_ms = app._broker.clock.now_ms()
        client.run(move_to_active(app._broker.keys("default"), FetchOptions("token", 30_000, "w1@host"), now_ms))
    return sent


def retried(app: App, connect: Connect) -> AsyncResult[Any]:
    sent, keys = acquired(app, connect), app._broker.keys("default")
    calls: list[Call[Any]] = [
        command("HSET", keys.job(sent.id), "failedReason", "no route to bank", "atm", 1),
        command("LREM", keys.active, 0, sent.id),
        command("ZADD", keys.delayed, 2**60, sent.id),
    ]
    app._broker.pool.run_many(calls)
    return sent


def with_children(app: App, _: Connect) -> AsyncResult[Any]:
    add: Any = app.signature("shop.add")
    return (group(add.clone(), add.clone()) | app.signature("shop.total")).delay()


def served(queue: str) -> Callable[[App, Connect], AsyncResult[Any]]:
    def send(app: App, connect: Connect) -> AsyncResult[Any]:
        connect(queue)
        return app.send_task("shop.add")

    return send


CASES: dict[str, tuple[Callable[[App, Connect], AsyncResult[Any]], str]] = {
    "no worker": (
        lambda app, _: app.send_task("shop.add"),
        r"'shop\.add', and it is waiting, because no worker is connected to this queue at redis\S*://\S+\. Start one "
        r"with `bulltask worker -A APP -Q default`, with the same broker_url\.",
    ),
    "another queue": (served("mail"), r"no worker is connected to this queue at \S+, only to mail\. Start one"),
    "a busy worker": (served("default"), r"it is waiting; workers that are connected to this queue: 1\."),
    "paused": (paused, r"it is waiting, because the queue is paused\."),
    "delayed": (
        lambda app, _: app.send_task("shop.add", countdown=60),
        r"it is delayed, because no worker is connected",
    ),
    "running": (acquired, r"it is active on worker w1@host\."),
    "retried": (retried, r"it is delayed, because an attempt failed: no route to bank\."),
    "children": (with_children, r"'shop\.total', and it is waiting-children: its child jobs have not finished\."),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_timeout_says_why_the_job_has_not_finished(app: App, connect_worker: Connect, case: str) -> None:
    send, message = CASES[case]
    result = send(app, connect_worker)
    for wait in (lambda: asyncio.to_thread(result.get, WAIT_S), lambda: result.aget(WAIT_S)):
        with pytest.raises(ResultTimeoutError, match=message) as caught:
            await wait()
        text = str(caught.value)
        assert text.startswith(f"job {result.id} in queue default did not finish within 0.5 s: its task is ")
        assert text.endswith(". The job is not affected, and you can call get() again")
    await app.aclose()


def test_a_short_wait_is_a_poll_and_reads_nothing_more(app: App, connect_worker: Connect) -> None:
    with pytest.raises(ResultTimeoutError, match=r"within 0\.1 s\. The job is not affected"):
        app.send_task("shop.add").get(timeout=0.1)


def test_the_password_of_the_server_is_not_shown_and_a_forbidden_command_is_no_error(
    server_factory: Callable[..., RedisServer],
) -> None:
    server = server_factory(password="secret")
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">other", "~*", "&*", "+@all", "-client|list")
    app = App("tested", server.url, set_as_current=False)
    with pytest.raises(ResultTimeoutError, match=r"is connected to this queue at redis://\*+@") as caught:
        app.send_task("shop.add").get(timeout=WAIT_S)
    assert "secret" not in str(caught.value)
    app.close()
    app = App("tested", server.url.replace(":secret@", "app:other@"), set_as_current=False)
    with pytest.raises(ResultTimeoutError, match=r"'shop\.add', and it is waiting\. The job"):
        app.send_task("shop.add").get(timeout=WAIT_S)
    app.close()
