"""Count jobs without Redis: each worker process has a memory-mapped file.

It contains three words of 8 bytes: the start of the first job, the end of the last job (both in ``CLOCK_MONOTONIC`` ns,
which is the same for all processes on a machine), and the number of finished jobs. After these, it has one byte for
each job of the run: how many times this process ran it. The sum across all files is 0 for a lost job, 2 or more for a
duplicated job.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["DIRECTORY", "JOBS", "Counter", "Counts", "count", "last_end_ns", "progress", "read_counts", "start_counter"]

DIRECTORY: Final = "BENCH_COUNTERS"
JOBS: Final = "BENCH_JOBS"

_STARTED, _ENDED, _DONE = range(3)
_HEADER: Final = 3 * 8
_MAX_RUNS: Final = 255


class Counter:
    """The file of one process.

    Args:
        path: The file, with any name.
        jobs: The number of jobs in the run.
        started_ns: When the process started its first job.
    """

    def __init__(self, path: Path, jobs: int, started_ns: int) -> None:
        with path.open("w+b") as file:
            file.truncate(_HEADER + jobs)
            memory = memoryview(mmap.mmap(file.fileno(), _HEADER + jobs))
        self._words, self._runs = memory[:_HEADER].cast("q"), memory[_HEADER:]
        self._words[_STARTED] = started_ns
        self._lock = threading.Lock()  # for workers that run jobs in threads

    def add(self, index: int) -> None:
        """Count a run of job ``index``."""
        with self._lock:
            self._runs[index] = min(self._runs[index] + 1, _MAX_RUNS)
            self._words[_DONE] += 1
            self._words[_ENDED] = time.monotonic_ns()


@dataclass(frozen=True)
class Counts:
    """The counts of all processes of a run."""

    started_ns: int
    ended_ns: int
    done: int
    lost: int
    duplicated: int
    processes: tuple[int, ...]


_starting = threading.Lock()
_counter: list[Counter] = []  # empty before this process's first job


def start_counter() -> None:
    """Record the start of this process's first job."""
    with _starting:  # opening the file again would truncate what another thread has mapped
        if not _counter:
            path = Path(os.environ[DIRECTORY], str(os.getpid()))
            _counter.append(Counter(path, int(os.environ[JOBS]), time.monotonic_ns()))


def count(index: int) -> None:
    """Count a run of job ``index``."""
    if not _counter:
        start_counter()
    _counter[0].add(index)


os.register_at_fork(after_in_child=_counter.clear)


def progress(directory: Path) -> int:
    """Return the number of finished jobs; read only the headers of the files."""
    return sum(_header(path)[_DONE] for path in directory.iterdir())


def last_end_ns(directory: Path) -> int:
    """Return the end of the last job of all processes."""
    return max((_header(path)[_ENDED] for path in directory.iterdir()), default=0)


def read_counts(directory: Path, jobs: int) -> Counts:
    """Return the counts of all processes; call it after all workers have exited."""
    headers = [header for path in directory.iterdir() if (header := _header(path))[_DONE]]
    runs = [0] * jobs
    for path in directory.iterdir():
        runs = [total + number for total, number in zip(runs, path.read_bytes()[_HEADER:], strict=True)]
    return Counts(
        started_ns=min((header[_STARTED] for header in headers), default=0),
        ended_ns=max((header[_ENDED] for header in headers), default=0),
        done=sum(header[_DONE] for header in headers),
        lost=runs.count(0),
        duplicated=sum(total - 1 for total in runs if total > 1),
        processes=tuple(sorted((header[_DONE] for header in headers), reverse=True)),
    )


def _header(path: Path) -> tuple[int, ...]:
    with path.open("rb") as file:
        raw = file.read(_HEADER)
    return tuple(memoryview(raw.ljust(_HEADER, b"\0")).cast("q"))  # empty between open and truncate
