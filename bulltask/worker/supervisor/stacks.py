"""Collects the stacks of a worker's processes."""

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
from bulltask.process import anonymous_file
from bulltask.worker.slots import STACKS_NAME, ChildBlock

__all__ = ["StackCollector"]

_TIMEOUT_MS: Final = 1_000
"""Maximum wait for a dump. A child that is running Python code responds within milliseconds. A child that is stuck in C
code writes the stacks of its threads, but not its asyncio tasks."""

_POLL_MS: Final = 20


@dataclass(frozen=True, slots=True)
class _StackRequest:
    index: int
    pid: int
    block: ChildBlock
    until_ms: int


class StackCollector:
    """Requests the stacks of children, and emits what they write.

    A child writes into an anonymous file. The supervisor reads it and logs one line, so the stacks of several children
    are never mixed, and the supervisor does not block on a child that hangs.

    Args:
        bus: Receives an event for every process.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._pending: list[_StackRequest] = []

    def dump_supervisor(self) -> None:
        """Emit the stacks of this process."""
        fd = anonymous_file(STACKS_NAME)
        if fd is None:
            return
        try:
            faulthandler.dump_traceback(fd, all_threads=True)
            text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        finally:
            os.close(fd)
        self._bus.emit(StacksDumped(None, os.getpid(), text))

    def request(self, index: int, pid: int, block: ChildBlock) -> None:
        """Request the stacks of a child; :meth:`collect` emits them."""
        with suppress(OSError):
            os.truncate(_file_of(pid, block), 0)
        block.request_stacks()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        self._pending.append(_StackRequest(index, pid, block, mono_ms() + _TIMEOUT_MS))

    def collect(self) -> int | None:
        """Emit the dumps that are complete; return when to check again in ms, ``None`` if no dump is pending."""
        incomplete = []
        for request in self._pending:
            if request.block.stacks_pending and mono_ms() < request.until_ms:
                incomplete.append(request)
                continue
            with suppress(OSError):  # the child has exited
                text = _file_of(request.pid, request.block).read_text(errors="replace")
                self._bus.emit(StacksDumped(request.index, request.pid, text))
        self._pending = incomplete
        return _POLL_MS if incomplete else None


def _file_of(pid: int, block: ChildBlock) -> Path:
    """Return the path of a child's file in ``/proc``.

    Raises:
        FileNotFoundError: The child has no file yet, or has exited and another process has its pid.
    """
    path = Path(f"/proc/{pid}/fd/{block.stacks_fd}")
    if STACKS_NAME not in str(path.readlink()):
        raise FileNotFoundError(path)
    return path
