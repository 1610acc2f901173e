"""What signals mean; the table is printed in the README."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Mapping
from types import FrameType
from typing import Final

from bulltask.worker.wakeups import Wakeups

__all__ = ["ON", "SignalQueue"]

ON: Final[Mapping[signal.Signals, str]] = {
    signal.SIGTERM: "warm_shutdown",
    signal.SIGINT: "warm_shutdown",
    signal.SIGQUIT: "cold_shutdown",
    signal.SIGCHLD: "child_changed",
}
"""Signal to the supervisor's method. A second TERM or INT while stopping is cold."""


class SignalQueue:
    """Responsible for remembering signals until the loop asks: a handler only enters the number, so it cannot
    interrupt anything half-done.

    Args:
        wakeups: ends a wait when a signal arrives.
    """

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._arrived: deque[int] = deque()

    def install(self) -> None:
        """Take over every signal of the table."""
        for number in ON:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(number)

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or as soon as a signal has arrived."""
        self._wakeups.wait(timeout_ms)

    def take(self) -> list[str]:
        """Return the methods to call, in order of arrival."""
        names = []
        while self._arrived:
            names.append(ON[signal.Signals(self._arrived.popleft())])
        return names
