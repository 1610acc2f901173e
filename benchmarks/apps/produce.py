"""The sending side, in a process of its own: ``produce.py MODULE OPERATION JOBS`` prints one line of JSON.

Operations: ``single`` and ``bulk`` send JOBS jobs and say in how many seconds; ``latency`` sends one, waits for its
result, pauses 3 ms, and so on, and says each time from send to result in seconds.
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
    pause, took = threading.Event(), []
    for index in range(-min(WARM_UP, jobs), jobs):
        started = time.perf_counter()
        app.wait(app.send(max(0, index)))
        if index >= 0:
            took.append(time.perf_counter() - started)
        pause.wait(PAUSE_S)
    return {"samples": took}


if __name__ == "__main__":
    module, operation, number = sys.argv[1:]
    run = {"single": single, "bulk": bulk, "latency": latency}[operation]
    print(json.dumps(run(importlib.import_module(module), int(number))), flush=True)
