"""Signal handling in the hook process and the outbox process, which stop only when the supervisor tells them to."""

from __future__ import annotations

import signal

from bulltask.process import die_with_parent, unblock_signals

__all__ = ["ignore_stop_signals"]


def ignore_stop_signals(parent_pid: int) -> None:
    """Ignore stop signals, which terminals and service managers send to all of a worker's processes.

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
