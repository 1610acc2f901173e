"""The bus that hands events to whoever listens; the events themselves are in ``bulltask.events``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Bus", "Event", "Listener", "OnError"]


class Event:
    """Something that happened; a listener of this class hears every event."""

    __slots__ = ()


E = TypeVar("E", bound=Event)
Listener = Callable[[Any], None]
"""Takes one event; what it returns is ignored, what it raises is reported and dropped."""
OnError = Callable[[str, Event, Exception], None]
"""Takes the listener's name, the event and what the listener raised."""


class Bus:
    """Hands every event to the listeners of its class, in the order in which they subscribed.

    Args:
        on_error: called with the listener's name, the event and the exception when a listener raises, once for each
            pair of listener and class of event: a broken listener on the hot path must not flood the log. Not given,
            the exception is dropped.
    """

    __slots__ = ("_on_error", "_reported", "_routes", "_subscribed")

    def __init__(self, on_error: OnError | None = None) -> None:
        self._on_error = on_error
        self._subscribed: list[tuple[type[Event], Listener]] = []
        # Class of an event to its listeners; filled at the first emit or question, emptied by subscribe().
        self._routes: dict[type[Event], tuple[Listener, ...]] = {}
        self._reported: set[tuple[str, type[Event]]] = set()

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> None:
        """Call ``listener`` with every event of class ``kind``; ``Event`` itself means all of them.

        The listener runs inside the caller's ``emit``, in the worker's hot path: it must be quick and must not block.
        """
        self._subscribed.append((kind, listener))
        self._routes = {}  # a new dict, not clear(): another thread may be inside emit()

    def wants(self, kind: type[Event]) -> bool:
        """True when somebody listens to ``kind``; hot paths ask before they build an event."""
        routes = self._routes
        return bool(routes[kind] if kind in routes else self._route(kind))

    def emit(self, event: Event) -> None:
        """Call the listeners of ``event``. Never raises, whatever they do (``Interrupt`` and ``SystemExit`` pass)."""
        kind = type(event)
        routes = self._routes
        for listener in routes[kind] if kind in routes else self._route(kind):
            try:
                listener(event)
            except Exception as exc:  # noqa: BLE001 - a listener is foreign code; the job must not pay for it
                self._report(listener, event, exc)

    def _route(self, kind: type[Event]) -> tuple[Listener, ...]:
        routes = self._routes  # taken before the list is read: a subscribe() in between throws this dict away
        routes[kind] = found = tuple(call for wanted, call in self._subscribed if issubclass(kind, wanted))
        return found

    def _report(self, listener: Listener, event: Event, exc: Exception) -> None:
        name = f"{getattr(listener, '__module__', '?')}.{getattr(listener, '__qualname__', type(listener).__name__)}"
        key = (name, type(event))
        if self._on_error is None or key in self._reported:
            return
        self._reported.add(key)
        try:
            self._on_error(name, event, exc)
        except Exception:  # noqa: BLE001 - nothing is left to report it to
            return
