"""Sends ``worker_process_init`` and ``worker_process_shutdown`` in a child."""

from __future__ import annotations

from bulltask.events import Bus, ChildClosing, ChildReady
from bulltask.hooks.calls import send_signal
from bulltask.signals.catalog import worker_process_init, worker_process_shutdown

__all__ = ["attach_process_signals"]


def attach_process_signals(bus: Bus) -> None:
    """Send the signals when the child is ready, and when it has finished its last job."""
    bus.subscribe(ChildReady, lambda _: send_signal(worker_process_init, None))
    bus.subscribe(ChildClosing, lambda event: send_signal(worker_process_shutdown, None, pid=event.pid, exitcode=0))
