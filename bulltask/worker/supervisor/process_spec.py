"""Where a worker comes from: how it was called, and how it is called again."""

from __future__ import annotations

import os
import signal
import sys

from bulltask.worker.supervisor.signals import SIGNAL_METHODS, STOP_METHODS, SignalQueue

__all__ = ["ProcessSpec"]


class ProcessSpec:
    """Responsible for what a worker must take hold of before any of the app's code runs.

    The app may change the directory and the environment while it is imported; whoever runs the worker's command again
    has to begin where the first one did. And a signal that comes meanwhile must not end a worker that has just
    restarted itself because of one.

    Attributes:
        signals: those that do not end the worker are remembered from now on.
    """

    def __init__(self) -> None:
        self.signals = SignalQueue()
        self.signals.install_early()
        self._directory, self._environ = _directory(), dict(os.environ)
        self._terminals = [fd for fd in range(3) if os.isatty(fd)]

    @property
    def terminal_closed(self) -> bool:
        """True when the worker was started in a terminal that is gone by now."""
        return bool(self._terminals) and not any(os.isatty(fd) for fd in self._terminals)

    @property
    def command(self) -> list[str]:
        """The program and the arguments that started this process, ``-m`` and the interpreter's options included."""
        return [sys.executable, *sys.orig_argv[1:]]

    def restart(self) -> None:
        """Become the same command anew, with the process id of this one; returns if told to stop meanwhile.

        All descriptors but the standard ones and those that this process was given are closed by the system: Python
        opens its own so. The caller has ended its children.

        Raises:
            OSError: it cannot be run, as when the interpreter was removed.
        """
        # From here on they come through to the new program, and wait there until it has handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNAL_METHODS)
        if self.signals.contains(STOP_METHODS):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self._directory:
            os.chdir(self._directory)
        os.execve(sys.executable, self.command, self._environ)  # noqa: S606 - our own command line


def _directory() -> str:
    """The working directory, by the name by which it was entered.

    Where releases are changed by pointing a symbolic link elsewhere, the link must be followed again.
    """
    named = os.environ.get("PWD", "")
    try:
        return named if named and os.path.samefile(named, ".") else os.getcwd()  # noqa: PTH109, PTH121
    except OSError:  # one of them was removed
        return ""
