"""Finds and ends what a child process has started: processes, and their processes.

A child leads a process group, unless the standard input is a terminal: there, only the foreground group can read, and a
task may use ``breakpoint()``. Programs that a child starts also have a mark in their environment, because they may have
a session of their own. A fork without a program has no such mark, but the descriptor of the shared memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from bulltask.process import CHILD_MARK

__all__ = ["Descendants", "end_group", "end_marked", "lead_group", "mark_programs"]

_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_TASKS: Final = Path("/proc/self/task")
_HAS_PROC: Final = _TASKS.exists()


def lead_group() -> None:
    """Let this child lead a process group, unless a task may read from the terminal."""
    if not os.isatty(0):
        with suppress(OSError):  # it leads a session
            os.setpgid(0, 0)


def mark_programs(worker_id: str) -> None:
    """Mark all programs that this child will start."""
    os.environ[CHILD_MARK] = f"{worker_id}/{os.getpid()}"


def end_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads, if it leads one."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end_marked(worker_id: str, shared_fd: int) -> bool:
    """Kill all processes of a worker's children, on Linux; return whether there was one.

    Args:
        worker_id: The worker.
        shared_fd: The descriptor of the worker's shared memory, in this process and in every fork.
    """
    found = False
    if not _HAS_PROC:
        return found
    mark, memory = f"{CHILD_MARK}={worker_id}/".encode(), os.fstat(shared_fd)
    for pid in (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()):
        if pid != os.getpid() and (_mark_of(pid).startswith(mark) or _has(pid, shared_fd, memory)):
            found = True
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    return found


def _has(pid: int, fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), file)  # noqa: PTH116 - for every process
    except OSError:  # the process has exited, or belongs to another user
        return False


def _mark_of(pid: int) -> bytes:
    """Return the mark in the environment with which a program was started."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return b""
    return next((variable for variable in variables if variable.startswith(f"{CHILD_MARK}=".encode())), b"")


class Descendants:
    """What the children of this supervisor have started.

    On Linux, the kernel makes an orphan a child of the supervisor. When a child has died, its processes are therefore
    among the supervisor's children. Those of a living child are, too, if their parent has exited: they are recognized
    by their group or mark, and otherwise end with the last child that was alive when they appeared.

    On other systems, only the process group of a dead child ends.

    Args:
        worker_id: The worker's id, as for :func:`mark_programs`.
        helpers: Returns the ids of the supervisor's other processes.
    """

    def __init__(self, worker_id: str, helpers: Callable[[], Collection[int]]) -> None:
        self._worker_id, self._helpers = worker_id, helpers
        self._group = os.getpgid(0)
        self._orphans: dict[int, set[int]] = {}
        if _HAS_PROC:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
        self._earlier = set(_children())  # started by the app's modules, for example

    def find(self, children: Collection[int]) -> list[int]:
        """Return the orphans that are running, and reap the others."""
        known = {*children, *self._helpers(), *self._earlier}
        found = [pid for pid in _children() if pid not in known and _is_running(pid)]
        self._orphans = {pid: candidates for pid, candidates in self._orphans.items() if pid in found}
        return found

    def note(self, orphans: Collection[int], children: Collection[int]) -> None:
        """Note that any of these children may have started the new orphans; all were alive after :meth:`find`."""
        for pid in orphans:
            self._orphans.setdefault(pid, set(children))

    def end(self, child: int, children: Collection[int]) -> bool:
        """Kill the processes of a child that has exited, and is not reaped yet; return whether none is left.

        Args:
            child: Its pid, which therefore no other process has.
            children: The pids of all children.
        """
        end_group(child)
        remaining = False
        for pid in self.find(children):
            if self._is_of(pid, child):
                remaining = True
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        return not remaining

    def _is_of(self, pid: int, child: int) -> bool:
        try:
            group = os.getpgid(pid)
        except OSError:
            return False
        if group == child:
            return True
        mark = _mark_of(pid)
        if mark == f"{CHILD_MARK}=".encode():
            return False
        if mark.startswith(f"{CHILD_MARK}={self._worker_id}/".encode()):
            return mark.endswith(b"/%d" % child)
        if group == self._group and not os.isatty(0):
            return False  # of a process that the supervisor has started before
        candidates = self._orphans.setdefault(pid, set())  # it is new, so its parent was the child
        candidates.discard(child)
        return not candidates


def _is_running(pid: int) -> bool:
    """Return whether a child is running; otherwise, reap it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def _children() -> list[int]:
    """Return the pids of this process's children."""
    if not _HAS_PROC:
        return []
    try:
        return [int(pid) for task in _TASKS.iterdir() for pid in (task / "children").read_text().split()]
    except OSError:  # a kernel without this file
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        return [pid for pid in pids if _parent_of(pid) == os.getpid()]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
