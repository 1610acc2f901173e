"""A queue's event stream: the calls that read and write it, and :class:`Follower`, which reads every entry once.

A follower reports a gap where entries were trimmed before it read them. The readers of one event loop share a
connection (:class:`SharedStream`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from bulltask.jobs import clock as loop_timers
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import BrokerUnavailableError, BulltaskError
from bulltask.lua import loader
from bulltask.transport.call import AnyAsyncClient, Arg, Call, QueueKeys, command, script_call, text
from bulltask.transport.operation import Operation, run_async, transaction

__all__ = [
    "BEGINNING",
    "DEFAULT_LENGTH",
    "LONGEST_BLOCK_MS",
    "MAX_RANGE",
    "NEWEST",
    "READ_ONLY_SCRIPTS",
    "Entry",
    "EventPage",
    "Follower",
    "RetentionNeed",
    "SharedStream",
    "StreamGap",
    "StreamInfo",
    "StreamRetention",
    "StreamSubscription",
    "busiest_rate",
    "entries_since",
    "id_parts",
    "last_id",
    "last_id_of_range",
    "page",
    "publish",
    "read_back",
    "read_blocking",
    "read_now",
    "recommended_length",
    "stream_exists",
    "stream_info",
]


BEGINNING: Final = "0-0"
"""An id that precedes every entry."""

LONGEST_BLOCK_MS: Final = 5_000
"""Maximum time that a read blocks, so that a connection that died silently is noticed."""

PAGE: Final = 1_000
"""Maximum number of entries in one read."""

Entry = tuple[str, dict[bytes, bytes]]
"""Id and fields."""

MAX_RANGE: Final = 10_000
"""Maximum number of entries that one call to :func:`last_id_of_range` reads, which takes a few milliseconds."""

DEFAULT_LENGTH: Final = 10_000
"""BullMQ's ``streams.events.maxLen``: Redis keeps about as many events of a queue, the newest ones."""

READ_ONLY_SCRIPTS: Final = frozenset({"lastIdOfRange"})
"""bulltask's scripts that write nothing."""

_STEP: Final = 1_000

RawEntry = tuple[bytes, Sequence[bytes]]
"""Id and fields of an entry as Redis sends them: name, value, name, value …"""


@value_class
class StreamInfo:
    """State of a stream (``XINFO STREAM``).

    Attributes:
        length: Number of entries.
        last: Id of the newest entry that was ever added.
        added: Number of entries that were ever added; ``None`` before Redis 7.0, which does not count them.
        deleted: True if individual entries were deleted (``XDEL``), which BullMQ never does.
        first: Id of the oldest entry, ``""`` if there is none.
    """

    length: int
    last: str
    added: int | None
    deleted: bool
    first: str = ""

    @property
    def trimmed(self) -> int | None:
        """Number of entries that were trimmed from the beginning; ``None`` if unknown."""
        return None if self.added is None or self.deleted else self.added - self.length


