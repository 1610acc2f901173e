"""The process in which receivers of ``worker_ready``, ``worker_shutting_down`` and ``worker_shutdown`` are called.

It is a fork of the supervisor, which itself runs no code of the app after its start: a receiver that blocks there would
cause the locks of all running jobs to expire. The process exists only if one of these signals has a receiver.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from structlog.typing import FilteringBoundLogger

from bulltask.app import App
from bulltask.clock import mono_ms
from bulltask.events import Bus, WorkerStopping
from bulltask.hooks.calls import send_signal
from bulltask.process import exit_child, fork_with_blocked_signals
from bulltask.signals.catalog import worker_ready, worker_shutdown, worker_shutting_down
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.helper_signals import ignore_stop_signals

__all__ = ["HookProcess", "WorkerInfo"]

_POLL_S: Final = 0.05
_STOP_TIMEOUT_MS: Final = 5_000
_EXIT: Final = "exit"
_CAUSES: Final = {"warm": ("SIGTERM", "Warm"), "cold": ("SIGQUIT", "Cold"), "restart": ("SIGHUP", "Warm")}
"""``sig`` and ``how`` of ``worker_shutting_down``, by the mode of a shutdown."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The sender of a worker's signals.

    Attributes:
        hostname: The worker id (Celery's node name).
        app: The app.
        queues: The names of the worker's queues in the app.
        concurrency: The number of children.
    """

    hostname: str
    app: App
    queues: tuple[str, ...]
    concurrency: int


class HookProcess:
    """Starts the process and tells it what happens to the worker.

    Args:
        worker: The sender of the signals.
        is_ready: Returns whether a child is ready; called in the process.
        logger: Logs that the process was killed.
    """

    def __init__(self, worker: WorkerInfo, is_ready: Callable[[], bool], logger: FilteringBoundLogger) -> None:
        self._worker, self._is_ready, self._logger = worker, is_ready, logger
        self._pid: int | None = None
        self._write_fd: int | None = None

    def start(self, bus: Bus, close_inherited: Callable[[], None]) -> None:
        """Fork the process, if one of the signals has a receiver.

        Args:
            bus: The supervisor's bus.
            close_inherited: Closes the supervisor's connections and pipes in the new process.
        """
        if not any(one.has_listeners() for one in (worker_ready, worker_shutting_down, worker_shutdown)):
            return
        read_fd, self._write_fd = os.pipe()
        parent_pid = os.getpid()
        self._pid = fork_with_blocked_signals()
        if self._pid == 0:
            try:
                ignore_stop_signals(parent_pid)
                close_inherited()
                self.close_inherited()
                self._run(read_fd)
            except BaseException:  # noqa: BLE001 - a fork must never return into the supervisor's code
                traceback.print_exc()
            finally:
                exit_child(ExitCode.OK)
        os.close(read_fd)
        os.set_blocking(self._write_fd, False)
        bus.subscribe(WorkerStopping, lambda event: self._send(event.mode))

    def stop(self) -> None:
        """Let the process send ``worker_shutdown``, and wait until it has exited; kill it after 5 s."""
        if self._pid is None:
            return
        self._send(_EXIT)
        self.close_inherited()
        deadline_ms = mono_ms() + _STOP_TIMEOUT_MS
        pid, self._pid = self._pid, None
        with suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if mono_ms() > deadline_ms:
                    self._logger.warning("Hook process killed", pid=pid, hint="A signal receiver did not return")
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                threading.Event().wait(_POLL_S)

    def close_inherited(self) -> None:
        """Close the pipe; forks of the supervisor call this, too."""
        if self._write_fd is not None:
            os.close(self._write_fd)
            self._write_fd = None

    def _send(self, message: str) -> None:
        if self._write_fd is not None:
            with suppress(OSError):  # the process is dead, or a receiver has blocked it for thousands of messages
                os.write(self._write_fd, f"{message}\n".encode())

    # ---- in the process ----

    def _run(self, read_fd: int) -> None:
        while not select.select([read_fd], [], [], _POLL_S)[0]:
            if self._is_ready():
                send_signal(worker_ready, self._worker)
                break
        with os.fdopen(read_fd) as messages:
            for line in messages:
                message = line.strip()
                if message == _EXIT:
                    send_signal(worker_shutdown, self._worker)
                    return
                sig, how = _CAUSES[message]
                send_signal(worker_shutting_down, self._worker.hostname, sig=sig, how=how, exitcode=0)
