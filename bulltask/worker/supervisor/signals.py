"""What signals mean; the table is printed in the README."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Collection, Iterable, Mapping
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
"""Signal to the supervisor's method. A second TERM or INT while stopping is cold."""

_LATE: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD})
"""What does its usual work until the worker runs: a program that is being loaded has nothing to end in good order."""

STOP_METHODS: Final = frozenset({"warm_shutdown", "cold_shutdown"})
"""The methods that end the worker for good."""


class SignalQueue:
    """Responsible for remembering signals until the loop asks: a handler only enters the number, so it cannot
    interrupt anything half-done."""

    def __init__(self) -> None:
        self._wakeup_pipe: WakeupPipe | None = None
        self._arrived: deque[int] = deque()

    def install_early(self) -> None:
        """Remember the signals that do not end the worker, while it is still being loaded."""
        self._take_over(number for number in SIGNAL_METHODS if number not in _LATE)

    def install(self, wakeup_pipe: WakeupPipe) -> None:
        """Take over every signal of the table.

        Args:
            wakeup_pipe: ends a wait when a signal arrives.
        """
        self._wakeup_pipe = wakeup_pipe
        self._take_over(SIGNAL_METHODS)

    def _take_over(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            # Started with nohup, a worker goes on when its terminal is closed, like any other program.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        # A worker that has restarted itself did so with all of them held back.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNAL_METHODS)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(number)

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or as soon as a signal has arrived."""
        assert self._wakeup_pipe is not None, "install() comes first"
        self._wakeup_pipe.wait(timeout_ms)

    def contains(self, names: Collection[str]) -> bool:
        """True when a signal for one of these methods has arrived and was not taken yet."""
        return any(SIGNAL_METHODS[signal.Signals(number)] in names for number in tuple(self._arrived))

    def pop_all(self) -> list[str]:
        """Return the methods to call, in order of arrival."""
        names = []
        while self._arrived:
            names.append(SIGNAL_METHODS[signal.Signals(self._arrived.popleft())])
        return names
