# Generated from bulltask/queue/aio/events.py by tools/generate_sync.py (make sync): do not edit.
"""``QueueEvents``: a queue's events as typed values, for iteration and callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

from bulltask.jobs.clock import Duration, mono_ms, to_ms
from bulltask.queue.events import EventReader, QueueEvent
from bulltask.transport.streams import LONGEST_BLOCK_MS

__all__ = ["QueueEvents"]


class QueueEvents(EventReader):
    """One queue's events.

    ::

        with QueueEvents("mail") as events:  # start="$": begins with the next event
            for event in events:  # waits for the next event; ends when close() is called
                match event:
                    case Completed(job_id=job_id, returnvalue=value): ...

        events.on("failed", notify)
        events.on(Progress, show, job_id=job.id)
        events.listen()  # a separate thread reads and calls the callbacks
        events.close()

    After an outage or a slow callback, reading continues where it stopped. If Redis has trimmed events in the
    meantime, an :class:`~bulltask.queue.events.EventsLost` takes their place.

    It has a separate connection, which does not survive a fork. One thread at a time may read; :meth:`close`
    may be called from any thread.

    For the arguments, see :class:`bulltask.queue.events.EventReaderBase`.
    """

    def open(self) -> Self:
        """Connect, and determine the position that ``start`` describes: by default, the current end of the stream.

        Raises:
            BrokerError: Redis cannot be reached. After later outages, reading continues.
        """
        if not self._opened:
            self._connect()
        return self

    def next(self, timeout: Duration | None = None) -> QueueEvent | None:
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
            self._fill(min(left_ms, LONGEST_BLOCK_MS))
            has_read = True
        event = self._pop()
        for callback in self.of(event):
            self._call(callback, event)
        return event

    def run(self) -> None:
        """Read events and call the callbacks until :meth:`close`; raises the errors of :meth:`next`."""
        while self.next() is not None:
            pass

    def listen(self) -> Self:
        """Call :meth:`open`, then :meth:`run` in a separate daemon thread.

        Raises the errors of :meth:`open`.
        """
        self.open()
        self._spawn(self.run)
        return self

    def publish(self, name: str, fields: Mapping[str, str | float] | None = None) -> str:
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
        return self._context.run(self._publish_call(name, fields or {}))

    def __iter__(self) -> Iterator[QueueEvent]:
        return self

    def __next__(self) -> QueueEvent:
        event = self.next()
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()
