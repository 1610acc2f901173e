"""Run real workers: ``python -m bulltask worker`` with an app that the test writes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkedProcess, fork_server
from tests.support.processes import parent_of, running_pids

__all__ = ["APP", "Worker", "fixed_prefetch_count", "wait_until_exited"]

APP = '''
"""A test's app. Its tasks record their runs in the journal, a stream on a server that no test disturbs."""

import os

import redis

from bulltask import App

app = App("tested")
_journals = {}


def journal():
    """The Redis client of this process, created after the fork."""
    if os.getpid() not in _journals:
        _journals[os.getpid()] = redis.Redis.from_url(os.environ["JOURNAL_URL"], socket_timeout=None)
    return _journals[os.getpid()]


def record(what, **fields):
    journal().xadd("journal", {"what": what, "pid": os.getpid(), **fields})


def wait_at(gate):
    """Wait until the test opens the gate, once for each caller."""
    journal().blpop(f"gate:{gate}", 60)


@app.task(bind=True, name="quick")
def quick(self, **_):
    record("start", job=self.request.id)


@app.task(bind=True, name="hold")
def hold(self, gate):
    record("start", job=self.request.id)
    wait_at(gate)
    record("end", job=self.request.id)
    return gate
'''


def fixed_prefetch_count(jobs: int) -> str:
    """Return source code that makes a worker acquire this many jobs per round trip, however long they take."""
    return f"""
from bulltask.worker.prefetch import PrefetchCount
PrefetchCount.jobs = property(lambda self: {jobs}, lambda self, _: None)
"""


PREFETCHING = {
    "": "",
    "off": fixed_prefetch_count(1),
    "always": """
from bulltask.worker.prefetch import PrefetchCount
PrefetchCount.jobs = property(lambda self: self._maximum, lambda self, _: None)
""",
    "random": """
import random
from bulltask.worker.prefetch import PrefetchCount
PrefetchCount.jobs = property(lambda self: random.randint(1, self._maximum), lambda self, _: None)
""",
}
"""Source code that makes a worker prefetch jobs never, always, or at random: ``BULLTASK_TEST_PREFETCHING``."""


class Worker:
    """A running worker with its processes and log lines.

    Args:
        directory: The directory for the app's module.
        source: Source code added to `APP`.
        options: Command line options.
        settings: ``BULLTASK_`` settings by their public names.
        environ: More environment variables.
        new_group: Whether the worker leads a new process group.
        prefix: A command that runs the worker's command line, such as ``nohup``.
        stdin: The standard input.
        fresh: Start a new interpreter that imports all modules, instead of a fork of `ForkServer`.
    """

    def __init__(
        self,
        directory: Path,
        source: str = "",
        *,
        options: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        new_group: bool = False,
        prefix: Sequence[str] = (),
        stdin: int = subprocess.DEVNULL,
        fresh: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tested.py").write_text(
            PREFETCHING[os.environ.get("BULLTASK_TEST_PREFETCHING", "")] + APP + textwrap.dedent(source)
        )
        variables = {f"BULLTASK_{name.upper()}": str(value) for name, value in (settings or {}).items()}
        args = ["worker", "-A", "tested:app", *options]
        environment = {**os.environ, **variables, **(environ or {})}
        self.process: ForkedProcess | subprocess.Popen[str]
        if fresh or prefix or sys.platform != "linux":
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "bulltask", *args],
                cwd=directory,
                env=environment,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=new_group,
            )
        else:
            self.process = fork_server.start(args, directory, environment, stdin, new_session=new_group)
        self.pid = self.process.pid
        self.text: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"log of worker {self.pid}", daemon=True)
        self._reader.start()

    @property
    def children(self) -> list[int]:
        """The process ids of the running children, oldest first, without the guard, which has a session of its own."""
        session = os.getsid(self.pid) if parent_of(self.pid) else 0
        return sorted(pid for pid in running_pids() if parent_of(pid) == self.pid and os.getsid(pid) == session)

    def wait_for_line(self, event: str, count: int = 1, timeout: float = 60.0, **fields: Any) -> list[dict[str, Any]]:
        """Wait until ``count`` lines for this event, with these fields, have been logged; return the first ``count``.

        Raises:
            TimeoutError: They were not logged in time, or the worker exited; the message contains the log.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while len(found := self.logged(event, **fields)) < count:
                exited = not self._reader.is_alive()
                if exited or not self._changed.wait(deadline - time.monotonic()):
                    why = "the worker exited" if exited else f"{timeout:g} s passed"
                    raise TimeoutError(f"{len(found)} of {count} lines {event!r} {fields}: {why}\n{self.log}")
        return found[:count]

    def logged(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines for this event, with these fields, that have been logged so far."""
        wanted = {"event": event, **fields}
        return [line for line in self.lines if all(line.get(name) == value for name, value in wanted.items())]

    def warnings(self) -> list[dict[str, Any]]:
        """Return the lines of level warning and above that have been logged so far."""
        return [line for line in self.lines if line.get("level") not in {"debug", "info"}]

    @property
    def log(self) -> str:
        """The output to stdout and stderr so far."""
        return "\n".join(self.text)

    def send(self, number: int) -> None:
        """Send a signal to the supervisor."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait until the supervisor exits and all output is read; return the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def stop(self, timeout: float = 60.0) -> int:
        """Stop the worker with TERM; return the exit code."""
        self.send(signal.SIGTERM)
        return self.wait(timeout)

    def close(self) -> None:
        """Kill the worker; the kernel kills its children, even stopped ones."""
        self.send(signal.SIGSTOP)  # so that it starts no more processes
        parents = {pid: parent_of(pid) for pid in running_pids()} if self.process.poll() is None else {}
        processes = {pid for pid, parent in parents.items() if parent == self.pid}
        self.process.kill()
        if processes.isdisjoint(parents.values()):
            # The children have started no process. To find that out, the guard would start Python, in 0.03 CPU seconds.
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read(self) -> None:
        for raw in self.process.stdout or ():
            text = raw.rstrip("\n")
            with self._changed:
                self.text.append(text)
                with suppress(ValueError):
                    line = json.loads(text)
                    if isinstance(line, dict):
                        self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def wait_until_exited(pid: int, timeout: float = 10.0) -> float:
    """Wait until a process exits, which need not be a child; return the seconds that it took.

    Raises:
        TimeoutError: The process is still running.
    """
    started = time.monotonic()
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0.0
    try:
        if not select.select([handle], [], [], timeout)[0]:
            raise TimeoutError(f"process {pid} is still running after {timeout:g} s")
    finally:
        os.close(handle)
    return time.monotonic() - started
