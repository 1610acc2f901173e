"""Runs tasks with ``spark=True`` in a child, by way of :mod:`bulltask.spark`, a higher layer than the worker."""

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
"""Module with the :class:`SparkChild`. Imported by name, because it is in a higher layer and needs an extra."""


@dataclass(frozen=True, slots=True)
class SparkRun:
    """One run of a task with ``spark=True``.

    Attributes:
        job_id: The job, which is also the job group of its work on Spark.
        task: The task's name.
        report: Stores the job's progress.
        has_reported: Whether the task has reported progress itself, which is then not overwritten.
        sent_by_bulltask: Whether this child still holds the job's lock.
    """

    job_id: str
    task: str
    report: Callable[[codec.Json], None]
    has_reported: Callable[[], bool]
    sent_by_bulltask: Callable[[], bool]


class SparkChild(Protocol):
    """The Spark session of a child."""

    def run(self, run: SparkRun, /) -> AbstractContextManager[None]:
        """Return a context manager for a task: it has a Spark session inside, and nothing of it runs on afterwards."""
        ...

    def interrupt(self) -> None:
        """Cancel the Spark work of the running job; see :meth:`SparkTasks.interrupt`."""
        ...

    def close(self) -> None:
        """Stop the JVM, if there is one."""
        ...


class SparkTasks:
    """Runs tasks with ``spark=True``. Create it in the child, before the first task.

    Args:
        app: Its name and settings.
        reporter: Makes the reporter that stores a job's progress.
        is_locked: Whether a job is still locked with a token; called from another thread.
        leave: Ends the child after its jobs: its JVM has died, and a process can start only one.
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
        # The app was imported before the fork, so a context that it made belongs to the supervisor. Spark Connect's
        # thin client has no such class, and starts nothing.
        contexts: Any = getattr(sys.modules.get("pyspark"), "SparkContext", None)
        self._inherited = contexts is not None and contexts._active_spark_context is not None  # noqa: SLF001

    def inside(
        self, job: RunningJob, token: str, function: Callable[..., Any], context: Context | None
    ) -> Callable[..., Any]:
        """Return the task's function with a Spark session around each call.

        Args:
            job: The job.
            token: The token of its lock.
            function: The task's function.
            context: Its first argument, if the task is bound.

        Returns:
            A function that raises ``PermanentError`` if Spark cannot run, and any exception of ``function``.
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
            has_reported=lambda: context is not None and context.has_reported,
            sent_by_bulltask=lambda: self._is_locked(job, token),
        )
        return call

    def interrupt(self) -> None:
        """Cancel the Spark work of the running job, so that its thread stops waiting for it.

        A signal handler calls this before it raises an interrupt: the exception alone would take effect only when
        Spark has finished, and would leave the connection to the JVM with an unread reply.
        """
        if self._child is not None:
            self._child.interrupt()

    def close(self) -> None:
        """Stop the JVM, if there is one, and wait for its end."""
        if self._child is not None:
            self._child.close()

    def _found(self, task: str) -> SparkChild:
        if self._child is None:
            if missing := missing_dependencies():
                raise PermanentError(f"task {task!r} has spark=True, and {missing}")
            if self._inherited:
                raise PermanentError(
                    f"task {task!r} has spark=True, and a Spark session was made while the app was imported: it "
                    "belongs to the supervisor; get it inside the task, with bulltask.spark.current_session()"
                )
            config = self._app.config
            made = importlib.import_module(_HOME).SparkInChild
            self._child = made(self._app.name, config.spark_master, config.spark_conf or {}, self._leave)
        assert self._child is not None
        return self._child


def missing_dependencies() -> str:
    """Return what is missing to run Spark on this machine and how to fix it; ``""`` if nothing is."""
    if "SPARK_REMOTE" in os.environ:
        return "SPARK_REMOTE is set, but tasks cannot use Spark Connect: unset it here"
    for module in ("pyspark", "py4j", "pyarrow"):  # py4j: pyspark-client is a pyspark without it
        if find_spec(module) is None:
            return f"{module} is not installed where this worker runs: pip install 'bulltask[spark]'"
    home = os.environ.get("JAVA_HOME")
    if home:  # Spark then looks nowhere else
        there = os.access(Path(home, "bin", "java"), os.X_OK)
        return "" if there else f"JAVA_HOME={home} has no bin/java: set it to a JRE, 17 or newer"
    return "" if shutil.which("java") else "this worker finds no Java: install a JRE, 17 or newer, or set JAVA_HOME"
