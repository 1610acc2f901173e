"""Keeps a shared server running while any process uses it: a separate program that imports only the standard library.

Usage: ``python -I -S keeper.py LOCK_FILE STATUS_FD PASSED_FDS -- PROGRAM ARGUMENTS…``

Every process that uses the server holds a shared ``flock`` on ``LOCK_FILE``. The keeper starts the server, then
requests the exclusive lock: the kernel grants it when the last of these processes has exited, even after a crash. Then
the keeper stops the server and exits, which releases the lock for the next process. There is no counter that could
be wrong after a crash.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["main", "tie_to_parent"]

_PR_SET_PDEATHSIG = 1
_STOP_TIMEOUT = 20.0


def tie_to_parent() -> Callable[[], None]:
    """Return a function for a new child to call, so that the kernel ends it (``SIGTERM``) when its parent dies.

    ``prctl`` is looked up before the fork, so that the child only calls it. Linux treats the death of the
    *thread* that forked as the death of the parent. On other systems the function does nothing.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def in_child() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the call, so the signal would never come

    return in_child


class _StopKeeping(Exception):
    """The server died, or the keeper received SIGTERM."""


def _on_signal(_number: int, _frame: object) -> None:
    raise _StopKeeping


def _wait_for_last_process(lock: int) -> None:
    try:
        signal.signal(signal.SIGTERM, _on_signal)
        signal.signal(signal.SIGCHLD, _on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        fcntl.flock(lock, fcntl.LOCK_EX)
    except _StopKeeping:
        pass
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _keep(lock: int, status: int, passed: Sequence[int], command: Sequence[str]) -> None:
    # Blocked until the handlers are set, so that a server's death right after its start is not missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    tie = tie_to_parent()

    def in_child() -> None:
        tie()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})

    server = subprocess.Popen(  # noqa: S603 # the command comes from bulltask.embedded
        command,
        pass_fds=passed,
        start_new_session=True,
        preexec_fn=in_child,  # noqa: PLW1509 # this process has one thread
    )
    os.write(status, b"%d\n" % server.pid)
    _wait_for_last_process(lock)
    server.terminate()
    try:
        server.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def main(arguments: Sequence[str]) -> None:
    """Detach, start the server, write its pid to the status pipe, and keep it running until no process uses it."""
    lock_file, status, *passed = arguments[: arguments.index("--")]
    command = arguments[arguments.index("--") + 1 :]
    if os.fork():
        os._exit(0)  # init adopts the keeper: a supervisor that reaps all its children must not reap this one
    os.setsid()
    _keep(os.open(lock_file, os.O_RDWR), int(status), [int(fd) for fd in passed], command)


if __name__ == "__main__":
    # The working directory may be removed while the server is in use.
    os.chdir(Path(sys.argv[1]).parent)
    main(sys.argv[1:])
