"""Callbacks for a queue's events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, overload

from bulltask.queue.events import KINDS, Custom, JobEvent, QueueEvent

__all__ = ["Callback", "Callbacks", "log_failure"]

log = logging.getLogger(__name__)

E = TypeVar("E", bound=QueueEvent)
C = TypeVar("C", bound=Callable[[Any], Any])
Callback = Callable[[Any], Any]
"""A function that is called with an event. If it raises an exception, that is logged, and reading continues."""

_Key = tuple[type[QueueEvent], str, str | None]
"""An event class, the name of a custom event, and a job id (``None``: all jobs)."""


class Callbacks:
    """The registered callbacks, in the order of registration."""

    def __init__(self) -> None:
        self._calls: list[tuple[_Key, Callback]] = []

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
        ``listen()``.

        Args:
            event: BullMQ's name (``"completed"``), the name of a custom event, or a class of
                ``bulltask.queue.events``; ``QueueEvent`` means all events.
            callback: Called with the event.
            job_id: Only events for this job.

        Returns:
            The callback itself, for :meth:`off`.
        """

        def add(target: Callback) -> Callback:
            kind = event if isinstance(event, type) else KINDS.get(event, Custom)
            name = event if isinstance(event, str) and event not in KINDS else ""
            self._calls.append(((kind, name, job_id), target))
            return target

        return add if callback is None else add(callback)

    def off(self, callback: Callback) -> None:
        """Remove a callback from all its events; unknown callbacks are ignored."""
        self._calls = [(key, known) for key, known in self._calls if known is not callback]

    def of(self, event: QueueEvent) -> list[Callback]:
        """Return the callbacks for ``event``."""
        return [callback for key, callback in self._calls if _fits(key, event)]


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
