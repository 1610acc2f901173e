"""What a child is doing at this moment: its threads and its asyncio tasks."""

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
from bulltask.worker.child.cancellation import uninterrupted
from bulltask.worker.slots import STACKS_NAME, ChildBlock, anonymous_file

__all__ = ["StackDumper", "tasks_text"]

_MOST_TASKS: Final = 200


class StackDumper:
    """Responsible for answering ``USR1``.

    ``faulthandler`` writes the threads inside the C handler, so it works in a child that is stuck in C code, too. The
    tasks follow from Python, when the main thread gets to it; a loop that is blocked does not hold that up.

    Args:
        block: where the supervisor finds the file, and where it is told that the answer is complete.
        loop: gives the child's event loop, ``None`` while there is none.
        bus: hears of it when it was somebody else who asked.
        index: the child's place in the fleet.
    """

    def __init__(
        self, block: ChildBlock, loop: Callable[[], asyncio.AbstractEventLoop | None], bus: Bus, index: int
    ) -> None:
        self._block, self._loop, self._bus, self._index = block, loop, bus, index
        self._fd = anonymous_file(STACKS_NAME)

    def install(self) -> None:
        """Answer from now on."""
        # What a fork has inherited would be in the way: faulthandler keeps the handler that it found first.
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, uninterrupted(self._answer))
        if self._fd is not None:
            # The supervisor empties the file, and the next answer begins where the file ends, not where the last did.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
            self._block.stacks_fd = self._fd
            faulthandler.register(signal.SIGUSR1, self._fd, all_threads=True, chain=True)

    def _answer(self) -> None:
        if self._fd is None:
            return
        os.write(self._fd, tasks_text(self._loop()).encode(errors="backslashreplace"))
        if self._block.stacks_pending:
            self._block.answer_stacks()
            return
        text = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace")
        os.ftruncate(self._fd, 0)
        self._bus.emit(StacksDumped(self._index, os.getpid(), text))


def tasks_text(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return where each task of a loop waits, outermost frame first; ``""`` without a loop.

    asyncio's own ``Task.print_stack`` shows the outermost coroutine only, which says nothing of a task that waits deep
    in a library. Callable from any thread.
    """
    if loop is None:
        return ""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    parts = [f"\n{len(tasks)} asyncio tasks\n"]
    for task in tasks[:_MOST_TASKS]:
        coroutine = task.get_coro()
        lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in _frames(coroutine)).format()
        # What a task runs at this moment is known to its thread only.
        order = "runs: see its thread" if getattr(coroutine, "cr_running", False) else "outermost call first"
        parts.append(f"Task {task.get_name()!r} ({order}):\n{''.join(lines)}")
    return "".join(parts)


def _frames(awaited: Any) -> Iterator[FrameType]:
    """The frames from a task's coroutine to what it waits for in the end, through generators too."""
    while awaited is not None:
        if type(awaited).__name__ == "coroutine_wrapper":
            # What coroutine.__await__() returns, as many libraries do; only the collector knows its coroutine.
            awaited = next(iter(gc.get_referents(awaited)), None)
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            return
        yield frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
