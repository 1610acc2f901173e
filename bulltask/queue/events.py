"""A queue's events: one class for each of BullMQ's events, callbacks, and the readers behind ``QueueEvents``.

An event has the fields that BullMQ's scripts write, under Python names. To get the whole job, read it from the queue.
Malformed events do not stop a reader: if the JSON is malformed, the event contains its text and an ``error``, and an
event that lacks a field is returned as :class:`Custom`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar, overload

from bulltask.config.urls import SecretUrl, secret_url
from bulltask.jobs import clock as loop_timers
from bulltask.jobs import codec
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.jobs.errors import RECOVERABLE, BrokerError, ConfigError, DecodeError, InvalidNameError
from bulltask.queue.context import QueueContext
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, SyncClient, text
from bulltask.transport.operation import run_sync
from bulltask.transport.streams import (
    BEGINNING,
    LONGEST_BLOCK_MS,
    NEWEST,
    Entry,
    EventPage,
    Follower,
    StreamSubscription,
    publish,
)

__all__ = [
    "KINDS",
    "Active",
    "Added",
    "AsyncEventReader",
    "Cleaned",
    "Completed",
    "Custom",
    "Debounced",
    "Deduplicated",
    "Delayed",
    "Drained",
    "Duplicated",
    "EventReader",
    "EventReaderBase",
    "EventsLost",
    "Failed",
    "JobEvent",
    "Paused",
    "Progress",
    "QueueEvent",
    "Released",
    "Removed",
    "Resumed",
    "RetriesExhausted",
    "Stalled",
    "Waiting",
    "WaitingChildren",
]


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """A queue's event; a callback for this class receives all events.

    ``id`` is the entry's id in the stream, ``"<milliseconds>-<number>"``; ids increase.
    """

    event: ClassVar[str] = ""
    """BullMQ's name."""

    id: str
    queue: str

    @property
    def timestamp_ms(self) -> int:
        """When the event happened, in epoch milliseconds by the server's clock."""
        return int(self.id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class JobEvent(QueueEvent):
    """A job's event; a callback for this class receives all job events."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Added(JobEvent):
    """A job was added; ``name`` is the job's name, which is also its task's name."""

    event: ClassVar[str] = "added"
    name: str


@dataclass(frozen=True, slots=True)
class Waiting(JobEvent):
    """A job is waiting. ``prev`` is its previous state, ``None`` for a new job.

    ``prev="active"`` means an immediate retry, a stalled job, or a released job; see :class:`Released`.
    """

    event: ClassVar[str] = "waiting"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Active(JobEvent):
    """A worker acquired the job. BullMQ 5.62 always writes ``prev="waiting"``, whatever the previous state was."""

    event: ClassVar[str] = "active"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Completed(JobEvent):
    """A job completed.

    ``returnvalue`` is ``None`` if its JSON, which is stored as ``text``, is malformed; ``error`` says why.
    """

    event: ClassVar[str] = "completed"
    returnvalue: Any
    text: str
    error: DecodeError | None
    prev: str | None


@dataclass(frozen=True, slots=True)
class Failed(JobEvent):
    """A job failed and will not be retried; a failed attempt that is retried has no such event."""

    event: ClassVar[str] = "failed"
    failed_reason: str
    prev: str | None


@dataclass(frozen=True, slots=True)
class RetriesExhausted(JobEvent):
    """A job failed because it had no attempts left; follows :class:`Failed`."""

    event: ClassVar[str] = "retries-exhausted"
    attempts_made: int


@dataclass(frozen=True, slots=True)
class WaitingChildren(JobEvent):
    """A job is waiting for its child jobs. ``prev`` is ``"active"`` if it was running, ``None`` for a new job."""

    event: ClassVar[str] = "waiting-children"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Stalled(JobEvent):
    """A job was active without a lock and is waiting again; its worker has died, or cannot reach Redis."""

    event: ClassVar[str] = "stalled"


@dataclass(frozen=True, slots=True)
class Released(JobEvent):
    """A worker of bulltask releases a job that it has acquired but not started; :class:`Waiting`, or :class:`Delayed`
    for a rate limit, follows. Neither an attempt nor a start counts.

    BullMQ has no such event: Node's ``QueueEvents`` emit it as ``released``.
    """

    event: ClassVar[str] = "released"


@dataclass(frozen=True, slots=True)
class Delayed(JobEvent):
    """A job was added with a delay, or will be retried later. ``due_ms``: epoch milliseconds."""

    event: ClassVar[str] = "delayed"
    due_ms: int


@dataclass(frozen=True, slots=True)
class Progress(JobEvent):
    """A job reported progress.

    ``data`` is ``None`` if its JSON, which is stored as ``text``, is malformed; ``error`` says why.
    """

    event: ClassVar[str] = "progress"
    data: Any
    text: str
    error: DecodeError | None


@dataclass(frozen=True, slots=True)
class Removed(JobEvent):
    """A client removed a job; ``prev`` is its previous state. Removal by retention has no event."""

    event: ClassVar[str] = "removed"
    prev: str | None


@dataclass(frozen=True, slots=True)
class Duplicated(JobEvent):
    """A job was added with the id of an existing job; nothing was stored."""

    event: ClassVar[str] = "duplicated"


@dataclass(frozen=True, slots=True)
class Deduplicated(JobEvent):
    """``job_id`` is kept; ``deduplicated_job_id``, with the same deduplication id, was not added, or was replaced."""

    event: ClassVar[str] = "deduplicated"
    deduplication_id: str
    deduplicated_job_id: str


@dataclass(frozen=True, slots=True)
class Debounced(JobEvent):
    """The older version of :class:`Deduplicated`; BullMQ 5 emits both."""

    event: ClassVar[str] = "debounced"
    debounce_id: str


@dataclass(frozen=True, slots=True)
class Cleaned(QueueEvent):
    """``clean`` removed ``count`` jobs."""

    event: ClassVar[str] = "cleaned"
    count: int


@dataclass(frozen=True, slots=True)
class Drained(QueueEvent):
    """The last waiting job has finished.

    BullMQ does not emit this event if a delayed job exists and the worker fetched the next job.
    """

    event: ClassVar[str] = "drained"


@dataclass(frozen=True, slots=True)
class Paused(QueueEvent):
    """The queue was paused."""

    event: ClassVar[str] = "paused"


@dataclass(frozen=True, slots=True)
class Resumed(QueueEvent):
    """The queue was resumed."""

    event: ClassVar[str] = "resumed"


@dataclass(frozen=True, slots=True)
class Custom(QueueEvent):
    """An event that is not one of BullMQ 5.62's, or that lacks one of its fields.

    Callbacks for the job ``job_id``, from its field ``jobId``, receive it, too; ``""`` for none.
    """

    event: ClassVar[str] = "custom"
    name: str
    fields: Mapping[str, str]
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class EventsLost(QueueEvent):
    """Events were trimmed before this reader read them. The reader creates this event; it is not in the stream.

    Its ``id`` is the id of the last event before the gap, so a later reader can start at it.

    Attributes:
        last_id_before: Id of the last event that was read before the gap, or the reader's start position.
        first_id_after: Id of the first event after the gap, ``None`` if no event has followed yet.
        count: How many events were lost; ``None`` if the number is unknown, and may be 0. It is unknown with Redis
            before 7.0, if the reader started at an id that had been trimmed, and if the stream was deleted
            (``obliterate``).
    """

    event: ClassVar[str] = "events-lost"
    last_id_before: str
    first_id_after: str | None
    count: int | None

    def __str__(self) -> str:
        subject = "events may have been" if self.count is None else f"{self.count:,} events were"
        stream = f"the stream of queue {self.queue}"
        return f"{subject} trimmed from {stream} after {self.last_id_before} before they were read"


class _Fields:
    """The fields of an entry, by type; a missing field raises ``KeyError``."""

    def __init__(self, raw: Mapping[bytes, bytes]) -> None:
        self._raw = raw

    def id(self, name: bytes = b"jobId") -> str:
        """Return an id, with any bytes in it unchanged."""
        return text(self._raw[name])

    def text(self, name: bytes) -> str:
        return codec.decode_text(self._raw[name])

    def number(self, name: bytes) -> int:
        return int(float(self._raw[name]))

    @property
    def prev(self) -> str | None:
        return codec.decode_text(self._raw[b"prev"]) if b"prev" in self._raw else None

    def json(self, name: bytes) -> tuple[Any, str, DecodeError | None]:
        """Return the value, its text, and the error if it is malformed."""
        raw = self._raw[name]
        try:
            return codec.decode(raw, what=f"{name.decode()} of job {self.id()}"), codec.decode_text(raw), None
        except DecodeError as exc:
            return None, codec.decode_text(raw), exc


_Read = Callable[[str, str, _Fields], QueueEvent]

_READERS: Final[Mapping[type[QueueEvent], _Read]] = {
    Added: lambda at, queue, its: Added(at, queue, its.id(), its.text(b"name")),
    Waiting: lambda at, queue, its: Waiting(at, queue, its.id(), its.prev),
    Active: lambda at, queue, its: Active(at, queue, its.id(), its.prev),
    Completed: lambda at, queue, its: Completed(at, queue, its.id(), *its.json(b"returnvalue"), its.prev),
    Failed: lambda at, queue, its: Failed(at, queue, its.id(), its.text(b"failedReason"), its.prev),
    RetriesExhausted: lambda at, queue, its: RetriesExhausted(at, queue, its.id(), its.number(b"attemptsMade")),
    WaitingChildren: lambda at, queue, its: WaitingChildren(at, queue, its.id(), its.prev),
    Stalled: lambda at, queue, its: Stalled(at, queue, its.id()),
    Released: lambda at, queue, its: Released(at, queue, its.id()),
    Delayed: lambda at, queue, its: Delayed(at, queue, its.id(), its.number(b"delay")),
    Progress: lambda at, queue, its: Progress(at, queue, its.id(), *its.json(b"data")),
    Removed: lambda at, queue, its: Removed(at, queue, its.id(), its.prev),
    Duplicated: lambda at, queue, its: Duplicated(at, queue, its.id()),
    Deduplicated: lambda at, queue, its: Deduplicated(
        at, queue, its.id(), its.text(b"deduplicationId"), its.id(b"deduplicatedJobId")
    ),
    Debounced: lambda at, queue, its: Debounced(at, queue, its.id(), its.text(b"debounceId")),
    Cleaned: lambda at, queue, its: Cleaned(at, queue, its.number(b"count")),
    Drained: lambda at, queue, _: Drained(at, queue),
    Paused: lambda at, queue, _: Paused(at, queue),
    Resumed: lambda at, queue, _: Resumed(at, queue),
}

KINDS: Final[Mapping[str, type[QueueEvent]]] = {
    **{kind.event: kind for kind in _READERS},
    Custom.event: Custom,
    EventsLost.event: EventsLost,
}
"""Event classes by name."""


def read_event(queue: str, entry: Entry) -> QueueEvent:
    """Return a stream entry as an event; never raises."""
    entry_id, raw = entry
    name = codec.decode_text(raw.get(b"event"))
    read = _READERS.get(KINDS.get(name, Custom))
    if read is not None:
        try:
            return read(entry_id, queue, _Fields(raw))
        except (KeyError, ValueError, OverflowError):
            pass  # another program's event with the same name, or a malformed event
    fields = {codec.decode_text(key): codec.decode_text(value) for key, value in raw.items() if key != b"event"}
    return Custom(entry_id, queue, name, fields, text(raw.get(b"jobId", b"")))


log = logging.getLogger(__name__)

E = TypeVar("E", bound=QueueEvent)
C = TypeVar("C", bound=Callable[[Any], Any])
Callback = Callable[[Any], Any]
"""A function that is called with an event. If it raises an exception, that is logged, and reading continues."""

_Key = tuple[type[QueueEvent], str, str | None]
"""An event class, the name of a custom event, and a job id (``None``: all jobs)."""


def _fits(key: _Key, event: QueueEvent) -> bool:
    kind, name, job_id = key
    if not isinstance(event, kind):
        return False
    if name and not (isinstance(event, Custom) and event.name == name):
        return False
    return job_id is None or (isinstance(event, JobEvent | Custom) and event.job_id == job_id)


def log_failure(callback: Callback, event: QueueEvent, exc: Exception) -> None:
    """Log an exception that a callback raised, so that other callbacks still receive the event."""
    name = getattr(callback, "__qualname__", type(callback).__name__)
    log.error("callback %s raised an exception for event %s in queue %s", name, event.event, event.queue, exc_info=exc)


_ID: Final = re.compile(r"\d{1,20}(-\d{1,20})?")


class EventReaderBase:
    """A position in an event stream, and the events that have been read but not yet returned.

    Args:
        queue: The queue's name in the app.
        broker_url: The server's URL, for a reader without an app; ``BULLTASK_BROKER_URL`` takes precedence.
        start: The first event to read. ``"$"``: the next one after :meth:`open` (or after the first call to
            :meth:`next`); ``"0"``: the oldest one in the stream; an event's id: the one after it (see
            :attr:`position`).
        broker: Returns the connection of an app's reader.
        settings: Any other setting of ``bulltask.config.config``: ``prefix``, ``queue_hash_tag`` …
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
        if broker is None:
            self._context = QueueContext.without_app(queue, broker_url, settings, None)
        else:
            self._context = QueueContext(queue, broker, None)
        self._queue = queue
        self._broker = self._context.broker
        self._keys = self._context.keys
        self._position = _check_start(start)
        self._follower = Follower(self._keys, self._position, self._broker.endpoint.safe_url)
        # Node's getQueueEvents() and dashboards find event readers by this name.
        self._name = f"{self._keys.client_name()}:qe"
        self._buffer: deque[Entry | QueueEvent] = deque()
        self._opened = False
        self._failures = 0
        self._callbacks: list[tuple[_Key, Callback]] = []  # in the order of registration
        self._set_up()

    @property
    def queue(self) -> str:
        """The queue's name in the app."""
        return self._queue

    @property
    def position(self) -> str:
        """The id of the last returned event, or the start position; a later reader can start at it."""
        return self._position

    @overload
    def on(self, event: type[E], callback: Callable[[E], Any], *, job_id: str | None = ...) -> Callable[[E], Any]: ...
    @overload
    def on(self, event: str, callback: C, *, job_id: str | None = ...) -> C: ...
    @overload
    def on(self, event: str | type[QueueEvent], *, job_id: str | None = ...) -> Callable[[C], C]: ...

    def on(
        self, event: str | type[QueueEvent], callback: Callback | None = None, *, job_id: str | None = None
    ) -> Callback:
        """Call ``callback`` for every matching event; without a callback, return a decorator.

        Callbacks run where events are read: in the loop that iterates, in ``run()``, or in the background after
        ``listen()``. The callback is returned, for :meth:`off`.

        Args:
            event: BullMQ's name (``"completed"``), the name of a custom event, or a class of ``bulltask.queue.events``;
                ``QueueEvent`` means all events.
            callback: Called with the event.
            job_id: Only events for this job.
        """

        def add(target: Callback) -> Callback:
            kind = event if isinstance(event, type) else KINDS.get(event, Custom)
            name = event if isinstance(event, str) and event not in KINDS else ""
            self._callbacks.append(((kind, name, job_id), target))
            return target

        return add if callback is None else add(callback)

    def off(self, callback: Callback) -> None:
        """Remove a callback from all its events; unknown callbacks are ignored."""
        self._callbacks = [(key, known) for key, known in self._callbacks if known is not callback]

    def of(self, event: QueueEvent) -> list[Callback]:
        """Return the callbacks for ``event``."""
        return [callback for key, callback in self._callbacks if _fits(key, event)]

    def _set_up(self) -> None:
        raise NotImplementedError

    def _add_page(self, page: EventPage) -> None:
        self._failures = 0
        if page.gap is not None:
            last, first, count = page.gap.last_id_before, page.gap.first_id_after, page.gap.count
            self._buffer.append(EventsLost(last, self._queue, last, first, count))
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
    """Reads in one event loop, where the readers of a queue and a broker share a connection."""

    def _set_up(self) -> None:
        self._subscription: StreamSubscription | None = None
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop reading; the last reader closes the connection. Callable from any task in the loop, and a callback."""
        self._closed.set()
        if self._subscription is not None:
            await self._subscription.close()
        await self._context.aclose()
        if self._task not in {None, asyncio.current_task()}:
            assert self._task is not None
            await self._task

    async def _connect(self) -> StreamSubscription:
        if self._subscription is None:
            stream = self._broker.event_stream(self._queue, self._name)
            self._subscription = StreamSubscription(stream, self._follower)
        if not self._opened:
            self._position = await self._subscription.open()
            self._opened = True
        return self._subscription

    async def _fill(self, block_ms: int) -> None:
        try:
            subscription = await self._connect()
            if not self._closed.is_set():
                self._add_page(await subscription.read(block_ms))
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
            if self._closed.is_set() and self._subscription is not None:
                await self._subscription.close()

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
