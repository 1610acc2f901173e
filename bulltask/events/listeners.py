"""An app's event listeners: ``@app.on(JobFailed)``."""

from __future__ import annotations

import inspect
import os
from typing import Any

from bulltask.errors import ConfigError
from bulltask.events.bus import Bus, Event, Listener
from bulltask.process import exit_if_forked

__all__ = ["Listeners"]


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
        from bulltask.events import ChildEvent  # noqa: PLC0415 - see bulltask.events.__getattr__

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
        """Subscribe all listeners to a child's bus; call it in the child.

        Args:
            bus: The bus.
            is_final: Whether adding another listener afterwards raises an error.
        """
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
