"""The process in which receivers of ``worker_ready``, ``worker_shutting_down`` and ``worker_shutdown`` are called.

It is a fork of the supervisor, which itself runs no code of the app after its start: a receiver that blocks there would
cause the locks of all running jobs to expire. The process exists only if one of these signals has a receiver.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from structlog.typing import FilteringBoundLogger

from bulltask.app import App
from bulltask.events import Bus, WorkerStopping
from bulltask.hooks.calls import send_signal
from bulltask.signals.catalog import worker_ready, worker_shutdown, worker_shutting_down
from bulltask.worker.helper_process import PipedProcess
from bulltask.worker.helper_signals import ignore_stop_signals

__all__ = ["HookProcess", "WorkerInfo"]

_POLL_S: Final = 0.05
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


class HookProcess(PipedProcess):
    """Starts the process, if one of the signals has a receiver, and tells it what happens to the worker.

    Args:
        worker: The sender of the signals.
        is_ready: Returns whether a child is ready; called in the process.
        close_inherited, logger: As in :class:`PipedProcess`.
    """

    title, stop_timeout_ms = "Hook process", 5_000
    kill_hint = "A signal receiver did not return"

    def __init__(
        self,
        worker: WorkerInfo,
        is_ready: Callable[[], bool],
        close_inherited: Callable[[], None],
        logger: FilteringBoundLogger,
    ) -> None:
        super().__init__(close_inherited, logger)
        self._worker, self._is_ready = worker, is_ready
        self._announces_ready = True

    def start(self, bus: Bus) -> None:
        """Fork the process; ``bus`` is the supervisor's."""
        if any(one.has_listeners() for one in (worker_ready, worker_shutting_down, worker_shutdown)):
            bus.subscribe(WorkerStopping, self._on_stopping)
            self._fork()

    def _on_stopping(self, event: WorkerStopping) -> None:
        self.tick(0, 0)  # otherwise, a process that has just died would miss the message
        self._send(event.mode)

    def _send(self, message: str) -> None:
        if self._write_fd is not None:
            with suppress(OSError):  # the process is dead, or a receiver has blocked it for thousands of messages
                os.write(self._write_fd, f"{message}\n".encode())

    def _send_stop(self) -> None:
        """Let the process send ``worker_shutdown``."""
        self._send(_EXIT)
        super()._send_stop()

    def _after_fork(self) -> None:
        super()._after_fork()
        assert self._write_fd is not None
        os.set_blocking(self._write_fd, False)

    def tick(self, now_ms: int, missed: int, /) -> None:
        """Start another process if this one has died. It sends ``worker_ready`` only if no child was ready before."""
        if self._announces_ready:
            self._announces_ready = not self._is_ready()
        super().tick(now_ms, missed)

    # ---- in the process ----

    def _run(self, parent_pid: int) -> None:
        ignore_stop_signals(parent_pid)
        self._close_inherited()  # also the pipe's other end
        while self._announces_ready and not select.select([self._read_fd], [], [], _POLL_S)[0]:
            if self._is_ready():
                send_signal(worker_ready, self._worker)
                break
        with os.fdopen(self._read_fd) as messages:
            for line in messages:
                message = line.strip()
                if message == _EXIT:
                    send_signal(worker_shutdown, self._worker)
                    return
                sig, how = _CAUSES[message]
                send_signal(worker_shutting_down, self._worker.hostname, sig=sig, how=how, exitcode=0)
