"""What an app wants to hear of its children: ``@app.on(JobFailed)``."""

from __future__ import annotations

import inspect
import os
from typing import Any

from bulltask.errors import ConfigError
from bulltask.events import ChildEvent
from bulltask.events.bus import Bus, Event, Listener
from bulltask.process import end_if_forked

__all__ = ["Listeners"]


class Listeners:
    """Responsible for remembering an app's listeners until a child has a bus for them.

    They are in the children and never in the supervisor, which renews the locks of running jobs and must not wait for
    code of an app (ADR 15).
    """

    def __init__(self) -> None:
        self._wanted: list[tuple[type[Event], Listener]] = []
        self._attached = False

    def add(self, kind: object, listener: object) -> None:
        """Remember that ``listener`` wants events of class ``kind``.

        Raises:
            ConfigError: ``kind`` is no class of events, or one that no child tells; ``listener`` cannot be called, or
                is a coroutine function; or the children work already.
        """
        if not isinstance(kind, type) or not issubclass(kind, Event):
            raise ConfigError(f"a listener needs a class of bulltask.events such as JobFailed, not {kind!r}")
        if not issubclass(kind, ChildEvent) and not issubclass(ChildEvent, kind):
            raise ConfigError(
                f"{kind.__name__} is told by the supervisor of a worker, which runs no code of an app; the log has it, "
                "and app.events(queue) hears from Redis what becomes of jobs"
            )
        if not callable(listener):
            raise ConfigError(f"a listener must be a function, not {listener!r}")
        if inspect.iscoroutinefunction(listener):
            raise ConfigError(
                f"listener {_name(listener)} must be a plain function: nobody would await it. Send a job instead"
            )
        if self._attached:
            raise ConfigError(
                f"listener {_name(listener)} comes too late: this child works already. Add it while the app is imported"
            )
        self._wanted.append((kind, _kept_in(listener)))

    def attach(self, bus: Bus) -> None:
        """Subscribe all of them to a child's bus; call it in the child."""
        self._attached = True
        for kind, listener in self._wanted:
            bus.subscribe(kind, listener)


def _kept_in(listener: Listener) -> Listener:
    """Return ``listener`` as something that can only raise an ``Exception``, which a bus reports and drops.

    A process that it forks ends where it returns.
    """

    def call(event: Any) -> None:
        pid, raised = os.getpid(), None
        try:
            listener(event)
        except BaseException as exc:
            raised = exc
            if isinstance(exc, Exception):
                raise
            # sys.exit() in a listener must not end the child and its jobs
            raise RuntimeError(f"the listener raised {type(exc).__name__}: {exc}") from exc
        finally:
            end_if_forked(pid, raised)

    call.__module__ = getattr(listener, "__module__", None) or "?"
    call.__qualname__ = _name(listener)
    return call


def _name(listener: object) -> str:
    return getattr(listener, "__qualname__", None) or repr(listener)
