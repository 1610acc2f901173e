"""Count jobs without touching Redis: every worker process has a file of its own, mapped into its memory.

Words of 8 bytes: start of the first job, end of the last job (both `CLOCK_MONOTONIC` ns, one clock for all processes
of a machine), jobs done. Then one byte for each job of the run: how often it ran in this process. A job that was lost
has zeros in all files, one that ran twice has more than one 1.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["DIRECTORY", "JOBS", "Counter", "Tally", "count", "progress", "tally"]

DIRECTORY: Final = "BENCH_COUNTERS"
JOBS: Final = "BENCH_JOBS"

_STARTED, _ENDED, _DONE = range(3)
_HEADER: Final = 3 * 8
_MOST: Final = 255


class Counter:
    """The file of one process.

    Args:
        path: the file; its name does not matter.
        jobs: how many jobs the run has.
        started_ns: when the first job of the process began.
    """

    def __init__(self, path: Path, jobs: int, started_ns: int) -> None:
        with path.open("w+b") as file:
            file.truncate(_HEADER + jobs)
            memory = memoryview(mmap.mmap(file.fileno(), _HEADER + jobs))
        self._words, self._runs = memory[:_HEADER].cast("q"), memory[_HEADER:]
        self._words[_STARTED] = started_ns
        self._lock = threading.Lock()  # for workers that run jobs in threads

    def add(self, index: int) -> None:
        """Job ``index`` ran."""
        with self._lock:
            self._runs[index] = min(self._runs[index] + 1, _MOST)
            self._words[_DONE] += 1
            self._words[_ENDED] = time.monotonic_ns()


@dataclass(frozen=True)
class Tally:
    """What all processes of a run have counted."""

    started_ns: int
    ended_ns: int
    done: int
    lost: int
    duplicated: int
    processes: tuple[int, ...]


_mine: list[Counter] = []  # one at the most: this process's


def count(index: int) -> None:
    """The body of every benchmark job: says that job ``index`` ran."""
    if not _mine:
        path = Path(os.environ[DIRECTORY], str(os.getpid()))
        _mine.append(Counter(path, int(os.environ[JOBS]), time.monotonic_ns()))
    _mine[0].add(index)


os.register_at_fork(after_in_child=_mine.clear)


def progress(directory: Path) -> int:
    """Jobs done so far; reads only the heads of the files."""
    return sum(_head(path)[_DONE] for path in directory.iterdir())


def tally(directory: Path, jobs: int) -> Tally:
    """Read everything that was counted; call it when no worker runs any more."""
    heads = [head for path in directory.iterdir() if (head := _head(path))[_DONE]]
    runs = [0] * jobs
    for path in directory.iterdir():
        runs = [total + own for total, own in zip(runs, path.read_bytes()[_HEADER:], strict=True)]
    return Tally(
        started_ns=min((head[_STARTED] for head in heads), default=0),
        ended_ns=max((head[_ENDED] for head in heads), default=0),
        done=sum(head[_DONE] for head in heads),
        lost=runs.count(0),
        duplicated=sum(total - 1 for total in runs if total > 1),
        processes=tuple(sorted((head[_DONE] for head in heads), reverse=True)),
    )


def _head(path: Path) -> tuple[int, ...]:
    with path.open("rb") as file:
        raw = file.read(_HEADER)
    return tuple(memoryview(raw.ljust(_HEADER, b"\0")).cast("q"))  # empty between open and truncate
