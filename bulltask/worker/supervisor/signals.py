"""The supervisor's signals; see the table in docs/reference/signals.md."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FrameType
from typing import Final

from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["SIGNAL_METHODS", "STOP_METHODS", "SignalQueue"]

SIGNAL_METHODS: Final[Mapping[signal.Signals, str]] = {
    signal.SIGTERM: "warm_shutdown",
    signal.SIGINT: "warm_shutdown",
    signal.SIGQUIT: "cold_shutdown",
    signal.SIGHUP: "restart",
    signal.SIGTSTP: "pause",
    signal.SIGCONT: "resume",
    signal.SIGTTIN: "grow",
    signal.SIGTTOU: "shrink",
    signal.SIGUSR1: "dump_stacks",
    signal.SIGUSR2: "ignore",
    signal.SIGCHLD: "child_changed",
}
"""The supervisor's method for each signal. A second TERM or INT during a shutdown makes it cold."""

_INSTALLED_LATE: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD})
"""Signals that keep their default action until the worker is running: before that there is nothing to shut down."""

_STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})

STOP_METHODS: Final = frozenset({"warm_shutdown", "cold_shutdown"})
"""The methods that stop the worker without a restart."""


class SignalQueue:
    """Queues signals for the supervisor's loop: a handler only records the number, so it interrupts nothing.

    Attributes:
        on_stop: Called in the handler of a signal that stops the worker.
    """

    def __init__(self) -> None:
        self._wakeup_pipe: WakeupPipe | None = None
        self.on_stop: Callable[[], None] | None = None
        self._arrived: deque[int] = deque()

    def install_early(self) -> None:
        """Record the signals that do not stop the worker, while the worker is still being loaded."""
        self._handle(number for number in SIGNAL_METHODS if number not in _INSTALLED_LATE)

    def install(self, wakeup_pipe: WakeupPipe) -> None:
        """Handle all signals.

        Args:
            wakeup_pipe: Ends a wait when a signal arrives.
        """
        self._wakeup_pipe = wakeup_pipe
        self._handle(SIGNAL_METHODS)

    def _handle(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            # With nohup a worker continues when its terminal is closed, like any other program.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        # After a restart, the worker starts with all these signals blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNAL_METHODS)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(number)
        if self.on_stop is not None and number in _STOP_SIGNALS:
            self.on_stop()

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or as soon as a signal has arrived."""
        assert self._wakeup_pipe is not None, "call install() first"
        self._wakeup_pipe.wait(timeout_ms)

    def contains(self, names: Collection[str]) -> bool:
        """Whether a signal for one of these methods is in the queue."""
        return any(SIGNAL_METHODS[signal.Signals(number)] in names for number in tuple(self._arrived))

    def pop_all(self) -> list[str]:
        """Return the methods to call, in order of arrival, and empty the queue."""
        names = []
        while self._arrived:
            names.append(SIGNAL_METHODS[signal.Signals(self._arrived.popleft())])
        return names
