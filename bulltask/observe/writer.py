"""Writes whole lines to a stream that several processes share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TextIO

from bulltask.config.urls import redact_text

__all__ = ["LineWriter"]

ATOMIC = 4096  # Linux' PIPE_BUF: a pipe that polls as writable takes this much at once, without blocking


class LineWriter:
    """Responsible for log lines that arrive whole, and for a worker that runs on when nobody reads them.

    A write of more than 4 KiB to a pipe may be mixed with other processes' lines, and in a container every traceback
    goes through a pipe. So a writer holds a lock that all forks share while it writes its line. Passwords in URLs
    are taken out here too, where no line gets past.

    A reader that stops (``| less``, a stuck log shipper) would block the supervisor, which then renews no locks, and
    every running job would run twice. So a line waits a second for the reader; then it and the following ones are
    dropped until the reader goes on, and the next line that is written comes after one that says how many are gone.

    Args:
        stream: where the lines go. Its file descriptor is used when it has one (then nothing is buffered), its
            ``write`` otherwise. Make the writer before the fork, or the processes do not share the lock.
        dropped_line: returns the line that tells of this many dropped ones.
    """

    patience_ms = 1000

    def __init__(self, stream: TextIO, dropped_line: Callable[[int], str] = "{} log lines were dropped".format) -> None:
        self._stream = stream
        self._dropped_line = dropped_line
        self._fd = _descriptor(stream)
        # A pipe, a socket or a terminal; one write to a file is kept in one piece by the kernel, and never waits.
        self._waits = self._fd is not None and not stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._lock_fd = _nameless_file() if self._waits else None
        self._lock_stuck = False
        self._writable = select.poll()
        if self._fd is not None and self._waits:
            self._writable.register(self._fd, select.POLLOUT)
        self._enter_process()

    def _enter_process(self) -> None:
        self._pid = os.getpid()
        self._threads = threading.RLock()  # a file lock belongs to the process; reentrant for signal handlers
        self._late = False  # the line before was given up: do not wait again
        self._torn = False  # the line before is half out
        self.dropped = 0
        """Lines lost since the last one that was written."""

    def close(self) -> None:
        """Free the lock's file; the stream stays open."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write(self, line: str) -> None:
        """Write ``line`` and a newline, or drop it when that is not possible within about a second. Never raises."""
        text = redact_text(line, json=True)
        if self._pid != os.getpid():  # a thread that is not in this fork may have held the lock
            self._enter_process()
        if not self._threads.acquire(timeout=self.patience_ms / 1000):
            self.dropped += 1
            return
        try:
            self._write(text)
        except (OSError, ValueError):  # closed, or a full disk: no reason to fail a job
            self.dropped += 1
        finally:
            self._threads.release()

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._stream.write(f"{text}\n")
            self._stream.flush()
            return
        lines = [self._dropped_line(self.dropped), text, ""] if self.dropped else [text, ""]
        if self._torn:
            lines.insert(0, "")
        data = "\n".join(lines).encode(errors="backslashreplace")
        give_up = time.monotonic() + self.patience_ms / 1000
        locked = self._take_lock(give_up)
        try:
            sent = self._send(self._fd, data, give_up)
        finally:
            if locked and self._lock_fd is not None:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)
        self._late = sent < len(data)
        self._torn = self._late and sent > 0
        self.dropped = self.dropped + 1 if self._late else 0

    def _send(self, fd: int, data: bytes, give_up: float) -> int:
        """Write ``data`` in pieces that do not block; return how much was taken in time."""
        if not self._waits:
            return os.write(fd, data)
        sent = 0
        while sent < len(data):
            patience = 0.0 if self._late else max(0.0, give_up - time.monotonic())
            if not self._writable.poll(patience * 1000):
                break
            with contextlib.suppress(BlockingIOError):  # O_NONBLOCK was set by somebody who shares the stream
                sent += os.write(fd, data[sent : sent + ATOMIC])
        return sent

    def _take_lock(self, give_up: float) -> bool:
        """Wait for the lock, but not for ever: a process that was stopped (SIGSTOP) may hold it.

        A line without the lock may be mixed with others; a supervisor that waits would lose its jobs' locks.
        """
        if self._lock_fd is None:
            return False
        while True:
            try:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if self._lock_stuck or time.monotonic() >= give_up:
                    self._lock_stuck = True  # the next line tries once
                    return False
                select.select([], [], [], 0.001)  # the kernel has no wait for a file lock that ends in time
            else:
                self._lock_stuck = False
                return True


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # io.StringIO, pytest's capture, sys.stderr of a daemon
        return None


def _nameless_file() -> int | None:
    """A file without a name for the lock: the kernel frees it when its holder is killed, whatever happens."""
    try:
        if hasattr(os, "memfd_create"):
            return os.memfd_create("bulltask-log-lock")
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    except OSError:  # nothing to make it with: long lines may be mixed, which is better than no worker
        return None
