"""The process that serves ``/metrics``: a fork, so that the supervisor stays single-threaded."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger

from bulltask.config.config import Config
from bulltask.observe.counters import MetricsMemory
from bulltask.worker.helper_process import HelperProcess

if TYPE_CHECKING:
    import socket

__all__ = ["MetricsProcess"]


class MetricsProcess(HelperProcess):
    """The process that serves ``/metrics``.

    The constructor binds the port, so that the worker does not start with an invalid port; :meth:`start` forks the
    process. The supervisor keeps the socket, so a client that connects while the process is dead is served by the next.

    Args:
        config: The address and port.
        memory: The counters of all processes.
        worker_id: A label of the metrics.
        queue_lengths: Reads the lengths of the queues; called in the new process.
        close_inherited, logger: As in :class:`HelperProcess`.

    Raises:
        ConfigError: The port cannot be bound.
    """

    title, stop_timeout_ms = "Metrics exporter", 1_000
    kill_hint = "It was stopped or suspended"

    def __init__(
        self,
        config: Config,
        memory: MetricsMemory,
        worker_id: str,
        queue_lengths: Callable[[], Mapping[str, Mapping[str, int]]],
        close_inherited: Callable[[], None],
        logger: FilteringBoundLogger,
    ) -> None:
        from bulltask.observe.exporter import bind  # noqa: PLC0415 - prometheus_client is slow to import

        super().__init__(close_inherited, logger)
        self._memory, self._worker_id, self._lengths = memory, worker_id, queue_lengths
        self._socket: socket.socket = bind(config.metrics_host, config.metrics_port or 0)

    def start(self) -> None:
        """Fork the process."""
        self._fork()

    def close_inherited(self) -> None:
        """Close the socket; forks of the supervisor call this, too."""
        self._socket.close()

    def _send_stop(self) -> None:
        assert self._pid is not None
        os.kill(self._pid, signal.SIGTERM)

    def _run(self, parent_pid: int) -> None:
        from bulltask.observe.exporter import run_exporter  # noqa: PLC0415
        from bulltask.observe.metrics import MetricsCollector  # noqa: PLC0415

        listener = self._socket.dup()
        self._close_inherited()  # also the other copy of the socket
        collector = MetricsCollector(self._memory, self._worker_id, self._lengths)
        run_exporter(listener, collector, parent_pid)  # unblocks the signals once it has handlers
