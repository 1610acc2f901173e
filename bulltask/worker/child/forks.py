"""Processes that a task forks are copies of its child, which must be no second child."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from bulltask.process import end_if_forked

__all__ = ["isolate_forks"]

_OURS: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGCONT,
)
"""Signals that the supervisor sends to a child, or a terminal to the whole group: copies go on as the child does."""

_TERM: Final = (signal.SIGTERM,)


def isolate_forks(close_inherited: Callable[[], None], loop: Callable[[], asyncio.AbstractEventLoop | None]) -> None:
    """Have every process that this one forks from now on leave alone what belongs to this one.

    A copy that comes back to the child's code ends there (:func:`bulltask.process.end_if_forked`). This is about what
    it does before, in the code of users, and about a task's own processes, which may live long: ``TERM`` ends them
    (``multiprocessing.Process.terminate``), and a connection does not stay open because they have it, too.

    Args:
        close_inherited: closes the child's connections, in the copy only.
        loop: gives the child's event loop, ``None`` while there is none.
    """
    pid = os.getpid()

    def hold() -> None:  # a TERM that came before SIG_DFL stands would be lost
        signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM)

    def tame() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in _OURS:
            # No SIG_IGN: programs that the copy starts would inherit it. Where it stands, as with nohup, they should.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        release()
        close_inherited()
        if (running := loop()) is not None:
            # An async task may have forked. When it waits, other tasks of the child would go on, in the copy too.
            with suppress(RuntimeError):  # the loop is closed; or asyncio's debug mode: another thread's
                running.call_soon(end_if_forked, pid)

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=tame)
