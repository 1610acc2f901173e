"""The process that sends the rows of the app's outboxes.

The supervisor forks it if the app has an outbox, because the supervisor itself must not wait for a database.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from bulltask.app import App
from bulltask.outbox.relay import run_relays
from bulltask.worker.helper_process import PipedProcess
from bulltask.worker.helper_signals import ignore_stop_signals

__all__ = ["OutboxProcess"]


class OutboxProcess(PipedProcess):
    """Runs the relays of an app's outboxes in a process.

    When it is told to stop, it finishes its rows. Killing it loses no job.

    Args:
        app: The app.
        close_inherited, logger: As in :class:`PipedProcess`; the relays log their errors, too.
    """

    title, stop_timeout_ms = "Outbox relay", 7_000
    kill_hint = "Its last rows are sent when a worker starts again, each once"

    def __init__(self, app: App, close_inherited: Callable[[], None], logger: FilteringBoundLogger) -> None:
        super().__init__(close_inherited, logger)
        self._app = app
        self._wanted = bool(app.outboxes) and app.config.outbox_relay

    def tick(self, now_ms: int, missed: int, /) -> None:
        """Start the process if it is not running."""
        if self._wanted and self._pid is None:
            self._fork()
        super().tick(now_ms, missed)

    def _after_fork(self) -> None:
        super()._after_fork()
        self._logger.info("Outbox relay started", pid=self._pid, outboxes=len(self._app.outboxes))

    def _run(self, parent_pid: int) -> None:
        ignore_stop_signals(parent_pid)
        self._close_inherited()
        for outbox in self._app.outboxes:
            outbox.after_fork()
        run_relays(self._app.outboxes, lambda: os.read(self._read_fd, 1), self._logger)
