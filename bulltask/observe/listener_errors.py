"""Logs the exceptions that listeners raise."""

from __future__ import annotations

from structlog.typing import FilteringBoundLogger

from bulltask import events

__all__ = ["listener_errors"]


def listener_errors(log: FilteringBoundLogger) -> events.OnError:
    """Return a function for ``Bus(on_error=…)`` that logs the exceptions that listeners raise."""

    def report(listener: str, event: events.Event, exc: Exception) -> None:
        log.error(
            "Listener failed",
            listener=listener,
            on=type(event).__name__,
            exc_info=exc,
            hint="Further failures of this listener for this event are not logged",
        )

    return report
