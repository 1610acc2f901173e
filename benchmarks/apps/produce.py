"""The producer process: ``produce.py MODULE OPERATION JOBS`` prints one line of JSON.

Operations: ``single`` and ``bulk`` send JOBS jobs and print the time in seconds. ``latency`` sends JOBS jobs one after
    another, with a pause of 3 ms after each result, and prints each job's time from send to result.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from typing import Any

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
    pause, samples = threading.Event(), []
    for index in range(-min(WARM_UP, jobs), jobs):
        started = time.perf_counter()
        app.wait(app.send(max(0, index)))
        if index >= 0:
            samples.append(time.perf_counter() - started)
        pause.wait(PAUSE_S)
    return {"samples": samples}


if __name__ == "__main__":
    module, operation, number = sys.argv[1:]
    run = {"single": single, "bulk": bulk, "latency": latency}[operation]
    print(json.dumps(run(importlib.import_module(module), int(number))), flush=True)
