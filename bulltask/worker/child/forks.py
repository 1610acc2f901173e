"""Prevents a process that a task forks from acting as a second child."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from bulltask.process import exit_if_forked

__all__ = ["isolate_forks"]

_IGNORED_SIGNALS: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGCONT,
)
"""Signals that the supervisor sends to a child, or that a terminal sends to the process group; a fork ignores them."""

_TERM: Final = (signal.SIGTERM,)


def isolate_forks(close_inherited: Callable[[], None], loop: Callable[[], asyncio.AbstractEventLoop | None]) -> None:
    """Make every process that this process forks drop the child's signal handlers and connections.

    A fork that returns to the child's code exits (:func:`bulltask.process.exit_if_forked`). Until then it runs user
    code, possibly for a long time: ``TERM`` must end it (``multiprocessing.Process.terminate``), and it must not keep
    the child's connections open.

    Args:
        close_inherited: Closes the child's connections in the fork.
        loop: Returns the child's event loop, ``None`` if there is none.
    """
    pid = os.getpid()

    def hold() -> None:  # a TERM that arrives before SIG_DFL is set would be lost
        signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM)

    def isolate() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in _IGNORED_SIGNALS:
            # Not SIG_IGN, which programs that the fork starts would inherit. An existing SIG_IGN (nohup) is kept.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        release()
        close_inherited()
        if (running := loop()) is not None:
            # If an async task has forked, the child's other tasks would continue in the fork whenever that task waits.
            with suppress(RuntimeError):  # the loop is closed, or belongs to another thread (asyncio's debug mode)
                running.call_soon(exit_if_forked, pid)

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=isolate)
