"""The supervisor's services, and the ticker that runs them at their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bulltask.clock import mono_ms
from bulltask.events import Bus, ServiceFailed
from bulltask.worker.broker_backoff import ReconnectBackoff

__all__ = ["Service", "Ticker"]


class Service(Protocol):
    """Periodic work of the supervisor. A tick is short, makes few calls, and never raises ``BrokerError``."""

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks."""
        ...

    def tick(self, now_ms: int, missed: int, /) -> None:
        """Run once.

        Args:
            now_ms: Monotonic time.
            missed: How many ticks were skipped because an earlier tick, or another service, took too long.
        """
        ...


class Ticker:
    """Runs services when they are due; ticks never overlap.

    Args:
        services: The services in order of urgency: when several are due, locks are renewed first.
        backoff: The backoff that the services share.
        bus: Receives an event when a service raises an unexpected exception.
    """

    def __init__(self, services: Sequence[Service], backoff: ReconnectBackoff, bus: Bus) -> None:
        self._services, self._backoff, self._bus = services, backoff, bus
        self._failures = [0] * len(services)
        self._due_ms = [0] * len(services)

    @property
    def is_exhausted(self) -> bool:
        """True after more than ``broker_connection_max_retries`` failed attempts to reach Redis."""
        return self._backoff.is_exhausted

    def wait_ms(self, max_ms: int) -> int:
        """Return the milliseconds until the next service is due, at most ``max_ms``."""
        return max(0, min([max_ms, *(due - mono_ms() for due in self._due_ms)]))

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
            except Exception as exc:  # noqa: BLE001 - running jobs need the other services
                self._failures[index] += 1
                self._bus.emit(ServiceFailed(type(service).__name__, self._failures[index], exc))
            # Computed from the due time, so that ticks do not drift; missed ticks are skipped.
            self._due_ms[index] = (due_ms or now_ms) + (missed + 1) * service.interval_ms
