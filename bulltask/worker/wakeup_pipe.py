"""Waiting without sleeping: a pipe that signals and threads write to."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

__all__ = ["WakeupPipe"]


class WakeupPipe:
    """Responsible for waking the main thread of a process when a signal or another thread has something for it.

    The interpreter itself writes to the pipe when a signal arrives, before any handler runs, so a signal that comes
    just before the wait is not missed.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or as soon as something was written."""
        readable, _, _ = select.select([self._read], [], [], max(0.0, timeout_ms) / 1000)
        if readable:
            os.read(self._read, 4096)

    def wake(self) -> None:
        """End the wait; callable from any thread."""
        with suppress(BlockingIOError):  # full of wake-ups already
            os.write(self._write, b"\0")

    def close(self) -> None:
        """Give the descriptors back."""
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)
