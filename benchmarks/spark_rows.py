"""How fast rows become jobs, and jobs rows: ``python benchmarks/spark_rows.py [ROWS]``, 100,000 if left out.

Needs Java, ``bulltask[spark]`` and a ``redis-server`` in the path, which it starts and ends. Beside rows/s it prints
the CPU time of Redis for each row, which says the same on a busy machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bulltask import spark as bulls
from bulltask.testing.server import RedisServer

ROUNDS = 3


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


def main(count: int, place: str) -> None:
    with (
        RedisServer.start(place, flavour="redis") as server,
        redis.Redis.from_url(server.url, decode_responses=True) as plain,
    ):
        spark = bulls.session("bench", "local[2]", conf={"spark.ui.showConsoleProgress": "false"})
        frame = spark.range(count, numPartitions=2).toDF("n")
        report = None

        def enqueue() -> None:
            nonlocal report
            plain.flushall()
            report = bulls.enqueue(frame, "bench", name="count", data=["n"], url=server.url)
            assert report.added == count

        def gather() -> None:
            found = bulls.gather(report, "bench", url=server.url).groupBy("state").count().collect()
            assert [(row["state"], row["count"]) for row in found] == [("completed", count)]

        def jobs() -> None:
            read(spark, server.url)

        for name, work in (("enqueue", enqueue), ("gather", gather), ("read jobs", jobs)):
            if name == "gather":
                end_all(plain, [key.rpartition(":")[2] for key in plain.scan_iter("bull:{bench}:s[0-9a-f]*", 5_000)])
            show(name, count, server.pid, work)
        spark.stop()


def read(spark: SparkSession, url: str) -> None:
    rows = spark.read.format("bulltask").options(url=url, queue="bench", state="completed").load()
    rows.agg(*(F.count(name) for name in rows.columns)).collect()


def show(name: str, count: int, redis_pid: int, work: Callable[[], None]) -> None:
    for _ in range(ROUNDS):
        before_s, began = cpu_s(redis_pid), time.monotonic()
        work()
        took, redis_us = time.monotonic() - began, (cpu_s(redis_pid) - before_s) / count * 1e6
        load = os.getloadavg()[0]
        print(f"{name}: {count / took:,.0f} rows/s ({took:.1f} s), Redis {redis_us:.0f} µs a row, load {load:.1f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, place)
