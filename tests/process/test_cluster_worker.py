"""A worker in a Redis Cluster: queues on several nodes, moving slots, and a node that fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from bulltask import App, AsyncResult
from bulltask.testing.worker import wait_until
from tests.conftest import FLAVOR
from tests.support.redis_cluster import Cluster
from tests.support.streams import Stream
from tests.support.worker import Worker

pytestmark = pytest.mark.process

SOURCE = """
import time

@app.task(name="short")
def short():
    time.sleep(0.002)

@app.task(name="ashort")
async def ashort():
    pass

@app.task(bind=True, name="counted")
def counted(self):
    record("start", job=self.request.id)
"""


class Workers:
    """Starts workers on a cluster, with a journal on a single server."""

    def __init__(self, cluster: Cluster, journal_url: str, directory: Path) -> None:
        self.url, self._journal_url, self._directory = cluster.broker_url, journal_url, directory
        self.app = App("sender", self.url)
        self.journal = Stream(journal_url, "journal")
        self._workers: list[Worker] = []

    def start(self, queues: Sequence[str], children: int = 2, **settings: object) -> Worker:
        merged = {"broker_url": self.url, "worker_concurrency": children, **settings}
        environ, options = {"JOURNAL_URL": self._journal_url}, ["-Q", ",".join(queues)]
        directory = self._directory / f"worker-{len(self._workers)}"
        self._workers.append(Worker(directory, SOURCE, settings=merged, environ=environ, options=options))
        self._workers[-1].wait_for_line("Worker started")
        return self._workers[-1]

    def send(self, task: str, queue: str, count: int = 1) -> list[AsyncResult[None]]:
        return self.app.send_many([self.app.signature(task, queue=queue) for _ in range(count)])

    def open_gate(self, times: int = 1) -> None:
        with redis.Redis.from_url(self._journal_url) as client:
            client.rpush("gate:gate", *["open"] * times)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self.journal.close()
        self.app.close()


@pytest.fixture
def workers(cluster: Cluster, single_url: str, tmp_path: Path) -> Iterator[Workers]:
    found = Workers(cluster, single_url, tmp_path)
    yield found
    found.close()


def test_a_job_on_any_node_wakes_an_idle_worker(cluster: Cluster, workers: Workers) -> None:
    queues = cluster.queues(each=2)
    workers.start(queues, children=1, drain_delay=30)
    for queue in (*queues, *reversed(queues)):
        for task in ("quick", "ashort"):
            workers.send(task, queue)[0].get(timeout=20)


def test_no_job_is_lost_or_repeated_while_the_slot_of_its_queue_moves(cluster: Cluster, workers: Workers) -> None:
    moving, other = cluster.queues()[:2]
    slot = cluster.slot(moving)
    home = cluster.owner(slot)
    jobs = workers.send("counted", moving, 300)
    workers.start([moving, other])
    workers.journal.wait_for(20, what="start")
    for to in ((home + 1) % 3, home):
        move(cluster, slot, to, step=100)
        jobs += workers.send("counted", moving, 50)
    jobs += workers.send("counted", other, 50)
    for job in jobs:
        job.get(timeout=60)
    assert sorted(entry["job"] for entry in workers.journal.all(what="start")) == sorted(job.id for job in jobs)


def test_no_job_is_lost_or_repeated_while_a_node_is_added_and_removed(
    cluster: Cluster, workers: Workers, tmp_path: Path
) -> None:
    queue, other = cluster.queues()[:2]
    slot = cluster.slot(queue)
    home = cluster.owner(slot)
    jobs = workers.send("counted", queue, 200)
    workers.start([queue, other])
    workers.journal.wait_for(20, what="start")
    with cluster.one_more(tmp_path / "node", FLAVOR) as added:
        for to in (added, home):
            move(cluster, slot, to, step=100)
            jobs += workers.send("counted", queue, 50)
            cluster.wait_for_owner(slot, to)
    jobs += workers.send("counted", queue, 50)
    jobs += workers.send("counted", other, 50)
    for job in jobs:
        job.get(timeout=60)
    assert sorted(entry["job"] for entry in workers.journal.all(what="start")) == sorted(job.id for job in jobs)


def test_other_queues_continue_when_a_node_dies_and_its_jobs_run_after_the_failover(
    failover_cluster: Cluster, single_url: str, tmp_path: Path
) -> None:
    cluster, workers = failover_cluster, Workers(failover_cluster, single_url, tmp_path)
    try:
        lost, *others = cluster.queues()
        number = cluster.owner(cluster.slot(lost))
        jobs = workers.send("counted", lost, 200)
        assert cluster.clients[number].wait(1, 10_000) == 1  # the replica has them
        workers.start([lost, *others])
        workers.journal.wait_for(20, what="start")
        cluster.servers[number].kill()
        for queue in others:
            for job in workers.send("counted", queue, 20):
                job.get(timeout=20)
        for job in jobs:
            job.get(timeout=60)
    finally:
        workers.close()


def test_an_idle_worker_notices_that_the_slot_of_its_queue_has_moved(cluster: Cluster, workers: Workers) -> None:
    queue, other = cluster.queues()[:2]
    slot = cluster.slot(queue)
    home = cluster.owner(slot)
    for queues in ([queue], [queue, other]):
        worker = workers.start(queues, children=1, drain_delay=60)
        workers.send("quick", queue)[0].get(timeout=20)
        for to in ((home + 1) % 3, home):
            wait_until(lambda: is_waiting(cluster, queue), 20, "an idle child")
            move(cluster, slot, to)
            workers.send("quick", queue)[0].get(timeout=20)
        assert worker.stop() == 0


def test_jobs_run_once_while_another_node_hangs(cluster: Cluster, workers: Workers) -> None:
    hung, *others = queues = cluster.queues()
    held = [workers.app.send_task("hold", kwargs={"gate": "gate"}, queue=queue) for queue in queues]
    settings = {"lock_duration": 5, "stalled_interval": 1}
    workers.start(queues, children=4, **settings)
    for job in held:
        workers.journal.wait_for(what="start", job=job.id)
    workers.start(queues, children=1, **settings)  # would run jobs whose locks have expired
    node = cluster.servers[cluster.owner(cluster.slot(hung))]
    os.kill(node.pid, signal.SIGSTOP)
    try:
        ends, rounds = time.monotonic() + 7, 0
        while time.monotonic() < ends:
            for queue in others:
                workers.send("quick", queue)[0].get(timeout=20)
            rounds += 1
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert rounds > 1  # children did not wait for the other node
    workers.send("quick", hung)[0].get(timeout=20)
    workers.open_gate(times=len(held))
    for job in held:
        job.get(timeout=20)
        assert len(workers.journal.all(what="start", job=job.id)) == 1


def test_closed_connections_end_no_child_that_waits_for_jobs_on_several_nodes(
    cluster: Cluster, workers: Workers
) -> None:
    queues = cluster.queues()
    worker = workers.start(queues, drain_delay=30)
    for queue in queues:
        workers.send("quick", queue)[0].get(timeout=20)
    children = worker.children
    for queue in [*queues, *queues]:
        wait_until(lambda: all(is_waiting(cluster, other) for other in queues), 20, "idle children")
        cluster.client_of(queue).execute_command("CLIENT", "KILL", "TYPE", "normal")
    for queue in queues:
        for task in ("quick", "ashort"):
            workers.send(task, queue)[0].get(timeout=20)
    assert worker.children == children
    assert worker.logged("Child died") == []


def test_other_queues_continue_and_keep_their_locks_while_a_slot_is_moved_key_by_key(
    cluster: Cluster, workers: Workers
) -> None:
    moving, *others = queues = cluster.queues()
    slot = cluster.slot(moving)
    home = cluster.owner(slot)
    settings = {"lock_duration": 2, "stalled_interval": 1}
    held = [workers.app.send_task("hold", kwargs={"gate": "gate"}, queue=queue) for queue in queues]
    worker = workers.start(queues, children=4, **settings)
    for job in held:
        workers.journal.wait_for(what="start", job=job.id)
    workers.start(queues, children=1, **settings)  # would run jobs whose locks have expired
    waiting = workers.send("counted", moving, 5)
    cluster.begin_move(slot, (home + 1) % 3)
    cluster.move_keys(slot, (home + 1) % 3, 2)
    ends, rounds = time.monotonic() + 4.5, 0  # more than two locks
    while time.monotonic() < ends:
        for queue in others:
            workers.send("quick", queue)[0].get(timeout=20)
        rounds += 1
    while cluster.move_keys(slot, (home + 1) % 3):
        pass
    cluster.end_move(slot, (home + 1) % 3)
    workers.open_gate(times=len(held))
    for job in [*held, *waiting]:
        job.get(timeout=20)
        assert len(workers.journal.all(what="start", job=job.id)) == 1
    cluster.wait_for_owner(slot, (home + 1) % 3)
    move(cluster, slot, home)
    assert rounds > 4  # no child has waited for the slot
    assert worker.logged("Lock lost") == []


def move(cluster: Cluster, slot: int, to: int, step: int = 1_000) -> None:
    """Move a slot key by key."""
    cluster.begin_move(slot, to)
    while cluster.move_keys(slot, to, step):
        pass
    cluster.end_move(slot, to)


def is_waiting(cluster: Cluster, queue: str) -> bool:
    """Return whether a worker waits for the marker of a queue, which does not exist."""
    client: Any = cluster.client_of(queue)
    waiting = any(entry["cmd"] == "bzpopmin" and "b" in entry["flags"] for entry in client.client_list())
    return waiting and not client.exists(f"bull:{{{queue}}}:marker")
