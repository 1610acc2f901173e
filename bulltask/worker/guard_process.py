"""Ends the processes of a worker's children when the supervisor was killed, and so cannot do it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from structlog.typing import FilteringBoundLogger

from bulltask.clock import mono_ms
from bulltask.worker.descendants import end_group, end_marked
from bulltask.worker.helper_process import PipedProcess
from bulltask.worker.slots import ChildBlock

__all__ = ["GuardProcess"]

_PAUSE_S: Final = 0.02
_TIMEOUT_MS: Final = 5_000


class GuardProcess(PipedProcess):
    """Waits for the end of a pipe, which is the supervisor's death, and then kills what the children have started.

    The kernel kills the children themselves, but it does not know the processes that they have started. These could
    work on a job that another worker starts again.

    Args:
        worker_id: The worker's id, which is in the environment of those processes.
        slots_fd: The descriptor of the shared memory.
        children: The blocks with the pids of the children.
        close_inherited, logger: As in :class:`PipedProcess`.
    """

    title, stop_timeout_ms, kill_hint = "Guard process", 1_000, "It did not stop"

    def __init__(
        self,
        worker_id: str,
        slots_fd: int,
        children: Sequence[ChildBlock],
        close_inherited: Callable[[], None],
        logger: FilteringBoundLogger,
    ) -> None:
        super().__init__(close_inherited, logger)
        self._worker_id, self._slots_fd, self._blocks = worker_id, slots_fd, children
        self._ready_pipe = (-1, -1)

    def start(self) -> None:
        """Fork the process."""
        self._fork()

    def _send_stop(self) -> None:
        if self._write_fd is not None:
            os.write(self._write_fd, b"\n")
            super()._send_stop()

    def _before_fork(self) -> None:
        # As for a child: a collection in the supervisor would copy all pages, which this process would keep.
        gc.collect()
        gc.freeze()
        super()._before_fork()
        self._ready_pipe = os.pipe()

    def _after_fork(self) -> None:
        """Wait until the process has left the supervisor's session."""
        super()._after_fork()
        os.close(self._ready_pipe[1])
        os.read(self._ready_pipe[0], 1)
        os.close(self._ready_pipe[0])

    # ---- in the process: its signals remain blocked ----

    def _run(self, parent_pid: int) -> None:  # noqa: ARG002 - it outlives its parent, which may have died already
        os.setsid()  # a signal to the worker's process group must not end it
        for fd in self._ready_pipe:
            os.close(fd)
        self._close_inherited()  # also the pipe's other end
        if os.read(self._read_fd, 1):
            return
        for pid in filter(None, [block.pid for block in self._blocks]):
            end_group(pid)
        give_up_ms = mono_ms() + _TIMEOUT_MS
        while end_marked(self._worker_id, self._slots_fd) and mono_ms() < give_up_ms:
            threading.Event().wait(_PAUSE_S)
