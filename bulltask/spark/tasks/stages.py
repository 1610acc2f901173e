"""How far the Spark jobs of a group are, as the progress of a job."""

from __future__ import annotations

from pyspark import SparkJobInfo, StatusTracker

from bulltask.jobs.codec import Json

__all__ = ["StageCount"]

_OVER = frozenset({"SUCCEEDED", "FAILED"})


class StageCount:
    """Responsible for counting the stages and tasks of a job group, from now on.

    What the group has done before is left out: a job that is run again has the group that it had. Of a Spark job that
    has ended nothing is asked a second time.

    Args:
        tracker: Spark's own.
        group: the job group.
    """

    def __init__(self, tracker: StatusTracker, group: str) -> None:
        self._tracker, self._group = tracker, group
        self._over = set(tracker.getJobIdsForGroup(group))
        self._stages: dict[int, tuple[int, int]] = {}
        self.is_running = False

    def read(self) -> dict[str, Json] | None:
        """Look again; ``None`` while there are no stages.

        Returns:
            ``progress`` (percent of the tasks known so far, from 0 to 100: boards of BullMQ show the number of this
            name), ``stages``, ``stages_done``, ``tasks`` and ``tasks_done``. A stage that Spark skips counts as pending
            until the Spark job has ended, and not at all then.
        """
        self.is_running = False
        for job in sorted(set(self._tracker.getJobIdsForGroup(self._group)) - self._over):
            info = self._tracker.getJobInfo(job)
            if info is None or info.status in _OVER:
                self._over.add(job)
            else:
                self.is_running = True
            if info is not None:
                self._count(info)
        return self._sum() if self._stages else None

    def _count(self, job: SparkJobInfo) -> None:
        succeeded = job.status == "SUCCEEDED"
        for stage in job.stageIds:
            info = self._tracker.getStageInfo(stage)
            if info is None:  # not known yet, or forgotten: Spark keeps the last thousand
                continue
            if succeeded and not info.numCompletedTasks:
                self._stages.pop(stage, None)  # its result was there already, which shows only in the end
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
