"""Runs tasks with ``spark=True`` in a child, with :mod:`bulltask.spark`, a higher layer than the worker."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from bulltask.app import App
from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import PermanentError
from bulltask.jobs.job import RunningJob
from bulltask.registry.context import Context, JobClient

__all__ = ["SparkAttempt", "SparkChild", "SparkTaskRunner", "missing_dependencies"]


_SPARK_MODULE: Final = "bulltask.spark.tasks"
"""Module of the :class:`SparkChild`. It is imported by name, because it is in a higher layer and needs an extra."""


@value_class
class SparkAttempt:
    """An attempt of a task with ``spark=True``. The job's id is also the job group of its Spark jobs.

    Attributes:
        has_reported: Whether the task has reported progress, which must not be overwritten.
        holds_lock: Whether this child still holds the job's lock.
    """

    job_id: str
    task: str
    report: Callable[[codec.Json], None]
    has_reported: Callable[[], bool]
    holds_lock: Callable[[], bool]


class SparkChild(Protocol):
    """The Spark session of a child."""

    def run(self, attempt: SparkAttempt, /) -> AbstractContextManager[None]:
        """Return a context manager that provides a task's Spark session, and cancels its Spark jobs on exit."""
        ...

    def interrupt(self) -> None:
        """Cancel the Spark jobs of the running job; see :meth:`SparkTaskRunner.interrupt`."""
        ...

    def close(self) -> None:
        """Stop the JVM, if there is one."""
        ...


class SparkTaskRunner:
    """Runs tasks with ``spark=True``. Create it in the child, before the first task."""

    def __init__(
        self,
        app: App,
        job_client: Callable[[RunningJob], JobClient],
        renew_lock: Callable[[RunningJob, str], bool],
        close_child: Callable[[], None],
    ) -> None:
        self._app = app
        self._job_client = job_client
        self._renew_lock = renew_lock
        self._close_child = close_child
        self._child: SparkChild | None = None
        # The app was imported before the fork, so a context that it has created belongs to the supervisor. Spark
        # Connect's thin client has no such class, and starts no JVM.
        contexts: Any = getattr(sys.modules.get("pyspark"), "SparkContext", None)
        self._inherited = contexts is not None and contexts._active_spark_context is not None  # noqa: SLF001

    def wrap(
        self, job: RunningJob, token: str, function: Callable[..., Any], context: Context | None
    ) -> Callable[..., Any]:
        """Return the task's function with a Spark session around each call; a bound task has a context.

        It raises ``PermanentError`` if Spark cannot run, and any exception of ``function``.
        """

        def report(progress: codec.Json) -> None:
            job_client.send("progress", codec.encode(progress, what=f"progress of job {job.id}"))

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._spark_child(job.name).run(attempt):
                return function(*args, **kwargs)

        job_client = self._job_client(job)
        attempt = SparkAttempt(
            job_id=job.id,
            task=job.name,
            report=report,
            has_reported=lambda: context is not None and context._has_reported,
            holds_lock=lambda: self._renew_lock(job, token),
        )
        return call

    def interrupt(self) -> None:
        """Cancel the Spark jobs of the running job, so that its thread stops waiting for them.

        A signal handler calls this before it raises an interrupt. Otherwise, the exception would take effect only after
        Spark has finished, and would leave an unread reply in the connection to the JVM.
        """
        if self._child is not None:
            self._child.interrupt()

    def close(self) -> None:
        """Stop the JVM, if there is one, and wait until it has exited."""
        if self._child is not None:
            self._child.close()

    def _spark_child(self, task: str) -> SparkChild:
        if self._child is None:
            if missing := missing_dependencies():
                raise PermanentError(f"task {task!r} has spark=True, but {missing}")
            if self._inherited:
                raise PermanentError(
                    f"task {task!r} has spark=True, but a Spark session was created while the app was being "
                    "imported. It belongs to the supervisor; get a session in the task, with "
                    "bulltask.spark.current_session()"
                )
            config = self._app._config
            spark_child_class = importlib.import_module(_SPARK_MODULE).SparkInChild
            self._child = spark_child_class(
                self._app.name, config.spark_master, config.spark_conf or {}, self._close_child
            )
        assert self._child is not None
        return self._child


def missing_dependencies() -> str:
    """Return the first missing dependency of Spark on this machine and how to fix it; ``""`` if there is none."""
    if "SPARK_REMOTE" in os.environ:
        return "SPARK_REMOTE is set, but tasks cannot use Spark Connect: unset it for the worker"
    for module in ("pyspark", "py4j", "pyarrow"):  # pyspark-client has the module pyspark, but no py4j
        if find_spec(module) is None:
            return f"{module} is not installed in the worker's environment: pip install 'bulltask[spark]'"
    home = os.environ.get("JAVA_HOME")
    if home:  # Spark then searches nowhere else
        has_java = os.access(Path(home, "bin", "java"), os.X_OK)
        return "" if has_java else f"JAVA_HOME={home} has no bin/java: set it to a JRE, 17 or newer"
    return "" if shutil.which("java") else "Java was not found: install a JRE, 17 or newer, or set JAVA_HOME"
