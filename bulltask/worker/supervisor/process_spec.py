"""How a worker process was started, so that it can restart itself."""

from __future__ import annotations

import os
import signal
import sys

from bulltask.worker.supervisor.signals import SIGNAL_METHODS, STOP_METHODS, SignalQueue

__all__ = ["ProcessSpec"]


class ProcessSpec:
    """The command, directory and environment of a worker, recorded before any of the app's code runs.

    The app may change directory and environment while it is imported, but a restart must begin where the first start
    did. Also, a signal during the import must not end a worker that is just restarting because of a signal.

    Attributes:
        signals: Records signals from now on, except those that stop the worker.
    """

    def __init__(self) -> None:
        self.signals = SignalQueue()
        self.signals.install_early()
        self._directory, self._environ = _directory(), dict(os.environ)
        self._terminals = [fd for fd in range(3) if os.isatty(fd)]

    @property
    def terminal_closed(self) -> bool:
        """True if the worker was started in a terminal that is closed now."""
        return bool(self._terminals) and not any(os.isatty(fd) for fd in self._terminals)

    @property
    def command(self) -> list[str]:
        """The program and arguments that started this process, with ``-m`` and the interpreter's options."""
        return [sys.executable, *sys.orig_argv[1:]]

    def restart(self) -> None:
        """Run the same command again in this process (``exec``); returns only if a stop signal has arrived.

        The system closes all descriptors that Python has opened (``O_CLOEXEC``). The caller has ended the children.

        Raises:
            OSError: The command cannot be run, for example because the interpreter was removed.
        """
        # From now on signals stay pending until the new program has its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNAL_METHODS)
        if self.signals.contains(STOP_METHODS):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self._directory:
            os.chdir(self._directory)
        os.execve(sys.executable, self.command, self._environ)  # noqa: S606 - our own command line


def _directory() -> str:
    """Return the working directory by the path by which it was entered.

    If it is a symbolic link to the current release, a restart must follow the link again.
    """
    named = os.environ.get("PWD", "")
    try:
        return named if named and os.path.samefile(named, ".") else os.getcwd()  # noqa: PTH109, PTH121
    except OSError:  # one of them was removed
        return ""
