"""``QueueEvents``: what happens in a queue, as typed events: iterators and callbacks, sync and async.

Whoever reads may be away for a while, because Redis restarts or because an event takes long to handle: reading goes
on where it stopped, and what was trimmed away meanwhile is told by an
:class:`~bulltask.queue.events_types.EventsLost` in its place.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Self

from bulltask.clock import Duration, mono_ms, to_ms
from bulltask.config.urls import SecretUrl, secret_url
from bulltask.errors import RECOVERABLE, BrokerError
from bulltask.queue.events_callbacks import report
from bulltask.queue.events_reader import EventReader
from bulltask.queue.events_types import QueueEvent
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.broker import Broker
from bulltask.transport.follow import NEWEST
from bulltask.transport.operation import run_async, run_sync
from bulltask.transport.scripts.stream import LONGEST_BLOCK_MS

__all__ = ["AsyncQueueEvents", "QueueEvents"]

log = logging.getLogger(__name__)


class QueueEvents(EventReader):
    """The events of one queue, for plain code.

    ::

        with QueueEvents("mail") as events:     # begins here
            for event in events:                # waits for the next one; ends when close() is called
                match event:
                    case Completed(job_id=job_id, returnvalue=value): ...

        events.on("failed", tell_somebody)
        events.on(Progress, show, job_id=job.id)
        events.listen()                                   # a thread of its own reads and calls
        events.close()

    It has a connection of its own, which does not survive a fork. One thread at a time may read; :meth:`close` may be
    called from any. Arguments are those of :class:`bulltask.queue.events_reader.EventReader`.
    """

    def __init__(
        self,
        queue: str,
        broker_url: str | SecretUrl | None = None,
        *,
        start: str = NEWEST,
        broker: Callable[[], Broker] | None = None,
        **settings: object,
    ) -> None:
        broker_url = secret_url(broker_url)
        super().__init__(queue, broker_url, start=start, broker=broker, **settings)
        self._client = self._broker.blocking_client(LONGEST_BLOCK_MS, self._name)
        self._closed = threading.Event()
        self._reading = threading.RLock()
        self._reader = 0
        self._thread: threading.Thread | None = None

    def open(self) -> Self:
        """Connect, and take the place in the stream: what happens from now on will be read.

        Raises:
            BrokerError: Redis cannot be reached. Later outages are waited out.
        """
        if not self._opened:
            self._client.connect()
            self._position = run_sync(self._client, self._follower.open())
            self._opened = True
        return self

    def next(self, timeout: Duration | None = None) -> QueueEvent | None:
        """Return the next event after its callbacks were called; ``None`` when there is none.

        Args:
            timeout: seconds or ``timedelta`` to wait for one; ``None`` waits until :meth:`close`.

        Raises:
            BrokerError: Redis could not be reached at the first time, or it refuses for a reason that does not pass.
        """
        deadline_ms = None if timeout is None else mono_ms() + to_ms(timeout, "timeout")
        asked = False
        while not self._read:
            left_ms = LONGEST_BLOCK_MS if deadline_ms is None else deadline_ms - mono_ms()
            if self._closed.is_set() or (asked and left_ms <= 0):
                return None
            self._fill(min(left_ms, LONGEST_BLOCK_MS))
            asked = True
        event = self._pop()
        for callback in self.of(event):
            try:
                callback(event)
            except Exception as exc:  # noqa: BLE001 - foreign code
                report(callback, event, exc)
        return event

    def run(self) -> None:
        """Read and call the callbacks until :meth:`close`; raises what :meth:`next` raises."""
        while self.next() is not None:
            pass

    def listen(self) -> Self:
        """:meth:`open`, and :meth:`run` in a thread of its own, which does not keep the process alive.

        Raises:
            BrokerError: Redis cannot be reached.
        """
        self.open()
        if self._thread is None:
            self._thread = threading.Thread(target=self._listen, name=f"bulltask-events-{self._queue}", daemon=True)
            self._thread.start()
        return self

    def publish(self, name: str, fields: Mapping[str, str | float] | None = None) -> str:
        """Add an event of one's own to the stream (Node's ``QueueEventsProducer``); listeners get a ``Custom``.

        Args:
            name: any name that BullMQ has no event for.
            fields: texts and numbers; ``jobId`` makes it one about that job.

        Returns:
            Its id.

        Raises:
            InvalidNameError: the name or a field is one of BullMQ's.
            ConfigError: a field is neither text nor number.
        """
        return self._broker.pool.run(self._publication(name, fields or {}))

    def close(self) -> None:
        """Stop reading, at once and for good, and close the connection; from any thread, and from a callback."""
        self._closed.set()
        self._client.interrupt()
        if self._reader == threading.get_ident():
            return  # a signal handler, in the middle of a read, which now ends and closes the connection itself
        with self._reading:
            self._client.close()
        self._link.close()
        if self._thread not in {None, threading.current_thread()}:
            assert self._thread is not None
            self._thread.join()

    def __iter__(self) -> Iterator[QueueEvent]:
        return self

    def __next__(self) -> QueueEvent:
        event = self.next()
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> None:
        try:
            self.run()
        except BrokerError as exc:
            log.error("nobody listens to the events of queue %s any more: %s", self._queue, exc)  # noqa: TRY400

    def _fill(self, block_ms: int) -> None:
        with self._reading:
            self._reader = threading.get_ident()
            try:
                self.open()
                # A close() that came before the connection did found nothing to interrupt.
                self._client.connect()
                if not self._closed.is_set():
                    self._keep(run_sync(self._client, self._follower.read(block_ms)))
            except RECOVERABLE as exc:
                if self._closed.is_set():
                    return
                if not self._opened:
                    raise
                self._closed.wait(min(self._failed(exc), max(block_ms, 1) / 1000))
            finally:
                self._reader = 0
                if self._closed.is_set():
                    self._client.close()


class AsyncQueueEvents(EventReader):
    """The events of one queue, for asyncio: the same names as :class:`QueueEvents`.

    ::

        async with AsyncQueueEvents("mail") as events:
            async for event in events: ...

    Callbacks may be coroutine functions; each is awaited before the next event is read. One task at a time may read;
    :meth:`close` may be called from any task of the same loop.
    """

    def __init__(
        self,
        queue: str,
        broker_url: str | SecretUrl | None = None,
        *,
        start: str = NEWEST,
        broker: Callable[[], Broker] | None = None,
        **settings: object,
    ) -> None:
        broker_url = secret_url(broker_url)
        super().__init__(queue, broker_url, start=start, broker=broker, **settings)
        self._client = AsyncClient(self._broker.endpoint.blocking(LONGEST_BLOCK_MS), None, self._name)
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """:meth:`QueueEvents.open`."""
        if not self._opened:
            await self._client.connect()
            self._position = await run_async(self._client, self._follower.open())
            self._opened = True
        return self

    async def next(self, timeout: Duration | None = None) -> QueueEvent | None:  # noqa: ASYNC109 - as in QueueEvents
        """:meth:`QueueEvents.next`."""
        deadline_ms = None if timeout is None else mono_ms() + to_ms(timeout, "timeout")
        asked = False
        while not self._read:
            left_ms = LONGEST_BLOCK_MS if deadline_ms is None else deadline_ms - mono_ms()
            if self._closed.is_set() or (asked and left_ms <= 0):
                return None
            await self._fill(min(left_ms, LONGEST_BLOCK_MS))
            asked = True
        event = self._pop()
        for callback in self.of(event):
            try:
                said = callback(event)
                if inspect.isawaitable(said):
                    await said
            except Exception as exc:  # noqa: BLE001 - foreign code
                report(callback, event, exc)
        return event

    async def run(self) -> None:
        """:meth:`QueueEvents.run`."""
        while await self.next() is not None:
            pass

    async def listen(self) -> Self:
        """:meth:`open`, and :meth:`run` in a task of its own."""
        await self.open()
        if self._task is None:
            self._task = asyncio.create_task(self.run(), name=f"bulltask-events-{self._queue}")
        return self

    async def publish(self, name: str, fields: Mapping[str, str | float] | None = None) -> str:
        """:meth:`QueueEvents.publish`."""
        return await self._broker.shared_async_client().run(self._publication(name, fields or {}))

    async def close(self) -> None:
        """:meth:`QueueEvents.close`."""
        self._closed.set()
        await self._client.close()
        await self._link.aclose()
        if self._task not in {None, asyncio.current_task()}:
            assert self._task is not None
            await self._task

    def __aiter__(self) -> AsyncIterator[QueueEvent]:
        return self

    async def __anext__(self) -> QueueEvent:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _fill(self, block_ms: int) -> None:
        try:
            await self.open()
            await self._client.connect()
            if not self._closed.is_set():
                self._keep(await run_async(self._client, self._follower.read(block_ms)))
        except RECOVERABLE as exc:
            if self._closed.is_set():
                return
            if not self._opened:
                raise
            try:
                async with asyncio.timeout(min(self._failed(exc), max(block_ms, 1) / 1000)):
                    await self._closed.wait()
            except TimeoutError:
                pass
        finally:
            if self._closed.is_set():
                await self._client.close()
