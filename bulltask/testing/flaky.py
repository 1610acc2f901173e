"""A TCP proxy that breaks connections to Redis on command, for tests of error handling.

::

    with FlakyProxy("127.0.0.1", 6379) as proxy:
        app = App("shop", broker_url=f"redis://127.0.0.1:{proxy.port}/0")
        proxy.drop_replies(10, every=3, match="evalsha")  # every third script runs, but its reply is lost
        for n in range(30):
            app.send_task("add", kwargs={"x": n, "y": 1})
        assert proxy.dropped == 10

Several faults can be active at the same time, such as ``latency`` and ``drop_replies``; ``pass_all`` ends all of them.
A method returns when its fault is active, so the fault applies to the next byte that the test sends.

``drop_replies``, ``partial_reply`` and ``inject_error`` apply to a command and its reply. The proxy parses RESP2 and
RESP3, and pairs the n-th reply with the n-th command. Pushes (RESP3) and pub/sub messages (RESP2) are not replies and
are never affected. If the stream is not RESP (TLS, inline commands), these faults apply to chunks as ``recv`` returns
them. A chunk of replies then belongs to all chunks that were sent before it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Self

from bulltask.embedded.server import STARTED_HERE
from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.errors import BulltaskError, ConfigError
from bulltask.testing.flaky_connection import ProxiedConnection
from bulltask.testing.flaky_faults import AfterLoss, CommandFilter, Counters, Faults, InjectedReply

__all__ = ["FlakyProxy"]

NO_LIMIT = 2**63


class FlakyProxy:
    """A TCP proxy on 127.0.0.1, in a separate thread, for one server; its faults can be switched on and off.

    It is a context manager. Between ``start()`` and ``close()``, methods may be called from any thread.

    Do not fork (without exec) while the proxy is running. A forked process inherits the proxy's sockets, so ``reset``
    would close a connection only after that process has exited. Fork before the start, or start workers as programs.

    Args:
        host: The server's address.
        port: The server's port.
        seed: Seed of the random numbers for ``drop_replies(probability=…)``.

    Attributes:
        host: Address that the proxy listens on, 127.0.0.1.
        port: Its port, assigned by the operating system; reserved while connections are refused.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self._upstream = (host, port)
        self._rng = random.Random(seed)  # noqa: S311 (not for cryptography)
        self._faults = Faults()
        self._counts = Counters()
        self._connections: set[ProxiedConnection] = set()
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # Start and end

    def start(self) -> Self:
        """Listen, and pass everything on; return the proxy. A second call does nothing."""
        if self._loop is None:
            # Bound but never listening, so that no other process gets the port while connections are refused.
            self._holder, self._listener = _bind_pair(self.host)
            self.port = self._holder.getsockname()[1]
            STARTED_HERE.add(self.port)  # a test's app may use it
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="flaky-proxy", daemon=True)
            self._thread.start()
            self.accept()
        return self

    def close(self) -> None:
        """Reset every connection and stop the thread; a second call does nothing."""
        if self._loop is not None:
            self._run(self._stop_listening())
            self._run(self._reset())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._holder.close()
            self._loop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # Faults of whole connections

    def pass_all(self) -> None:
        """End every fault: accept and pass on everything. Frozen connections stay frozen."""
        self._change(self._faults.clear)
        self.accept()

    def latency(self, seconds: Duration) -> None:
        """Delay every byte by ``seconds`` in each direction, which delays a round trip by twice that time."""
        self._change(partial(setattr, self._faults, "latency_ms", to_ms(seconds, "latency")))

    def bandwidth(self, bytes_per_second: int, *, replies_only: bool = False) -> None:
        """Limit the bytes per second, per connection and direction.

        Args:
            bytes_per_second: The limit.
            replies_only: Do not slow down commands.
        """
        limit = _check_positive("bytes_per_second", bytes_per_second)
        self._change(partial(self._faults.throttle, limit, replies_only))

    def slice(self, size: int) -> None:
        """Write at most ``size`` bytes at a time, so that readers receive values in parts."""
        self._change(partial(setattr, self._faults, "slice", _check_positive("size", size)))

    def blackhole(self) -> None:
        """Stall every connection, old and new, until ``pass_all``, which delivers what was sent in between.

        New connections succeed, because the kernel accepts them for the proxy, but receive nothing.
        """
        self._change(self._faults.open.clear)

    def freeze(self) -> None:
        """Freeze all current connections forever: their bytes are dropped, but they are not closed. New ones work.

        The connections to the server stay open, too. Data that the server still sends, such as a popped job, is lost.
        """
        self._change(self._freeze)

    def reset(self) -> None:
        """End all connections, including frozen ones, with RST: "connection reset by peer"."""
        self._run(self._reset())

    def refuse(self) -> None:
        """Refuse new connections until ``accept`` or ``pass_all``; open connections stay open (see ``reset``)."""
        self._run(self._stop_listening())

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        self._run(self._listen())

    # Faults of individual commands

    def drop_replies(
        self,
        count: int | None = None,
        *,
        every: int = 1,
        probability: float = 1.0,
        match: str = "",
        then: AfterLoss = "reset",
    ) -> None:
        """Execute commands but lose their replies, together with the connection.

        The proxy waits for the complete reply, so the command was executed. Commands that the client sent later (the
        rest of a pipeline) are also executed, and their replies are lost. The connection ends when no more data is in
        transit.

        Args:
            count: Number of replies to lose, ``None`` for no limit.
            every: Lose only every n-th reply.
            probability: Probability of losing each of them.
            match: Only commands that contain this text in their first 4 KiB, ignoring case. By default, all commands,
                including the handshake of a new connection (HELLO, CLIENT SETINFO).
            then: ``reset`` the connection, or ``freeze`` it, so that the client waits until its timeout.

        Raises:
            ConfigError: A number is out of range.
        """
        if not 0 <= probability <= 1:
            raise ConfigError(f"probability must be from 0 to 1, not {probability!r}")
        commands = CommandFilter(_limit(count), _check_positive("every", every), probability, match, self._rng)
        self._change(lambda: self._faults.lose_replies(commands, then))

    def partial_reply(self, n_bytes: int, count: int | None = 1, *, match: str = "") -> None:
        """Pass only the first ``n_bytes`` of a reply, then reset the connection.

        The command was executed; it is undefined whether later commands in a pipeline were.

        Args:
            n_bytes: Number of bytes that the client receives.
            count: Number of replies to truncate, ``None`` for no limit.
            match: As in ``drop_replies``.

        Raises:
            ConfigError: A number is out of range.
        """
        commands = CommandFilter(_limit(count), match=match)
        _check_positive("n_bytes", n_bytes)
        self._change(lambda: self._faults.cut_replies(commands, n_bytes))

    def inject_error(self, message: str, count: int | None = 1, *, match: str = "") -> None:
        """Reply to commands with an error instead of passing them to the server.

        Args:
            message: The error, as in ``"READONLY You can't write against a read only replica."``; a leading ``-`` is
                allowed.
            count: Number of commands, ``None`` for no limit.
            match: As in ``drop_replies``.

        Raises:
            ConfigError: ``message`` is empty or has several lines, or ``count`` is out of range.
        """
        text = message.removeprefix("-")
        if not text.strip() or "\r" in text or "\n" in text:
            raise ConfigError(f"an error reply is one line of text, not {message!r}")
        self.inject_reply(f"-{text}\r\n".encode(), count, match=match)

    def inject_reply(self, reply: bytes, count: int | None = 1, *, match: str = "") -> None:
        """Reply to commands with any bytes instead of passing them on, such as a proxy's error page.

        Args:
            reply: The bytes that the client receives.
            count: Number of commands, ``None`` for no limit.
            match: As in ``drop_replies``.

        Raises:
            ConfigError: ``count`` is out of range.
        """
        commands, injected = CommandFilter(_limit(count), match=match), InjectedReply(reply)
        self._change(lambda: self._faults.answer(commands, injected))

    # Counters

    @property
    def connections(self) -> int:
        """Number of connections that have been accepted since the start."""
        return self._counts["connections"]

    @property
    def dropped(self) -> int:
        """Number of replies that ``drop_replies`` has dropped; their commands have run."""
        return self._counts["dropped"]

    @property
    def injected(self) -> int:
        """Number of commands that received an injected error or reply."""
        return self._counts["injected"]

    def wait_for(self, condition: Callable[[FlakyProxy], bool], timeout: Duration = 10) -> None:
        """Wait until ``condition(proxy)`` is true; it is checked whenever one of the counters changes.

        Raises:
            TimeoutError: The condition did not become true in time.
        """
        self._counts.wait_for(lambda: condition(self), to_ms(timeout, "timeout"))

    # In the proxy's thread

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bind(self.host, self.port)
        self._listener.listen(512)
        asyncio.get_running_loop().add_reader(self._listener, self._accept_from, self._listener)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            # close() alone would leave the port listening in processes that were forked since the start.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def _accept_from(self, listener: socket.socket) -> None:
        """Accept a connection in a callback of the loop: a cancelled task could leave an unclosed socket."""
        with suppress(BlockingIOError, ConnectionAbortedError):  # the client has disconnected
            client, _ = listener.accept()
            client.setblocking(False)
            self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        connection = ProxiedConnection(client, self._upstream, self._faults, self._counts)
        self._connections.add(connection)
        connection.task.add_done_callback(lambda _: self._connections.discard(connection))
        self._counts.add("connections")

    def _freeze(self) -> None:
        for connection in self._connections:
            connection.frozen = True

    async def _reset(self) -> None:
        if self._connections:
            await asyncio.wait([connection.reset() for connection in self._connections])

    def _change(self, change: Callable[[], object]) -> None:
        async def call() -> None:
            change()

        self._run(call())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the proxy's thread and wait until it has taken effect."""
        if self._loop is None:
            work.close()
            raise BulltaskError("the flaky proxy is not running: use it inside `with FlakyProxy(host, port) as proxy:`")
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _bind_pair(host: str) -> tuple[socket.socket, socket.socket]:
    """Bind two sockets to one free port; try again if an outgoing connection takes the port between the two."""
    for attempts_left in reversed(range(10)):
        first = _bind(host, 0)
        try:
            return first, _bind(host, first.getsockname()[1])
        except OSError:
            first.close()
            if not attempts_left:
                raise
    raise AssertionError("unreachable")


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket()
    # Two sockets share the port, one reserves it and one listens: Linux requires the first option, macOS the second.
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def _limit(count: int | None) -> int:
    return NO_LIMIT if count is None else _check_positive("count", count)


def _check_positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value!r}")
    return value
