"""Writes complete lines to a stream that several processes share."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from bulltask.clock import mono_s
from bulltask.config.urls import redact_text
from bulltask.process import anonymous_file

if sys.platform != "win32":
    import fcntl

__all__ = ["LineWriter"]

ATOMIC = 4096  # PIPE_BUF of Linux: a pipe that polls as writable accepts this much without blocking


class LineWriter:
    """Writes log lines that are never mixed with those of other processes, and never block the worker for long.

    A write of more than 4 KiB to a pipe may be mixed with other processes' lines, and in a container every traceback is
    written to a pipe. Therefore, while a writer writes a line, it holds a lock that all forks share. It also removes
    passwords from URLs.

    A reader that stops (``| less``, a stuck log shipper) would block the supervisor, which would renew no locks, and
    every running job would run twice. Therefore, a line waits for about a second at most; after that, it and the
    following lines are dropped until the reader continues. Then the writer first writes a line with the number of
    dropped lines.

    Args:
        stream: Where the lines are written. Its file descriptor is used if it has one (without buffering), its
            ``write`` otherwise. Create the writer before the fork, so that the processes share the lock.
        dropped_line: Returns the line that reports a number of dropped lines.
    """

    timeout_ms = 1000

    def __init__(self, stream: TextIO, dropped_line: Callable[[int], str] = "{} log lines were dropped".format) -> None:
        self._stream = stream
        self._dropped_line = dropped_line
        self._fd = _descriptor(stream)
        # True for a pipe, a socket or a terminal. The kernel writes a line to a file atomically, without blocking.
        self._may_block = self._fd is not None and not stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._lock_fd = _anonymous_file() if self._may_block else None
        self._lock_stuck = False
        if self._fd is not None and self._may_block:
            self._writable = select.poll()
            self._writable.register(self._fd, select.POLLOUT)
        self._enter_process()

    def _enter_process(self) -> None:
        self._pid = os.getpid()
        self._threads = threading.RLock()  # a file lock is per process; reentrant for signal handlers
        self._late = False  # the previous line was dropped: do not wait again
        self._torn = False  # the previous line was only partially written
        self.dropped = 0
        """The number of lines dropped since the last line that was written."""

    def close(self) -> None:
        """Close the lock's file; the stream stays open."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write(self, line: str) -> None:
        """Write ``line`` and a newline, or drop it if that takes longer than about a second. Never raises."""
        text = redact_text(line, json=True)
        if self._pid != os.getpid():  # one of the parent's threads may have held the lock
            self._enter_process()
        if not self._threads.acquire(timeout=self.timeout_ms / 1000):
            self.dropped += 1
            return
        try:
            self._write(text)
        except (OSError, ValueError):  # closed, or a full disk; neither must fail a job
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
        deadline = mono_s() + self.timeout_ms / 1000
        locked = self._acquire_lock(deadline)
        try:
            sent = self._send(self._fd, data, deadline)
        finally:
            if locked and self._lock_fd is not None:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)
        self._late = sent < len(data)
        self._torn = self._late and sent > 0
        self.dropped = self.dropped + 1 if self._late else 0

    def _send(self, fd: int, data: bytes, deadline: float) -> int:
        """Write ``data`` in parts that do not block; return the number of bytes written before the deadline."""
        if not self._may_block:
            return os.write(fd, data)
        sent = 0
        while sent < len(data):
            timeout = 0.0 if self._late else max(0.0, deadline - mono_s())
            if not self._writable.poll(timeout * 1000):
                break
            with contextlib.suppress(BlockingIOError):  # another process that shares the stream has set O_NONBLOCK
                sent += os.write(fd, data[sent : sent + ATOMIC])
        return sent

    def _acquire_lock(self, deadline: float) -> bool:
        """Wait for the lock until the deadline, because a process that was stopped (SIGSTOP) may hold it.

        A line without the lock may be mixed with others, but a supervisor that waits would lose its jobs' locks.
        """
        if self._lock_fd is None:
            return False
        while True:
            try:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if self._lock_stuck or mono_s() >= deadline:
                    self._lock_stuck = True  # the next line does not wait
                    return False
                select.select([], [], [], 0.001)  # file locks have no wait with a timeout
            else:
                self._lock_stuck = False
                return True


def _descriptor(stream: TextIO) -> int | None:
    if sys.platform == "win32":  # without a worker, no processes share the stream
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # io.StringIO, pytest's capture, sys.stderr of a daemon
        return None


def _anonymous_file() -> int | None:
    """Return an anonymous file for the lock; the kernel releases the lock when its holder dies."""
    try:
        return anonymous_file("bulltask-log-lock")
    except OSError:  # no file can be created: long lines may be mixed
        return None
