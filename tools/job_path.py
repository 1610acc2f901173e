"""Counts what one job passes through: files, functions, and changes of file.

``python -m tools job-path`` starts a server and a worker with one child, and prints the path of ``add.delay(1, y=2)``,
of the worker's cycle (write the outcome of the previous job, fetch the next one, start it), and of ``get()``.
``--functions`` also prints the functions of each file. tests/process/test_job_path.py pins the numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bulltask import App

URL: Final = "JOB_PATH_URL"
ROUNDS: Final = 6
_PACKAGE: Final = f"{os.sep}bulltask{os.sep}"


class Trace:
    """A profile function that records the calls of the package's functions on this thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call."""
        if event == "call" and _PACKAGE in (name := frame.f_code.co_filename):
            self.calls.append((name.rpartition(_PACKAGE)[2], frame.f_code.co_qualname))


@dataclass(frozen=True, slots=True)
class JobPath:
    """A part of a job's path.

    Attributes:
        calls: The functions of the package that were called, in order, each with its file.
    """

    calls: list[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        """The files."""
        return {file for file, _ in self.calls}

    @property
    def functions(self) -> set[tuple[str, str]]:
        """The functions, each with its file."""
        return set(self.calls)

    @property
    def changes(self) -> int:
        """How often the next function is in another file."""
        return sum(before[0] != after[0] for before, after in zip(self.calls, self.calls[1:], strict=False))

    def __str__(self) -> str:
        counts = f"{len(self.files)} files, {len(self.functions)} functions, {self.changes} changes of file"
        return f"{counts}, {len(self.calls)} calls"

    def by_file(self) -> str:
        """Return the functions of each file."""
        counts = Counter(self.calls)
        lines: list[str] = []
        for file in sorted(self.files):
            names = [f"{name} x{count}" if count > 1 else name for (of, name), count in counts.items() if of == file]
            lines.append(f"  {file}: {', '.join(names)}")
        return "\n".join(lines)


def traced(function: Callable[[], Any]) -> tuple[Any, JobPath]:
    """Call a function; return its result and its path."""
    trace = Trace()
    sys.setprofile(trace)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, JobPath(trace.calls)


def make_app(url: str) -> App:
    """Return the app of this program and of its worker.

    In the worker's child, ``start`` installs the profile function, and the next job, ``stop``, returns its calls.
    """
    made = App("job_path", url)

    @made.task(name="add")
    def add(x: int, y: int) -> int:
        return x + y

    @made.task(name="start")
    def start() -> None:
        sys.setprofile(Trace())

    @made.task(name="stop")
    def stop() -> Any:
        trace = sys.getprofile()
        sys.setprofile(None)
        return getattr(trace, "calls", [])

    return made


app = make_app(os.environ[URL]) if URL in os.environ else None


def measure(url: str, rounds: int = ROUNDS) -> dict[str, JobPath]:
    """Return the paths of a warm job: ``delay``, ``cycle`` and ``get``.

    Args:
        url: The URL of a server.
        rounds: Each path is measured this often, and the shortest one counts: the others contain what happens once a
            second.
    """
    # One job at a time: how many a child prefetches depends on how busy the machine is.
    environ = {
        **os.environ,
        URL: url,
        "BULLTASK_WORKER_PREFETCH": "1",
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "bulltask", "worker", "-A", "job_path:app", "-c", "1"]
    sender = make_app(url)
    add, start, stop = (sender.tasks[name] for name in ("add", "start", "stop"))
    delays: list[JobPath] = []
    gets: list[JobPath] = []
    cycles: list[JobPath] = []
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, env=environ, stdout=log, stderr=log) as worker:
        try:
            for _ in range(20):
                add.delay(1, y=2).get(timeout=60)
            for _ in range(rounds):
                result, path = traced(lambda: add.delay(1, y=2))
                delays.append(path)
                add.delay(2, y=3).get(timeout=60)  # the job before it has finished, too
                gets.append(traced(lambda result=result: result.get(timeout=60))[1])  # type: ignore[misc]
            with sender.queue("default") as queue:
                for _ in range(rounds):
                    queue.pause()
                    start.delay()
                    stopped = stop.delay()
                    queue.resume()
                    cycles.append(JobPath([(file, name) for file, name in stopped.get(timeout=60)]))
        finally:
            sender.close()
            worker.terminate()
    shortest = {"delay": delays, "cycle": cycles, "get": gets}
    return {name: min(paths, key=lambda path: len(path.calls)) for name, paths in shortest.items()}


def main() -> None:
    """Print the paths."""
    from bulltask.testing import RedisServer  # noqa: PLC0415 - not in the worker

    with tempfile.TemporaryDirectory() as directory, RedisServer.start(Path(directory), appendonly=False) as server:
        paths = measure(server.url)
    for name, path in paths.items():
        print(f"{name}: {path}")  # noqa: T201
        if "--functions" in sys.argv:
            print(path.by_file())  # noqa: T201
    union = JobPath([call for path in paths.values() for call in path.calls])
    print(f"together: {len(union.files)} files, {len(union.functions)} functions")  # noqa: T201


if __name__ == "__main__":
    main()
