"""Run the scenarios in Celery, and print those whose outcome there is not the stated one.

Run it in an environment that has Celery, with a Redis server that may be flushed:
``python -m tests.celery_parity redis://localhost:6379/9 [a part of a sentence]``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import celery
import redis

from tests.celery_parity.areas import AREAS
from tests.celery_parity.scenario import TIMEOUT, Project

SOURCE = """
import sys
from celery import Celery
from tests.celery_parity.tasks import define
app = Celery("tested", broker={url!r}, backend={url!r})
define(app)
"""
QUEUES = {"celery": 4, "single": 1}


def main(url: str, part: str = "") -> None:
    """Start workers, run the scenarios whose sentences contain ``part`` one after the other, and stop the workers."""
    os.environ["JOURNAL_URL"] = url
    journal = redis.Redis.from_url(url, socket_timeout=None)
    journal.flushdb()
    workers = [start(url, queue, children) for queue, children in QUEUES.items()]
    try:
        app = celery.Celery("tested", broker=url, backend=url)
        wait_until_up(app, len(workers))
        project = Project(celery, app, journal)
        for scenario in [
            scenario for area in AREAS for scenario in area.scenarios if part in f"{area.title} {scenario.sentence}"
        ]:
            started, outcome = time.monotonic(), scenario.outcome(project.again())
            sign = "ok  " if outcome == scenario.celery else "FAIL"
            print(f"{sign} {time.monotonic() - started:5.1f} s  {scenario.sentence}", flush=True)  # noqa: T201
            if outcome != scenario.celery:
                print(f"       {outcome!r}, not {scenario.celery!r}", flush=True)  # noqa: T201
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def wait_until_up(app: Any, count: int) -> None:
    """Wait until the workers answer, so that the first scenarios do not run without them.

    Raises:
        TimeoutError: They do not answer; see their logs in ``/tmp``.
    """
    deadline = time.monotonic() + TIMEOUT
    while len(app.control.ping(timeout=1)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of the {count} workers are up: see /tmp/celery_parity_*.log")


def start(url: str, queue: str, children: int) -> subprocess.Popen[bytes]:
    """Start a Celery worker."""
    Path(f"/tmp/celery_parity_{queue}.py").write_text(SOURCE.format(url=url))
    words = ["-A", f"celery_parity_{queue}", "worker", "-Q", queue, "-c", str(children), "-n", queue]
    environ = {**os.environ, "PYTHONPATH": f"/tmp:{Path.cwd()}"}
    with Path(f"/tmp/celery_parity_{queue}.log").open("wb") as log:
        command = [sys.executable, "-m", "celery", *words, "--prefetch-multiplier", "1"]
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log)


if __name__ == "__main__":
    main(*sys.argv[1:])
