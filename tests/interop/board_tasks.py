"""Tasks and helper functions of the bull-board tests."""

from __future__ import annotations

from typing import Any

from bulltask.queue import Job, Queue
from tests.interop.board import Board
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

__all__ = [
    "PARTS",
    "QUEUE",
    "add_failed_jobs",
    "ids",
    "queue_of",
    "start_worker",
    "state_counts",
    "wait_for_end",
    "wait_until_running",
]

QUEUE = "{default}"
PARTS = "{parts}"
TASKS = '''
@app.task(name="greet")
def greet(to, subject="Hello"):
    return f"{subject}, {to}"


@app.task(bind=True, name="load")
def load(self, progress, gate="gate"):
    """Report progress, and wait at a gate."""
    self.log("the first line")
    self.update_progress(progress)
    self.log("the second <b>line</b>")
    record("start", job=self.request.id)
    wait_at(gate)
    return progress


@app.task(bind=True, name="flaky")
def flaky(self, good):
    """Fail before the attempt of this number."""
    record("start", job=self.request.id)
    if self.request.retries + 1 < good:
        raise ConnectionError(f"attempt {self.request.retries + 1} failed")
    return self.request.retries


@app.task(name="lookup")
def lookup(key):
    return {}[key]


@app.task(bind=True, name="total")
def total(self):
    return sum(self.get_children_values().values())


@app.task(name="part")
def part(n):
    return n


@app.task(name="collect")
def collect(values):
    return values


@app.task(bind=True, name="slow_part")
def slow_part(self, n):
    record("start", job=self.request.id)
    wait_at("gate")
    return n
'''


def start_worker(harness: WorkerHarness, *, children: int = 2, **settings: object) -> Worker:
    """Start a bulltask worker for both queues."""
    return harness.worker(TASKS, children=children, settings=settings, options=["-Q", "default,parts"])


def queue_of(harness: WorkerHarness, queue: str = "default") -> Queue:
    """Return a queue of the app."""
    return harness.app.queue(queue)


def wait_for_end(harness: WorkerHarness, job_id: str, event: str = "completed", count: int = 1) -> None:
    """Wait until a job of the default queue has ended for the ``count``-th time."""
    harness.events.wait_for(count, 30.0, event=event, jobId=job_id)


def wait_until_running(harness: WorkerHarness, job_id: str, count: int = 1) -> None:
    """Wait until a task that waits at a gate runs, for the ``count``-th time."""
    harness.journal.wait_for(count, 30.0, what="start", job=job_id)


def add_failed_jobs(harness: WorkerHarness, count: int, *, good: int = 2) -> list[Job]:
    """Add jobs that fail in their only attempt; a retry completes them."""
    jobs = queue_of(harness).add_bulk(
        [{"name": "flaky", "data": {"good": good}, "options": {"attempts": 1}} for _ in range(count)]
    )
    harness.events.wait_for(count, 30.0, event="failed")
    return jobs


def ids(shown: list[dict[str, Any]]) -> list[str]:
    """Return the ids of jobs that the board lists."""
    return [job["id"] for job in shown]


def state_counts(board: Board, queue: str = QUEUE) -> dict[str, int]:
    """Return the board's counts without the zeros."""
    return {state: count for state, count in board.queue(queue)["counts"].items() if count}
