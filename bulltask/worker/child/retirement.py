"""Decides when a child has reached a limit, and asks the supervisor to replace it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from bulltask.config.config import Config
from bulltask.events import Bus, ChildLimitReached
from bulltask.worker.slots import ChildBlock
from bulltask.worker.states import RetireReason

__all__ = ["Retirement"]


class Retirement:
    """Retires a child: the child acquires no more jobs, finishes its jobs, exits, and is replaced.

    The limit is Celery's ``worker_max_tasks_per_child``. Unlike in Celery, a child can run several jobs at a time, so
    the jobs that it has acquired are counted, not those that have finished. The replacement starts when the child
    acquires no more jobs, not when its last job has finished, which may take a long time.

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
        self._jobs = 0
        self._reason = RetireReason.NONE

    def count_job(self) -> bool:
        """Count a job that the child has acquired; return True if the child must not acquire another one."""
        self._jobs += 1
        if self._jobs == self._max_tasks:
            self._reason = RetireReason.MAX_TASKS_PER_CHILD
        return self._reason is not RetireReason.NONE

    def announce(self, running: Callable[[], int]) -> None:
        """Let the supervisor replace the child, if it is retiring; call this when the child acquires no more jobs.

        Args:
            running: Returns the number of jobs that the child is still running.
        """
        if self._reason is RetireReason.NONE:
            return
        self._block.retire_reason = self._reason
        self._bus.emit(ChildLimitReached(self._index, os.getpid(), self._reason.name.lower(), self._jobs, running()))
        # The supervisor's SIGCHLD handler only ends the loop's wait; the loop then starts the missing child.
        os.kill(self._supervisor_pid, signal.SIGCHLD)
