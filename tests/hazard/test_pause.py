"""Who may resume a queue that others paused and added to: each cell of the first table, done and counted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bulltask.jobs.states import JobState
from bulltask.queue import Queue
from bulltask.testing.wait import wait_until
from tests.hazard.conftest import Clients
from tests.hazard.page import PINNED, Pausing, pausing
from tests.interop.conftest import sides
from tests.interop.side_by_side import SideBySide
from tests.support.manual_worker import ManualWorker

pytestmark = [pytest.mark.interop, pytest.mark.process]

OURS = "bulltask"
BEFORE, MEANWHILE = 3, 2
"""Jobs that wait before the first pause, and that each step adds which adds."""
CELLS = [pytest.param(row, who, id=f"{row.label}-{who}") for row in pausing() for who in row.outcomes]
SEVEN = [row for row in pausing() if row.label in {f"T{number}" for number in range(1, 8)}]
"""The sequences in which BullMQ's own clients were seen to lose jobs, and their harmless relatives."""


class Scene:
    """One queue and everybody who uses it.

    Attributes:
        added: the ids of all jobs.
    """

    def __init__(self, clients: Clients, side: SideBySide) -> None:
        self._clients, self.side = clients, side
        self.queue: Queue = side.app.queue("mail")
        self.added: list[str] = []

    def add(self, who: str, count: int) -> None:
        for _ in range(count):
            if who == OURS:
                self.added.append(self.queue.add("echo").id)
            else:
                job = self._clients[who].call("queue.add", queue=self.side.name, name="echo", data={}, opts={})
                self.added.append(job["id"])

    def do(self, who: str, what: str) -> None:
        if what == "adds":
            self.add(who, MEANWHILE)
        elif who == OURS:
            (self.queue.pause if what == "pauses" else self.queue.resume)()
        else:
            method = what.removesuffix("s")
            self._clients[who].call("queue.call", queue=self.side.name, method=method, args=[])

    def lost(self) -> list[str]:
        """Jobs of which there is nothing but the hash."""
        return [job for job in self.added if self.queue.get_job_state(job) is JobState.UNKNOWN]

    def run_all(self) -> list[str]:
        """Run by hand what the queue gives; the ids."""
        manual_worker = ManualWorker(self.side.app.broker, self.side.keys)
        found = []
        while job := manual_worker.acquire():
            manual_worker.finish(job)
            found.append(job)
        manual_worker.close()
        return found


@pytest.fixture
def scene(clients: Clients, broker_url: str, tmp_path: Path) -> Iterator[Scene]:
    for side in sides(clients[PINNED], broker_url, tmp_path, hash_tag=True):
        made = Scene(clients, side)
        yield made
        made.queue.close()


@pytest.mark.parametrize(("row", "who"), CELLS)
def test_what_is_lost_is_what_the_page_says(scene: Scene, row: Pausing, who: str) -> None:
    scene.add(PINNED, BEFORE)
    for other, what in row.steps:
        scene.do(other, what)
    scene.do(who, row.last)
    lost = scene.lost()
    if row.last == "pauses":
        scene.do(OURS, "resumes")
    assert sorted(scene.run_all()) == sorted(set(scene.added) - set(lost)), "all others run, each once"
    seen = f"loses {len(lost)}" if lost else "safe"
    assert seen == row.outcomes[who], f"docs/reference/mixed-versions.md, {row.label}, {who}: the table can be updated"


def test_a_worker_of_ours_runs_every_job_of_t1_to_t7_when_we_resume(scene: Scene) -> None:
    worker = scene.side.worker()
    worker.wait_for_line("Worker started")
    for done, row in enumerate(SEVEN, 1):
        worker.send(signal.SIGTSTP)
        worker.wait_for_line("Worker paused", done)
        scene.add(PINNED, BEFORE)
        for other, what in row.steps:
            scene.do(other, what)
        worker.send(signal.SIGCONT)
        scene.do(OURS, "resumes")
        wait_until(lambda: scene.side.redis.zcard(scene.side.keys.completed) == len(scene.added), 20, row.label)
    assert scene.side.counts() == {"completed": len(scene.added)}


def test_the_seven_sequences_are_on_the_page_and_safe_when_we_resume() -> None:
    assert [row.label for row in SEVEN] == ["T1", "T2", "T3", "T4", "T5", "T6", "T7"]
    assert {row.outcomes[OURS] for row in SEVEN} == {"safe"}
