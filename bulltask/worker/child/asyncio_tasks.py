"""The asyncio tasks of a child's event loop, which the code of jobs shares with bulltask."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from bulltask.registry.current_job import current_job
from bulltask.worker.child.outcomes import AcquiredJob

__all__ = ["OWN_TASK", "JobTask", "OwnTask", "end_code"]

OWN_TASK: Final = "bulltask-settling"
"""Name of the asyncio tasks in which bulltask writes outcomes."""


class JobTask(asyncio.Task[None]):
    """Runs the code of a job. Another job cannot cancel it, as by cancelling all tasks of the loop.

    bulltask itself cancels it with ``asyncio.Task.cancel``.

    Attributes:
        jobs: The job, or those of a batch.
        ended: Called when the task has ended after it was cancelled; its code may not even have started.
        context: Its context.
        code_ended: Whether the job's code has ended, and only hooks follow.
    """

    __slots__ = ("code_ended", "context", "ended", "jobs")
    code_ended: bool
    context: contextvars.Context
    jobs: Sequence[AcquiredJob]
    ended: Callable[[JobTask], None]

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, unless another job has requested it, or the job's code has ended."""
        by = current_job()
        if self.code_ended or (by is not None and by is not self.jobs[0].job):
            return False
        self.add_done_callback(self.ended)
        return super().cancel(msg)


class OwnTask(asyncio.Task[None]):
    """Runs bulltask's own code, which no job can cancel."""

    __slots__ = ()

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, unless a job has requested it."""
        return current_job() is None and super().cancel(msg)


async def end_code() -> None:
    """Protect the hooks that follow the code of a job from what it has cancelled."""
    task = asyncio.current_task()
    if isinstance(task, JobTask):
        task.code_ended = True
    if task is not None and task.cancelling():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
