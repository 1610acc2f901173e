"""Workers and senders of both kinds on one queue at the same time."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bulltask.testing.wait import wait_until
from tests.interop.node_bridge import NodeBridge
from tests.interop.side_by_side import SideBySide, ran
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]

JOBS = 4_000
BULK = 250
MIXED = ("record", "arecord", "record")
SYNC = ("record",)


@contextmanager
def fleet(side: SideBySide, file: str, **node_options: Any) -> Iterator[tuple[list[Worker], list[NodeBridge]]]:
    """Two workers of ours with two children each, and two Node workers in processes of their own; all are ready."""
    with ExitStack() as stack:
        ours = [side.worker(children=2, lock_duration=2, stalled_interval=1) for _ in range(2)]
        theirs = [stack.enter_context(NodeBridge.to(side.url)) for _ in range(2)]
        for node in theirs:
            opts = {"concurrency": 4, "stalledInterval": 1_000, **node_options}
            node.call("worker.start", queue=side.name, processor="record", args={"file": file}, opts=opts)
        for worker in ours:
            worker.wait_for_line("Child started", 2)
        yield ours, theirs


def send_from_node(side: SideBySide, count: int, file: str, tasks: Sequence[str]) -> list[str]:
    """Send that many jobs by Node's ``addBulk``, plain, with priority, delayed, lifo; return their ids."""
    kinds: list[dict[str, Any]] = [{}, {"priority": 3}, {}, {"delay": 150}, {"lifo": True}]
    jobs = [
        {"name": tasks[n % len(tasks)], "data": {"file": file}, "opts": {"attempts": 3, **kinds[n % 5]}}
        for n in range(count)
    ]
    ids: list[str] = []
    for start in range(0, count, BULK):
        ids += [job["id"] for job in side.call("addBulk", jobs[start : start + BULK])]
    return ids


def send_from_here(side: SideBySide, count: int, file: str, tasks: Sequence[str]) -> list[str]:
    """Send that many jobs by ``app.send_many``, of the same kinds; return their ids."""
    kinds: list[dict[str, Any]] = [{}, {"priority": 3}, {}, {"countdown": 0.15}, {"lifo": True}]
    ours: list[Any] = [side.app.tasks[name] for name in tasks]
    calls = [ours[n % len(ours)].s(file).set(**kinds[n % 5]) for n in range(count)]
    ids: list[str] = []
    for start in range(0, count, BULK):
        ids += [job.id for job in side.app.send_many(calls[start : start + BULK])]
    return ids


def send_from_both(side: SideBySide, count: int, file: str, tasks: Sequence[str] = MIXED) -> list[str]:
    """Both send half of the jobs at the same time; return all ids."""
    with ThreadPoolExecutor() as threads:
        halves = [threads.submit(send, side, count // 2, file, tasks) for send in (send_from_node, send_from_here)]
        return [job_id for half in halves for job_id in half.result()]


def wait_until_completed(side: SideBySide, count: int, timeout: float) -> None:
    """Wait until that many jobs have completed."""
    wait_until(lambda: side.redis.zcard(side.keys.completed) >= count, timeout, f"{count} completed: {side.counts()}")


def test_a_mixed_fleet_loses_none_of_4000_jobs_and_runs_none_twice(mail: SideBySide, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    with fleet(mail, file) as (ours, theirs):
        sent = send_from_both(mail, JOBS, file)
        wait_until_completed(mail, JOBS, 45)
        assert len(set(sent)) == JOBS
        assert mail.counts() == {"completed": JOBS}
        assert Counter(ran(file)) == Counter(sent), "each id exactly once"

        runs = Counter(int(line.split()[1]) for line in Path(file).read_text().splitlines())
        everyone = {pid for worker in ours for pid in worker.children} | {node.pid for node in theirs}
        assert runs.keys() == everyone, "every process of both kinds has run some"
        assert [worker.warnings() for worker in ours] == [[], []]
    with mail.redis.pipeline(transaction=False) as pipeline:
        for job_id in sent:
            pipeline.hmget(mail.keys.job(job_id), "atm", "ats", "stc", "failedReason")
        assert Counter(map(tuple, pipeline.execute())) == {("1", "1", None, None): JOBS}
    # What our check for stalled jobs notes is there for two of its intervals.
    left = {key.removeprefix(mail.keys.base) for key in mail.redis.keys("*")} - {*sent, mail.keys.lock_ends}
    assert left <= {"completed", "events", "id", "marker", "meta", "pc", "stalled-check"}, left


def test_a_mixed_fleet_that_loses_a_worker_of_each_kind_still_completes_every_job(
    mail: SideBySide, tmp_path: Path
) -> None:
    file, jobs = str(tmp_path / "runs"), 1_000
    with fleet(mail, file, lockDuration=2_000) as (ours, theirs):
        mail.listen()
        with ThreadPoolExecutor() as threads:
            sending = threads.submit(send_from_both, mail, jobs, file, SYNC)
            wait_until(lambda: mail.redis.zcard(mail.keys.completed) >= 100)
            os.kill(theirs[0].pid, signal.SIGKILL)
            ours[0].send(signal.SIGKILL)
            sent = sending.result()
        wait_until_completed(mail, jobs, 30)
        assert mail.counts() == {"completed": jobs}
        runs = Counter(ran(file))
        assert runs.keys() == set(sent)
        # Only what ran in the moment of the kill may have run twice: four jobs of Node and two of ours at most.
        assert sum(runs.values()) <= jobs + 6
        ours[0].wait()
