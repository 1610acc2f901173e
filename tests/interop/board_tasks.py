"""The tasks behind the tests of bull-board, and the steps that several of them take."""

from __future__ import annotations

from typing import Any

from bulltask.queue import Job, Queue
from tests.interop.board import Board
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

__all__ = ["PARTS", "QUEUE", "ended", "failed_jobs", "ids", "ours", "start_worker", "states", "waiting_for"]

QUEUE = "{default}"
PARTS = "{parts}"
TASKS = '''
@app.task(name="greet")
def greet(to, subject="Hello"):
    return f"{subject}, {to}"


@app.task(bind=True, name="load")
def load(self, progress, gate="gate"):
    """Say how far it is, and wait there."""
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


@app.task(bind=True, name="slow_part")
def slow_part(self, n):
    record("start", job=self.request.id)
    wait_at("gate")
    return n
'''


def start_worker(harness: WorkerHarness, *, children: int = 2, **settings: object) -> Worker:
    """Start our worker for both queues."""
    return harness.worker(TASKS, children=children, settings=settings, options=["-Q", "default,parts"])


def ours(harness: WorkerHarness, queue: str = "default") -> Queue:
    """A queue as we see it."""
    return harness.app.queue(queue)


def ended(harness: WorkerHarness, job_id: str, event: str = "completed", count: int = 1) -> None:
    """Wait for the ``count``-th end of a job of the default queue."""
    harness.events.wait_for(count, 30.0, event=event, jobId=job_id)


def waiting_for(harness: WorkerHarness, job_id: str, count: int = 1) -> None:
    """Wait until a task that waits at a gate runs, for the ``count``-th time."""
    harness.journal.wait_for(count, 30.0, what="start", job=job_id)


def failed_jobs(harness: WorkerHarness, count: int, *, good: int = 2) -> list[Job]:
    """Jobs that have failed in their only attempt; tried again, they are done."""
    jobs = ours(harness).add_bulk(
        [{"name": "flaky", "data": {"good": good}, "options": {"attempts": 1}} for _ in range(count)]
    )
    harness.events.wait_for(count, 30.0, event="failed")
    return jobs


def ids(shown: list[dict[str, Any]]) -> list[str]:
    """The ids of jobs as the board lists them."""
    return [job["id"] for job in shown]


def states(board: Board, queue: str = QUEUE) -> dict[str, int]:
    """The board's counts without the zeros."""
    return {state: count for state, count in board.queue(queue)["counts"].items() if count}
