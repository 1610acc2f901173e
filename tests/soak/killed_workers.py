"""Workers that are killed at random, and started again."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.support.worker import Worker

__all__ = ["KilledWorkers"]

WORKERS: Final = 3
CHILDREN: Final = 2
SHARE_OF_SUPERVISORS: Final = 0.15
TASKS: Final = """
import time


@app.task(bind=True, name="member")
def member(self, n):
    record("member", job=self.request.id)
    journal().blpop("nothing", 0.005)
    return n


@app.task(bind=True, name="body")
def body(self, numbers):
    record("body", job=self.request.id)
    journal().blpop("nothing", 0.005)
    return sum(numbers)
"""
SETTINGS: Final = {
    "worker_concurrency": CHILDREN,
    "lock_duration": 2,
    "stalled_interval": 1,
    # Here, a job must not fail because its child was killed.
    "max_stalled_count": 1_000,
    "max_crashes": 1_000,
}


class KilledWorkers:
    """Three workers with two children each, and possibly another one that is not killed.

    Args:
        directory: The directory for their modules.
        url: The server.
        rng: Chooses what is killed.
        every: Mean seconds between two kills.
        safe_queue: The queue of another worker, which is not killed; by default, there is none.

    Attributes:
        killed: The process ids of killed supervisors and children.
    """

    def __init__(self, directory: Path, url: str, rng: random.Random, every: float, safe_queue: str = "") -> None:
        self._directory, self._url, self._rng, self._every, self._safe_queue = directory, url, rng, every, safe_queue
        self._started, self._supervisors, self._children = 0, 0, 0
        self._never = threading.Event()
        self._workers: list[Worker] = []
        self.killed: set[int] = set()

    def start(self) -> Callable[[], None]:
        """Start the workers; return a function that waits and then kills a process."""
        self._workers = [self._start() for _ in range(WORKERS)]
        if self._safe_queue:
            self._workers.append(self._start(self._safe_queue))
        for worker in self._workers:
            worker.wait_for_line("Child started", CHILDREN)
        return self._kill

    def stop(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.stop(60)

    @property
    def summary(self) -> str:
        """What was killed."""
        return f"{self._children} children and {self._supervisors} supervisors were killed"

    def _kill(self) -> None:
        self._never.wait(self._rng.uniform(0, 2 * self._every))
        index = self._rng.randrange(WORKERS)
        worker = self._workers[index]
        children = worker.children
        if self._rng.random() < SHARE_OF_SUPERVISORS:
            worker.process.kill()
            worker.wait()
            # The children exit with their supervisor. From the log, because it may have started another one just now.
            started, died = ({line["pid"] for line in worker.logged(f"Child {end}")} for end in ("started", "died"))
            self.killed |= {worker.pid, *(started - died)}
            self._workers[index] = self._start()
            self._supervisors += 1
        elif children:
            victim = self._rng.choice(children)
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                self.killed.add(victim)
                self._children += 1

    def _start(self, queue: str = "default") -> Worker:
        self._started += 1
        settings = {**SETTINGS, "broker_url": self._url}
        environ = {"JOURNAL_URL": self._url}
        directory = self._directory / f"worker-{self._started}"
        return Worker(directory, TASKS, settings=settings, environ=environ, options=["-Q", queue])
