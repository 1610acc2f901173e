"""How fast rows become jobs, and jobs and events rows: ``python benchmarks/spark_rows.py [ROWS]``, 100,000 if left out.

Needs Java, ``bulltask[spark]`` and a ``redis-server`` in the path, which it starts and ends. Each figure is the best of
three and stands beside its target. The CPU seconds of that round say the same on a busy machine: of the JVM, of the
Python processes (Spark's tasks and this one), and of Redis.
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

from bulltask import spark as bulls
from bulltask.testing.server import RedisServer

ROUNDS: Final = 3

TARGETS: Final[Mapping[str, int]] = {
    "enqueue": 15_000,
    "gather": 20_000,
    "read jobs": 40_000,
    "read events": 80_000,
    "stream events to Parquet": 25_000,
}
"""Rows a second on two cores with nothing else running."""

_HEAD: Final = (
    "|                          |  rows/s |  target | CPU s: JVM | Python | Redis | Redis µs/row | load |\n"
    "|--------------------------|---------|---------|------------|--------|-------|--------------|------|"
)


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds up to some moment."""

    jvm: float
    python: float
    redis: float

    def since(self, before: Spent) -> Spent:
        return Spent(self.jvm - before.jvm, self.python - before.python, self.redis - before.redis)


@dataclass(frozen=True, slots=True)
class Clock:
    """Responsible for looking at what the processes have used."""

    jvm: int
    redis: int

    def now(self) -> Spent:
        own, waited_for = cpu_s(self.jvm)
        tasks = waited_for + sum(sum(cpu_s(pid)) for pid in below(self.jvm))
        return Spent(own, tasks + time.process_time(), cpu_s(self.redis)[0])


def cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds of a process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:  # it has just ended
        return 0.0, 0.0
    user, system, of_children, system_of_children = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])
    return user + system, of_children + system_of_children


def below(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listing.read_text().split()):
            found += [child, *below(child)]
    return found


def end_all(plain: redis.Redis, ids: list[str]) -> None:
    """Let the jobs have ended, as a worker would leave them."""
    plain.delete("bull:{bench}:wait")
    for start in range(0, len(ids), 5_000):
        pipe = plain.pipeline(transaction=False)
        for number, one in enumerate(ids[start : start + 5_000], start):
            ended = 1_700_000_000_000 + number
            said = {"returnvalue": '{"ok":true}', "processedOn": ended - 5, "finishedOn": ended, "atm": 1, "ats": 1}
            pipe.hset("bull:{bench}:" + one, mapping=said)
            pipe.zadd("bull:{bench}:completed", {one: ended})
        pipe.execute()


def fill_ring(plain: redis.Redis, count: int) -> None:
    """Write as many events as the scripts would of jobs that complete."""
    plain.hset("bull:{ring}:meta", "opts.maxLenEvents", count)
    for start in range(0, count, 4_000):
        pipe = plain.pipeline(transaction=False)
        for number in range(start, min(start + 4_000, count), 4):
            one = f"s{number:024x}"
            pipe.xadd("bull:{ring}:events", {"event": "added", "jobId": one, "name": "count"})
            pipe.xadd("bull:{ring}:events", {"event": "waiting", "jobId": one})
            pipe.xadd("bull:{ring}:events", {"event": "active", "jobId": one, "prev": "waiting"})
            done = {"event": "completed", "jobId": one, "returnvalue": '{"ok":true}', "prev": "active"}
            pipe.xadd("bull:{ring}:events", done)
        pipe.execute()


class Rows:
    """Responsible for the work that is measured.

    Args:
        spark: the session.
        url: of Redis.
        plain: a client of the same Redis.
        count: rows.
        place: where files go.
    """

    def __init__(self, spark: SparkSession, url: str, plain: redis.Redis, count: int, place: Path) -> None:
        self._spark, self._url, self._plain, self._count, self._place = spark, url, plain, count, place
        self._report: bulls.EnqueueReport | None = None

    def enqueue(self) -> None:
        self._plain.flushall()
        frame = self._spark.range(self._count, numPartitions=2).toDF("n")
        self._report = bulls.enqueue(frame, "bench", name="count", data=["n"], url=self._url)
        assert self._report.added == self._count

    def gather(self) -> None:
        assert self._report is not None
        found = bulls.gather(self._report, "bench", url=self._url).groupBy("state").count().collect()
        assert [(row["state"], row["count"]) for row in found] == [("completed", self._count)]

    def jobs(self) -> None:
        self._read(queue="bench", state="completed")

    def events(self) -> None:
        self._read(queue="ring", table="events")

    def stream(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        events = self._options(queue="ring", table="events")
        rows = self._spark.readStream.format("bulltask").options(**events).load()
        query = (
            rows.writeStream.format("parquet")
            .option("path", str(self._place / "events"))
            .option("checkpointLocation", str(self._place / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        written = sum(progress["numInputRows"] for progress in query.recentProgress)
        assert written == self._count, f"{written:,} of {self._count:,} events"

    def _read(self, **options: str) -> None:
        rows: DataFrame = self._spark.read.format("bulltask").options(**self._options(**options)).load()
        [seen] = rows.agg(F.count("*").alias("rows"), *(F.count(name).alias(name) for name in rows.columns)).collect()
        assert seen["rows"] == self._count

    def _options(self, **options: str) -> dict[str, str]:
        return {"url": self._url, **options}


def show(name: str, count: int, clock: Clock, work: Callable[[], None]) -> None:
    best_s, spent = float("inf"), Spent(0, 0, 0)
    for _ in range(ROUNDS):
        before, began = clock.now(), time.monotonic()
        work()
        if (took_s := time.monotonic() - began) < best_s:
            best_s, spent = took_s, clock.now().since(before)
    print(
        f"| {name:<24} | {count / best_s:7,.0f} | {TARGETS[name]:7,} | {spent.jvm:10.1f} | {spent.python:6.1f} "
        f"| {spent.redis:5.1f} | {spent.redis / count * 1e6:12.0f} | {os.getloadavg()[0]:4.1f} |",
        flush=True,
    )


def main(count: int, place: Path) -> None:
    with (
        RedisServer.start(place / "redis", flavour="redis") as server,
        redis.Redis.from_url(server.url, decode_responses=True) as plain,
    ):
        spark = bulls.session("bench", "local[2]", conf={"spark.ui.showConsoleProgress": "false"})
        [jvm] = [pid for pid in below(os.getpid()) if Path(f"/proc/{pid}/comm").read_text() == "java\n"]
        clock = Clock(jvm, server.pid)
        rows = Rows(spark, server.url, plain, count, place / "lake")
        print(_HEAD)
        show("enqueue", count, clock, rows.enqueue)
        end_all(plain, [key.rpartition(":")[2] for key in plain.scan_iter("bull:{bench}:s[0-9a-f]*", 5_000)])
        show("gather", count, clock, rows.gather)
        show("read jobs", count, clock, rows.jobs)
        fill_ring(plain, count)
        show("read events", count, clock, rows.events)
        show("stream events to Parquet", count, clock, rows.stream)
        spark.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, Path(made))
