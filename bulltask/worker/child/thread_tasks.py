"""Runs sync tasks in threads, many at a time: the ``threads`` pool, for libraries that block while they wait."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import threading
from asyncio import get_running_loop
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bulltask.errors import Interrupt
from bulltask.worker.slot import Slot

__all__ = ["InterruptibleCall", "TaskThreads"]

_set_async_exc: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc


class InterruptibleCall:
    """A call of a function in a thread, which the event loop's thread can interrupt.

    Python runs signal handlers only on the main thread, so a limit cannot be a signal here. Instead, the interpreter
    raises an exception in the thread before its next bytecode instruction. A thread that waits in C code (for a socket,
    a lock or a process) receives it only when it runs Python code again.

    Args:
        function: The function, without arguments.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._thread_id: int | None = None
        self._early: type[Interrupt] | None = None
        self._ended = self._interrupting = False

    def run(self) -> tuple[BaseException | None, Any]:
        """Call the function; return its exception, or ``None``, and its result."""
        # The exception is returned, not raised: a future cannot hold a StopIteration.
        try:
            try:
                self._thread_id = threading.get_ident()
                if self._early is not None:
                    raise self._early
                return None, self._function()
            finally:
                self._end()
        except BaseException as exc:  # noqa: BLE001 - sys.exit() in a task fails its job
            return exc, None

    def interrupt(self, kind: type[Interrupt]) -> None:
        """Raise an exception of this class in the function, if it is still running; never after it has returned."""
        self._interrupting = True
        try:
            if self._thread_id is None:
                self._early = kind
            elif not self._ended:
                _set_async_exc(ctypes.c_ulong(self._thread_id), ctypes.py_object(kind))
        finally:
            self._interrupting = False

    def _end(self) -> None:
        """Prevent interrupts from now on, because the thread's next code is not the task's."""
        while True:
            try:
                self._ended = True
                while self._interrupting:
                    os.sched_yield()
                _set_async_exc(ctypes.c_ulong(threading.get_ident()), None)
            except Interrupt:  # it arrived just after the function had returned
                continue
            return


class TaskThreads:
    """Manages the threads in which a child runs sync tasks.

    Args:
        count: The number of threads; 0 if sync tasks run on the main thread.

    Attributes:
        enabled: Whether sync tasks run in threads.
    """

    def __init__(self, count: int) -> None:
        self._count, self.enabled = count, count > 0
        self._busy: set[Slot] = set()  # each change is atomic
        self._executor = ThreadPoolExecutor(count, "bulltask-task") if count else None

    @property
    def all_busy(self) -> bool:
        """Whether no thread is free, so that the child must not acquire another job, which may need one."""
        return self._executor is not None and len(self._busy) >= self._count

    def reserve(self, slot: Slot) -> None:
        """Reserve a thread for the job in ``slot``; :meth:`run` frees it."""
        self._busy.add(slot)

    def free(self, slot: Slot) -> None:
        """Free the thread that was reserved for ``slot``, if any."""
        self._busy.discard(slot)

    async def run(
        self, slot: Slot, started: Callable[[InterruptibleCall], None], function: Callable[..., Any], *args: Any
    ) -> tuple[BaseException | None, Any]:
        """Run a function in the thread that was reserved for ``slot``; return its exception, or ``None``, and result.

        Args:
            started: Called with the call before it starts, so that it can be interrupted.
        """
        assert self._executor is not None
        # A copy, as for a task on the main thread: a task's context variables are not visible to the next one.
        call = InterruptibleCall(functools.partial(contextvars.copy_context().run, function, *args))
        started(call)
        try:
            return await get_running_loop().run_in_executor(self._executor, call.run)
        finally:
            self.free(slot)
