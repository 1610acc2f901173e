"""Workers and senders of Node and bulltask share a queue without losing jobs or running them twice."""

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

from bulltask.testing.worker import wait_until
from bulltask.transport.call import known_queues, queue_consumers
from tests.interop.interop_queue import InteropQueue, recorded_ids
from tests.interop.node_bridge import NodeBridge
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]

PREFETCH = 32
"""The default of `worker_prefetch`."""

JOBS = 4_000
BULK = 250
MIXED = ("record", "arecord", "record")
SYNC = ("record",)


@contextmanager
def fleet(
    side: InteropQueue, file: str, lock_duration: float = 2, **node_options: Any
) -> Iterator[tuple[list[Worker], list[NodeBridge]]]:
    """Start two bulltask workers with two children each, and two Node worker processes."""
    settings: dict[str, Any] = {"children": 2, "lock_duration": lock_duration, "stalled_interval": 1}
    with ExitStack() as stack:
        bulltask_workers = [side.worker(**settings) for _ in range(2)]
        node_bridges = [stack.enter_context(NodeBridge.to(side.url)) for _ in range(2)]
        for node in node_bridges:
            opts = {"concurrency": 4, "stalledInterval": 1_000, **node_options}
            node.call("worker.start", queue=side.name, processor="record", args={"file": file}, opts=opts)
        for worker in bulltask_workers:
            worker.wait_for_line("Child started", 2)
        yield bulltask_workers, node_bridges


def send_from_node(side: InteropQueue, count: int, file: str, tasks: Sequence[str]) -> list[str]:
    """Send a number of jobs with Node's ``addBulk``: plain, with priority, delayed, lifo; return their ids."""
    kinds: list[dict[str, Any]] = [{}, {"priority": 3}, {}, {"delay": 150}, {"lifo": True}]
    jobs = [
        {"name": tasks[n % len(tasks)], "data": {"file": file}, "opts": {"attempts": 3, **kinds[n % 5]}}
        for n in range(count)
    ]
    ids: list[str] = []
    for start in range(0, count, BULK):
        ids += [job["id"] for job in side.call("addBulk", jobs[start : start + BULK])]
    return ids


def send_from_bulltask(side: InteropQueue, count: int, file: str, tasks: Sequence[str]) -> list[str]:
    """Send a number of jobs with ``app.send_many``, of the same kinds; return their ids."""
    kinds: list[dict[str, Any]] = [{}, {"priority": 3}, {}, {"countdown": 0.15}, {"lifo": True}]
    task_objects: list[Any] = [side.app.tasks[name] for name in tasks]
    calls = [task_objects[n % len(task_objects)].s(file).set(**kinds[n % 5]) for n in range(count)]
    ids: list[str] = []
    for start in range(0, count, BULK):
        ids += [job.id for job in side.app.send_many(calls[start : start + BULK])]
    return ids


def send_from_both(side: InteropQueue, count: int, file: str, tasks: Sequence[str] = MIXED) -> list[str]:
    """Send half of the jobs with each client at the same time; return all ids."""
    with ThreadPoolExecutor() as threads:
        halves = [threads.submit(send, side, count // 2, file, tasks) for send in (send_from_node, send_from_bulltask)]
        return [job_id for half in halves for job_id in half.result()]


def wait_until_completed(side: InteropQueue, count: int, timeout: float) -> Counter[tuple[str, str]]:
    """Wait until a number of jobs have completed; return how often each job was seen locked with each token.

    A job that a worker has acquired, but does not start, is seen most often with that worker's token.
    """
    seen: Counter[tuple[str, str]] = Counter()

    def is_completed() -> bool:
        active = side.redis.lrange(side.keys.active, 0, -1)
        locks = side.redis.mget([f"{side.keys.job(job_id)}:lock" for job_id in active]) if active else []
        seen.update((job_id, token) for job_id, token in zip(active, locks, strict=True) if token)
        return bool(side.redis.zcard(side.keys.completed) >= count)

    wait_until(is_completed, timeout, f"{count} completed: {side.counts()}")
    return seen


def test_a_mixed_fleet_loses_none_of_4000_jobs_and_runs_none_twice(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    # On a busy machine, a process may get no CPU time for two seconds.
    with fleet(mail, file, lock_duration=10) as (bulltask_workers, node_bridges):
        sent = send_from_both(mail, JOBS, file)
        seen = wait_until_completed(mail, JOBS, 45)
        assert len(set(sent)) == JOBS
        assert mail.counts() == {"completed": JOBS}
        assert Counter(recorded_ids(file)) == Counter(sent), "each id exactly once"

        runs = Counter(int(line.split()[1]) for line in Path(file).read_text().splitlines())
        processes = {pid for worker in bulltask_workers for pid in worker.children} | {
            node.pid for node in node_bridges
        }
        assert runs.keys() == processes, "every process of both kinds has run some"
        warnings = [line for worker in bulltask_workers for line in worker.warnings()]
        assert {line["event"] for line in warnings} <= {"Job stalled", "Stalled check skipped"}, warnings
        stalled = {line["job_id"] for line in warnings if line["event"] == "Job stalled"}
        tokens = {job_id: token for (job_id, token), _ in reversed(seen.most_common())}  # the most frequent one is last
        of_bulltask = {job_id for job_id in stalled if ":" not in tokens.get(job_id, "")}
        assert of_bulltask == set(), "BullMQ's tokens contain a colon; such a worker may acquire a job and not start it"
    with mail.redis.pipeline(transaction=False) as pipeline:
        for job_id in set(sent) - stalled:
            pipeline.hmget(mail.keys.job(job_id), "atm", "ats", "stc", "failedReason")
        assert Counter(map(tuple, pipeline.execute())) == {("1", "1", None, None): JOBS - len(stalled)}
    # The times that bulltask's stalled check records expire after two of its intervals.
    kept = {
        *sent,
        mail.keys.lock_expiries,
        mail.keys.task_rates,
        queue_consumers("bull", "tested"),
        known_queues("bull"),
    }
    names = (key for key in mail.redis.keys("*") if not key.startswith(f"{mail.keys.bulltask_base}worker"))
    left = {key.removeprefix(mail.keys.base) for key in names} - kept
    assert left <= {"completed", "events", "id", "marker", "meta", "pc", "stalled-check"}, left


def test_a_mixed_fleet_that_loses_a_worker_of_each_kind_still_completes_every_job(
    mail: InteropQueue, tmp_path: Path
) -> None:
    file, jobs = str(tmp_path / "runs"), 1_000
    with fleet(mail, file, lockDuration=2_000) as (bulltask_workers, node_bridges):
        mail.listen()
        with ThreadPoolExecutor() as threads:
            sending = threads.submit(send_from_both, mail, jobs, file, SYNC)
            wait_until(lambda: mail.redis.zcard(mail.keys.completed) >= 100)
            os.kill(node_bridges[0].pid, signal.SIGKILL)
            bulltask_workers[0].send(signal.SIGKILL)
            sent = sending.result()
        wait_until_completed(mail, jobs, 30)
        assert mail.counts() == {"completed": jobs}
        runs = Counter(recorded_ids(file))
        assert runs.keys() == set(sent)
        # Only jobs that ran when the workers were killed may run twice: at most four of Node's, two of bulltask's, and
        # short jobs whose outcomes a bulltask child had not yet written.
        assert sum(runs.values()) <= jobs + 4 + 2 * PREFETCH
        bulltask_workers[0].wait()
