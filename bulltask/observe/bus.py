"""The bus that passes events to listeners, and the listeners of an app (``@app.on(JobFailed)``)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeVar

from bulltask.config.process import exit_if_forked
from bulltask.jobs.errors import ConfigError

__all__ = ["Bus", "Event", "Listener", "OnError"]


class Event:
    """Base class of all events; a listener for this class receives every event.

    It has the methods that ``dataclass`` would write for each class, which takes a twentieth of a worker's start.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash((type(self), self._compared()))

    def __repr__(self) -> str:
        shown = [f"{each.name}={getattr(self, each.name)!r}" for each in _fields(self) if each.repr]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _compared(self) -> tuple[object, ...]:
        return tuple(getattr(self, each.name) for each in _fields(self) if each.compare)


def _fields(event: Event) -> tuple[Field[Any], ...]:
    return fields(event) if is_dataclass(event) else ()


E = TypeVar("E", bound=Event)
Listener = Callable[[Any], None]
"""Called with an event. Its return value is ignored; an exception is reported and dropped."""
ListenerOfClass = Callable[[type[Event]], Listener | None]
"""Returns the listener of an event class, ``None`` if it has none."""
OnError = Callable[[str, Event, Exception], None]
"""Called with the listener's name, the event and the listener's exception."""


class Bus:
    """Passes every event to the listeners of its class, in the order in which they subscribed.

    Args:
        on_error: Called when a listener raises, once for each pair of listener and event class, so that a broken
            listener does not flood the log. Without it the exception is dropped.

    Attributes:
        listeners: The listeners of each event class; a frequent event is created only if it has some.
    """

    __slots__ = ("_of_class", "_on_error", "_reported", "_subscribed", "listeners")

    def __init__(self, on_error: OnError | None = None) -> None:
        self._on_error = on_error
        self._subscribed: list[tuple[type[Event], Listener]] = []
        self._of_class: ListenerOfClass = lambda _: None
        self.listeners: Mapping[type[Event], tuple[Listener, ...]]
        self._renew()
        self._reported: set[tuple[str, type[Event]]] = set()

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> None:
        """Call ``listener`` with every event of class ``kind`` or its subclasses.

        The listener is called by :meth:`emit`: it must be quick and must not block. A slow listener delays the next job
        (in the supervisor: its services).
        """
        self._subscribed.append((kind, listener))
        self._renew()

    def subscribe_first(self, of_class: ListenerOfClass) -> None:
        """Call the listener of each class before all others; it replaces that of an earlier call.

        It is asked for when the first event of the class is emitted, so that a child, which emits few classes, does not
        copy the pages of memory of all declarations.
        """
        self._of_class = of_class
        self._renew()

    def _renew(self) -> None:
        # A new object, as another thread may be in emit().
        self.listeners = _ListenersOfClass(self._of_class, self._subscribed)

    def emit(self, event: Event) -> None:
        """Call the listeners of ``event``. An ``Exception`` that a listener raises is reported and dropped."""
        for listener in self.listeners[type(event)]:
            try:
                listener(event)
            except Exception as exc:  # noqa: BLE001 - a listener must not fail a job
                self._report(listener, event, exc)

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


class _ListenersOfClass(dict[type[Event], tuple[Listener, ...]]):
    """The listeners of each event class, looked up when the first event of the class is emitted."""

    def __init__(self, of_class: ListenerOfClass, subscribed: Sequence[tuple[type[Event], Listener]]) -> None:
        super().__init__()
        self._of_class = of_class
        self._subscribed = tuple(subscribed)

    def __missing__(self, kind: type[Event]) -> tuple[Listener, ...]:
        first = self._of_class(kind)
        others = (call for subscribed, call in self._subscribed if issubclass(kind, subscribed))
        self[kind] = listeners = (*(() if first is None else (first,)), *others)
        return listeners


class Listeners:
    """Collects an app's listeners until a child attaches them to its bus.

    Listeners never run in the supervisor, which renews the locks of running jobs and must not wait for an app's code
    (docs/adr/0015-listeners-in-children.md).
    """

    def __init__(self) -> None:
        self._listeners: list[tuple[type[Event], Listener]] = []
        self._attached = False

    def add(self, kind: object, listener: object) -> None:
        """Add a listener for events of class ``kind``.

        Raises:
            ConfigError: ``kind`` is not an event class, or children do not emit it; ``listener`` is not callable, or is
                a coroutine function; or the child is already running.
        """
        from bulltask.observe.events import ChildEvent  # noqa: PLC0415 - see bulltask.events.__getattr__

        if not isinstance(kind, type) or not issubclass(kind, Event):
            raise ConfigError(f"a listener needs a class of bulltask.events such as JobFailed, not {kind!r:.200}")
        if not issubclass(kind, ChildEvent) and not issubclass(ChildEvent, kind):
            raise ConfigError(
                f"{kind.__name__} is emitted by a worker's supervisor, which runs no app code; the worker logs it, "
                "and app.events(queue) reads the events of jobs from Redis"
            )
        if not callable(listener):
            raise ConfigError(f"a listener must be a function, not {listener!r:.200}")
        if inspect.iscoroutinefunction(listener):
            raise ConfigError(
                f"listener {_name(listener)} must be a plain function, because it is not awaited. Send a job instead"
            )
        if self._attached:
            raise ConfigError(f"listener {_name(listener)} was added too late: add it while the app is being imported")
        self._listeners.append((kind, _wrap(listener)))

    def attach(self, bus: Bus, *, is_final: bool = True) -> None:
        """Subscribe all listeners to a child's bus; if this is final, no other can be added afterwards."""
        self._attached = is_final
        for kind, listener in self._listeners:
            bus.subscribe(kind, listener)


def _wrap(listener: Listener) -> Listener:
    """Wrap a listener so that it raises only ``Exception``, which a bus reports and drops.

    A process that the listener forks ends when the listener returns.
    """

    def call(event: Any) -> None:
        pid, raised = os.getpid(), None
        try:
            listener(event)
        except BaseException as exc:
            raised = exc
            if isinstance(exc, Exception):
                raise
            # sys.exit() in a listener must not stop the child and its jobs
            raise RuntimeError(f"the listener raised {type(exc).__name__}: {exc}") from exc
        finally:
            exit_if_forked(pid, raised)

    call.__module__ = getattr(listener, "__module__", None) or "?"
    call.__qualname__ = _name(listener)
    return call


def _name(listener: object) -> str:
    return getattr(listener, "__qualname__", None) or repr(listener)
