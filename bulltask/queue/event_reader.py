"""Readers of a queue's event stream: a base class, and its variants for threads and for asyncio."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from bulltask import loop_timers
from bulltask.config.urls import SecretUrl, secret_url
from bulltask.errors import RECOVERABLE, BrokerError, ConfigError, InvalidNameError
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.queue.callbacks import Callback, Callbacks, log_failure
from bulltask.queue.context import QueueContext
from bulltask.queue.events import KINDS, QueueEvent, lost_events, read_event
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call
from bulltask.transport.client_types import SyncClient
from bulltask.transport.follow import NEWEST, EventPage, Follower
from bulltask.transport.operation import run_async, run_sync
from bulltask.transport.scripts.stream import BEGINNING, LONGEST_BLOCK_MS, Entry, publish

__all__ = ["AsyncEventReader", "EventReader", "EventReaderBase"]

log = logging.getLogger(__name__)

_ID: Final = re.compile(r"\d{1,20}(-\d{1,20})?")


class EventReaderBase(Callbacks):
    """A position in an event stream, and the events that have been read but not yet returned.

    Args:
        queue: The queue's name in the app.
        broker_url: The server's URL, for a reader without an app; ``BULLTASK_BROKER_URL`` takes precedence.
        start: The first event to read. ``"$"``: the next one after :meth:`open` (or after the first call to
            :meth:`next`); ``"0"``: the oldest one in the stream; an event's id: the one after it (see
            :attr:`position`).
        broker: Returns the connection of an app's reader.
        settings: Any other setting of ``bulltask.config.settings``: ``prefix``, ``queue_hash_tag`` …

    Raises:
        InvalidNameError: The queue's name is invalid.
        ConfigError: A setting or ``start`` is invalid.
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
        super().__init__()
        if broker is None:
            self._context = QueueContext.without_app(queue, broker_url, settings, None)
        else:
            self._context = QueueContext(queue, broker, None)
        self._queue, self._broker, self._keys = queue, self._context.broker, self._context.keys
        self._position = _check_start(start)
        self._follower = Follower(self._keys, self._position, self._broker.endpoint.safe_url)
        # Node's getQueueEvents() and dashboards find event readers by this name.
        self._name = f"{self._keys.client_name()}:qe"
        self._buffer: deque[Entry | QueueEvent] = deque()
        self._opened = False
        self._failures = 0
        self._set_up()

    @property
    def queue(self) -> str:
        """The queue's name in the app."""
        return self._queue

    @property
    def position(self) -> str:
        """The id of the last returned event, or the start position; a later reader can start at it."""
        return self._position

    def _set_up(self) -> None:
        raise NotImplementedError

    def _add_page(self, page: EventPage) -> None:
        self._failures = 0
        if page.gap is not None:
            self._buffer.append(lost_events(self._queue, page.gap))
        self._buffer += page.entries

    def _pop(self) -> QueueEvent:
        item = self._buffer.popleft()
        event = item if isinstance(item, QueueEvent) else read_event(self._queue, item)
        self._position = event.id
        return event

    def _record_failure(self, exc: BrokerError) -> float:
        """Return the seconds to wait before the next attempt; log the first of several failures in a row."""
        if not self._failures:
            log.warning("cannot read the events of queue %s, retrying: %s", self._queue, exc)
        self._failures += 1
        config = self._broker.config
        first_ms, cap_ms = config.reconnect_delay_ms, config.reconnect_delay_max_ms
        return reconnect_delay_ms(self._failures, first_ms=first_ms, cap_ms=cap_ms) / 1000

    def _publish_call(self, name: str, fields: Mapping[str, str | float]) -> Call[str]:
        if not isinstance(name, str) or not name or name in KINDS:
            raise InvalidNameError(f"a custom event needs a name that BullMQ does not use, not {name!r:.200}")
        if "event" in fields:
            raise InvalidNameError("the field 'event' contains the event's name; use another name for your field")
        texts = {key: _field_text(value, key) for key, value in fields.items()}
        return publish(self._keys, name, texts, self._broker.config.max_events)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of queue {self._queue} at {self._position}>"


