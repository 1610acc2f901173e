"""What a process asks of the kernel about itself."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

__all__ = [
    "HELD_AT_START",
    "die_with_parent",
    "end_if_forked",
    "fork_holding_signals",
    "leave",
    "release_signals",
    "usable_cores",
]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signal_number: int, parent_pid: int) -> bool:
    """Have the kernel send ``signal_number`` to this process when its parent dies.

    Call it first thing after the fork. The kernel forgets the wish at a fork (a grandchild must ask for itself) and
    means the parent's *thread* that forked: a parent that forks from a thread which ends kills its children.

    Args:
        signal_number: usually ``SIGKILL`` or ``SIGTERM``.
        parent_pid: ``os.getpid()`` of the parent, taken before the fork. Without it a parent that died between the
            fork and this call would never be noticed; when that has happened the signal is sent at once.

    Returns:
        True when it is arranged; False where the system cannot do it (only Linux can).
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0) != 0:
        return False
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)
    return True


_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """How many cores this process may use: its affinity, and the quota of its container (cgroup 2), at least 1.

    A container limited to 2 of a machine's 64 cores sees all 64; 64 children would fight for 2.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no cgroup 2 here, or no quota
    return max(1, cores)


HELD_AT_START: Final = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGTSTP,
        signal.SIGCONT,
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)
"""What would end or stop a process, or be lost, before its handlers stand."""

_HELD: Final = HELD_AT_START | {signal.SIGTERM, signal.SIGQUIT}


def fork_holding_signals() -> int:
    """``os.fork()``, with signals held back in the child until it calls :func:`release_signals`.

    A signal that came to the child before it has handlers of its own would run its parent's in it, and be lost: a
    child told to stop just then would go on.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def release_signals() -> None:
    """Let signals through; the child calls this when its handlers stand."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def end_if_forked(pid: int, raised: BaseException | None = None) -> None:
    """End this process unless it is ``pid``: user code has forked it, and has now returned to ours.

    The exit code is what a Python program would end with. Nothing is flushed and no ``atexit`` handler runs: buffers
    and handlers are copies of those of ``pid``.

    Args:
        pid: the process that called the user code.
        raised: what came out of that code.
    """
    if os.getpid() == pid:
        return
    code = 0
    if isinstance(raised, SystemExit) and not isinstance(raised.code, str):
        code = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
    elif raised is not None:
        code = 1
        with suppress(Exception):  # somebody's broken __str__
            # Not through sys.stderr: another thread may have held its lock at the fork, and nobody would release it.
            os.write(2, "".join(traceback.format_exception(raised)).encode(errors="backslashreplace"))
    os._exit(code & 0xFF)


def leave(code: int) -> NoReturn:
    """End a forked process without its parent's ``atexit`` handlers."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
