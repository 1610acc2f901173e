"""Dumps a child's stacks: those of its threads and asyncio tasks."""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from bulltask.events import Bus, StacksDumped
from bulltask.process import anonymous_file
from bulltask.worker.child.cancellation import uninterrupted
from bulltask.worker.slots import STACKS_NAME, ChildBlock

__all__ = ["StackDumper", "tasks_text"]

_MAX_TASKS: Final = 200


class StackDumper:
    """Dumps this child's stacks after ``USR1``.

    ``faulthandler`` writes the threads' stacks in its C handler, so this works even in a child that is stuck in C code.
    The asyncio tasks are added when the main thread runs Python code again; a blocked event loop does not delay that.

    Args:
        block: The child's block, in which the supervisor reads the file's descriptor and whether the dump is complete.
        loop: Returns the child's event loop, ``None`` while there is none.
        bus: Receives the dump if the supervisor has not requested it.
        index: The child's index in the pool.
    """

    def __init__(
        self, block: ChildBlock, loop: Callable[[], asyncio.AbstractEventLoop | None], bus: Bus, index: int
    ) -> None:
        self._block, self._loop, self._bus, self._index = block, loop, bus, index
        self._fd = anonymous_file(STACKS_NAME)

    def install(self) -> None:
        """Handle ``USR1`` from now on."""
        # Unregister the handler that a fork inherits, because faulthandler does not replace it.
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, uninterrupted(self._dump))
        if self._fd is not None:
            # O_APPEND: the supervisor truncates the file, and the next dump must not start at the old offset.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
            self._block.stacks_fd = self._fd
            faulthandler.register(signal.SIGUSR1, self._fd, all_threads=True, chain=True)

    def _dump(self) -> None:
        if self._fd is None:
            return
        os.write(self._fd, tasks_text(self._loop()).encode(errors="backslashreplace"))
        if self._block.stacks_pending:
            self._block.complete_stacks()
            return
        text = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace")
        os.ftruncate(self._fd, 0)
        self._bus.emit(StacksDumped(self._index, os.getpid(), text))


def tasks_text(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return the stack of each task in a loop, outermost frame first; ``""`` without a loop. Callable from any thread.

    asyncio's ``Task.print_stack`` shows only the outermost coroutine, but a task may be waiting deep in a library.
    """
    if loop is None:
        return ""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    parts = [f"\n{len(tasks)} asyncio tasks\n"]
    for task in tasks[:_MAX_TASKS]:
        coroutine = task.get_coro()
        lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in _frames(coroutine)).format()
        # The frames of the task that is running now are only in its thread's stack.
        order = "running: see its thread" if getattr(coroutine, "cr_running", False) else "outermost call first"
        parts.append(f"Task {task.get_name()!r} ({order}):\n{''.join(lines)}")
    return "".join(parts)


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames from a task's coroutine to the innermost awaitable, including generators."""
    while awaited is not None:
        if type(awaited).__name__ == "coroutine_wrapper":
            # The result of coroutine.__await__(); only the garbage collector can find its coroutine.
            awaited = next(iter(gc.get_referents(awaited)), None)
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            return
        yield frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