class EventReader(EventReaderBase):
    """Reads with a connection that one thread at a time uses, and that any thread may close."""

    def _set_up(self) -> None:
        self._client: SyncClient = self._broker.blocking_client(LONGEST_BLOCK_MS, self._name)
        self._closed = threading.Event()
        self._reading = threading.RLock()
        self._reader = 0
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Stop reading and close the connection; callable from any thread, and from a callback."""
        self._closed.set()
        self._client.interrupt()
        if self._reader == threading.get_ident():
            return  # called by a signal handler during a read, which now ends and closes the connection itself
        with self._reading:
            self._client.close()
        self._context.close()
        if self._thread not in {None, threading.current_thread()}:
            assert self._thread is not None
            self._thread.join()

    def _connect(self) -> None:
        self._client.connect()
        if not self._opened:
            self._position = run_sync(self._client, self._follower.open())
            self._opened = True

    def _fill(self, block_ms: int) -> None:
        with self._reading:
            self._reader = threading.get_ident()
            try:
                self._connect()
                if not self._closed.is_set():  # close() may have run before there was a connection
                    self._add_page(run_sync(self._client, self._follower.read(block_ms)))
            except RECOVERABLE as exc:
                if self._closed.is_set():
                    return
                if not self._opened:
                    raise
                self._closed.wait(min(self._record_failure(exc), max(block_ms, 1) / 1000))
            finally:
                self._reader = 0
                if self._closed.is_set():
                    self._client.close()

    def _call(self, callback: Callback, event: QueueEvent) -> None:
        try:
            callback(event)
        except Exception as exc:  # noqa: BLE001 - the user's code
            log_failure(callback, event, exc)

    def _spawn(self, run: Callable[[], None]) -> None:
        def listen() -> None:
            try:
                run()
            except BrokerError as exc:
                log.error("stopped listening to the events of queue %s: %s", self._queue, exc)  # noqa: TRY400

        if self._thread is None:
            self._thread = threading.Thread(target=listen, name=f"bulltask-events-{self._queue}", daemon=True)
            self._thread.start()


class AsyncEventReader(EventReaderBase):
    """Reads with a connection that belongs to one event loop."""

    def _set_up(self) -> None:
        self._client = self._broker.blocking_async_client(LONGEST_BLOCK_MS, self._name)
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop reading and close the connection; callable from any task in the loop, and from a callback."""
        self._closed.set()
        await self._client.close()
        await self._context.aclose()
        if self._task not in {None, asyncio.current_task()}:
            assert self._task is not None
            await self._task

    async def _connect(self) -> None:
        await self._client.connect()
        if not self._opened:
            self._position = await run_async(self._client, self._follower.open())
            self._opened = True

    async def _fill(self, block_ms: int) -> None:
        try:
            await self._connect()
            if not self._closed.is_set():
                self._add_page(await run_async(self._client, self._follower.read(block_ms)))
        except RECOVERABLE as exc:
            if self._closed.is_set():
                return
            if not self._opened:
                raise
            try:
                async with loop_timers.timeout(min(self._record_failure(exc), max(block_ms, 1) / 1000)):
                    await self._closed.wait()
            except TimeoutError:
                pass
        finally:
            if self._closed.is_set():
                await self._client.close()

    async def _call(self, callback: Callback, event: QueueEvent) -> None:
        try:
            result = callback(event)
            if inspect.isawaitable(result):
                await result
        except Exception as exc:  # noqa: BLE001 - the user's code
            log_failure(callback, event, exc)

    async def _spawn(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._task is None:
            self._task = asyncio.create_task(run(), name=f"bulltask-events-{self._queue}")


def _check_start(start: str) -> str:
    if start == NEWEST:
        return NEWEST
    if not isinstance(start, str) or not _ID.fullmatch(start):
        raise ConfigError(f'start must be "$", "0", or the id of an event ("1700000000000-0"), not {start!r:.200}')
    ms, _, sequence = start.partition("-")
    return BEGINNING if int(ms) == int(sequence or 0) == 0 else f"{int(ms)}-{int(sequence or 0)}"


def _field_text(value: object, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"field {key!r:.200} of an event must be a string or a number, not {value!r:.200}")
    return str(value)
