"""What a process asks of the kernel about itself."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["die_with_parent"]

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
