"""The stacks of all processes, for whoever wants to know what they are doing."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bulltask.clock import mono_ms
from bulltask.events import Bus, StacksDumped
from bulltask.worker.slots import STACKS_NAME, ChildBlock, anonymous_file

__all__ = ["StackCollector"]

_PATIENCE_MS: Final = 1_000
"""A child that runs Python code answers in milliseconds; one that is stuck in C code has written its threads at once
and does not come to its asyncio tasks."""

_LOOK_MS: Final = 20


@dataclass(frozen=True, slots=True)
class _StackRequest:
    index: int
    pid: int
    block: ChildBlock
    until_ms: int


class StackCollector:
    """Responsible for asking children for their stacks and for telling what they answer.

    A child writes into a nameless file of its own, which is read here and becomes a line of the log: nothing is mixed
    with other lines, and nothing waits, neither for a child that hangs nor for a log that nobody reads.

    Args:
        bus: hears of every answer.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._open: list[_StackRequest] = []

    def dump_own(self) -> None:
        """Tell the stacks of this process."""
        fd = anonymous_file(STACKS_NAME)
        if fd is None:
            return
        try:
            faulthandler.dump_traceback(fd, all_threads=True)
            text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        finally:
            os.close(fd)
        self._bus.emit(StacksDumped(None, os.getpid(), text))

    def ask(self, index: int, pid: int, block: ChildBlock) -> None:
        """Ask a child; :meth:`collect` tells what it answers."""
        with suppress(OSError):
            os.truncate(_file_of(pid, block), 0)
        block.ask_for_stacks()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        self._open.append(_StackRequest(index, pid, block, mono_ms() + _PATIENCE_MS))

    def collect(self) -> int | None:
        """Tell the answers that are there; return in how many ms to look again, ``None`` if nothing is awaited."""
        waiting = []
        for request in self._open:
            if request.block.stacks_pending and mono_ms() < request.until_ms:
                waiting.append(request)
                continue
            with suppress(OSError):  # it has ended meanwhile
                text = _file_of(request.pid, request.block).read_text(errors="replace")
                self._bus.emit(StacksDumped(request.index, request.pid, text))
        self._open = waiting
        return _LOOK_MS if waiting else None


def _file_of(pid: int, block: ChildBlock) -> Path:
    """The file into which a child writes; the kernel shows the files of our own children.

    Raises:
        FileNotFoundError: it has none yet, or has ended, and the number is another process's by now.
    """
    path = Path(f"/proc/{pid}/fd/{block.stacks_fd}")
    if STACKS_NAME not in str(path.readlink()):
        raise FileNotFoundError(path)
    return path
