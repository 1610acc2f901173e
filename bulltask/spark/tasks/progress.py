"""The progress of a running job on Spark, and the check of the job's lock."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkContext, SparkJobInfo, StatusTracker

from bulltask.jobs.clock import mono_s
from bulltask.jobs.codec import Json
from bulltask.jobs.errors import BulltaskError
from bulltask.worker.spark_tasks import SparkAttempt

__all__ = ["JVM_GONE", "SparkJobMonitor", "StageProgress"]

JVM_GONE: Final = (Py4JError, OSError)
"""The errors raised by calls when the JVM has exited or the context has stopped."""

_MIN_INTERVAL_S: Final = 1.0
_MAX_INTERVAL_S: Final = 10.0
_INTERVAL_FRACTION: Final = 0.02
"""The report interval as a fraction of the run time, so that long jobs do not fill the queue's event stream."""

_FINAL_CHECKS: Final = 20
_FINAL_PAUSE_S: Final = 0.05
"""Spark's status is delayed: a Spark job that has finished may still be reported as running for this time."""

_ENDED = frozenset({"SUCCEEDED", "FAILED"})


class SparkJobMonitor:
    """Reports a job's progress, and cancels its Spark jobs if its lock is lost.

    It runs in a separate thread, with a separate connection to the JVM, because the task's connection is blocked while
    the task waits for Spark.

    Args:
        context: The Spark context.
        attempt: The attempt.
    """

    def __init__(self, context: SparkContext, attempt: SparkAttempt) -> None:
        self._context = context
        self._attempt = attempt
        self._count = StageProgress(context.statusTracker(), attempt.job_id)
        self._reported: dict[str, Json] | None = None
        self._lost = self._failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"spark job {attempt.job_id}", daemon=True)
        self._thread.start()

    def end(self, *, failed: bool) -> None:
        """Report the last progress and stop when the task has ended."""
        self._failed = failed
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        start_s = mono_s()
        interval = _MIN_INTERVAL_S
        with suppress(*JVM_GONE):  # the task gets the same error
            while not self._ended.wait(interval):
                self._check()
                elapsed = mono_s() - start_s
                interval = (
                    _MIN_INTERVAL_S
                    if self._lost
                    else min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, elapsed * _INTERVAL_FRACTION))
                )
            self._final_check()

    def _check(self) -> None:
        self._report(self._count.read())
        with suppress(BulltaskError):  # Redis is down: the lock may still be valid
            self._lost = self._lost or not self._attempt.holds_lock()
        if self._lost:  # repeatedly, because the task may start another action
            self._context.cancelJobGroup(self._attempt.job_id)

    def _final_check(self) -> None:
        progress, checks = self._count.read(), 1
        while self._count.is_running and not self._failed and checks < _FINAL_CHECKS:
            threading.Event().wait(_FINAL_PAUSE_S)
            progress, checks = self._count.read(), checks + 1
        self._report(progress)

    def _report(self, progress: dict[str, Json] | None) -> None:
        if progress is None or progress == self._reported or self._lost or self._attempt.has_reported():
            return
        with suppress(BulltaskError):  # progress is not essential; it is reported again later
            self._attempt.report(progress)
            self._reported = progress


class StageProgress:
    """Counts the stages and tasks of the Spark jobs that are added to a job group after this object is created.

    Earlier Spark jobs in the group are ignored, because a job that is run again has the same group. Finished Spark jobs
    are not queried again.

    Args:
        tracker: Spark's status tracker.
        group: The job group.
    """

    def __init__(self, tracker: StatusTracker, group: str) -> None:
        self._tracker = tracker
        self._group = group
        self._ended = set(tracker.getJobIdsForGroup(group))
        self._stages: dict[int, tuple[int, int]] = {}
        self.is_running = False

    def read(self) -> dict[str, Json] | None:
        """Query Spark again; return ``None`` while there are no stages.

        Returns:
            ``progress`` (the percentage of finished tasks among those known so far, from 0 to 100; dashboards show the
            number with this name), ``stages``, ``stages_done``, ``tasks`` and ``tasks_done``. A stage that Spark skips
            counts as pending until the Spark job has finished, and then not at all.
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
