"""Spark in a worker's child: one JVM and one session, which its ``spark=True`` tasks use one after another.

:mod:`bulltask.worker.spark_tasks` imports this module and defines the interface.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext, SparkJobInfo, StatusTracker
from pyspark.java_gateway import launch_gateway

from bulltask.jobs.clock import mono_s
from bulltask.jobs.codec import Json
from bulltask.jobs.errors import BulltaskError, ReleaseJob, TransientError
from bulltask.spark.connector import session
from bulltask.worker.spark_tasks import SparkAttempt

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
                elapsed = 0 if self._lost else mono_s() - start_s
                interval = min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, elapsed * _INTERVAL_FRACTION))
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


_STOP_TIMEOUT_S: Final = 10.0
_EXIT_TIMEOUT_S: Final = 2.0

_CONF: Final[Mapping[str, str]] = {"spark.ui.showConsoleProgress": "false"}
"""Spark's progress bar is for terminals, not for a worker's log."""


class SparkInChild:
    """Owns the JVM of a child; implements :class:`bulltask.worker.spark_tasks.SparkChild`.

    The JVM is started for the first job, on the job's thread. It exits when its standard input is closed, and only this
    process holds the other end of that pipe. The JVM and Spark's Python processes therefore always exit with the child.
    ``leave`` makes the child exit after its running jobs: a JVM that has died is not replaced, because PySpark keeps
    references to it; a new child starts a new JVM.
    """

    def __init__(self, app: str, master: str | None, conf: Mapping[str, str], leave: Callable[[], None]) -> None:
        self._app = app
        self._master = master
        self._conf = {**_CONF, **conf}
        self._leave = leave
        self._gateway: Any = None
        self._running: tuple[SparkContext, SparkAttempt] | None = None

    @contextmanager
    def run(self, attempt: SparkAttempt, /) -> Iterator[None]:
        """Provide the session for a task, in a Spark job group with the job's id; at the end, cancel the group.

        Raises:
            ReleaseJob: The JVM has died since the last job: another child runs this one.
            TransientError: The JVM could not be started, or has died while the task ran.
        """
        handler = signal.getsignal(signal.SIGINT)
        context = self._started()
        # Spark's handler would raise an exception in the running code; the supervisor handles Ctrl-C.
        signal.signal(signal.SIGINT, handler)
        _join_group(context, attempt)
        watch, failed = SparkJobMonitor(context, attempt), True
        self._running = context, attempt
        try:
            yield
            failed = False
        except Exception as exc:
            if self._has_died(exc):
                self._leave()
                raise TransientError(f"this child's JVM died ({self._exit_reason()}) while the task ran") from exc
            raise
        finally:
            self._running = None
            watch.end(failed=failed)
            self._clear(context, attempt, failed=failed)
            signal.signal(signal.SIGINT, handler)  # the task may have created a session itself

    def interrupt(self) -> None:
        """Cancel the Spark jobs of the running job; called in its thread, by a signal handler."""
        if self._running is None:
            return
        context, attempt = self._running
        self._disconnect()
        with suppress(*JVM_GONE):
            _join_group(context, attempt)
            context.cancelJobGroup(attempt.job_id)

    def close(self) -> None:
        """Stop the JVM and wait until it has exited."""
        if (jvm := self._jvm()) is None:
            return
        with suppress(OSError):
            assert jvm.stdin is not None
            jvm.stdin.close()
        try:
            jvm.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            jvm.kill()
            jvm.wait()

    def _started(self) -> SparkContext:
        if self._has_died():
            self._leave()
            raise ReleaseJob
        context = SparkContext._active_spark_context  # noqa: SLF001 - no public API returns it
        if context is None:  # the first job, or the previous task stopped its session, as scripts do
            try:
                self._start_jvm()
                context = session(self._app, self._master, conf=self._conf).sparkContext
            except Exception as exc:
                raise TransientError(f"Spark could not be started: {exc}") from exc
        self._gateway = context._gateway  # noqa: SLF001 - no public API returns it
        return context

    def _start_jvm(self) -> None:
        """Start the JVM like PySpark, but in a separate process group; do nothing if there is a JVM.

        A terminal sends its signals to a whole group: Ctrl-Z pauses a worker but would stop the JVM permanently.
        """
        if SparkContext._gateway is not None:  # noqa: SLF001 - as below
            return
        conf = SparkConf(loadDefaults=False).setAppName(self._app).setAll(list(self._conf.items()))
        if self._master is not None:
            conf.setMaster(self._master)
        gateway = launch_gateway(conf, {"process_group": 0})  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - a session uses the existing gateway

    def _clear(self, context: SparkContext, attempt: SparkAttempt, *, failed: bool) -> None:
        """Cancel Spark jobs that the task's threads may have left running."""
        if failed:
            self._disconnect()
        with suppress(*JVM_GONE, AttributeError):  # the task stopped its session, or the JVM has exited
            context.cancelJobGroup(attempt.job_id)
            context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
            context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]

    def _disconnect(self) -> None:
        """Give this thread a new connection to the JVM.

        After an exception that interrupted a call, the reply is still in transit, and the next call would read it.
        """
        client = self._gateway._gateway_client  # noqa: SLF001 - py4j drops it only for a KeyboardInterrupt
        client.thread_connection.connection = None

    def _jvm(self) -> subprocess.Popen[bytes] | None:
        return None if self._gateway is None else self._gateway.proc

    def _has_died(self, exc: Exception | None = None) -> bool:
        if (jvm := self._jvm()) is None:
            return False
        # The connection breaks a moment before the process exits.
        disconnected = isinstance(exc, JVM_GONE) and not isinstance(exc, Py4JJavaError)
        with suppress(subprocess.TimeoutExpired):
            return jvm.wait(_EXIT_TIMEOUT_S if disconnected else 0) is not None
        return False

    def _exit_reason(self) -> str:
        jvm = self._jvm()
        code = None if jvm is None else jvm.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _join_group(context: SparkContext, attempt: SparkAttempt) -> None:
    context.setJobGroup(attempt.job_id, attempt.task, interruptOnCancel=True)
