"""The producer process: ``produce.py MODULE OPERATION JOBS`` prints one line of JSON.

Operations: ``single`` and ``bulk`` send JOBS jobs and print the time in seconds. ``latency`` sends JOBS jobs one after
    another, with a pause of 3 ms after each result, and prints each job's time from send to result, and from send to
    the end of the task.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.apps.counter import DIRECTORY, last_end_ns

BULK = 1_000
WARM_UP = 20
PAUSE_S = 0.003


def single(app: Any, jobs: int) -> dict[str, object]:
    for index in range(WARM_UP):
        app.send(index)
    started = time.perf_counter()
    for index in range(jobs):
        app.send(index)
    return {"seconds": time.perf_counter() - started, "sent": jobs + WARM_UP}


def bulk(app: Any, jobs: int) -> dict[str, object]:
    started = time.perf_counter()
    for first in range(0, jobs, BULK):
        app.send_many(range(first, min(first + BULK, jobs)))
    return {"seconds": time.perf_counter() - started, "sent": jobs}


def latency(app: Any, jobs: int) -> dict[str, object]:
    pause, results, task_ends = threading.Event(), [], []
    for index in range(-min(WARM_UP, jobs), jobs):
        started_ns = time.monotonic_ns()
        app.wait(app.send(max(0, index)))
        received_ns = time.monotonic_ns()
        pause.wait(PAUSE_S)
        if index >= 0:
            results.append((received_ns - started_ns) / 1e9)
            task_ends.append((last_end_ns(Path(os.environ[DIRECTORY])) - started_ns) / 1e9)
    return {"results": results, "task_ends": task_ends}


if __name__ == "__main__":
    module, operation, number = sys.argv[1:]
    run = {"single": single, "bulk": bulk, "latency": latency}[operation]
    print(json.dumps(run(importlib.import_module(module), int(number))), flush=True)
