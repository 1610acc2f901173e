"""Sends ``worker_process_init`` and ``worker_process_shutdown`` in a child, and enters the app's lifespan."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

from bulltask.events import Bus, ChildClosing, ChildReady
from bulltask.hooks.calls import asend_signal, send_signal
from bulltask.hooks.lifespan import Lifespan
from bulltask.signals.catalog import worker_process_init, worker_process_shutdown

__all__ = ["LoopHooks", "attach_process_signals"]


def attach_process_signals(bus: Bus) -> None:
    """Send the signals when the child is ready, and when it has finished its last job."""
    bus.subscribe(ChildReady, lambda _: send_signal(worker_process_init, None))
    bus.subscribe(ChildClosing, lambda event: send_signal(worker_process_shutdown, None, pid=event.pid, exitcode=0))


class LoopHooks:
    """What runs on the event loop of a child before its first job and after the last one.

    Args:
        lifespan: The app's lifespan.
    """

    def __init__(self, lifespan: Lifespan) -> None:
        self._lifespan = lifespan

    @property
    def exist(self) -> bool:
        """Whether there are any, so that the event loop starts before the first job."""
        signals = worker_process_init, worker_process_shutdown
        receivers = (receiver for signal in signals for receiver in signal.receivers(None))
        return self._lifespan.is_defined or any(map(inspect.iscoroutinefunction, receivers))

    async def open(self, opened: Callable[[BaseException | None], None]) -> None:
        """Enter the lifespan and call the receivers; the coroutine ends when the lifespan does.

        Args:
            opened: Called when jobs may start, with the exception that prevents it, if any.
        """

        async def call_receivers() -> None:
            await asend_signal(worker_process_init, None)
            opened(None)

        if self._lifespan.is_defined:
            await self._lifespan.live(opened, call_receivers)
        else:
            await call_receivers()

    async def close(self) -> None:
        """Call the receivers and leave the lifespan."""
        await asend_signal(worker_process_shutdown, None, pid=os.getpid(), exitcode=0)
        if self._lifespan.is_defined:
            await self._lifespan.leave()
