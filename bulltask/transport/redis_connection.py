"""Connections of redis-py, with a deadline for complete replies: the only module that uses private parts of redis-py.

redis-py connects (TLS, ``AUTH``, ``SELECT``) and parses replies. Its clients would take twice the time of a call, so
bulltask's clients write to these connections and read from them. ``Endpoint.connection`` creates them.
"""

from __future__ import annotations

import asyncio
import select
import socket
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

import redis
import redis.asyncio
from redis._parsers import _HiredisParser
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.exceptions import TimeoutError as RedisTimeout

from bulltask.jobs.clock import mono_ms

__all__ = ["AsyncConnection", "Connection", "DeadlineParser"]

_SLACK_S: Final = 0.01  # changing a socket's timeout costs a system call


class DeadlineParser(_HiredisParser):
    """redis-py's parser with a deadline for the whole reply; redis-py's timeout restarts with each part of a reply."""

    deadline_ms: int | None = None

    def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:
        """Read the next part of a reply; raises redis-py's ``TimeoutError`` if the deadline has passed."""
        if self.deadline_ms is not None and self._sock is not None:
            remaining_s = (self.deadline_ms - mono_ms()) / 1000
            if remaining_s <= 0:
                raise RedisTimeout("timed out while reading a reply")
            if (timeout_s := self._sock.gettimeout()) is None or timeout_s > remaining_s + _SLACK_S:
                self._sock.settimeout(remaining_s)
        return super().read_from_socket(*args, **kwargs)  # type: ignore[no-untyped-call]


class Connection:
    """A connection of redis-py with a :class:`DeadlineParser`.

    Its methods raise the errors of redis-py; ``read``, which reads the next reply, returns an error reply.
    """

    def __init__(self, connection: redis.Connection) -> None:
        self._connection = connection
        self._parser = cast("DeadlineParser", connection._parser)  # noqa: SLF001
        self.read = partial(self._parser.read_response, disable_decoding=True)

    def connect(self, deadline_ms: int, now_ms: int) -> None:
        """Connect, and do redis-py's handshake, until ``deadline_ms`` (``mono_ms``)."""
        self.set_deadline(deadline_ms, now_ms)
        self._connection.connect()
        if (sock := self.socket) is not None:
            # An app that nobody closes dies in a cycle, where Python may find the socket before redis-py can close it:
            # a ResourceWarning at a random moment, which fails tests that have nothing to do with it.
            weakref.finalize(self, sock.close).atexit = False

    def send(self, data: bytes, deadline_ms: int, now_ms: int) -> None:
        """Send calls; they and their replies have a deadline (``mono_ms``)."""
        self.set_deadline(deadline_ms, now_ms)
        # redis-py would send a pipeline's calls one by one, each with a system call.
        self._connection.send_packed_command([data], check_health=False)

    def set_deadline(self, deadline_ms: int, now_ms: int) -> None:
        """Set the deadline (``mono_ms``) for sending and reading; before connecting, for the handshake."""
        self._parser.deadline_ms = deadline_ms
        if (sock := self._connection._sock) is None:  # noqa: SLF001
            return
        remaining_s = max(1, deadline_ms - now_ms) / 1000
        if (timeout_s := sock.gettimeout()) is None or abs(timeout_s - remaining_s) > _SLACK_S:
            sock.settimeout(remaining_s)

    def extend_deadline(self, deadline_ms: int, now_ms: int) -> None:
        """Set the deadline, unless it is later already."""
        self.set_deadline(max(self._parser.deadline_ms or 0, deadline_ms), now_ms)

    def can_read(self, timeout_s: float) -> bool:
        """Wait until a reply arrives; raises an error if the server closes the connection."""
        return bool(self._connection.can_read(timeout=timeout_s))

    def has_unread_bytes(self) -> bool:
        """Return, without a system call, whether received bytes have not been read, or redis-py has disconnected."""
        reader = self._parser._reader
        return reader is None or reader.has_data()

    def messages(self, deadline_ms: int, now_ms: int) -> Iterator[Any]:
        """Yield the messages that have arrived, without waiting for another; TLS may wait for a complete record."""
        sock = self.socket
        if sock is None:
            raise ConnectionError("the connection was closed")
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        pending = getattr(sock, "pending", int)  # bytes that TLS has decrypted, but not delivered
        while poll.poll(0) or pending():
            self.set_deadline(deadline_ms, now_ms)
            self._parser.read_from_socket()
            while (message := self._parser._reader.gets(False)) is not NOT_ENOUGH_DATA:
                yield message

    @property
    def socket(self) -> socket.socket | None:
        """The socket; ``None`` if it is not connected."""
        sock: socket.socket | None = self._connection._sock  # noqa: SLF001
        return sock

    def close(self) -> None:
        """Close the connection; after a fork, the child does not end the parent's."""
        self._connection.disconnect()


class AsyncConnection:
    """An asyncio connection of redis-py, without its timeouts; ``read`` reads a reply, or raises an error reply."""

    def __init__(self, connection: redis.asyncio.Connection) -> None:
        self._connection = connection
        parser: Any = connection._parser  # noqa: SLF001
        self.read = partial(parser.read_response, disable_decoding=True)

    async def connect(self) -> None:
        """Connect, and do redis-py's handshake."""
        await self._connection.connect()

    def write(self, data: bytes) -> None:
        """Send calls, without waiting; a closed connection is ignored."""
        if (writer := self._writer) is not None:
            writer.write(data)

    async def drain(self) -> None:
        """Wait until the buffer has room.

        redis-py's method would close the connection, which other tasks share, if the task is cancelled during the wait.
        """
        if (writer := self._writer) is None:
            raise ConnectionError("the connection was closed")
        if writer.transport.get_write_buffer_size():
            await writer.drain()

    def abort(self) -> None:
        """Drop the connection without sending buffered bytes, which could block on a half-open connection."""
        if (writer := self._writer) is not None:
            writer.transport.abort()

    async def close(self) -> None:
        """:meth:`abort`, and free what redis-py holds."""
        self.abort()
        with suppress(Exception):
            await self._connection.disconnect(nowait=True)

    @property
    def _writer(self) -> asyncio.StreamWriter | None:
        writer: asyncio.StreamWriter | None = self._connection._writer  # noqa: SLF001
        return writer
