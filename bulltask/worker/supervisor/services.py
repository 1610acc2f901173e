"""What the supervisor does at intervals, and the clockwork that does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bulltask.clock import mono_ms
from bulltask.events import Bus, ServiceFailed
from bulltask.worker.broker_backoff import ReconnectBackoff

__all__ = ["Service", "Ticker"]


class Service(Protocol):
    """One duty of the supervisor; a tick is short, touches Redis at most a few times, and never raises BrokerError."""

    @property
    def interval_ms(self) -> int:
        """Time between ticks."""
        ...

    def tick(self, now_ms: int, missed: int, /) -> None:
        """Do it once.

        Args:
            now_ms: monotonic time.
            missed: ticks that fell out because an earlier one, or something else, took longer than the interval.
        """
        ...


class Ticker:
    """Responsible for running services when they are due, the first one first; ticks never overlap.

    Args:
        services: in order of urgency: when several are due, locks must be renewed before anything else is looked at.
        backoff: the view of an outage that the services share.
        bus: hears of a service that raised what it should not.
    """

    def __init__(self, services: Sequence[Service], backoff: ReconnectBackoff, bus: Bus) -> None:
        self._services, self._backoff, self._bus = services, backoff, bus
        self._failures = [0] * len(services)
        self._due_ms = [0] * len(services)

    @property
    def is_exhausted(self) -> bool:
        """True when the services have failed to reach Redis for more tries than the settings allow."""
        return self._backoff.is_exhausted

    def wait_ms(self, longest_ms: int) -> int:
        """Milliseconds until the next service is due."""
        return max(0, min([longest_ms, *(due - mono_ms() for due in self._due_ms)]))

    def run_due(self) -> None:
        """Run every service that is due."""
        for index, service in enumerate(self._services):
            now_ms = mono_ms()
            due_ms = self._due_ms[index]
            if now_ms < due_ms:
                continue
            missed = (now_ms - due_ms) // service.interval_ms if due_ms else 0
            try:
                service.tick(now_ms, missed)
            except Exception as exc:  # noqa: BLE001 - whatever it met: running jobs need the other services
                self._failures[index] += 1
                self._bus.emit(ServiceFailed(type(service).__name__, self._failures[index], exc))
            # From the planned moment, so that ticks do not drift; missed ones are dropped, not made up for.
            self._due_ms[index] = (due_ms or now_ms) + (missed + 1) * service.interval_ms
