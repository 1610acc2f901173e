"""Measure the data source for Spark: ``python benchmarks/spark_rows.py [ROWS]``, by default with 100,000 rows.

Needs Java, ``bulltask[spark]`` and ``redis-server``, which it starts and stops. Each figure is the best of three
rounds, next to its target. The CPU seconds of that round, which are comparable even on a busy machine, are those of the
JVM, of the Python processes (Spark's tasks and this one), and of Redis.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bulltask import spark as bulltask_spark
from bulltask.testing.worker import RedisServer

ROUNDS: Final = 3

TARGETS: Final[Mapping[str, int]] = {
    "enqueue": 15_000,
    "gather": 20_000,
    "read jobs": 40_000,
    "read events": 80_000,
    "stream events to Parquet": 25_000,
}
"""Rows per second on two idle cores."""

_HEAD: Final = (
    "|                          |  rows/s |  target | CPU s: JVM | Python | Redis | Redis µs/row | load |\n"
    "|--------------------------|---------|---------|------------|--------|-------|--------------|------|"
)


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds of the processes."""

    jvm: float
    python: float
    redis: float

    def since(self, before: CpuTime) -> CpuTime:
        return CpuTime(self.jvm - before.jvm, self.python - before.python, self.redis - before.redis)


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Reads the processes' CPU time, by their process ids."""

    jvm: int
    redis: int

    def now(self) -> CpuTime:
        jvm, exited_children = cpu_s(self.jvm)
        tasks = exited_children + sum(sum(cpu_s(pid)) for pid in descendants(self.jvm))
        return CpuTime(jvm, tasks + time.process_time(), cpu_s(self.redis)[0])


def cpu_s(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process, and of its exited children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:  # the process has just exited
        return 0.0, 0.0
    user, system, of_children, system_of_children = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])
    return user + system, of_children + system_of_children


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process."""
    pids = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listing.read_text().split()):
            pids += [child, *descendants(child)]
    return pids


def complete_jobs(client: redis.Redis, ids: list[str]) -> None:
    """Move the jobs to the completed set, as a worker would."""
    client.delete("bull:{bench}:wait")
    for start in range(0, len(ids), 5_000):
        pipe = client.pipeline(transaction=False)
        for number, job_id in enumerate(ids[start : start + 5_000], start):
            finished_ms = 1_700_000_000_000 + number
            fields = {
                "returnvalue": '{"ok":true}',
                "processedOn": finished_ms - 5,
                "finishedOn": finished_ms,
                "atm": 1,
                "ats": 1,
            }
            pipe.hset("bull:{bench}:" + job_id, mapping=fields)
            pipe.zadd("bull:{bench}:completed", {job_id: finished_ms})
        pipe.execute()


def write_events(client: redis.Redis, count: int) -> None:
    """Write the events of completed jobs, as BullMQ's scripts do."""
    client.hset("bull:{events}:meta", "opts.maxLenEvents", count)
    for start in range(0, count, 4_000):
        pipe = client.pipeline(transaction=False)
        for number in range(start, min(start + 4_000, count), 4):
            job_id = f"s{number:024x}"
            pipe.xadd("bull:{events}:events", {"event": "added", "jobId": job_id, "name": "count"})
            pipe.xadd("bull:{events}:events", {"event": "waiting", "jobId": job_id})
            pipe.xadd("bull:{events}:events", {"event": "active", "jobId": job_id, "prev": "waiting"})
            completed = {"event": "completed", "jobId": job_id, "returnvalue": '{"ok":true}', "prev": "active"}
            pipe.xadd("bull:{events}:events", completed)
        pipe.execute()


class Rows:
    """The measured operations.

    Args:
        spark: The session.
        url: The URL of Redis.
        client: A client for the same server.
        count: The number of rows.
        directory: The directory for files.
    """

    def __init__(self, spark: SparkSession, url: str, client: redis.Redis, count: int, directory: Path) -> None:
        self._spark, self._url, self._client, self._count, self._directory = spark, url, client, count, directory
        self._report: bulltask_spark.EnqueueResult | None = None

    def enqueue(self) -> None:
        self._client.flushall()
        frame = self._spark.range(self._count, numPartitions=2).toDF("n")
        self._report = bulltask_spark.enqueue(frame, "bench", name="count", data=["n"], url=self._url)
        assert self._report.added == self._count

    def gather(self) -> None:
        assert self._report is not None
        counts = bulltask_spark.gather(self._report, "bench", url=self._url).groupBy("state").count().collect()
        assert [(row["state"], row["count"]) for row in counts] == [("completed", self._count)]

    def jobs(self) -> None:
        self._read(queue="bench", state="completed")

    def events(self) -> None:
        self._read(queue="events", table="events")

    def stream(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        events = self._options(queue="events", table="events")
        rows = self._spark.readStream.format("bulltask").options(**events).load()
        query = (
            rows.writeStream.format("parquet")
            .option("path", str(self._directory / "events"))
            .option("checkpointLocation", str(self._directory / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        written = sum(progress["numInputRows"] for progress in query.recentProgress)
        assert written == self._count, f"{written:,} of {self._count:,} events"

    def _read(self, **options: str) -> None:
        rows: DataFrame = self._spark.read.format("bulltask").options(**self._options(**options)).load()
        [counts] = rows.agg(F.count("*").alias("rows"), *(F.count(name).alias(name) for name in rows.columns)).collect()
        assert counts["rows"] == self._count

    def _options(self, **options: str) -> dict[str, str]:
        return {"url": self._url, **options}


def measure(name: str, count: int, clock: CpuClock, operation: Callable[[], None]) -> None:
    best_s, cpu = float("inf"), CpuTime(0, 0, 0)
    for _ in range(ROUNDS):
        cpu_before, started = clock.now(), time.monotonic()
        operation()
        if (took_s := time.monotonic() - started) < best_s:
            best_s, cpu = took_s, clock.now().since(cpu_before)
    print(
        f"| {name:<24} | {count / best_s:7,.0f} | {TARGETS[name]:7,} | {cpu.jvm:10.1f} | {cpu.python:6.1f} "
        f"| {cpu.redis:5.1f} | {cpu.redis / count * 1e6:12.0f} | {os.getloadavg()[0]:4.1f} |",
        flush=True,
    )


def main(count: int, directory: Path) -> None:
    with (
        RedisServer.start(directory / "redis", flavor="redis") as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        spark = bulltask_spark.session("bench", "local[2]", conf={"spark.ui.showConsoleProgress": "false"})
        [jvm] = [pid for pid in descendants(os.getpid()) if Path(f"/proc/{pid}/comm").read_text() == "java\n"]
        clock = CpuClock(jvm, server.pid)
        rows = Rows(spark, server.url, client, count, directory / "lake")
        print(_HEAD)
        measure("enqueue", count, clock, rows.enqueue)
        complete_jobs(client, [key.rpartition(":")[2] for key in client.scan_iter("bull:{bench}:s[0-9a-f]*", 5_000)])
        measure("gather", count, clock, rows.gather)
        measure("read jobs", count, clock, rows.jobs)
        write_events(client, count)
        measure("read events", count, clock, rows.events)
        measure("stream events to Parquet", count, clock, rows.stream)
        spark.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, Path(directory))
