"""Signals in processes that the supervisor forks next to its children: the supervisor tells them when to stop."""

from __future__ import annotations

import signal

from bulltask.process import die_with_parent, unblock_signals

__all__ = ["ignore_stop_signals"]


def ignore_stop_signals(parent_pid: int) -> None:
    """Continue while the worker stops: terminals and service managers send its signals to all of its processes.

    The process is killed when its parent dies.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that a receiver starts would inherit
    for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, lambda *_: None)
    die_with_parent(signal.SIGKILL, parent_pid)
    unblock_signals()
