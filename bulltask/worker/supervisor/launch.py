"""Starting a child: a fork while that is safe, a new interpreter when it is not."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bulltask.process import HELD_AT_START, fork_holding_signals
from bulltask.worker.exit_codes import ExitCode

__all__ = ["ForkLauncher", "Launcher", "SpawnLauncher", "choose_launcher", "limit_native_threads", "thread_count"]

_FORK_SAFE: Final = frozenset({"jemalloc_bg_thd"})
"""Threads by their names in the kernel. This one comes with ``import pyarrow``; jemalloc switches it off in a fork."""

Launcher = Callable[[int], int]
"""Starts the child of an index and returns its pid."""


class ForkLauncher:
    """Starts a child as a copy of this process: quick, and the tasks are already imported.

    Args:
        run: the child's life after the fork; it gets its index and the supervisor's pid, and does not return.
    """

    def __init__(self, run: Callable[[int, int], None]) -> None:
        self._run = run

    def __call__(self, index: int) -> int:
        """Fork."""
        # Objects that exist now are left alone by the collector, so that it does not copy their pages in each child.
        gc.collect()
        gc.freeze()
        parent_pid = os.getpid()
        pid = fork_holding_signals()
        if pid == 0:
            self._run(index, parent_pid)
            os._exit(ExitCode.FAILED)  # not reached: a child ends itself
        return pid


class SpawnLauncher:
    """Starts a child as a new interpreter that imports the app again: slower, and safe with threads.

    Args:
        order: gives, for an index, the descriptor of a file that tells the child everything (it may hold a password,
            which is why it is no argument), and the descriptors that the child shares.
    """

    def __init__(self, order: Callable[[int], tuple[int, tuple[int, ...]]]) -> None:
        self._order = order

    def __call__(self, index: int) -> int:
        """Spawn."""
        order_fd, shared = self._order(index)
        try:
            for fd in (order_fd, *shared):
                os.set_inheritable(fd, True)
            words = [sys.executable, "-m", "bulltask.worker.child.spawned", str(order_fd)]
            # Not TERM: a child that still imports the app has no job, and may end at once.
            return os.posix_spawn(sys.executable, words, dict(os.environ), setsigmask=HELD_AT_START)
        finally:
            for fd in shared:
                os.set_inheritable(fd, False)
            os.close(order_fd)


def choose_launcher(
    method: str, fork: ForkLauncher, spawn: SpawnLauncher | None, warn: Callable[[str], None]
) -> Launcher:
    """Return what starts children.

    Args:
        method: ``fork``, ``spawn``, or ``auto``: fork unless this process has other threads when a child is due. A
            fork copies one thread and every lock that the others hold, and a child may then wait for ever.
        fork: starts by forking.
        spawn: starts by spawning; ``None`` when nobody knows how the app is found (``-A``).
        warn: is told once when ``auto`` does not fork, and when it should not but must.
    """
    if method == "fork" or (method == "spawn" and spawn is not None):
        return fork if method == "fork" or spawn is None else spawn
    warned = False

    def start(index: int) -> int:
        nonlocal warned
        threads = thread_count()
        if threads <= 1 and method == "auto":
            return fork(index)
        if not warned:
            warned = True
            cure = "children are started as new interpreters" if spawn else "without -A only a fork is possible"
            warn(f"the app has started threads ({threads - 1}), which do not survive a fork: {cure}")
        return fork(index) if spawn is None else spawn(index)

    return start


def limit_native_threads() -> None:
    """Have NumPy, which the app may import, start no threads; what the environment says of it already counts.

    OpenBLAS, which does NumPy's linear algebra, starts one for each core as soon as it is imported. Children could not
    be forked any more, and each would have as many threads as the machine has cores. Dask's workers do the same.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def thread_count() -> int:
    """How many threads this process has that a fork would harm, those of C libraries included where one can tell."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return threading.active_count()
    return sum(_name_of(task) not in _FORK_SAFE for task in tasks.iterdir())


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""
