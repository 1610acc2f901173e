"""Who is called for which event of a queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, overload

from bulltask.queue.events_types import KINDS, Custom, JobEvent, QueueEvent

__all__ = ["Callback", "Callbacks", "report"]

log = logging.getLogger(__name__)

E = TypeVar("E", bound=QueueEvent)
C = TypeVar("C", bound=Callable[[Any], Any])
Callback = Callable[[Any], Any]
"""Takes one event. What it raises is logged and ends nothing."""

_Key = tuple[type[QueueEvent], str, str | None]
"""Class of events, name of a custom one, and id of the job, ``None`` for all jobs."""


class Callbacks:
    """Responsible for finding the callbacks of an event, in the order in which they were given."""

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
        """Call ``callback`` with every such event; without a callback it is a decorator.

        The events are read by whoever iterates, or by ``run()`` or ``listen()``, and that is who calls.

        Args:
            event: BullMQ's name (``"completed"``), the name of a custom event, or a class of
                ``bulltask.queue.events_types``; ``QueueEvent`` means all of them.
            callback: takes the event.
            job_id: only those about this job.

        Returns:
            The callback itself, which is what :meth:`off` takes.
        """

        def add(target: Callback) -> Callback:
            kind = event if isinstance(event, type) else KINDS.get(event, Custom)
            name = event if isinstance(event, str) and event not in KINDS else ""
            self._calls.append(((kind, name, job_id), target))
            return target

        return add if callback is None else add(callback)

    def off(self, callback: Callback) -> None:
        """Forget a callback, for whatever it was given; an unknown one is no error."""
        self._calls = [(key, known) for key, known in self._calls if known is not callback]

    def of(self, event: QueueEvent) -> list[Callback]:
        """The callbacks that want to hear ``event``."""
        return [callback for key, callback in self._calls if _fits(key, event)]


def _fits(key: _Key, event: QueueEvent) -> bool:
    kind, name, job_id = key
    if not isinstance(event, kind):
        return False
    if name and not (isinstance(event, Custom) and event.name == name):
        return False
    return job_id is None or (isinstance(event, JobEvent | Custom) and event.job_id == job_id)


def report(callback: Callback, event: QueueEvent, exc: Exception) -> None:
    """Log what a callback raised: it is foreign code, and the next event must not pay for it."""
    name = getattr(callback, "__qualname__", type(callback).__name__)
    log.error("callback %s of event %s of queue %s raised", name, event.event, event.queue, exc_info=exc)
