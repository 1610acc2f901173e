"""Starts children: with a fork if that is safe, otherwise as a new interpreter."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bulltask.process import BLOCKED_AT_START, fork_with_blocked_signals
from bulltask.worker.exit_codes import ExitCode

__all__ = ["ForkLauncher", "Launcher", "SpawnLauncher", "choose_launcher", "limit_native_threads", "thread_count"]

_FORK_SAFE: Final = frozenset({"jemalloc_bg_thd"})
"""Names of fork-safe threads. ``import pyarrow`` starts this one; jemalloc stops it for a fork."""

Launcher = Callable[[int], int]
"""Starts the child with the given index and returns its pid."""


class ForkLauncher:
    """Starts a child with a fork, which is fast, because the tasks are already imported.

    Args:
        run: Runs the child with its index and the supervisor's pid; does not return.
    """

    def __init__(self, run: Callable[[int, int], None]) -> None:
        self._run = run

    def __call__(self, index: int) -> int:
        """Fork."""
        # Freeze existing objects, so that garbage collection in a child does not copy their memory pages.
        gc.collect()
        gc.freeze()
        parent_pid = os.getpid()
        pid = fork_with_blocked_signals()
        if pid == 0:
            self._run(index, parent_pid)
            os._exit(ExitCode.FAILED)  # not reached: run() exits the process
        return pid


class SpawnLauncher:
    """Starts a child as a new interpreter that imports the app again: slower, but safe with threads.

    Args:
        write_spec: Writes the spec of the child with a given index to a file (a command line would show the broker's
            password), and returns the file's descriptor and the descriptors that the child shares.
    """

    def __init__(self, write_spec: Callable[[int], tuple[int, tuple[int, ...]]]) -> None:
        self._write_spec = write_spec

    def __call__(self, index: int) -> int:
        """Spawn."""
        spec_fd, shared = self._write_spec(index)
        try:
            for fd in (spec_fd, *shared):
                os.set_inheritable(fd, True)
            args = [sys.executable, "-m", "bulltask.worker.child.spawned", str(spec_fd)]
            # TERM is not blocked, because a child that is still importing the app has no job and may exit immediately.
            return os.posix_spawn(sys.executable, args, dict(os.environ), setsigmask=BLOCKED_AT_START)
        finally:
            for fd in shared:
                os.set_inheritable(fd, False)
            os.close(spec_fd)


def choose_launcher(
    method: str, fork: ForkLauncher, spawn: SpawnLauncher | None, warn: Callable[[str], None]
) -> Launcher:
    """Return the function that starts children.

    Args:
        method: ``fork``, ``spawn``, or ``auto``: fork unless this process has other threads, now or when a child
            starts. A fork copies only the calling thread, but also the locks that other threads hold, which are never
            released.
        fork: Starts a child with a fork.
        spawn: Spawns a child; ``None`` if the app was not given with ``-A``.
        warn: Logs a warning, once, if ``auto`` cannot fork safely.
    """
    if method == "fork" or (method == "spawn" and spawn is not None):
        return fork if method == "fork" or spawn is None else spawn
    warned, threads_now = False, thread_count()  # a fork of any process ends the threads of OpenBLAS

    def start(index: int) -> int:
        nonlocal warned
        threads = max(threads_now, thread_count())
        if threads <= 1 and method == "auto":
            return fork(index)
        if not warned:
            warned = True
            result = (
                "children are started as new interpreters"
                if spawn
                else "the worker forks anyway, because only one that was started with -A can start new interpreters"
            )
            warn(f"The app has started threads ({threads - 1}), which do not survive a fork: {result}")
        return fork(index) if spawn is None else spawn(index)

    return start


def limit_native_threads() -> None:
    """Prevent NumPy, which the app may import, from starting threads, unless the environment sets their number.

    NumPy's OpenBLAS starts a thread per core when it is imported. Then children could not be forked, and each child
    would have a thread per core. Dask sets the same variable for its workers.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def thread_count() -> int:
    """Return the number of threads that are not fork-safe; on Linux including threads of C libraries."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return threading.active_count()
    return sum(_name_of(task) not in _FORK_SAFE for task in tasks.iterdir())


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # the thread has ended
        return ""
