"""A process that the supervisor forks in addition to its children, because it must not run this code itself."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final

from structlog.typing import FilteringBoundLogger

from bulltask.clock import mono_ms
from bulltask.process import exit_child, fork_with_blocked_signals
from bulltask.worker.exit_codes import ExitCode

__all__ = ["HelperProcess", "PipedProcess"]

_POLL_S: Final = 0.02


class HelperProcess(ABC):
    """A helper process of the worker; a service of the supervisor, which starts another process if this one dies.

    Args:
        close_inherited: Closes the supervisor's connections and pipes in the new process.
        logger: Logs when the process dies.
    """

    interval_ms = 1_000
    title: ClassVar[str]
    """The process's name in log lines."""
    stop_timeout_ms: ClassVar[int]
    """How long the process may take to stop, unless the worker must stop earlier."""
    kill_hint: ClassVar[str]
    """What it means that the process did not stop in time."""

    def __init__(self, close_inherited: Callable[[], None], logger: FilteringBoundLogger) -> None:
        self._close_inherited, self._logger = close_inherited, logger
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """The process's id; 0 if it is not running."""
        return self._pid or 0

    def tick(self, now_ms: int, missed: int, /) -> None:  # noqa: ARG002 - a service's arguments
        """Start another process if this one has died; also reaps it."""
        if self._pid is not None and (code := self._exit_code(os.WNOHANG)) is not None:
            self._logger.warning(f"{self.title} died", pid=self._pid, code=code, hint="Another one starts")
            self._fork()

    def request_stop(self) -> None:
        """Tell the process to stop, without waiting for it."""
        if self._pid is not None:
            with suppress(OSError):
                self._send_stop()

    def wait(self, deadline_ms: int | None) -> None:
        """Wait until the process has exited; kill it when its time is over.

        Args:
            deadline_ms: When the worker must stop (monotonic time); ``None`` for no limit but the process's own.
        """
        if self._pid is None:
            return
        kill_at_ms = mono_ms() + self.stop_timeout_ms
        if deadline_ms is not None:
            kill_at_ms = min(kill_at_ms, deadline_ms)
        while self._exit_code(os.WNOHANG) is None:
            if mono_ms() >= kill_at_ms:
                self._logger.warning(f"{self.title} killed", pid=self._pid, hint=self.kill_hint)
                os.kill(self._pid, signal.SIGKILL)
                self._exit_code(0)
                break
            threading.Event().wait(_POLL_S)
        self._pid = None

    def _fork(self) -> None:
        parent_pid = os.getpid()
        self._before_fork()
        pid = fork_with_blocked_signals()
        if pid == 0:
            try:
                self._run(parent_pid)
            except BaseException:  # noqa: BLE001 - a fork must never return into the supervisor's code
                traceback.print_exc()
            finally:
                exit_child(ExitCode.OK)
        self._pid = pid
        self._after_fork()

    def _exit_code(self, options: int) -> int | None:
        """Return the process's exit code, negative after a signal; ``None`` while it is running."""
        assert self._pid is not None
        try:
            pid, status = os.waitpid(self._pid, options)
        except ChildProcessError:
            return 0
        return os.waitstatus_to_exitcode(status) if pid else None

    @abstractmethod
    def close_inherited(self) -> None:
        """Close what only the supervisor needs; its other forks call this, too."""

    @abstractmethod
    def _send_stop(self) -> None:
        """Tell the process to stop."""

    def _before_fork(self) -> None:  # noqa: B027 - optional
        """Prepare a fork."""

    def _after_fork(self) -> None:  # noqa: B027 - optional
        """Complete a fork, in the supervisor."""

    @abstractmethod
    def _run(self, parent_pid: int) -> None:
        """Run in the new process, and close what it has inherited."""


class PipedProcess(HelperProcess):
    """A helper process that reads from the supervisor through a pipe; it also reads the pipe's end.

    Args:
        close_inherited, logger: As in :class:`HelperProcess`.
    """

    def __init__(self, close_inherited: Callable[[], None], logger: FilteringBoundLogger) -> None:
        super().__init__(close_inherited, logger)
        self._read_fd = -1
        self._write_fd: int | None = None

    def close_inherited(self) -> None:
        """Close the pipe. Forks of the supervisor also call this: an open copy would keep the process running."""
        if self._write_fd is not None:
            os.close(self._write_fd)
            self._write_fd = None

    def _send_stop(self) -> None:
        self.close_inherited()

    def _before_fork(self) -> None:
        self.close_inherited()
        self._read_fd, self._write_fd = os.pipe()

    def _after_fork(self) -> None:
        os.close(self._read_fd)
