"""Which client can resume a queue that others have paused and added jobs to: each cell of the first table."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.jobs.names import JobState
from bulltask.queue import Queue
from bulltask.testing.worker import wait_until
from tests.interop.conftest import open_interop_queue
from tests.interop.interop_queue import InteropQueue
from tests.mixed_versions.conftest import Clients
from tests.mixed_versions.page import NEWEST_5, NEWEST_6, PINNED, PauseSequence, pause_sequences
from tests.support.command_output import json_of
from tests.support.manual_worker import ManualWorker

pytestmark = [pytest.mark.interop, pytest.mark.process]

BULLTASK = "bulltask"
BEFORE, ADDED = 3, 2
"""The number of jobs that wait before the first pause, and that each *adds* step adds."""
CELLS = [pytest.param(row, client, id=f"{row.label}-{client}") for row in pause_sequences() for client in row.outcomes]
T1_TO_T7 = [row for row in pause_sequences() if row.label in {f"T{number}" for number in range(1, 8)}]
"""The sequences of official clients only, which lose jobs with some versions."""


class SharedQueue:
    """One queue and all its clients.

    Attributes:
        added: The ids of all jobs.
    """

    def __init__(self, clients: Clients, side: InteropQueue) -> None:
        self._clients, self.side = clients, side
        self.queue: Queue = side.app.queue("mail")
        self.added: list[str] = []

    def add(self, client: str, count: int) -> None:
        for _ in range(count):
            if client == BULLTASK:
                self.added.append(self.queue.add("echo").id)
            else:
                job = self._clients[client].call("queue.add", queue=self.side.name, name="echo", data={}, opts={})
                self.added.append(job["id"])

    def do(self, client: str, action: str) -> None:
        if action == "adds":
            self.add(client, ADDED)
        elif client == BULLTASK:
            (self.queue.pause if action == "pauses" else self.queue.resume)()
        else:
            method = action.removesuffix("s")
            self._clients[client].call("queue.call", queue=self.side.name, method=method, args=[])

    def lost(self) -> list[str]:
        """Return the jobs that are in no list."""
        return [job for job in self.added if self.queue.get_job_state(job) is JobState.UNKNOWN]

    def run_all(self) -> list[str]:
        """Run all waiting jobs; return their ids."""
        manual_worker = ManualWorker(self.side.app._broker, self.side.keys)
        found = []
        while job := manual_worker.acquire():
            manual_worker.finish(job)
            found.append(job)
        manual_worker.close()
        return found


@pytest.fixture
def shared_queue(clients: Clients, broker_url: str, tmp_path: Path) -> Iterator[SharedQueue]:
    for side in open_interop_queue(clients[PINNED], broker_url, tmp_path, hash_tag=True):
        shared_queue = SharedQueue(clients, side)
        yield shared_queue
        shared_queue.queue.close()


@pytest.mark.parametrize(("row", "client"), CELLS)
def test_each_pause_sequence_loses_the_documented_number_of_jobs(
    shared_queue: SharedQueue, row: PauseSequence, client: str
) -> None:
    shared_queue.add(PINNED, BEFORE)
    for other, action in row.steps:
        shared_queue.do(other, action)
    shared_queue.do(client, row.last_action)
    lost = shared_queue.lost()
    if row.last_action == "pauses":
        shared_queue.do(BULLTASK, "resumes")
    assert sorted(shared_queue.run_all()) == sorted(set(shared_queue.added) - set(lost)), "all other jobs run once"
    outcome = f"loses {len(lost)}" if lost else "safe"
    assert outcome == row.outcomes[client], f"docs/reference/mixed-versions.md, {row.label}, {client}: update the table"


def test_sequences_t1_to_t7_lose_no_job_if_bulltask_resumes_the_queue(shared_queue: SharedQueue) -> None:
    worker = shared_queue.side.worker()
    worker.wait_for_line("Worker started")
    for done, row in enumerate(T1_TO_T7, 1):
        worker.send(signal.SIGTSTP)
        worker.wait_for_line("Worker paused", done)
        shared_queue.add(PINNED, BEFORE)
        for other, action in row.steps:
            shared_queue.do(other, action)
        worker.send(signal.SIGCONT)
        shared_queue.do(BULLTASK, "resumes")
        wait_until(
            lambda: shared_queue.side.redis.zcard(shared_queue.side.keys.completed) == len(shared_queue.added),
            20,
            row.label,
        )
    assert shared_queue.side.counts() == {"completed": len(shared_queue.added)}


def test_sequences_t1_to_t7_are_documented_as_safe_if_bulltask_resumes() -> None:
    assert [row.label for row in T1_TO_T7] == ["T1", "T2", "T3", "T4", "T5", "T6", "T7"]
    assert {row.outcomes[BULLTASK] for row in T1_TO_T7} == {"safe"}


def test_the_doctor_finds_both_versions_although_the_older_one_was_the_last_to_write_its_own(
    shared_queue: SharedQueue, broker_url: str
) -> None:
    shared_queue.do(NEWEST_6, "pauses")
    shared_queue.do(NEWEST_6, "adds")
    shared_queue.do(NEWEST_5, "adds")
    side = shared_queue.side
    wait_until(lambda: side.redis.hget(side.keys.meta, "version") == f"bullmq:{NEWEST_5}")
    findings = json_of(CliRunner().invoke(main, ["-b", broker_url, "doctor", "--json"]), "doctor")["findings"]
    (mixed,) = (finding for finding in findings if finding["code"] == "mixed-bullmq")
    assert mixed["evidence"] == {
        "meta.version": f"bullmq:{NEWEST_5}",
        "BullMQ 6": ["a paused queue with jobs in `wait`"],
        "BullMQ 5": ["meta.version", "jobs in `paused`"],
    }
    assert "paused-apart" in {finding["code"] for finding in findings}
