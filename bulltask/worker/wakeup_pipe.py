"""A pipe that signals and threads write to in order to end a wait immediately (self-pipe)."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

__all__ = ["WakeupPipe"]


class WakeupPipe:
    """Wakes the main thread of a process when a signal arrives or another thread calls :meth:`wake`.

    The interpreter writes to the pipe when a signal arrives, before any handler runs, so a signal that arrives just
    before the wait is not missed.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or as soon as the pipe has data."""
        readable, _, _ = select.select([self._read], [], [], max(0.0, timeout_ms) / 1000)
        if readable:
            os.read(self._read, 4096)

    def wake(self) -> None:
        """End the wait; callable from any thread."""
        with suppress(BlockingIOError):  # the pipe is full, so the wait ends anyway
            os.write(self._write, b"\0")

    def close(self) -> None:
        """Close the pipe."""
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)
