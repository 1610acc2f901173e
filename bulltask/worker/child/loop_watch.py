"""Notices that one callback or coroutine blocks the event loop of a child, and whose it is."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from bulltask.jobs.job import RunningJob
from bulltask.registry.current_job import job_in
from bulltask.worker.child.asyncio_tasks import JobTask, place_of
from bulltask.worker.child.cancellation import Cancellation

__all__ = ["LoopWatch"]

_INTERVAL_S: Final = 0.1
_REPORT_MS: Final = 1_000
"""How long the loop must be blocked until a warning names the job."""


class LoopWatch:
    """A thread that looks, while async jobs are running, whether the event loop still turns.

    It needs the GIL, so it does not notice C code that holds it; for that case, the supervisor reads when the loop has
    last turned.

    Args:
        loop: The event loop.
        thread_id: The loop's thread.
        cancellation: Knows when the loop has last turned, and receives the execution that blocks it.
        blocked: Called every 0.1 s while the loop is blocked.
        report: Called once for each block that lasts for a second, with the job and the place.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread_id: int,
        cancellation: Cancellation,
        blocked: Callable[[], None],
        report: Callable[[RunningJob | None, str], None],
    ) -> None:
        self._loop, self._thread_id, self._cancellation = loop, thread_id, cancellation
        self._blocked, self._report = blocked, report
        self._seen: FrameType | None = None
        self._seen_ms = 0
        self._reported = False
        threading.Thread(target=self._watch, name="bulltask-loop-watch", daemon=True).start()

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            self._cancellation.polling.wait()
            pause.wait(_INTERVAL_S)
            late_ms = self._cancellation.late_ms()
            if late_ms <= 0:
                self._seen, self._reported = None, False
                continue
            self._look(late_ms)
            self._blocked()

    def _look(self, late_ms: int) -> None:
        innermost = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the documented way
        running = innermost
        while running is not None and running.f_code is not asyncio.Handle._run.__code__:  # noqa: SLF001
            running = running.f_back
        if running is None or running is not self._seen:  # a loop that is only busy runs another callback each time
            self._seen, self._reported = running, False
            self._seen_ms = late_ms
            return
        job, task = self._job_of(running)
        self._cancellation.hold(job, task)
        if late_ms - self._seen_ms >= _REPORT_MS and not self._reported:
            self._reported = True
            self._report(job, place_of(innermost, running))

    def _job_of(self, running: FrameType) -> tuple[RunningJob | None, asyncio.Task[Any] | None]:
        task = asyncio.current_task(self._loop)
        if isinstance(task, JobTask):
            return task.jobs[0].job, task
        return job_in(running.f_locals["self"]._context), None  # noqa: SLF001 - Handle has no public name for it
