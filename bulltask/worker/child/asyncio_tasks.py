"""The asyncio tasks of a child's event loop, which the code of jobs shares with bulltask."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import sysconfig
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

import bulltask
from bulltask.jobs.job import RunningJob
from bulltask.registry.current_job import current_job, job_in
from bulltask.worker.child.outcomes import AcquiredJob

__all__ = ["OWN_TASK", "JobTask", "MadeTask", "OwnTask", "TaskOwner", "end_code", "made_task", "origin_of", "place_of"]

OWN_TASK: Final = "bulltask-settling"
"""Name of the asyncio tasks in which bulltask writes outcomes."""

_LIBRARIES: Final = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(bulltask.__file__).parent),
)

_CANCELS_OTHERS: Final = "tried to cancel the asyncio tasks of other jobs or of bulltask, which was prevented"


class TaskOwner(Protocol):
    """The loop's side of :class:`JobTask` and :class:`OwnTask`."""

    def end_cancelled(self, task: asyncio.Task[None], /) -> None:
        """Release the jobs of an asyncio task that was cancelled before it could start."""

    def report(
        self, job: RunningJob | None, problem: str, where: str = "", raised: BaseException | None = None
    ) -> None:
        """Report what a job's code did to the event loop."""


class JobTask(asyncio.Task[None]):
    """Runs the code of a job. Another job cannot cancel it, as by cancelling all tasks of the loop.

    bulltask itself cancels it with ``asyncio.Task.cancel``.

    Attributes:
        jobs: The job, or those of a batch.
        owner: The loop.
        context: Its context.
        code_ended: Whether the job's code has ended, and only hooks follow.
    """

    __slots__ = ("code_ended", "context", "jobs", "owner")
    code_ended: bool
    context: contextvars.Context
    jobs: Sequence[AcquiredJob]
    owner: TaskOwner

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, unless another job has requested it, or the job's code has ended."""
        if self.code_ended or self.done():
            return False
        by = current_job()
        if by is not None and by is not self.jobs[0].job:
            self.owner.report(by, _CANCELS_OTHERS, place_of(sys._getframe()))  # noqa: SLF001 - the documented way
            return False
        self.add_done_callback(self.owner.end_cancelled)
        return super().cancel(msg)


class OwnTask(asyncio.Task[None]):
    """Runs bulltask's own code, which no job can cancel."""

    __slots__ = ("owner",)
    owner: TaskOwner

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, unless a job has requested it."""
        by = current_job()
        if by is not None:
            self.owner.report(by, _CANCELS_OTHERS, place_of(sys._getframe()))  # noqa: SLF001
            return False
        return super().cancel(msg)


class MadeTask(asyncio.Task[Any]):
    """An asyncio task that other code has made.

    Attributes:
        made_by: The job, if any.
    """

    __slots__ = ("made_by",)
    made_by: RunningJob | None


def made_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> MadeTask:
    """Make an asyncio task: the loop's task factory."""
    task = MadeTask(coroutine, loop=loop, **options)
    task.made_by = current_job()
    return task


def origin_of(raised: BaseException | None) -> tuple[RunningJob | None, str]:
    """Return the job whose code has ended the loop with an exception, and the place."""
    job, place, trace = None, "", None if raised is None else raised.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code is asyncio.Handle._run.__code__:  # noqa: SLF001 - its frame has the context of the code
            job = job_in(frame.f_locals["self"]._context)  # noqa: SLF001
        elif job is not None:
            place = place_of(frame, frame.f_back) or place
    return job, place


def place_of(frame: FrameType | None, outermost: FrameType | None = None) -> str:
    """Return the file and the line of the innermost frame that is not a library's; ``""`` if there is none.

    Args:
        frame: The innermost frame.
        outermost: Its last caller that matters.
    """
    while frame is not None and frame is not outermost and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None or frame is outermost:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


async def end_code() -> None:
    """Protect the hooks that follow the code of a job from what it has cancelled."""
    task = asyncio.current_task()
    if isinstance(task, JobTask):
        task.code_ended = True
    if task is not None and task.cancelling():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
