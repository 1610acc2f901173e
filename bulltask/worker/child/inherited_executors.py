"""Separates a module's process pool from those of the worker's other children.

A ``ProcessPoolExecutor`` opens its pipes when it is created, but starts its processes when it is used. One that a
module creates is therefore inherited by all forked children: each would use the same pipes, so the process of one child
could receive the call of another, and the wrong job its result. A process that is killed while it holds a lock of such
a pipe would block all later children.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

__all__ = ["find_executors", "renew_executors"]


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
