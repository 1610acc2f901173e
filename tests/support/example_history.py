"""Run ``examples/history`` and compare its lake with the expected outcomes of its jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake
from bulltask.lake.tables import ATTEMPTS, ERRORS_DAY, EVENTS, JOBS, TASK_MINUTE
from tests.support.programs import ROOT
from tests.support.spark_jvm import SMALL_QUERIES, conf_options, java_options, spark_home

__all__ = ["PREFIX", "check_lake", "count_finished_jobs", "count_sent_jobs", "run_example", "run_worker"]

PREFIX = "history-demo"
EXAMPLE = ROOT / "examples" / "history"
QUEUES = {"mail.send": "mail", **dict.fromkeys(("card.charge", "photo.resize", "invoice.print", "stock.count"), "shop")}


@contextmanager
def run_example(url: str, root: Path, python: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run the example on a given server, without its workers; its output goes to a file next to the lake.

    Args:
        url: The server's URL.
        root: The directory of the lake.
        python: The interpreter of Spark's Python processes.
        args: Further arguments for the example.
    """
    command = [sys.executable, str(EXAMPLE / "run.py"), "--url", url, "--lake", str(root), "--no-worker", *args]
    command += conf_options(SMALL_QUERIES)
    environ = {
        **os.environ,
        "PYSPARK_PYTHON": str(python),
        "SPARK_HOME": str(spark_home(root.with_name("home"))),
        "SPARK_SUBMIT_OPTS": java_options(root.parent),
    }
    with (
        root.with_suffix(".log").open("a") as log,
        subprocess.Popen(command, env=environ, stdout=log, stderr=log, text=True) as run,
    ):
        try:
            yield run
        finally:
            run.kill()


@contextmanager
def run_worker(url: str, children: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker for the example, which the test does not kill."""
    args = ["-b", url, "worker", "-A", "tasks", "-c", str(children), "-l", "warning", "--queues", "mail,shop"]
    # A job whose moveToActive reply was lost is recovered soon.
    environ = {**os.environ, "BULLTASK_PREFIX": PREFIX, "BULLTASK_STALLED_INTERVAL": "2"}
    command = [sys.executable, "-m", "bulltask", *args]
    with subprocess.Popen(command, cwd=EXAMPLE, env=environ, stderr=subprocess.DEVNULL) as run:
        try:
            yield run
        finally:
            run.terminate()


def count_sent_jobs(client: redis.Redis) -> int:
    """Return the number of jobs that were sent."""
    return sum(int(client.get(_key(queue, "id")) or 0) for queue in set(QUEUES.values()))


def count_finished_jobs(client: redis.Redis) -> int:
    """Return the number of finished jobs."""
    ends = ((queue, state) for queue in set(QUEUES.values()) for state in ("completed", "failed"))
    return sum(int(client.zcard(_key(queue, state))) for queue, state in ends)


def check_lake(root: Path, client: redis.Redis, count: int) -> None:
    """Check that every job is in Redis and in all tables of the lake once, with the expected outcome.

    There may be additional stalled or released attempts, because the server was killed before its reply was read. The
    gold tables count these too.
    """
    reader, known = TableReader(Lake(root)), jobs_in(client)
    assert Counter(known.values()) == Counter(every_call(count))
    jobs = [(row["queue"], row["job_id"], row["name"], row["state"]) for row in reader.rows(JOBS)]
    assert Counter(jobs) == Counter((*key, name, expected_state(name, order)) for key, (name, order) in known.items())
    attempts = [(row["queue"], row["job_id"], row["outcome"]) for row in reader.rows(ATTEMPTS)]
    expected = [(*key, outcome) for key, call in known.items() for outcome in expected_outcomes(*call)]
    additional = Counter(attempts) - Counter(expected)
    assert not Counter(expected) - Counter(attempts)
    assert {outcome for _, _, outcome in additional} <= {"stalled", "requeued"}
    assert additional.total() < count / 10
    events = Counter((row["queue"], row["event_id"]) for row in reader.rows(EVENTS))
    assert events == Counter((queue, entry) for queue in set(QUEUES.values()) for entry in _entries(client, queue))
    minutes = reader.rows(TASK_MINUTE)
    for name in QUEUES:
        calls = [expected_outcomes(*call) for call in known.values() if call[0] == name]
        expected_sums = Counter({"added": len(calls), "finished": len(calls)})
        expected_sums.update(outcome for call in calls for outcome in call)
        additional_of_task = [key for key in additional.elements() if known[key[0], key[1]][0] == name]
        expected_sums.update(outcome for _, _, outcome in additional_of_task)
        sums = {column: sum(row[column] for row in minutes if row["name"] == name) for column in expected_sums}
        assert sums == expected_sums, name
    failed = sum(expected_outcomes(*call).count("failed") for call in known.values())
    assert sum(row["count"] for row in reader.rows(ERRORS_DAY)) == failed > 0


def every_call(count: int) -> Iterator[tuple[str, int]]:
    """Yield the name and the order number of each job."""
    names = list(QUEUES)
    for number in range(count):
        yield names[number % len(names)], number // len(names)


def expected_state(name: str, order: int) -> str:
    """Return the expected final state of a job."""
    bad = (name == "card.charge" and order % 40 == 7) or (name == "invoice.print" and order % 100 == 3)
    return "failed" if bad else "completed"


def expected_outcomes(name: str, order: int) -> list[str]:
    """Return the expected outcomes of a job's attempts."""
    return [*(["requeued"] if name == "mail.send" and order % 25 == 0 else []), expected_state(name, order)]


def jobs_in(client: redis.Redis) -> dict[tuple[str, str], tuple[str, int]]:
    """Return the name and order number of each finished job in Redis, by queue and id."""
    jobs: dict[tuple[str, str], tuple[str, int]] = {}
    for queue in set(QUEUES.values()):
        ids: list[Any] = [
            job_id for end in ("completed", "failed") for job_id in client.zrange(_key(queue, end), 0, -1)
        ]
        with client.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hmget(_key(queue, job_id), "name", "data")
            for job_id, (name, data) in zip(ids, pipe.execute(), strict=True):
                jobs[queue, job_id] = name, json.loads(data)["order"]
    return jobs


def _entries(client: redis.Redis, queue: str) -> list[str]:
    entries: Any = client.xrange(_key(queue, "events"))
    return [entry_id for entry_id, _ in entries]


def _key(queue: str, name: str) -> str:
    return f"{PREFIX}:{{{queue}}}:{name}"