@value_class(frozen=True)
class RetentionNeed:
    """How long a stream must keep events.

    Attributes:
        trigger_s: Seconds between two batches.
        batch_s: Seconds that a batch takes.
        outage_s: The longest pause of the pipeline, in seconds, during which no event may be lost.
    """

    trigger_s: float
    batch_s: float
    outage_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of two batches (an event can arrive just after a batch, and the next can be slow), or the outage."""
        return max(2 * (self.trigger_s + self.batch_s), self.outage_s)


@value_class(frozen=True)
class StreamRetention:
    """A queue's event stream and its retention.

    Attributes:
        queue: The queue, without BullMQ's braces.
        length: The number of its entries.
        limit: The maximum number of entries: ``opts.maxLenEvents`` of the queue's ``meta``.
        rate: Events per second at the busiest time in the stream; ``None`` if unknown.
    """

    queue: str
    length: int
    limit: int
    rate: float | None

    @property
    def retention_s(self) -> float | None:
        """The number of seconds that the stream keeps events at this rate; ``None`` if the rate is unknown."""
        return self.limit / self.rate if self.rate else None

    def is_enough(self, need: RetentionNeed) -> bool | None:
        """Whether the stream keeps events long enough; ``None`` if the rate is unknown."""
        return None if self.retention_s is None else self.retention_s >= need.seconds

    def recommended_limit(self, need: RetentionNeed) -> int | None:
        """Return the ``maxLen`` that is long enough; ``None`` if the rate is unknown."""
        return None if self.rate is None else recommended_length(self.rate, need)


def recommended_length(rate: float, need: RetentionNeed) -> int:
    """Return the smallest ``maxLen``, in whole thousands, that keeps events at this rate for as long as needed."""
    # Rounded first, as floating point can turn 30,000 into 30,000.00001.
    return max(DEFAULT_LENGTH, math.ceil(round(rate * need.seconds / _STEP, 6)) * _STEP)


def busiest_rate(spans: Iterable[tuple[int, int]]) -> float | None:
    """Return the events per second of the busiest span: its number of events, and its milliseconds, at least 1,000."""
    return max((count * 1_000 / max(ms, 1_000) for count, ms in spans if count), default=None)


def last_id(keys: QueueKeys) -> Call[str]:
    """Return the id of the newest entry, :data:`BEGINNING` if there is none."""

    def parse_reply(reply: Any) -> str:
        return reply[0][0].decode() if reply else BEGINNING

    return command("XREVRANGE", keys.events, "+", "-", "COUNT", 1, parse_reply=parse_reply)


def read_blocking(keys: QueueKeys, cursor: str, block_ms: int) -> Call[list[Entry]]:
    """Read the entries after ``cursor``; wait up to ``block_ms`` for them, at least 1 because 0 would mean forever."""
    block = max(1, min(block_ms, LONGEST_BLOCK_MS))
    return command("XREAD", "COUNT", PAGE, "BLOCK", block, "STREAMS", keys.events, cursor, parse_reply=_read)


def read_now(keys: QueueKeys, cursor: str) -> Call[list[Entry]]:
    """Read the entries after ``cursor`` that exist now."""
    return command("XREAD", "COUNT", PAGE, "STREAMS", keys.events, cursor, parse_reply=_read)


def entries_since(keys: QueueKeys, since: str) -> Call[list[Entry]]:
    """Read all entries from ``since`` on, inclusive."""
    return command("XRANGE", keys.events, since, "+", parse_reply=_entries)


def read_back(keys: QueueKeys, until: str, since: str, count: int) -> Call[list[Entry]]:
    """Read the last ``count`` entries from ``since`` to ``until``, inclusive, beginning with the newest."""
    return command("XREVRANGE", keys.events, until, since, "COUNT", count, parse_reply=_entries)


def is_retained(keys: QueueKeys, cursor: str) -> Call[bool]:
    """Return True if an entry at or before ``cursor`` still exists: then no entry after it was trimmed."""
    return command("XREVRANGE", keys.events, cursor, "-", "COUNT", 1, parse_reply=bool)


def stream_exists(keys: QueueKeys) -> Call[bool]:
    """Return True if the queue has a stream."""
    return command("EXISTS", keys.events, parse_reply=bool)


def stream_info(keys: QueueKeys) -> Call[StreamInfo]:
    """Read the state of the stream; Redis returns an error if it does not exist."""

    def parse_reply(reply: Any) -> StreamInfo:
        reply_map = dict(zip(reply[::2], reply[1::2], strict=True))
        return StreamInfo(
            length=int(reply_map[b"length"]),
            last=reply_map[b"last-generated-id"].decode(),
            added=int(reply_map[b"entries-added"]) if b"entries-added" in reply_map else None,
            deleted=reply_map.get(b"max-deleted-entry-id", b"0-0") != b"0-0",
            first=reply_map[b"first-entry"][0].decode() if reply_map.get(b"first-entry") else "",
        )

    return command("XINFO", "STREAM", keys.events, parse_reply=parse_reply)


def publish(keys: QueueKeys, event: str, fields: Mapping[str, str], max_events: int) -> Call[str]:
    """Add a custom event and trim the stream to about ``max_events``. Returns the entry's id."""
    args: list[Arg] = [arg for pair in fields.items() for arg in pair]
    limit: tuple[Arg, ...] = ("MAXLEN", "~", max_events, "*")
    return command("XADD", keys.events, *limit, "event", event, *args, parse_reply=lambda reply: str(reply.decode()))


def _read(reply: Any) -> list[Entry]:
    return _entries(reply[0][1]) if reply else []


