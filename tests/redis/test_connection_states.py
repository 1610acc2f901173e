"""Whatever has happened to a connection, each method of a client returns, or raises the error that callers expect."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import redis

from bulltask.errors import BrokerUnavailableError
from bulltask.jobs.clock import ServerClock
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.endpoint import Endpoint
from tests.support.certificates import Certificates, TlsServer
from tests.support.flaky_proxy import FlakyProxy

pytestmark = [pytest.mark.redis, pytest.mark.one_server]

PING: Call[Any] = command("PING")
POP: Call[Any] = command("BZPOPMIN", "marker", "0.01")


def killed(client: Client, plain: redis.Redis, _: FlakyProxy | None) -> None:
    """The server has closed the connection (FIN)."""
    plain.execute_command("CLIENT", "KILL", "ID", client.connection_id())


def reset(client: Client, plain: redis.Redis, proxy: FlakyProxy | None) -> None:
    """The connection was reset (RST); with TLS, only the server closes it."""
    if proxy is None:
        killed(client, plain, proxy)
    else:
        client.connect()
        proxy.reset()


def killed_in_a_call(client: Client, plain: redis.Redis, _: FlakyProxy | None) -> None:
    """The server has closed the connection while a call blocks."""
    identity = client.connection_id()
    client.send([command("BZPOPMIN", "marker", 10).packed()])
    plain.execute_command("CLIENT", "KILL", "ID", identity)


def interrupted(client: Client, _: redis.Redis, __: FlakyProxy | None) -> None:
    """Another thread has shut the socket down."""
    client.connect()
    client.interrupt()


def disconnected(client: Client, _: redis.Redis, __: FlakyProxy | None) -> None:
    """redis-py has closed its connection after an error."""
    client.connect()
    assert client._connection is not None
    client._connection.close()


def half_a_reply(client: Client, plain: redis.Redis, proxy: FlakyProxy | None) -> None:
    """The server has closed the connection within a reply."""
    client.connect()
    if proxy is None:
        killed_in_a_call(client, plain, proxy)
    else:
        proxy.partial_reply(2, match="ping")
        client.send([PING.packed()])


STATES = [killed, reset, killed_in_a_call, interrupted, disconnected, half_a_reply]
USES: dict[str, Callable[[Client], object]] = {
    "has_reply": Client.has_reply,
    "receive": lambda client: client.receive(1),
    "send": lambda client: client.send([PING.packed()]),
    "run": lambda client: client.run(PING),
    "run_many": lambda client: client.run_many([PING, PING]),
    "try_many": lambda client: client.try_many([PING, PING]),
    "start_many": lambda client: client.start_many([PING], [PING.packed()])(),
    "wait": lambda client: client.wait(POP, 10, lambda: None),
    "wait_then": lambda client: client.wait_then(POP, PING, 10, lambda: None),
    "dry_run": lambda client: client.dry_run([PING]),
    "connection_id": Client.connection_id,
    "close_if_dead": Client.close_if_dead,
    "interrupt": Client.interrupt,
    "fileno": Client.fileno,
    "close": Client.close,
}


@pytest.fixture(params=["plain", pytest.param("tls", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[tuple[str, str, FlakyProxy | None]]:
    """The URL for the client, the plain URL of the same server, and the proxy between them; none with TLS."""
    if request.param == "tls":
        tls: TlsServer = request.getfixturevalue("tls_server")
        yield f"rediss://localhost:{tls.port}/0?{certificates.query()}", tls.plain.url, None
    else:
        plain: RedisServer = request.getfixturevalue("redis_server")
        with FlakyProxy("127.0.0.1", plain.port) as proxy:
            yield f"redis://127.0.0.1:{proxy.port}/0", plain.url, proxy


@pytest.mark.parametrize("state", STATES)
def test_no_state_of_a_connection_raises_an_error_that_callers_do_not_expect(
    server: tuple[str, str, FlakyProxy | None], state: Callable[[Client, redis.Redis, FlakyProxy | None], None]
) -> None:
    url, plain_url, proxy = server
    with redis.Redis.from_url(plain_url) as plain:
        for name, use in USES.items():
            client = Client(Endpoint(url, 2_000, 2_000), ServerClock())
            state(client, plain, proxy)
            if state in {killed, reset, killed_in_a_call, half_a_reply}:
                wait_until(partial(has_ended, client), what=f"the end of the connection, for {name}")
            with suppress(BrokerUnavailableError):
                use(client)
            if proxy is not None:
                proxy.pass_all()
            with suppress(BrokerUnavailableError):  # at most one more call fails
                client.run(PING)
            assert client.run(PING) == b"PONG", name
            client.close()


def has_ended(client: Client) -> bool:
    """Return whether the peer has closed the connection; bytes that were received before remain unread."""
    assert client._connection is not None
    sock = client._connection.socket
    assert sock is not None
    try:
        received = socket.socket.recv(sock, 100, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return len(received) != 1  # nothing, TLS' notification, or half of a reply
