"""What Python runs when a program ends, in a child that exits without the end of an interpreter.

A forked child is deep in the supervisor's code, to which it must never return. So it calls the functions that Python
would call: it waits for threads, which also ends executors, and calls what was registered with ``atexit``.
"""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import threading
import traceback
import weakref
from typing import Any, Final

__all__ = ["forget_inherited", "run_exit_handlers"]

EXIT_TIMEOUT_S: Final = 5.0


def forget_inherited() -> None:
    """Forget the handlers that a fork has inherited: they belong to the supervisor, as temporary directories do.

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
