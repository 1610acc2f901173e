"""``AsyncQueueEvents``: a queue's events as typed values, for iteration and callbacks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Self

from bulltask.jobs.clock import Duration, mono_ms, to_ms
from bulltask.queue.events import AsyncEventReader, QueueEvent
from bulltask.transport.streams import LONGEST_BLOCK_MS

__all__ = ["AsyncQueueEvents"]


class AsyncQueueEvents(AsyncEventReader):
    """One queue's events.

    ::

        async with AsyncQueueEvents("mail") as events:  # start="$": begins with the next event
            async for event in events:  # waits for the next event; ends when close() is called
                match event:
                    case Completed(job_id=job_id, returnvalue=value): ...

        events.on("failed", notify)
        events.on(Progress, show, job_id=job.id)
        await events.listen()  # reads in the background and calls the callbacks
        await events.close()

    After an outage or a slow callback, reading continues where it stopped. If Redis has trimmed events in the
    meantime, an :class:`~bulltask.queue.events.EventsLost` takes their place.

    Callbacks may be coroutine functions; each is awaited before the next event is read. One task at a time may read;
    :meth:`close` may be called from any task in the same loop.

    For the arguments, see :class:`bulltask.queue.events.EventReaderBase`.
    """

    async def open(self) -> Self:
        """Connect, and determine the position that ``start`` describes: by default, the current end of the stream.

        Raises:
            BrokerError: Redis cannot be reached. After later outages, reading continues.
        """
        if not self._opened:
            await self._connect()
        return self

    async def next(self, timeout: Duration | None = None) -> QueueEvent | None:
        """Return the next event after calling its callbacks; ``None`` if no event arrives in time.

        Args:
            timeout: Seconds or ``timedelta`` to wait for an event; ``None`` waits until :meth:`close`.

        Raises:
            BrokerError: Redis could not be reached on the first attempt, or it returns a permanent error.
        """
        deadline_ms = None if timeout is None else mono_ms() + to_ms(timeout, "timeout")
        has_read = False
        while not self._buffer:
            left_ms = LONGEST_BLOCK_MS if deadline_ms is None else deadline_ms - mono_ms()
            if self._closed.is_set() or (has_read and left_ms <= 0):
                return None
            await self._fill(min(left_ms, LONGEST_BLOCK_MS))
            has_read = True
        event = self._pop()
        for callback in self.of(event):
            await self._call(callback, event)
        return event

    async def run(self) -> None:
        """Read events and call the callbacks until :meth:`close`; raises the errors of :meth:`next`."""
        while await self.next() is not None:
            pass

    async def listen(self) -> Self:
        """Call :meth:`open`, then :meth:`run` in the background.

        Raises the errors of :meth:`open`.
        """
        await self.open()
        await self._spawn(self.run)
        return self

    async def publish(self, name: str, fields: Mapping[str, str | float] | None = None) -> str:
        """Add a custom event to the stream (Node's ``QueueEventsProducer``); readers receive it as ``Custom``.

        Args:
            name: A name that BullMQ does not use for its events.
            fields: Strings and numbers; ``jobId`` is the job that the event is about.

        Returns:
            The event's id.

        Raises:
            InvalidNameError: BullMQ uses the name, or a field is called ``event``.
            ConfigError: A field is neither a string nor a number.
        """
        return await self._context.arun(self._publish_call(name, fields or {}))

    def __aiter__(self) -> AsyncIterator[QueueEvent]:
        return self

    async def __anext__(self) -> QueueEvent:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
