"""What the benchmark's tasks do (their body): ``BENCH_BODY`` is ``noop``, ``sleep`` (50 ms) or ``busy:LOOPS``.

``body.py busy LOOPS JOBS`` runs the busy loop JOBS times, without a framework, and prints the time in seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Final

from benchmarks.apps.counter import count, start_counter

__all__ = ["BODY", "SLEEP_S", "arun", "run"]

BODY: Final = "BENCH_BODY"
SLEEP_S: Final = 0.05

_kind, _, _loops = os.environ.get(BODY, "noop").partition(":")


def run(index: int) -> int:
    """Do the work of job ``index``, count the job, and return its result."""
    if _kind != "noop":
        _run_long_body()
    count(index)
    return index


def _run_long_body() -> None:
    start_counter()
    if _kind == "sleep":
        threading.Event().wait(SLEEP_S)
    else:
        burn(int(_loops))


async def arun(index: int) -> int:
    """:func:`run` for async tasks."""
    if _kind != "sleep":
        return run(index)
    start_counter()
    await asyncio.sleep(SLEEP_S)
    count(index)
    return index


def burn(loops: int) -> int:
    """Use the CPU."""
    number = 0
    for step in range(loops):
        number = (number + step * step) % 65_536
    return number


if __name__ == "__main__":
    loops, jobs = sys.argv[2:]
    burn(int(loops))
    started = time.perf_counter()
    for _ in range(int(jobs)):
        burn(int(loops))
    print(time.perf_counter() - started)
