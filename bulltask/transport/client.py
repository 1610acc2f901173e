"""The blocking client of one server (:class:`Client`), and the pool from which threads take clients.

A client makes one call, or one pipeline of calls, at a time on one connection. It has a deadline for all replies, loads
scripts that the server does not have, and sets the server's clock.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, TypeVar, cast

from redis.exceptions import AuthenticationError, NoScriptError, ResponseError

from bulltask.jobs.clock import ServerClock, mono_ms
from bulltask.jobs.errors import BrokerError, BrokerUnavailableError, BulltaskError
from bulltask.transport import redis_errors
from bulltask.transport.call import (
    Call,
    OptionalCall,
    PackedCall,
    SyncClient,
    command,
    packed_chunks,
    packed_with_sources,
)
from bulltask.transport.discovery import TIME, PrimaryLink, check_server, handshake_calls
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.redis_connection import Connection
from bulltask.transport.redis_errors import result_or_raise

__all__ = ["Client", "ClientPool"]


R = TypeVar("R")
T = TypeVar("T")
_MULTI: Call[Any] = command("MULTI")
_DISCARD: Call[Any] = command("DISCARD")
_CLIENT_ID: Call[int] = command("CLIENT", "ID")
_PING_AFTER_S = 0.002  # the server's timeout starts a little later than the client's
_FRESH_MS = 100
_SLICE_MS = 250
_ARRIVED_MS = 100
_NEVER_MS: Final = 2**62


class Client:
    """One connection: makes calls, loads scripts that the server does not have, and sets the clock.

    It is not thread-safe (see :class:`ClientPool`), and a forked process must create a new client.

    Args:
        endpoint: The server.
        clock: Set from the server's ``TIME`` on every connect and every few seconds; ``None`` for connections that only
            wait.
        name: The connection's name in ``CLIENT LIST``.
    """

    def __init__(self, endpoint: Endpoint, clock: ServerClock | None, name: str | None = None) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._name = name
        self._connection: Connection | None = None
        self._deadline_ms = _NEVER_MS
        self._authenticate_ms: int | None = None
        self._used_ms = 0
        self._identified: tuple[Connection | None, int] = (None, 0)
        self._unread: UnreadReplies | None = None
        self._link = PrimaryLink(endpoint)

    def set_deadline(self, deadline_ms: int | None) -> None:
        """Limit all calls, and connecting, to ``deadline_ms`` (``mono_ms``); ``None``: the endpoint's timeouts."""
        self._deadline_ms = _NEVER_MS if deadline_ms is None else deadline_ms

    def run(self, call: Call[R]) -> R:
        """Make one call; errors as in ``SyncClient``."""
        replies = self._round_trip(self._ready(), [call.packed()])
        if type(replies[0]) is NoScriptError:
            replies = self._with_missing_scripts([call], replies)
        return self._result(call, replies[0])

    def wait(self, call: Call[R], wait_ms: int, ping: Callable[[], object]) -> R:
        """Make a call that blocks for up to ``wait_ms``, to the millisecond; errors as in ``SyncClient``."""
        result: R = result_or_raise(self.wait_many([call], wait_ms, ping)[0])
        return result

    def wait_then(
        self, call: Call[R], then: Call[T], wait_ms: int, ping: Callable[[], object]
    ) -> tuple[R, T | BulltaskError]:
        """Make a call that blocks and one after it, as in ``SyncClient``."""
        first, second = self.wait_many([call, then], wait_ms, ping)
        return result_or_raise(first), second

    def wait_many(self, calls: Sequence[Call[Any]], wait_ms: int, ping: Callable[[], object]) -> list[Any]:
        """Like :meth:`wait_then`, but return the result, or the error, of each call."""
        connection = self._connected()

        def ping_when_due() -> None:
            until_ms = mono_ms() + wait_ms
            while not connection.can_read(self._slice_s(until_ms - mono_ms())):
                self._link.raise_if_replaced()
                if mono_ms() >= until_ms:
                    ping()
                    return

        return self.results(calls, self._round_trip(connection, [call.packed() for call in calls], ping_when_due))

    def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip and return their results in order; as in ``SyncClient``."""
        made: Sequence[Call[Any]]
        if isinstance(calls, list):
            made, replies = calls, self._replies(calls, [call.packed() for call in calls])
        else:
            made, replies = self._replies_while_built(calls)
        return [self._result(call, reply) for call, reply in zip(made, replies, strict=True)]

    def try_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes] | None = None) -> list[Any]:
        """Make independent calls in one round trip; the result of a failed call is its error, as in ``SyncClient``."""
        replies = self._replies(calls, [call.packed() for call in calls] if packed is None else packed)
        return [self._try(call, reply) for call, reply in zip(calls, replies, strict=True)]

    def start_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes]) -> Callable[[], list[Any]]:
        """Send calls without waiting for their replies, as in ``SyncClient``."""
        self._read_unread()
        clock_due = self._clock is not None and mono_ms() >= self._clock.due_at_ms
        if self._connection is None or clock_due or self._authenticate_ms is not None or self._endpoint.primary:
            results = self.try_many(calls, packed)
            return lambda: results
        unread = self._unread = UnreadReplies(len(packed), self.receive)  # before an interrupt can come
        self.send(packed)
        return lambda: self.results(calls, unread.get())

    def run_on_all_nodes(self, call: Call[R]) -> list[R]:
        """Make one call, and return its result in a list, because there is only one server."""
        return [self.run(call)]

    def pack(self, call: Call[Any]) -> bytes:
        """Return the bytes that :meth:`send_packed` sends for a call."""
        return call.packed()

    def send_packed(self, packed: Sequence[bytes]) -> list[Any]:
        """Make calls that another process has packed, in one round trip; return the raw replies, or errors."""
        return self.try_many([PackedCall(item) for item in packed], packed)

    def dry_run(self, calls: Sequence[Call[Any]]) -> list[Any] | None:
        """Queue calls in a transaction and discard it, as in ``SyncClient``."""
        connection = self._connected()
        # Both round trips use this connection: on another connection, without MULTI, the calls would be executed.
        if self._round_trip(connection, [_MULTI.packed()]) != [b"OK"]:
            return None
        *replies, end = self._round_trip(connection, [*(call.packed() for call in calls), _DISCARD.packed()])
        if end != b"OK":  # DISCARD was rejected, too: later calls would be queued in the transaction
            self.close()
        return replies

    def send(self, packed: Sequence[bytes]) -> None:
        """Send calls, whose timeout starts now; :meth:`receive` reads the replies before any other call."""
        connection = self._connection or self._connected()
        with self._closed_after_error():
            self._used_ms = now_ms = mono_ms()
            connection.send(
                b"".join(packed), min(now_ms + self._endpoint.command_timeout_ms, self._deadline_ms), now_ms
            )

    def receive(self, count: int) -> list[Any]:
        """Read the raw replies to the ``count`` calls that :meth:`send` has sent; an error reply is an exception."""
        with self._closed_after_error():
            if self._connection is None:
                raise ConnectionError("it was closed")
            now_ms = mono_ms()
            # The time may have been used up by waiting for another node, although these replies have arrived.
            self._connection.extend_deadline(now_ms + _ARRIVED_MS, now_ms)
            return [self._connection.read() for _ in range(count)]

    def results(self, calls: Sequence[Call[Any]], replies: Sequence[Any]) -> list[Any]:
        """Convert raw replies to the results of :meth:`try_many`; scripts that the server does not have are resent."""
        final = self._with_missing_scripts(calls, list(replies))
        return [self._try(call, reply) for call, reply in zip(calls, final, strict=True)]

    def fileno(self) -> int:
        """Return the descriptor of the socket, which is readable when a reply arrives; -1 if there is no connection."""
        sock = None if self._connection is None else self._connection.socket
        return -1 if sock is None else sock.fileno()

    def has_reply(self) -> bool:
        """Return whether :meth:`receive` would return or raise now; a readable TLS socket may have half a record."""
        try:
            return self._connection is None or self._connection.can_read(0)
        except redis_errors.CONNECTION_ERRORS:
            return True  # the server has closed the connection: receive() raises the error that callers expect

    def connection_id(self) -> int:
        """Return the server's id of this connection, for ``CLIENT UNBLOCK``; raises the errors of :meth:`run`."""
        connection, identity = self._identified
        if connection is None or connection is not self._connection:
            identity = self.run(_CLIENT_ID)
            self._identified = (self._connection, identity)
        return identity

    @property
    def safe_url(self) -> str:
        """The server's URL without its password."""
        return self._endpoint.safe_url

    @property
    def database(self) -> int:
        """The number of the database."""
        return self._endpoint.url.database

    def connect(self) -> None:
        """Connect now instead of on the first call, and set the clock if it is due; raises the errors of :meth:`run`.

        Call it before the clock is read for a call's arguments: otherwise, the call sets the clock after that.
        """
        self._ready()

    def close(self) -> None:
        """Close the connection. A later call opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._unread is not None:
            self._unread.abandon(f"the connection to Redis at {self.safe_url} was closed")
            self._unread = None

    def close_if_dead(self) -> None:
        """Close a connection that the server has closed (a restart, an idle timeout); the next call opens a new one.

        A connection with unread bytes is closed, too: they would be read as the reply to the next call.
        """
        if self._connection is None:
            return
        try:
            if mono_ms() - self._used_ms < _FRESH_MS:
                is_closed = self._connection.has_unread_bytes()
            else:
                is_closed = self._connection.can_read(0)  # an idle connection is readable only if it was closed
        except redis_errors.CONNECTION_ERRORS:
            is_closed = True
        if is_closed or (self._endpoint.primary is not None and self._link.is_replaced()):
            self.close()

    def interrupt(self) -> None:
        """Abort another thread's call, which raises ``BrokerUnavailableError`` immediately.

        This only shuts the socket down. If it were closed, its descriptor could be reused while that thread is reading.
        """
        if self._connection is not None and (sock := self._connection.socket) is not None:
            with suppress(OSError):
                # Not sock.shutdown(): for a TLS socket it drops the TLS state that the other thread is using.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _replies(self, calls: Sequence[Call[Any]], packed: Sequence[bytes]) -> list[Any]:
        """Make calls in one round trip, and again those whose script the server does not have."""
        replies = self._round_trip(self._ready(), packed)
        return self._with_missing_scripts(calls, replies) if NoScriptError in map(type, replies) else replies

    def _replies_while_built(self, calls: Iterable[Call[Any]]) -> tuple[Sequence[Call[Any]], list[Any]]:
        """Send calls while the next ones are built; return them and their replies."""
        made: list[Call[Any]] = []
        self._ready()
        with self._closed_after_error():
            for chunk, packed in packed_chunks(calls):
                self.send(packed)
                made += chunk
            replies = self._checked(self.receive(len(made)))
        return made, self._with_missing_scripts(made, replies)

    def _with_missing_scripts(self, calls: Sequence[Call[Any]], replies: list[Any]) -> list[Any]:
        while missing := redis_errors.to_resend(calls, replies):
            again = self._round_trip(self._ready(), packed_with_sources([calls[index] for index in missing]))
            for index, reply in zip(missing, again, strict=True):
                replies[index] = reply
        return replies

    def _ready(self) -> Connection:
        """Return the connection, with all its replies read and the clock set."""
        if (connection := self._connection) is None or self._unread is not None or self._authenticate_ms is not None:
            connection = self._connected()
        if self._clock is not None and mono_ms() >= self._clock.due_at_ms:
            self._read_clock(self._clock, connection)
        return connection

    def _round_trip(
        self, connection: Connection, packed: Sequence[bytes], between: Callable[[], None] | None = None
    ) -> list[Any]:
        try:
            self._used_ms = now_ms = mono_ms()
            connection.send(
                b"".join(packed), min(now_ms + self._endpoint.command_timeout_ms, self._deadline_ms), now_ms
            )
            if between is not None:
                between()
            replies = []
            for _ in packed:  # not a comprehension, which takes another call
                replies.append(connection.read())  # noqa: PERF401
        except redis_errors.CONNECTION_ERRORS as exc:
            self.close()
            raise redis_errors.connection_error(exc, self._link.url, connecting=False) from exc
        except BaseException:
            # After an interrupt (a time limit, Ctrl-C) between sending and reading, the reply would be read as the
            # reply to the next call.
            self.close()
            raise
        return replies if self._endpoint.primary is None else self._checked(replies)

    def _checked(self, replies: list[Any]) -> list[Any]:
        """Return replies, unless sentinels have replaced the server."""
        if self._endpoint.primary is not None and self._link.must_close(replies):
            self.close()
            self._link.raise_if_replaced()
        return replies

    @contextmanager
    def _closed_after_error(self) -> Iterator[None]:
        """Close the connection after any error or interrupt, as :meth:`_round_trip` does without this call."""
        try:
            yield
        except redis_errors.CONNECTION_ERRORS as exc:
            self.close()
            raise redis_errors.connection_error(exc, self._link.url, connecting=False) from exc
        except BaseException:
            self.close()
            raise

    def _read_unread(self) -> None:
        """Read the replies to :meth:`start_many`, which would be read as the replies to the next call."""
        if self._unread is not None:
            self._unread.read()
            self._unread = None

    def _connected(self) -> Connection:
        self._read_unread()
        if self._connection is None:
            deadline_ms = None if self._deadline_ms == _NEVER_MS else self._deadline_ms
            remaining_ms = None if deadline_ms is None else max(1, deadline_ms - mono_ms())
            endpoint = self._link.find_server(self._endpoint.within(remaining_ms), deadline_ms)
            connection = endpoint.connection(self._name)
            now_ms = mono_ms()
            until_ms = now_ms + endpoint.connect_timeout_ms + endpoint.command_timeout_ms
            try:
                connection.connect(min(until_ms, self._deadline_ms), now_ms)
            except (*redis_errors.CONNECTION_ERRORS, ResponseError) as exc:
                connection.close()
                raise self._link.not_connected(exc) from redis_errors.visible_cause(exc)
            except BaseException:  # an interrupt
                connection.close()
                raise
            self._connection = connection
            self._authenticate_ms = endpoint.next_authentication_ms()
            self._handshake(connection)
        elif self._authenticate_ms is not None and mono_ms() >= self._authenticate_ms:
            self._authenticate_again(self._connection)
        return self._connected() if self._connection is None else self._connection

    def _authenticate_again(self, connection: Connection) -> None:
        """Authenticate with current credentials, before the server closes the connection because they have expired."""
        self._authenticate_ms = self._endpoint.next_authentication_ms()
        now_ms = mono_ms()
        try:
            call = self._endpoint.authentication().call()
            until_ms = min(now_ms + self._endpoint.command_timeout_ms, self._deadline_ms)
            connection.send(call.packed(), until_ms, now_ms)
            connection.read()
        except (AuthenticationError, BrokerError):
            return  # the server may not know a new password yet; the connection remains authenticated as before
        except BaseException as exc:
            self.close()
            if not isinstance(exc, redis_errors.CONNECTION_ERRORS):
                raise

    def _handshake(self, connection: Connection) -> None:
        """Check whether the server is usable, and set the clock, in one round trip."""
        sent_ms = mono_ms()
        try:
            info, *time = self._round_trip(connection, [call.packed() for call in handshake_calls(self._clock)])
        except BrokerUnavailableError as exc:
            cause = exc.__cause__ or exc
            raise redis_errors.connection_error(cause, self._endpoint.safe_url, connecting=True) from exc.__cause__
        try:
            check_server(info, self._endpoint)
        except BrokerError:
            self.close()
            raise
        if self._clock is not None:
            self._set_clock(self._clock, time[0], sent_ms)
            while self._clock.is_uncertain:
                self._read_clock(self._clock, connection)

    def _slice_s(self, wait_ms: int) -> float:
        """Return how long a wait may last before this client checks whether the primary has changed."""
        slice_ms = wait_ms if self._endpoint.primary is None else min(wait_ms, _SLICE_MS)
        return max(0, slice_ms) / 1000 + _PING_AFTER_S

    def _read_clock(self, clock: ServerClock, connection: Connection) -> None:
        sent_ms = mono_ms()
        self._set_clock(clock, self._round_trip(connection, [TIME.packed()])[0], sent_ms)

    def _set_clock(self, clock: ServerClock, reply: Any, sent_ms: int) -> None:
        clock.set(self._result(TIME, reply), sent_ms, mono_ms())

    def _result(self, call: Call[R], reply: Any) -> R:
        if isinstance(reply, ResponseError):
            if isinstance(call, OptionalCall):
                return cast("R", None)
            raise redis_errors.reply_error(reply, self._link.url) from reply
        try:
            return call.parse_reply(reply)
        except BulltaskError:  # some of them are also a ValueError
            raise
        except redis_errors.UNEXPECTED_REPLY as exc:
            self.close()  # the following replies may belong to other calls, too
            raise redis_errors.unexpected_reply(exc, self._link.url) from exc

    def _try(self, call: Call[R], reply: Any) -> R | BulltaskError:
        try:
            return self._result(call, reply)
        except BulltaskError as exc:
            return exc


class UnreadReplies:
    """The replies to calls that a client has sent without waiting for them.

    The client reads them, with ``receive``, before it makes another call, and keeps them here until somebody asks for
    them.
    """

    def __init__(self, count: int, receive: Callable[[int], list[Any]]) -> None:
        self._count = count
        self._receive = receive
        self._replies: list[Any] | None = None
        self._error: BrokerUnavailableError | None = None

    def read(self) -> None:
        """Read the replies now, unless they have been read or the connection was closed; keep an error, too."""
        if self._replies is None and self._error is None:
            self._error = BrokerUnavailableError("the replies were not read, because the process was interrupted")
            try:
                self._replies = self._receive(self._count)
            except BrokerUnavailableError as exc:
                self._error = exc

    def abandon(self, reason: str) -> None:
        """Record that the connection was closed before the replies were read."""
        if self._replies is None and self._error is None:
            self._error = BrokerUnavailableError(reason)

    def get(self) -> list[Any]:
        """Return the replies, or raise ``BrokerUnavailableError``: then it is unknown which calls were executed."""
        self.read()
        if self._replies is None:
            assert self._error is not None
            raise self._error
        return self._replies


class _CheckedOutClient:
    """Context manager for a pooled client. (``contextlib``'s generator would take 3% of a send's time.)"""

    __slots__ = ("_client", "_pool")

    def __init__(self, pool: ClientPool, client: SyncClient) -> None:
        self._pool = pool
        self._client = client

    def __enter__(self) -> SyncClient:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._pool.put_back(self._client)


class ClientPool:
    """Clients for any number of threads; ``make`` creates them, and at most ``limit`` idle ones are kept.

    It works after a fork, because a child does not use the parent's clients. It has no lock, because a signal handler
    that sends may have interrupted a send, and would then wait for the lock forever.
    """

    def __init__(self, make: Callable[[], SyncClient], *, limit: int = 10) -> None:
        self._make = make
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: deque[SyncClient] = deque()  # append() and pop() are atomic

    def client(self, deadline_ms: int | None = None) -> AbstractContextManager[SyncClient]:
        """Return a client for a ``with`` statement; ``deadline_ms`` (``mono_ms``) is for all of its calls."""
        if os.getpid() != self._pid:
            # After a fork the sockets are shared with the parent, so they must not be read, nor shut down.
            self._reset()
        try:
            client = self._idle.pop()
        except IndexError:
            client = self._make()
        client.close_if_dead()
        client.set_deadline(deadline_ms)
        return _CheckedOutClient(self, client)

    def put_back(self, client: SyncClient) -> None:
        """Keep a client for the next caller, or close it; :meth:`client` does this at the end of its block."""
        if len(self._idle) < self._limit:
            self._idle.append(client)
        else:
            client.close()

    def run(self, call: Call[R]) -> R:
        """:meth:`SyncClient.run` on a client from the pool."""
        with self.client() as client:
            return client.run(call)

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """:meth:`SyncClient.run_many` on a client from the pool."""
        with self.client() as client:
            return client.run_many(calls)

    def close(self) -> None:
        """Close every idle connection."""
        idle = self._idle
        self._idle = deque()
        for client in idle:
            client.close()
