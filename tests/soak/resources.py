"""Memory, open files and threads of the workers' processes over time, and zombies."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.processes import parent_of

__all__ = ["Resources", "Sample"]

WARM_UP: Final = 6
COMPARED: Final = 5
"""The median of the first samples after the warm-up is compared with that of the last samples."""
MAX_GROWTH_MB: Final = 8.0
"""Per process: the first of each kind of job and of error imports modules and fills caches."""
MAX_MORE_FILES: Final = 4
"""The pidfd of a replaced child, and connections that were closed by a fault when the first samples were taken."""
MAX_MORE_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident memory in MB, open files and threads of a process at one time."""

    memory_mb: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        """Measure a process.

        Raises:
            OSError: The process does not exist.
        """
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        files, threads = (sum(1 for _ in (process / name).iterdir()) for name in ("fd", "task"))
        return cls(pages * os.sysconf("SC_PAGESIZE") / 2**20, files, threads)

    @classmethod
    def median(cls, samples: Sequence[Sample]) -> Sample:
        """Return the median of each figure."""
        figures = zip(*((each.memory_mb, each.files, each.threads) for each in samples), strict=True)
        memory_mb, files, threads = (statistics.median_low(each) for each in figures)
        return cls(memory_mb, int(files), int(threads))

    def __str__(self) -> str:
        return f"{self.memory_mb:.1f} MB, {self.files} open files, {self.threads} threads"


class Resources:
    """Samples of processes.

    Attributes:
        zombies: Children that their supervisor has not reaped between two samples.
    """

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        self._last_zombies: set[int] = set()
        self.zombies: list[str] = []

    def record(self, processes: Iterable[tuple[str, int]]) -> None:
        """Take a sample of each process, which has a name and a process id; find zombies of supervisors."""
        supervisors = set()
        for name, pid in processes:
            if name.startswith("supervisor"):  # a zombie of a child is a process that a task has forked
                supervisors.add(pid)
            with suppress(OSError):  # it has exited
                self._samples[f"{name} {pid}"].append(Sample.of(pid))
        running = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        zombies = {pid for pid in running if parent_of(pid) in supervisors and _is_zombie(pid)}
        self.zombies += [f"process {pid}, child of {parent_of(pid)}" for pid in zombies & self._last_zombies]
        self._last_zombies = zombies

    def growth(self) -> tuple[list[str], list[str]]:
        """Return a line for each process that lived long enough, and the problems: processes that have grown."""
        lines, problems = [], []
        for name, samples in self._samples.items():
            if len(samples) < WARM_UP + 2 * COMPARED:
                continue
            first, last = Sample.median(samples[WARM_UP:][:COMPARED]), Sample.median(samples[-COMPARED:])
            lines.append(f"{name}: {len(samples)} samples, from {first} to {last}")
            if (
                last.memory_mb - first.memory_mb > MAX_GROWTH_MB
                or last.files - first.files > MAX_MORE_FILES
                or last.threads - first.threads > MAX_MORE_THREADS
            ):
                problems.append(lines[-1])
        return lines, problems


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
