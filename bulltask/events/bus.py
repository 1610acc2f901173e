"""The bus that passes events to listeners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Bus", "Event", "Listener", "OnError"]


class Event:
    """Base class of all events; a listener for this class receives every event."""

    __slots__ = ()


E = TypeVar("E", bound=Event)
Listener = Callable[[Any], None]
"""Called with an event. Its return value is ignored; an exception is reported and dropped."""
OnError = Callable[[str, Event, Exception], None]
"""Called with the listener's name, the event and the listener's exception."""


class Bus:
    """Passes every event to the listeners of its class, in the order in which they subscribed.

    Args:
        on_error: Called when a listener raises, once for each pair of listener and event class, so that a broken
            listener does not flood the log. Without it the exception is dropped.
    """

    __slots__ = ("_on_error", "_reported", "_routes", "_subscribed")

    def __init__(self, on_error: OnError | None = None) -> None:
        self._on_error = on_error
        self._subscribed: list[tuple[type[Event], Listener]] = []
        # Event class to listeners; filled by the first emit() or wants(), emptied by subscribe().
        self._routes: dict[type[Event], tuple[Listener, ...]] = {}
        self._reported: set[tuple[str, type[Event]]] = set()

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> None:
        """Call ``listener`` with every event of class ``kind`` or its subclasses.

        The listener is called by :meth:`emit`: it must be quick and must not block. A slow listener delays the next job
        (in the supervisor: its services).
        """
        self._subscribed.append((kind, listener))
        self._routes = {}  # a new dict rather than clear(), as another thread may be in emit()

    def wants(self, kind: type[Event]) -> bool:
        """Return whether ``kind`` has a listener; frequent events are created only if it does."""
        routes = self._routes
        return bool(routes[kind] if kind in routes else self._route(kind))

    def emit(self, event: Event) -> None:
        """Call the listeners of ``event``. An ``Exception`` that a listener raises is reported and dropped."""
        kind = type(event)
        routes = self._routes
        for listener in routes[kind] if kind in routes else self._route(kind):
            try:
                listener(event)
            except Exception as exc:  # noqa: BLE001 - a listener must not fail a job
                self._report(listener, event, exc)

    def _route(self, kind: type[Event]) -> tuple[Listener, ...]:
        routes = self._routes  # read before the list: a subscribe() in between replaces this dict
        routes[kind] = listeners = tuple(call for subscribed, call in self._subscribed if issubclass(kind, subscribed))
        return listeners

    def _report(self, listener: Listener, event: Event, exc: Exception) -> None:
        name = f"{getattr(listener, '__module__', '?')}.{getattr(listener, '__qualname__', type(listener).__name__)}"
        key = (name, type(event))
        if self._on_error is None or key in self._reported:
            return
        self._reported.add(key)
        try:
            self._on_error(name, event, exc)
        except Exception:  # noqa: BLE001 - on_error failed
            return
