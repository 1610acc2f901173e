"""The Spark side of a running job: its progress, and whether the job is still locked by this worker."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkContext, SparkJobInfo, StatusTracker

from bulltask.errors import BulltaskError
from bulltask.jobs.codec import Json
from bulltask.worker.child.spark_tasks import SparkRun

__all__ = ["JVM_GONE", "SparkJobMonitor", "StageProgress"]

JVM_GONE: Final = (Py4JError, OSError)
"""What a call raises if its JVM or context has ended."""

_SHORTEST_S: Final = 1.0
_LONGEST_S: Final = 10.0
_SHARE: Final = 0.02
"""Of the time that a job has been running: an hour of progress must not fill the queue's event stream."""

_FINAL_CHECKS: Final = 20
_FINAL_PAUSE_S: Final = 0.05
"""Spark's own records lag a moment behind; a Spark job that has ended may be reported as running for so long."""

_ENDED = frozenset({"SUCCEEDED", "FAILED"})


class SparkJobMonitor:
    """Reports a job's progress, and cancels its work on Spark if its lock is lost.

    It has its own thread and so its own connection to the JVM: the task's is blocked while it waits for Spark.

    Args:
        context: Spark's.
        run: The job.
    """

    def __init__(self, context: SparkContext, run: SparkRun) -> None:
        self._context, self._run = context, run
        self._count = StageProgress(context.statusTracker(), run.job_id)
        self._reported: dict[str, Json] | None = None
        self._lost = self._failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"spark job {run.job_id}", daemon=True)
        self._thread.start()

    def end(self, *, failed: bool) -> None:
        """Report the last progress and stop, because the task has ended."""
        self._failed = failed
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        begun = time.monotonic()
        pause = _SHORTEST_S
        with suppress(*JVM_GONE):  # the task gets the same error
            while not self._ended.wait(pause):
                self._check()
                passed = time.monotonic() - begun
                pause = _SHORTEST_S if self._lost else min(_LONGEST_S, max(_SHORTEST_S, passed * _SHARE))
            self._final_check()

    def _check(self) -> None:
        self._report(self._count.read())
        with suppress(BulltaskError):  # Redis is down: the lock may still be ours
            self._lost = self._lost or not self._run.holds_lock()
        if self._lost:  # each time: the task may start another action
            self._context.cancelJobGroup(self._run.job_id)

    def _final_check(self) -> None:
        progress, checks = self._count.read(), 1
        while self._count.is_running and not self._failed and checks < _FINAL_CHECKS:
            threading.Event().wait(_FINAL_PAUSE_S)
            progress, checks = self._count.read(), checks + 1
        self._report(progress)

    def _report(self, progress: dict[str, Json] | None) -> None:
        if progress is None or progress == self._reported or self._lost or self._run.has_reported():
            return
        with suppress(BulltaskError):  # progress is not essential; try again next time
            self._run.report(progress)
            self._reported = progress


class StageProgress:
    """Counts the stages and tasks of a job group, from now on.

    What the group did before is left out: a job that is run again has the same group. A Spark job that has ended is not
    queried again.

    Args:
        tracker: Spark's own.
        group: The job group.
    """

    def __init__(self, tracker: StatusTracker, group: str) -> None:
        self._tracker, self._group = tracker, group
        self._ended = set(tracker.getJobIdsForGroup(group))
        self._stages: dict[int, tuple[int, int]] = {}
        self.is_running = False

    def read(self) -> dict[str, Json] | None:
        """Query Spark again; return ``None`` while there are no stages.

        Returns:
            ``progress`` (percent of the tasks known so far, from 0 to 100; boards for BullMQ show the number with this
            name), ``stages``, ``stages_done``, ``tasks`` and ``tasks_done``. A stage that Spark skips counts as pending
            until the Spark job has ended, and then not at all.
        """
        self.is_running = False
        for job in sorted(set(self._tracker.getJobIdsForGroup(self._group)) - self._ended):
            info = self._tracker.getJobInfo(job)
            if info is None or info.status in _ENDED:
                self._ended.add(job)
            else:
                self.is_running = True
            if info is not None:
                self._count(info)
        return self._sum() if self._stages else None

    def _count(self, job: SparkJobInfo) -> None:
        succeeded = job.status == "SUCCEEDED"
        for stage in job.stageIds:
            info = self._tracker.getStageInfo(stage)
            if info is None:  # not known yet, or dropped: Spark keeps the last thousand
                continue
            if succeeded and not info.numCompletedTasks:
                self._stages.pop(stage, None)  # Spark skipped it, which shows only at the end
            else:
                done = info.numTasks if succeeded else min(info.numTasks, info.numCompletedTasks)
                self._stages[stage] = (info.numTasks, done)

    def _sum(self) -> dict[str, Json]:
        tasks = sum(tasks for tasks, _ in self._stages.values())
        done = sum(done for _, done in self._stages.values())
        return {
            "progress": round(100 * done / tasks, 1) if tasks else 0.0,
            "stages": len(self._stages),
            "stages_done": sum(0 < tasks == done for tasks, done in self._stages.values()),
            "tasks": tasks,
            "tasks_done": done,
        }
