"""What sync and async listeners to a queue's events have in common: everything but the waiting."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from bulltask.config.urls import SecretUrl
from bulltask.errors import BrokerError, ConfigError, InvalidNameError
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.queue.events_callbacks import Callbacks
from bulltask.queue.events_types import KINDS, QueueEvent, lost_events, read_event
from bulltask.queue.link import Link
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call
from bulltask.transport.follow import NEWEST, EventPage, Follower
from bulltask.transport.scripts.stream import BEGINNING, Entry, publish

__all__ = ["EventReader"]

log = logging.getLogger(__name__)

_ID: Final = re.compile(r"\d{1,20}(-\d{1,20})?")


class EventReader(Callbacks):
    """Responsible for the place in the stream and for what was read but not given out.

    Args:
        queue: the queue as the user spells it.
        broker_url: the server, when there is no app; the environment's ``BULLTASK_BROKER_URL`` wins.
        start: ``"$"`` begins with what happens from :meth:`open` (or the first event that is asked for) on, ``"0"``
            with the oldest event that is still there, an id behind the event of that id (see :attr:`position`).
        broker: gives the way to Redis, where there is an app.
        settings: any other setting of ``bulltask.config.settings``: ``prefix``, ``queue_hash_tag`` …

    Raises:
        InvalidNameError: the queue's name is refused.
        ConfigError: a setting is wrong, or ``start`` is none of these.
    """

    def __init__(
        self,
        queue: str,
        broker_url: SecretUrl | None = None,
        *,
        start: str = NEWEST,
        broker: Callable[[], Broker] | None = None,
        **settings: object,
    ) -> None:
        super().__init__()
        if broker is None:
            self._link = Link.to(queue, broker_url, settings, None)
        else:
            self._link = Link(queue, broker, None)
        self._queue, self._broker, self._keys = queue, self._link.broker, self._link.keys
        self._position = _start(start)
        self._follower = Follower(self._keys, self._position, self._broker.endpoint.safe_url)
        # Node and the boards list listeners by this name (PROTOCOL 4.2).
        self._name = f"{self._keys.client_name()}:qe"
        self._read: deque[Entry | QueueEvent] = deque()
        self._opened = False
        self._failures = 0

    @property
    def queue(self) -> str:
        """The queue as the user spells it."""
        return self._queue

    @property
    def position(self) -> str:
        """Id of the last event that was given out, or where it began; a later listener may start there."""
        return self._position

    def _keep(self, page: EventPage) -> None:
        self._failures = 0
        if page.gap is not None:
            self._read.append(lost_events(self._queue, page.gap))
        self._read += page.entries

    def _pop(self) -> QueueEvent:
        item = self._read.popleft()
        event = item if isinstance(item, QueueEvent) else read_event(self._queue, item)
        self._position = event.id
        return event

    def _failed(self, exc: BrokerError) -> float:
        """Seconds to wait before the next try; the first failure in a row is logged."""
        if not self._failures:
            log.warning("events of queue %s cannot be read now, which is tried again: %s", self._queue, exc)
        self._failures += 1
        config = self._broker.config
        return (
            reconnect_delay_ms(self._failures, first_ms=config.reconnect_delay_ms, cap_ms=config.reconnect_delay_max_ms)
            / 1000
        )

    def _publication(self, name: str, fields: Mapping[str, str | float]) -> Call[str]:
        if not isinstance(name, str) or not name or name in KINDS:
            raise InvalidNameError(f"an event of one's own needs a name that BullMQ has no event for, not {name!r}")
        if "event" in fields:
            raise InvalidNameError("the field 'event' holds the event's name; call it something else")
        words = {key: _word(value, key) for key, value in fields.items()}
        return publish(self._keys, name, words, self._broker.config.max_events)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of queue {self._queue} at {self._position}>"


def _start(start: str) -> str:
    if start == NEWEST:
        return NEWEST
    if not isinstance(start, str) or not _ID.fullmatch(start):
        raise ConfigError(f'start must be "$", "0", or the id of an event ("1700000000000-0"), not {start!r}')
    ms, _, sequence = start.partition("-")
    return BEGINNING if int(ms) == int(sequence or 0) == 0 else f"{int(ms)}-{int(sequence or 0)}"


def _word(value: object, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"field {key!r} of an event must be a string or a number, not {value!r}")
    return str(value)
