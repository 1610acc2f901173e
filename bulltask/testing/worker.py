"""A worker for tests and scripts: ``bulltask worker`` as a process that can be paused, resumed and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from bulltask.embedded.launch import wait_for_exit
from bulltask.errors import BulltaskError
from bulltask.testing.wait import wait_until

__all__ = ["WorkerProcess"]

_LAST_LINES = 20


class WorkerProcess:
    """A running worker, created by `WorkerProcess.start`.

    `pause`, `resume` and `close` have the same names as in Node's ``Worker``. Example::

        def test_a_paused_worker_leaves_jobs_alone(server):
            with WorkerProcess.start("shop.tasks:app", broker_url=server.url) as worker:
                worker.pause()
                result = add.delay(1, 2)
                worker.resume()
                assert result.get(timeout=10) == 3

    Attributes:
        pid: Process id of its supervisor.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process, self._log = process, log
        self.pid = process.pid

    @classmethod
    def start(
        cls,
        app: str,
        *options: str,
        broker_url: str | None = None,
        settings: Mapping[str, object] | None = None,
        directory: Path | str | None = None,
        timeout: float = 30.0,
    ) -> Self:
        """Start a worker and wait until it is ready.

        Args:
            app: The value of ``-A``.
            options: Further flags of ``bulltask worker``, such as ``"--paused"``, ``"-Q"``, ``"mail"``.
            broker_url: Address of Redis; default: the app's.
            settings: Other settings by name; they override the app's.
            directory: Working directory, from which the app is imported; default: the current directory.
            timeout: Maximum wait in seconds.

        Returns:
            The worker; also a context manager that stops it.

        Raises:
            BulltaskError: The worker exited; the message shows the end of its log.
            TimeoutError: The worker did not start in time.
        """
        given = {"loglevel": "info", **(settings or {}), **({} if broker_url is None else {"broker_url": broker_url})}
        environ = {f"BULLTASK_{name.upper()}": str(value) for name, value in given.items()}
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop(); unlike a pipe, a file never fills up
        process = subprocess.Popen(  # noqa: S603 - this interpreter with the caller's options
            [sys.executable, "-m", "bulltask", "worker", "-A", app, *options],
            cwd=directory,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        worker = cls(process, log)
        try:
            worker._wait_for("Worker started", 1, timeout)
            if "--paused" in options:
                worker._wait_for("Worker paused", 1, timeout)
        except BaseException:
            worker.close()
            raise
        return worker

    @property
    def text(self) -> str:
        """Its output so far, stdout and stderr."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its log lines so far, oldest first; ``event`` is the message."""
        lines = (line for line in self.text.splitlines() if line.startswith("{") and line.endswith("}"))
        return [json.loads(line) for line in lines]

    @property
    def is_running(self) -> bool:
        """True while its process is running."""
        return self._process.poll() is None

    @property
    def is_paused(self) -> bool:
        """True after `pause`, or a start with ``--paused``, until `resume`."""
        logged = [line["event"] for line in self.lines if line["event"] in {"Worker paused", "Worker resumed"}]
        return logged[-1:] == ["Worker paused"]

    def pause(self, timeout: float = 30.0) -> None:
        """Pause the worker and wait until it confirms. Running jobs continue; this does not wait for them.

        Raises:
            BulltaskError, TimeoutError: As for `start`.
        """
        if not self.is_paused:
            self._signal(signal.SIGTSTP, "Worker paused", timeout)

    def resume(self, timeout: float = 30.0) -> None:
        """Let the worker acquire jobs again, and wait until it confirms.

        Raises:
            BulltaskError, TimeoutError: As for `start`.
        """
        if self.is_paused:
            self._signal(signal.SIGCONT, "Worker resumed", timeout)

    def stop(self, *, force: bool = False, timeout: float = 60.0) -> int:
        """Stop the worker and wait until it has exited.

        Args:
            force: Release running jobs immediately instead of waiting up to ``shutdown_timeout`` for them to end.
            timeout: Maximum wait in seconds.

        Returns:
            Its exit code.

        Raises:
            TimeoutError: It is still running.
        """
        if self.is_running:
            self._process.send_signal(signal.SIGQUIT if force else signal.SIGTERM)
        code = wait_for_exit(self._process, timeout)
        if code is None:
            raise TimeoutError(f"the worker (process {self.pid}) is still running after {timeout:g} s")
        return code

    def kill(self) -> None:
        """Kill it (``SIGKILL``), which also kills its children, and wait until it has exited."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill it if it is still running, and delete its log."""
        self.kill()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.close()

    def _signal(self, number: signal.Signals, event: str, timeout: float) -> None:
        before = self._count(event)
        if self.is_running:
            self._process.send_signal(number)
        self._wait_for(event, before + 1, timeout)

    def _count(self, event: str) -> int:
        return sum(line["event"] == event for line in self.lines)

    def _wait_for(self, event: str, count: int, timeout: float) -> None:
        def logged() -> bool:
            ended = not self.is_running  # checked first, because its last output is read below
            if self._count(event) >= count:
                return True
            if ended:
                last = "\n".join(self.text.splitlines()[-_LAST_LINES:])
                raise BulltaskError(f"the worker exited with code {self._process.returncode}:\n{last}")
            return False

        wait_until(logged, timeout, f"the line {event!r} of the worker (process {self.pid})")
