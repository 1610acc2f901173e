"""Decides when a child has reached a limit, and asks the supervisor to replace it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from bulltask.config.config import Config
from bulltask.events import Bus, ChildLimitReached
from bulltask.process import memory_kib
from bulltask.worker.slots import ChildBlock
from bulltask.worker.states import RetireReason

__all__ = ["Retirement"]


class Retirement:
    """Retires a child: the child acquires no more jobs, finishes its jobs, exits, and is replaced.

    The limits are Celery's ``worker_max_tasks_per_child`` and ``worker_max_memory_per_child``. Unlike in Celery, a
    child can run several jobs at a time, so the jobs that it has acquired are counted, not those that have finished.
    The replacement starts when the child acquires no more jobs, not when its last job has finished, which may take a
    long time. The current memory is compared; Celery compares the maximum so far, even if it has been freed.

    Args:
        config: The limits.
        block: The child's block, in which the supervisor reads that the child is retiring.
        index: The child's index in the pool.
        bus: Receives an event when the child has reached a limit.
        supervisor_pid: Process id of the supervisor.
    """

    def __init__(self, config: Config, block: ChildBlock, index: int, bus: Bus, supervisor_pid: int) -> None:
        self._block, self._index, self._bus, self._supervisor_pid = block, index, bus, supervisor_pid
        self._max_tasks = config.max_tasks_per_child
        self._max_memory_kib = config.max_memory_kib or config.hard_memory_kib
        self._memory_kib: int | None = None
        self._jobs, self._lock = 0, threading.Lock()
        self._reason = RetireReason.NONE

    @property
    def limits_jobs(self) -> bool:
        """Whether the number of the child's jobs is limited."""
        return self._max_tasks is not None

    def count_job(self) -> bool:
        """Count a job that the child has acquired; return True if the child must not acquire another one."""
        with self._lock:  # the main thread and the event loop call this
            self._jobs += 1
        if self._jobs != self._max_tasks:
            return False
        self._reason = RetireReason.MAX_TASKS_PER_CHILD
        return True

    def check_memory(self) -> None:
        """Retire the child if its memory exceeds the limit; call this after a task, on any thread.

        The check runs only after a task: if new children exceeded the limit before their first one, the worker would
        replace them forever and run no jobs.
        """
        if self._max_memory_kib is None or self._reason is not RetireReason.NONE:
            return
        self._memory_kib = memory_kib()
        if self._memory_kib > self._max_memory_kib:
            self._reason = RetireReason.MAX_MEMORY_PER_CHILD
            # The handler of SIGTERM closes the fetcher on the main thread, which may be waiting for a job.
            os.kill(os.getpid(), signal.SIGTERM)

    def announce(self, running: Callable[[], int]) -> None:
        """Let the supervisor replace the child, if it is retiring; call this when the child acquires no more jobs.

        Args:
            running: Returns the number of jobs that the child is still running.
        """
        if self._reason is RetireReason.NONE:
            return
        self._block.retire_reason = self._reason
        limit = self._reason.name.lower()
        self._bus.emit(ChildLimitReached(self._index, os.getpid(), limit, self._jobs, running(), self._memory_kib))
        # The supervisor's SIGCHLD handler only ends the loop's wait; the loop then starts the missing child.
        os.kill(self._supervisor_pid, signal.SIGCHLD)
