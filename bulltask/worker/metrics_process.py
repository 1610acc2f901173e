"""Starts the process that serves ``/metrics``: a fork, so that the supervisor stays single-threaded."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from bulltask.config.config import Config
from bulltask.observe.counters import MetricsMemory
from bulltask.process import fork_with_blocked_signals
from bulltask.worker.exit_codes import ExitCode

if TYPE_CHECKING:
    import socket

__all__ = ["MetricsProcess"]


class MetricsProcess:
    """The process that serves ``/metrics``.

    The constructor binds the port, so that the worker does not start with an invalid port; :meth:`start` forks the
    process.

    Args:
        config: The address and port.
        memory: The counters of all processes.
        worker_id: A label of the metrics.
        queue_lengths: Reads the lengths of the queues; called in the new process.

    Raises:
        ConfigError: The port cannot be bound.
    """

    def __init__(
        self,
        config: Config,
        memory: MetricsMemory,
        worker_id: str,
        queue_lengths: Callable[[], Mapping[str, Mapping[str, int]]],
    ) -> None:
        from bulltask.observe.exporter import bind  # noqa: PLC0415 - prometheus_client is slow to import

        self._memory, self._worker_id, self._lengths = memory, worker_id, queue_lengths
        self._socket: socket.socket = bind(config.metrics_host, config.metrics_port or 0)
        self._pid: int | None = None

    def start(self, close_inherited: Callable[[], None]) -> None:
        """Fork the process.

        Args:
            close_inherited: Closes the supervisor's connections and pipes in the new process.
        """
        from bulltask.observe.exporter import run_exporter  # noqa: PLC0415
        from bulltask.observe.metrics import MetricsCollector  # noqa: PLC0415

        parent_pid = os.getpid()
        self._pid = fork_with_blocked_signals()  # the exporter unblocks them once it has handlers
        if self._pid == 0:
            close_inherited()
            collector = MetricsCollector(self._memory, self._worker_id, self._lengths)
            run_exporter(self._socket, collector, parent_pid)
            os._exit(ExitCode.FAILED)
        self._socket.close()

    def stop(self) -> None:
        """Stop the process and wait until it has exited."""
        self._socket.close()
        if self._pid is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGTERM)
                os.waitpid(self._pid, 0)