def _entries(reply: Any) -> list[Entry]:
    return [(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in reply or ()]


@value_class
class RangeEnd:
    """The end of a range in a stream: the id of the last entry, ``""`` if there is none, and the number of entries."""

    last: str
    count: int


def last_id_of_range(keys: QueueKeys, after: str, until: str, max_entries: int) -> Call[RangeEnd]:
    """bulltask's ``lastIdOfRange``: find the last of the next ``max_entries`` (up to :data:`MAX_RANGE`) entries.

    They come after the id ``after`` (``0-0`` for the beginning) and not after ``until``: ``+`` for no limit,
    ``1760010061025`` for the last entry of that millisecond.
    """

    def parse_reply(reply: Any) -> RangeEnd:
        return RangeEnd(text(reply[0]), int(reply[1]))

    return script_call(
        loader.bulltask_script("lastIdOfRange"),
        (keys.events,),
        (after, until, min(max_entries, MAX_RANGE)),
        parse_reply,
    )


def page(keys: QueueKeys, after: str, until: str, size: int) -> Call[list[RawEntry]]:
    """Read up to ``size`` entries after ``after``, up to and including ``until``, without decoding them."""
    return command("XRANGE", keys.events, f"({after}", until, "COUNT", size)


NEWEST: Final = "$"
"""Start after all existing entries."""

_MAX_SEQUENCE: Final = 2**64 - 1


@value_class(frozen=True)
class StreamGap:
    """Entries that were trimmed before they were read; ``count`` is ``None`` if it is unknown, and may be 0."""

    last_id_before: str
    first_id_after: str | None
    count: int | None


@value_class(frozen=True)
class EventPage:
    """Result of one read: the gap comes before the entries."""

    entries: list[Entry]
    gap: StreamGap | None = None


class Follower:
    """A reader's position in a stream, with operations for the sync or the async client.

    After every read it checks whether an entry at or before its position still exists. Streams are trimmed from their
    beginning, so if one exists, no entry after the position is missing. Otherwise, the stream's counters, read in the
    same transaction as further entries, show how many are missing: Redis counts all entries that were ever added (since
    7.0), and the follower counts the entries that it has read.

    It starts at :data:`NEWEST`, at :data:`BEGINNING` for the oldest entry that exists, or after an entry's id;
    ``where`` is the server, for error messages.
    """

    def __init__(self, keys: QueueKeys, start: str, where: str) -> None:
        self._keys = keys
        self._start = start
        self._where = where
        self._position: str | None = None
        self._count: int | None = None
        """Number of entries that were added up to and including the position; ``None`` while unknown."""
        self._counting = True
        self._doubtful = False

    def open(self) -> Operation[str]:
        """Determine the position and return it as an id. Later calls change nothing."""
        if self._position is not None:
            return self._position
        info, _ = yield from self._read_counters(None)
        if info is None:
            self._position = BEGINNING if self._start == NEWEST else self._start
            self._count = 0
        elif self._start == NEWEST:
            self._position = info.last
            self._count = info.added
        elif self._start == BEGINNING:
            # Entries that were trimmed before the oldest one do not count as missing.
            self._position = BEGINNING
            self._count = info.trimmed
        else:
            self._position = self._start
        self._counting = info is None or info.added is not None
        return self._position

    def read(self, block_ms: int) -> Operation[EventPage]:
        """Read the next entries; wait up to ``block_ms`` for them. A read that failed can be retried."""
        try:
            position = yield from self.checked_position()
            entries, retained = yield [read_blocking(self._keys, position, block_ms), is_retained(self._keys, position)]
            return (yield from self.advance(position, entries, retained))
        except BulltaskError:
            self.doubt()
            raise

    def doubt(self) -> None:
        """Check the position before the next read: after an outage, the server may be a different one."""
        self._doubtful = True

    def checked_position(self) -> Operation[str]:
        """Return the position; if it is in doubt, check it first."""
        position = yield from self.open()
        if self._doubtful:
            info, _ = yield from self._read_counters(None)
            if info is not None and id_parts(info.last) < id_parts(position):
                # A replica that had not received all entries has become the primary. Its entries have been read; if
                # its clock is behind, its new entries would have ids before the position.
                self._position = position = info.last
                self._count = info.added
            self._doubtful = False
        return position

    def advance(self, position: str, entries: list[Entry], retained: bool) -> Operation[EventPage]:
        """Move the position behind the entries read after it; look for a gap unless an earlier one is ``retained``."""
        page = EventPage(entries)
        if not retained or (self._count is None and self._counting and not entries):
            page = yield from self._compare(position, retained)
        if page.entries:
            self._position = page.entries[-1][0]
            self._count = None if self._count is None else self._count + len(page.entries)
        return page

    def _compare(self, position: str, retained: bool) -> Operation[EventPage]:
        """Read again, together with the stream's counters, and update the count of entries before the position."""
        info, entries = yield from self._read_counters(position)
        if info is None:
            self._position = BEGINNING
            self._count = 0
            return EventPage([], None if position == BEGINNING else StreamGap(position, None, None))
        self._counting = info.added is not None
        if retained:
            self._count = None if entries else info.added
            return EventPage(entries)
        gap = self._gap(position, info, entries)
        self._count = info.trimmed
        if not entries:
            self._position = info.last
        return EventPage(entries, gap)

    def _gap(self, position: str, info: StreamInfo, entries: list[Entry]) -> StreamGap | None:
        """Return the gap between the position, at which no entry is left, and the first entry."""
        first = entries[0][0] if entries else None
        if position == info.last or (first is not None and _follows(position, first)):
            return None
        if info.trimmed is None:
            # If the server does not count, a stream that is read from its beginning is assumed to be complete.
            return None if position == BEGINNING else StreamGap(position, first, None)
        if self._count is None:
            return StreamGap(position, first, None) if info.trimmed else None
        missing = info.trimmed - self._count
        if missing < 0:  # the stream was deleted, and a new one with the same name counts from 0
            return StreamGap(position, first, None)
        return StreamGap(position, first, missing) if missing else None

    def _read_counters(self, position: str | None) -> Operation[tuple[StreamInfo | None, list[Entry]]]:
        """Read the stream's counters, and the entries after ``position``, at the same moment."""
        calls = [stream_exists(self._keys), stream_info(self._keys)]
        if position is not None:
            calls.append(read_now(self._keys, position))
        results: list[Any] = yield from transaction(calls, self._where)
        exists, info, entries = (*results, [])[:3]
        if exists is False:
            return None, []
        for result in (exists, info, entries):
            if isinstance(result, BulltaskError):
                raise result
        return info, entries


def id_parts(entry_id: str) -> tuple[int, int]:
    """Return the time of an entry's id in epoch milliseconds, and its number at that time; ids have this order."""
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence or 0)


