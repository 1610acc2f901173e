"""What a forked child inherits from the supervisor and must not use: exit handlers, and the pipes of process pools.

A forked child is deep in the supervisor's code, to which it must never return. So it calls the functions that Python
would call when a program ends: it waits for threads, which also ends executors, and calls what was registered with
``atexit``.

A ``ProcessPoolExecutor`` opens its pipes when it is created, but starts its processes when it is used. One that a
module creates is therefore inherited by all forked children: each would use the same pipes, so the process of one child
could receive the call of another, and the wrong job its result. A process that is killed while it holds a lock of such
a pipe would block all later children.
"""

from __future__ import annotations

import atexit
import gc
import logging
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

__all__ = ["find_executors", "forget_exit_handlers", "renew_executors", "run_exit_handlers"]

EXIT_TIMEOUT_S: Final = 5.0


def forget_exit_handlers() -> None:
    """Forget the inherited handlers: they belong to the supervisor, as temporary directories do.

    :mod:`multiprocessing` does the same in its own forks.
    """
    finalizers: Any = weakref.finalize
    for finalizer in tuple(finalizers._registry):  # noqa: SLF001 - there is no public list
        finalizer.atexit = False
    finalizers._registered_with_atexit = False  # noqa: SLF001 - the next one registers again
    atexit._clear()  # noqa: SLF001 - as multiprocessing does
    atexit.register(logging.shutdown)
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        atexit.register(util._exit_function)  # noqa: SLF001 - it has registered itself in the supervisor
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process._children = set()  # type: ignore[attr-defined]  # noqa: SLF001 - as in its own forks


def find_executors() -> Sequence[Any]:
    """Return the process pools of this process that have not been used; call this before the first fork."""
    module: Any = sys.modules.get("concurrent.futures.process")  # imported on first use
    if module is None:
        return ()
    pools = [one for one in gc.get_objects() if issubclass(type(one), module.ProcessPoolExecutor)]
    return [pool for pool in pools if vars(pool).get("_executor_manager_thread", False) is None]


def renew_executors(executors: Sequence[Any]) -> None:
    """Give the process pools their own pipes in this fork."""
    for pool in executors:
        base = sys.modules["concurrent.futures.process"].ProcessPoolExecutor
        with suppress(AttributeError, TypeError):  # another Python must not keep a child from starting
            base.__init__(
                pool,
                pool._max_workers,  # noqa: SLF001 - they have no public names
                pool._mp_context,  # noqa: SLF001
                pool._initializer,  # noqa: SLF001
                pool._initargs,  # noqa: SLF001
                max_tasks_per_child=pool._max_tasks_per_child,  # noqa: SLF001
            )


def run_exit_handlers() -> None:
    """Wait for threads and call the handlers; the kernel kills the process if this takes more than 5 s."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, EXIT_TIMEOUT_S)
    for function in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]  # noqa: SLF001
        try:
            function()
        except BaseException:  # noqa: BLE001 - a handler may raise SystemExit
            traceback.print_exc()
    signal.setitimer(signal.ITIMER_REAL, 0)
