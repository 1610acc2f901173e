"""Who listens to a child: its log lines, its counters, and what the app has asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bulltask.events import Bus
from bulltask.events.listeners import Listeners
from bulltask.observe.counters import MetricsListener, MetricsMemory
from bulltask.observe.log_listener import LogListener, listener_errors

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["child_bus"]


def child_bus(
    logger: FilteringBoundLogger, memory: MetricsMemory | None, index: int, queues: Sequence[str], listeners: Listeners
) -> Bus:
    """Return a child's bus; call it in the child, because the counters remember who writes them."""
    bus = Bus(on_error=listener_errors(logger))
    LogListener(logger).attach(bus)
    if memory is not None:
        MetricsListener(memory.block(index + 1), queues).attach(bus)
    listeners.attach(bus)  # after the log, so that a job's line comes before whatever they do
    return bus
