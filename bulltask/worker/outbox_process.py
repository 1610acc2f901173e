"""The process that sends the rows of the app's outboxes.

The supervisor forks it if the app has an outbox, because the supervisor itself must not wait for a database.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from structlog.typing import FilteringBoundLogger

from bulltask.app import App
from bulltask.clock import mono_ms
from bulltask.outbox.relay import run_relays
from bulltask.process import exit_child, fork_with_blocked_signals
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.helper_signals import ignore_stop_signals

__all__ = ["OutboxProcess"]

_POLL_S: Final = 0.02
_STOP_TIMEOUT_MS: Final = 7_000


class OutboxProcess:
    """Runs the relays of an app's outboxes in a process; a service of the supervisor.

    Args:
        app: The app.
        close_inherited: Closes the supervisor's connections and pipes in the new process.
        logger: Logs when the process starts and dies, and the errors of relays.
    """

    interval_ms = 1_000

    def __init__(self, app: App, close_inherited: Callable[[], None], logger: FilteringBoundLogger) -> None:
        self._app, self._close_inherited, self._logger = app, close_inherited, logger
        self._wanted = bool(app.outboxes) and app.config.outbox_relay
        self._pid: int | None = None
        self._stop_fd: int | None = None

    def tick(self, now_ms: int, missed: int, /) -> None:  # noqa: ARG002 - a service's arguments
        """Start the process if it is not running."""
        if not self._wanted:
            return
        if self._pid is not None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if not pid:
                    return
                self._logger.warning(
                    "Outbox relay died", pid=pid, code=os.waitstatus_to_exitcode(status), hint="Another one starts"
                )
            self.close_inherited()
        self._start()

    def stop(self) -> None:
        """Let the process finish its rows, and wait until it exits. After 7 s, kill it, which loses no job."""
        self.close_inherited()
        if self._pid is None:
            return
        pid, self._pid = self._pid, None
        deadline_ms = mono_ms() + _STOP_TIMEOUT_MS
        with suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if mono_ms() > deadline_ms:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                threading.Event().wait(_POLL_S)

    def close_inherited(self) -> None:
        """Close the pipe. Forks of the supervisor also call this: an open copy would keep the relays running."""
        if self._stop_fd is not None:
            os.close(self._stop_fd)
            self._stop_fd = None

    def _start(self) -> None:
        read_fd, self._stop_fd = os.pipe()
        parent_pid = os.getpid()
        self._pid = fork_with_blocked_signals()
        if self._pid == 0:
            try:
                ignore_stop_signals(parent_pid)
                self._close_inherited()
                for outbox in self._app.outboxes:
                    outbox.after_fork()
                run_relays(self._app.outboxes, lambda: os.read(read_fd, 1), self._logger)
            except BaseException:  # noqa: BLE001 - a fork must never return into the supervisor's code
                traceback.print_exc()
            finally:
                exit_child(ExitCode.OK)
        os.close(read_fd)
        self._logger.info("Outbox relay started", pid=self._pid, outboxes=len(self._app.outboxes))
