"""The asyncio client: one connection for any number of tasks; their calls are pipelined."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from redis.exceptions import AuthenticationError, ResponseError

from bulltask.jobs import clock as loop_timers
from bulltask.jobs.clock import LoopTimer, ServerClock, mono_ms, mono_s
from bulltask.jobs.errors import BrokerError, BrokerUnavailableError, BulltaskError
from bulltask.transport import redis_errors
from bulltask.transport.call import Call, OptionalCall, packed_with_sources
from bulltask.transport.discovery import TIME, PrimaryLink, check_server, handshake_calls
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.redis_connection import AsyncConnection

__all__ = ["AsyncClient"]

R = TypeVar("R")


class AsyncClient:
    """One connection that the tasks of one event loop share.

    Redis replies in the order of the calls, so a hundred tasks need one connection and no lock. The calls that tasks
    make in the same iteration of the event loop are sent together. The reply to a cancelled task's call is read and
    dropped. It is never passed to another task, as it was in redis-py (CVE-2023-28858).

    The arguments are those of :class:`~bulltask.transport.client.Client`.
    """

    def __init__(self, endpoint: Endpoint, clock: ServerClock | None = None, name: str | None = None) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._name = name
        self._connecting = asyncio.Lock()
        self._connection: AsyncConnection | None = None
        self._pending: deque[tuple[asyncio.Future[Any], float]] = deque()  # each with its deadline (mono_s)
        self._reply_timer: LoopTimer | None = None
        self._unsent: list[bytes] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._link = PrimaryLink(endpoint)
        self._authenticate_ms: int | None = None
        self._authenticating = False

    async def run(self, call: Call[R]) -> R:
        """Make one call; raises the same errors as :meth:`bulltask.transport.client.Client.run`."""
        reply = (await self._exchange([call.packed()]))[0]
        if redis_errors.is_noscript(reply):
            reply = (await self._exchange([call.packed_with_source()]))[0]
        return self._result(call, reply)

    async def run_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """Make several calls in one round trip, until ``deadline_ms`` (``mono_ms``); errors as in ``Client``."""
        replies = await self._exchange([call.packed() for call in calls], deadline_ms)
        if any(map(redis_errors.is_noscript, replies)):
            await self._resend(calls, replies, deadline_ms)
        return [self._result(call, reply) for call, reply in zip(calls, replies, strict=True)]

    async def try_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """:meth:`run_many` for independent calls; the result of a failed call is its error."""
        replies = await self._exchange([call.packed() for call in calls], deadline_ms)
        if any(map(redis_errors.is_noscript, replies)):
            await self._resend(calls, replies, deadline_ms)
        return [self._try(call, reply) for call, reply in zip(calls, replies, strict=True)]

    async def _resend(self, calls: Sequence[Call[Any]], replies: list[Any], deadline_ms: int | None) -> None:
        while missing := redis_errors.to_resend(calls, replies):
            again = await self._exchange(packed_with_sources([calls[index] for index in missing]), deadline_ms)
            for index, reply in zip(missing, again, strict=True):
                replies[index] = reply

    async def connect(self, deadline_ms: int | None = None) -> None:
        """Connect now instead of on the first call, and set the clock; ``deadline_ms`` as in :meth:`run_many`."""
        connection = await self._connected(deadline_ms)
        if self._clock is not None and mono_ms() >= self._clock.due_at_ms:
            await self._read_clock(self._clock, connection, deadline_ms)

    async def close(self) -> None:
        """Close the connection. Calls that are waiting fail with ``BrokerUnavailableError``."""
        reader = self._reader
        self._reader = None
        if reader is not None:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        await self._drop(ConnectionError("the client was closed"))

    async def _exchange(self, packed: Sequence[bytes], deadline_ms: int | None = None) -> list[Any]:
        connection = self._connection
        if connection is None or self._connecting.locked():  # checked here, too, to save a coroutine for each call
            connection = await self._connected(deadline_ms)
        if self._authenticate_ms is not None and mono_ms() >= self._authenticate_ms:
            connection = await self._authenticate_again(connection, deadline_ms)
        if self._clock is not None and mono_ms() >= self._clock.due_at_ms:
            await self._read_clock(self._clock, connection, deadline_ms)
        replies = await self._round_trip(connection, packed, deadline_ms)
        if self._endpoint.primary is not None and await self._link.amust_close(replies):
            await self._drop(ConnectionError("the server is no longer the primary"), only=connection)
            self._link.raise_if_replaced()
        return replies

    async def _authenticate_again(self, connection: AsyncConnection, deadline_ms: int | None) -> AsyncConnection:
        """Authenticate with current credentials, as the sync client does; return the connection to use."""
        self._authenticate_ms = self._endpoint.next_authentication_ms()
        with suppress(BrokerError):
            call = await self._endpoint.authentication().acall()
            self._authenticating = True
            try:
                await self._round_trip(connection, [call.packed()], deadline_ms)
            finally:
                self._authenticating = False
        return await self._connected(deadline_ms)

    async def _round_trip(
        self, connection: AsyncConnection, packed: Sequence[bytes], deadline_ms: int | None = None
    ) -> list[Any]:
        if connection is not self._connection:
            exc = ConnectionError("the connection was replaced")
            raise redis_errors.connection_error(exc, self._link.url, connecting=False)
        loop = asyncio.get_running_loop()
        waiters: list[asyncio.Future[Any]] = [loop.create_future() for _ in packed]
        due_s = mono_s() + _seconds(self._endpoint.command_timeout_ms, deadline_ms)
        # No await between queueing the waiters and the bytes: if another task could send a call in between, each would
        # receive the other's reply.
        self._pending.extend([(waiter, due_s) for waiter in waiters])
        if self._reply_timer is None or due_s < self._reply_timer.due_s:
            self._set_reply_timer(due_s)
        if self._unsent is None:
            self._unsent = []
            loop.call_soon(self._flush, connection, self._unsent)
        self._unsent += packed
        try:
            await connection.drain()
            return [await waiter for waiter in waiters]
        except redis_errors.CONNECTION_ERRORS as exc:
            await self._drop(exc, only=connection)
            raise redis_errors.connection_error(exc, self._link.url, connecting=False) from exc
        finally:
            for waiter in waiters:  # after a cancelled or failed exchange; cancel() ignores waiters that are done
                waiter.cancel()
                if not waiter.cancelled():
                    waiter.exception()  # mark the exception as retrieved: it has already been raised

    def _set_reply_timer(self, due_s: float) -> None:
        """Set the timer for the next timeout: one timer, because ``asyncio.timeout()`` in each call takes 4 µs.

        Its time includes sending, which may block, too: on a half-open connection the buffers fill up.
        """
        if self._reply_timer is not None:
            self._reply_timer.cancel()
        self._reply_timer = LoopTimer(due_s - mono_s(), self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._reply_timer = None
        due_s = min((due_s for waiter, due_s in self._pending if not waiter.done()), default=None)
        if due_s is None:
            return
        if due_s > mono_s():
            self._set_reply_timer(due_s)
        else:
            self._abandon(TimeoutError())

    def _flush(self, connection: AsyncConnection, unsent: list[bytes]) -> None:
        """Send the calls of one iteration of the event loop together, because each write is a system call."""
        if unsent is not self._unsent:
            return  # the connection was dropped
        self._unsent = None
        connection.write(b"".join(unsent))

    async def _connected(self, deadline_ms: int | None = None) -> AsyncConnection:
        if self._connection is not None and not self._connecting.locked():
            return self._connection
        # redis-py's timeout covers only the first step, but a server may accept connections and never reply.
        max_ms = self._endpoint.connect_timeout_ms + self._endpoint.command_timeout_ms
        try:
            async with loop_timers.timeout(_seconds(max_ms, deadline_ms)), self._connecting:
                return self._connection or await self._connect(deadline_ms)
        except BrokerError:
            raise
        except (*redis_errors.CONNECTION_ERRORS, ResponseError) as exc:
            raise self._link.not_connected(exc) from redis_errors.visible_cause(exc)

    async def _connect(self, deadline_ms: int | None) -> AsyncConnection:
        endpoint = await self._link.afind_server(self._endpoint, deadline_ms)
        connection = endpoint.async_connection(self._name)
        try:
            await connection.connect()
        except BaseException:  # including the task's cancellation
            await connection.close()
            raise
        self._connection = connection
        self._authenticate_ms = self._endpoint.next_authentication_ms()
        self._reader = asyncio.create_task(self._read_replies(connection), name="bulltask-redis-reader")
        await self._handshake(connection, deadline_ms)
        return connection

    async def _handshake(self, connection: AsyncConnection, deadline_ms: int | None) -> None:
        """Check whether the server is usable, and set the clock, in one round trip."""
        sent_ms = mono_ms()
        try:
            info, *time = await self._round_trip(
                connection, [call.packed() for call in handshake_calls(self._clock)], deadline_ms
            )
        except BrokerUnavailableError as exc:
            cause = exc.__cause__ or exc
            raise redis_errors.connection_error(cause, self._endpoint.safe_url, connecting=True) from exc.__cause__
        try:
            check_server(info, self._endpoint)
        except BrokerError as exc:
            await self._drop(exc, only=connection)
            raise
        if self._clock is not None:
            self._set_clock(self._clock, time[0], sent_ms)
            while self._clock.is_uncertain:
                await self._read_clock(self._clock, connection, deadline_ms)

    async def _read_replies(self, connection: AsyncConnection) -> None:
        reason: BaseException = ConnectionError("the reader was stopped")
        try:
            while True:
                try:
                    reply: Any = await connection.read()
                except redis_errors.ERROR_REPLIES as exc:  # the reply to one call, not the end of the connection
                    reply = exc
                except AuthenticationError as exc:
                    if not self._authenticating:
                        raise
                    reply = exc  # the connection is still authenticated with the previous credentials
                if not self._pending:
                    raise ConnectionError("the server sent an unexpected reply")
                waiter, _ = self._pending.popleft()
                if not waiter.done():
                    waiter.set_result(reply)
        except redis_errors.CONNECTION_ERRORS as exc:
            reason = exc
        finally:
            await self._drop(reason, only=connection)

    async def _drop(self, exc: BaseException, only: AsyncConnection | None = None) -> None:
        if only is not None and only is not self._connection:
            await only.close()
            return  # another task has already replaced the broken connection
        connection = self._detach(exc)
        if connection is not None:
            await connection.close()

    def _detach(self, exc: BaseException) -> AsyncConnection | None:
        """Fail the waiting calls; return the connection, which is no longer used."""
        connection = self._connection
        self._connection = None
        self._unsent = None
        pending = self._pending
        self._pending = deque()
        if self._reply_timer is not None:
            self._reply_timer.cancel()
            self._reply_timer = None
        for waiter, _ in pending:
            if not waiter.done():
                waiter.set_exception(redis_errors.lost_reply(exc))
        return connection

    async def _read_clock(self, clock: ServerClock, connection: AsyncConnection, deadline_ms: int | None) -> None:
        sent_ms = mono_ms()
        self._set_clock(clock, (await self._round_trip(connection, [TIME.packed()], deadline_ms))[0], sent_ms)

    def _set_clock(self, clock: ServerClock, reply: Any, sent_ms: int) -> None:
        clock.set(self._result(TIME, reply), sent_ms, mono_ms())

    def _result(self, call: Call[R], reply: Any) -> R:
        if isinstance(reply, redis_errors.ERROR_REPLIES):
            if isinstance(call, OptionalCall):
                return cast("R", None)
            raise redis_errors.reply_error(reply, self._link.url) from reply
        try:
            return call.parse_reply(reply)
        except BulltaskError:  # some of them are also a ValueError
            raise
        except redis_errors.UNEXPECTED_REPLY as exc:
            self._abandon(ConnectionError("a reply belonged to another call"))
            raise redis_errors.unexpected_reply(exc, self._link.url) from exc

    def _abandon(self, exc: BaseException) -> None:
        """Stop using the connection; its reader then ends and closes it."""
        connection = self._detach(exc)
        if connection is not None:
            connection.abort()

    def _try(self, call: Call[R], reply: Any) -> R | BulltaskError:
        try:
            return self._result(call, reply)
        except BulltaskError as exc:
            return exc


def _seconds(max_ms: int, deadline_ms: int | None) -> float:
    """Return ``max_ms`` in seconds, or the time until ``deadline_ms`` if that is shorter."""
    return (max_ms if deadline_ms is None else max(1, min(max_ms, deadline_ms - mono_ms()))) / 1000
