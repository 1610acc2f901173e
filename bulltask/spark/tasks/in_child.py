"""Spark in a worker's child: one JVM and one session, which its ``spark=True`` tasks use one after another.

:mod:`bulltask.worker.spark_tasks` imports this module and defines the interface.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

from bulltask.jobs.errors import ReleaseJob, TransientError
from bulltask.spark.connector.session import session
from bulltask.spark.tasks.progress import JVM_GONE, SparkJobMonitor
from bulltask.worker.spark_tasks import SparkAttempt

__all__ = ["SparkInChild"]

_STOP_TIMEOUT_S: Final = 10.0
_EXIT_TIMEOUT_S: Final = 2.0

_CONF: Final[Mapping[str, str]] = {"spark.ui.showConsoleProgress": "false"}
"""Spark's progress bar is for terminals, not for a worker's log."""


class SparkInChild:
    """Owns the JVM of a child; implements :class:`bulltask.worker.spark_tasks.SparkChild`.

    The JVM is started for the first job, on the job's thread. It exits when its standard input is closed, and only
    this process holds the other end of that pipe. The JVM and Spark's Python processes therefore always exit with the
    child.

    Args:
        app: The session's name.
        master: Spark's master; ``None`` for the master in Spark's settings.
        conf: Spark's settings.
        leave: A function that makes the child exit after its running jobs. A JVM that has died is not replaced, because
            PySpark keeps references to it; a new child starts a new JVM.
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
        watch, failed = self._begin(context, attempt), True
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

    def _begin(self, context: SparkContext, attempt: SparkAttempt) -> SparkJobMonitor:
        _join_group(context, attempt)
        watch = SparkJobMonitor(context, attempt)
        self._running = context, attempt
        return watch

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
