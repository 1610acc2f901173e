"""A worker process's command line, directory and environment, which it needs to restart itself."""

from __future__ import annotations

import os
import signal
import sys

from bulltask.worker.supervisor.signals import SIGNAL_METHODS, STOP_METHODS, SignalQueue

__all__ = ["ProcessSpec"]


class ProcessSpec:
    """The command, directory and environment of a worker, recorded before any of the app's code runs.

    The app may change the directory and environment while it is being imported, but a restart needs the original ones.
    Also, a second ``HUP`` must not kill a worker that is importing the app after a restart.

    Attributes:
        signals: Records signals from the start, except those that stop the worker.
    """

    def __init__(self) -> None:
        self.signals = SignalQueue()
        self.signals.install_early()
        self._directory, self._environ = _directory(), dict(os.environ)
        self._terminals = [fd for fd in range(3) if os.isatty(fd)]

    @property
    def terminal_closed(self) -> bool:
        """True if the worker was started in a terminal that has been closed."""
        return bool(self._terminals) and not any(os.isatty(fd) for fd in self._terminals)

    @property
    def command(self) -> list[str]:
        """The program and arguments that started this process, with ``-m`` and the interpreter's options."""
        return [sys.executable, *sys.orig_argv[1:]]

    def restart(self) -> None:
        """Run the same command again in this process (``exec``); returns only if a stop signal has arrived.

        The kernel closes all descriptors that Python has opened (``O_CLOEXEC``). All children must already have exited.

        Raises:
            OSError: The command cannot be run, for example because the interpreter was removed.
        """
        # From now on, signals are pending until the new program has installed its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNAL_METHODS)
        if self.signals.contains(STOP_METHODS):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self._directory:
            os.chdir(self._directory)
        os.execve(sys.executable, self.command, self._environ)  # noqa: S606 - this worker's command line


def _directory() -> str:
    """Return the working directory, without resolving symbolic links.

    If it is a link to the current release, a restart must follow the link again.
    """
    pwd = os.environ.get("PWD", "")
    try:
        return pwd if pwd and os.path.samefile(pwd, ".") else os.getcwd()  # noqa: PTH109, PTH121
    except OSError:  # the directory was removed
        return ""
