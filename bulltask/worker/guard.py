"""The program of a worker's guard process: when the supervisor has died, it kills what its children have started.

The kernel kills the children themselves, but it does not know the processes that they have started. These could work on
a job that another worker starts again.

It starts when the supervisor dies, and must not take long: this module imports neither bulltask nor installed packages,
and only small modules of the standard library. ``bulltask.worker.helpers.GuardProcess`` is who starts it.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys

__all__ = ["HAS_PROC", "end_group", "end_marked", "mark_of"]

HAS_PROC = os.path.exists("/proc/self/task")  # noqa: PTH110 - pathlib is not small
_TRIES, _PAUSE_S = 250, 0.02


def main(mark: str, shared_fd: int, pids_at: range) -> None:
    """Wait for the supervisor's death, which ends standard input; a byte in it says that nothing is left to do.

    Args:
        mark: The beginning of the mark of the worker's children.
        shared_fd: The worker's shared memory.
        pids_at: Where the shared memory has the pids of the children.
    """
    if os.read(0, 1):
        return
    memory = mmap.mmap(shared_fd, 0)
    for at in pids_at:
        if pid := int.from_bytes(memory[at : at + 8], sys.byteorder):
            end_group(pid)
    for _ in range(_TRIES):  # a process may have started another one meanwhile
        if not end_marked(mark, shared_fd):
            break
        select.select([], [], [], _PAUSE_S)


def end_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads, if it leads one."""
    try:  # noqa: SIM105 - contextlib is not small
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def end_marked(mark: str, shared_fd: int) -> bool:
    """Kill the processes of a worker's children, on Linux: they have its mark, or its memory as ``shared_fd``.

    Returns:
        Whether there was one.
    """
    found = False
    if not HAS_PROC:
        return found
    name, memory = mark.partition("=")[0], os.fstat(shared_fd)
    for pid in (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()):
        if pid != os.getpid() and (mark_of(pid, name).startswith(mark) or _has(pid, shared_fd, memory)):
            found = True
            try:  # noqa: SIM105
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
    return found


def _has(pid: int, fd: int, file: os.stat_result) -> bool:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Whoever has opened the file only for reading is not a child, but a probe of any worker (`bulltask health`).
        return os.path.samestat(os.stat(path), file) and os.lstat(path).st_mode & 0o200 != 0  # noqa: PTH116
    except OSError:  # the process has exited, or belongs to another user
        return False


def mark_of(pid: int, name: str) -> str:
    """Return the variable ``name``, with its name, in the environment with which a program was started, or ``""``."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            variables = os.fsdecode(file.read()).split("\0")
    except OSError:
        return ""
    return next((variable for variable in variables if variable.startswith(f"{name}=")), "")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), range(*map(int, sys.argv[3:6])))
