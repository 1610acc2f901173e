"""Tasks with ``spark=True``: the way from a child to :mod:`bulltask.spark`, which stands above the worker."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from bulltask.app import App
from bulltask.errors import PermanentError
from bulltask.jobs import codec
from bulltask.jobs.job import RunningJob
from bulltask.registry.context import Context, Reporter

__all__ = ["SparkChild", "SparkRun", "SparkTasks", "missing_dependencies"]

_HOME: Final = "bulltask.spark.tasks.in_child"
"""Has the :class:`SparkChild`. Named and not imported: it stands above the worker, and needs what is an extra."""


@dataclass(frozen=True, slots=True)
class SparkRun:
    """One run of a job whose task wants Spark.

    Attributes:
        job_id: the job, and so the job group of all that it does on Spark.
        task: its task's name.
        report: stores the job's progress.
        has_spoken: whether the task has reported progress of its own: then it is not overwritten.
        is_ours: whether the job's lock is still this child's.
    """

    job_id: str
    task: str
    report: Callable[[codec.Json], None]
    has_spoken: Callable[[], bool]
    is_ours: Callable[[], bool]


class SparkChild(Protocol):
    """The Spark session of a child."""

    def run(self, run: SparkRun, /) -> AbstractContextManager[None]:
        """Return what a task is run inside of: it has a session there, and nothing of it goes on afterwards."""
        ...

    def interrupt(self) -> None:
        """Cancel what the job that runs does on Spark; see :meth:`SparkTasks.interrupt`."""
        ...

    def close(self) -> None:
        """End the JVM, if there is one."""
        ...


class SparkTasks:
    """Responsible for running tasks with ``spark=True``. Make it in the child, before the first task.

    Args:
        app: its name and settings.
        reporter: gives what carries a job's progress.
        is_locked: whether a job is still locked with a token; called from another thread.
        leave: has the child end when its jobs have: its JVM is gone, and a process starts only one.
    """

    def __init__(
        self,
        app: App,
        reporter: Callable[[RunningJob], Reporter],
        is_locked: Callable[[RunningJob, str], bool],
        leave: Callable[[], None],
    ) -> None:
        self._app, self._reporter, self._is_locked, self._leave = app, reporter, is_locked, leave
        self._child: SparkChild | None = None
        # The app was imported before the fork: what it had started belongs to the supervisor. The thin client of Spark
        # Connect has no such class, and nothing to start.
        contexts: Any = getattr(sys.modules.get("pyspark"), "SparkContext", None)
        self._inherited = contexts is not None and contexts._active_spark_context is not None  # noqa: SLF001

    def inside(
        self, job: RunningJob, token: str, function: Callable[..., Any], context: Context | None
    ) -> Callable[..., Any]:
        """Return a task's function so that it finds a Spark session when it is called.

        Args:
            job: the job.
            token: locks it.
            function: the task's.
            context: its first argument, if the task is bound.

        Returns:
            A function that raises ``PermanentError`` where Spark cannot run, and what ``function`` raises.
        """

        def report(progress: codec.Json) -> None:
            reporter.send("progress", codec.encode(progress, what=f"progress of job {job.id}"))

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._found(job.name).run(run):
                return function(*args, **kwargs)

        reporter = self._reporter(job)
        run = SparkRun(
            job_id=job.id,
            task=job.name,
            report=report,
            has_spoken=lambda: context is not None and context.has_reported,
            is_ours=lambda: self._is_locked(job, token),
        )
        return call

    def interrupt(self) -> None:
        """Cancel what the job that runs does on Spark, so that its thread stops waiting for it.

        Call it in a signal handler that raises (:mod:`bulltask.errors.interrupts`) right afterwards, before it does: an
        exception alone would wait until Spark is done, and leave the thread's connection to the JVM out of step.
        """
        if self._child is not None:
            self._child.interrupt()

    def close(self) -> None:
        """End the JVM, if there is one, and wait for its end."""
        if self._child is not None:
            self._child.close()

    def _found(self, task: str) -> SparkChild:
        if self._child is None:
            if missing := missing_dependencies():
                raise PermanentError(f"task {task!r} has spark=True, and {missing}")
            if self._inherited:
                raise PermanentError(
                    f"task {task!r} has spark=True, and a Spark session was made while the app was imported: it "
                    "belongs to the supervisor; ask for it inside the task, with bulltask.spark.current_session()"
                )
            config = self._app.config
            made = importlib.import_module(_HOME).SparkInChild
            self._child = made(self._app.name, config.spark_master, config.spark_conf or {}, self._leave)
        assert self._child is not None
        return self._child


def missing_dependencies() -> str:
    """Return what keeps this machine from running Spark, and the cure; ``""`` for nothing."""
    if "SPARK_REMOTE" in os.environ:
        return "SPARK_REMOTE is set, but a task needs a Spark of its own, and none of Spark Connect: unset it here"
    for module in ("pyspark", "py4j", "pyarrow"):  # py4j: pyspark-client is a pyspark without it
        if find_spec(module) is None:
            return f"{module} is not installed where this worker runs: pip install 'bulltask[spark]'"
    home = os.environ.get("JAVA_HOME")
    if home:  # Spark looks nowhere else then
        there = os.access(Path(home, "bin", "java"), os.X_OK)
        return "" if there else f"JAVA_HOME={home} has no bin/java: set it to a JRE, 17 or newer"
    return "" if shutil.which("java") else "this worker finds no Java: install a JRE, 17 or newer, or set JAVA_HOME"