def _follows(position: str, entry_id: str) -> bool:
    """Return True if no id fits between the two."""
    (ms, sequence), (next_ms, next_sequence) = id_parts(position), id_parts(entry_id)
    if ms == next_ms:
        return next_sequence == sequence + 1
    return next_ms == ms + 1 and next_sequence == 0 and sequence == _MAX_SEQUENCE


_Read = tuple[list[Entry], bool]
"""The entries after a position, and whether an entry at or before it still exists."""

_CLOSED: Final = "the reader was closed"


class SharedStream:
    """A queue's stream, and its readers in one event loop, which share a connection.

    Readers at the end of the stream wait for one blocking read, whoever began it. A reader that is behind the end reads
    for itself, with the client for short calls, so a slow reader delays no other. ``failures`` counts the shared reads
    that have failed; each reader then checks its position.
    """

    def __init__(self, keys: QueueKeys, client: AnyAsyncClient, short_client: Callable[[], AnyAsyncClient]) -> None:
        self.failures = 0
        self._keys = keys
        self._client = client
        self._short_client = short_client
        self._readers = 0
        self._changing = asyncio.Lock()
        self._end = ""  # the id after which the shared read waits; "" if unknown, and then it is not waiting
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[StreamSubscription, asyncio.Future[_Read | BulltaskError]] = {}

    async def join(self) -> None:
        """Connect, for one more reader; :meth:`leave` also after an error."""
        self._readers += 1
        async with self._changing:  # not while the last reader closes the connection
            await self._client.connect()

    async def leave(self) -> None:
        """Forget a reader; the last one closes the connection."""
        self._readers -= 1
        async with self._changing:
            if not self._readers:
                if self._reading is not None:
                    self._reading.cancel()
                    with suppress(asyncio.CancelledError):
                        await self._reading
                    self._reading = None
                await self._client.close()

    async def run_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """Make calls that do not block; raises ``BrokerUnavailableError`` if the last reader has left."""
        if not self._readers:
            raise BrokerUnavailableError(_CLOSED)
        client = self._client if self._reading is None else self._short_client()
        return await client.run_many(calls, deadline_ms)

    async def read(self, reader: StreamSubscription, position: str, block_ms: int) -> _Read:
        """Read the entries after ``position``; wait up to ``block_ms``. An error if the reader is closed meanwhile."""
        while block_ms > 0:
            if not self._end:
                (last,) = await self.run_many([last_id(self._keys)])
                self._end = self._end or last
            end = self._end
            if id_parts(position) < id_parts(end):
                entries, retained = await self._read_now(position)
                if entries or not retained:
                    return entries, retained
                if end != self._end:
                    continue
            read = await self._wait(reader, end, block_ms)
            if read is None or not read[1]:
                break
            later = [entry for entry in read[0] if position == end or id_parts(entry[0]) > id_parts(position)]
            if later or not read[0]:
                return later, True
        return await self._read_now(position)

    def interrupt(self, reader: StreamSubscription) -> None:
        """End the wait of a reader that was closed."""
        self._resolve(reader, BrokerUnavailableError(_CLOSED))

    async def _read_now(self, position: str) -> _Read:
        entries, retained = await self.run_many([read_now(self._keys, position), is_retained(self._keys, position)])
        return entries, retained

    async def _wait(self, reader: StreamSubscription, end: str, block_ms: int) -> _Read | None:
        """Wait for the shared read of the entries after ``end``; return ``None`` after ``block_ms``."""
        if reader.closed:
            raise BrokerUnavailableError(_CLOSED)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_shared(end), name=f"bulltask-stream-{self._keys.queue}")
        future: asyncio.Future[_Read | BulltaskError] = asyncio.get_running_loop().create_future()
        self._waiting[reader] = future
        try:
            # A read that has begun earlier also ends earlier.
            async with loop_timers.timeout(None if block_ms >= LONGEST_BLOCK_MS else block_ms / 1000):
                read = await future
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(reader, None)
        if isinstance(read, BulltaskError):
            raise read
        return read

    async def _read_shared(self, end: str) -> None:
        read: _Read | BulltaskError
        try:
            calls: list[Call[Any]] = [
                read_blocking(self._keys, end, LONGEST_BLOCK_MS),
                is_retained(self._keys, end),
            ]
            entries, retained = await self._client.run_many(calls)
            read = entries, retained
            self._end = (entries[-1][0] if entries else end) if retained else ""
        except BulltaskError as exc:
            read = exc
            self._end = ""
            self.failures += 1
        self._reading = None
        for reader in tuple(self._waiting):
            self._resolve(reader, read)

    def _resolve(self, reader: StreamSubscription, read: _Read | BulltaskError) -> None:
        future = self._waiting.get(reader)
        if future is not None and not future.done():
            future.set_result(read)


class StreamSubscription:
    """One of the readers of a :class:`SharedStream`, with its own position."""

    def __init__(self, stream: SharedStream, follower: Follower) -> None:
        self._stream = stream
        self._follower = follower
        self.closed = False
        self._joined = False
        self._failures = stream.failures

    async def open(self) -> str:
        """Connect; determine the position and return it as an id. It can be called again after an error."""
        if not self._joined:
            self._joined = True
            try:
                await self._stream.join()
            except BaseException:
                await self._leave()
                raise
        return await run_async(self._stream, self._follower.open())

    async def read(self, block_ms: int) -> EventPage:
        """Read the next entries; wait up to ``block_ms`` for them. A read that failed can be retried."""
        stream, follower = self._stream, self._follower
        if self._failures != stream.failures:
            self._failures = stream.failures
            follower.doubt()
        try:
            position = await run_async(stream, follower.checked_position())
            entries, retained = await stream.read(self, position, block_ms)
            return await run_async(stream, follower.advance(position, entries, retained))
        except BulltaskError:
            follower.doubt()
            raise

    async def close(self) -> None:
        """End a read, and leave the stream."""
        self.closed = True
        self._stream.interrupt(self)
        await self._leave()

    async def _leave(self) -> None:
        if self._joined:
            self._joined = False
            await self._stream.leave()
