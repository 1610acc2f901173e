"""The steps of the demo, in order: a pipeline, jobs from a DataFrame, tables, a report."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import duckdb
from deltalake import DeltaTable
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from tasks import FAILS, QUEUES, RETRIES, app

import bulltask.spark
from bulltask.errors import BrokerNotReadyError, BrokerUnavailableError
from bulltask.spark import Pipeline

MAX_EVENTS = 1_000_000
"""The number of events that Redis keeps per queue: enough for the whole demo (docs/how-to/pipeline.md)."""

CONF = {
    "spark.driver.memory": "2g",
    "spark.ui.showConsoleProgress": "false",
    # The JVM lives for a minute: optimizing its code takes longer than that saves. On two cores, the demo takes 47 s
    # instead of 54.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
TASKS = tuple(QUEUES)


class DemoSteps:
    """The steps of the demo, with its Spark session and pipeline.

    Args:
        url: The server's URL.
        server: The server's description.
        lake: The directory of the lake.
        master: Spark's master.
        conf: Further Spark settings.
    """

    def __init__(self, url: str, server: str, lake: Path, master: str, conf: Mapping[str, str]) -> None:
        self._url, self._server, self._lake, self._start = url, server, lake, time.perf_counter()
        self._master, self._conf = master, {**CONF, **conf}
        self._first_day = datetime.now(UTC).date()

    def __enter__(self) -> Self:
        print(f"\n   server  {self._server}")
        for queue in set(QUEUES.values()):
            app.queue(queue).set_meta({"opts.maxLenEvents": MAX_EVENTS})
        with redirect_jvm_log(self._lake / "spark.log"):
            self._spark: SparkSession = bulltask.spark.session("demo", self._master, conf=self._conf)
        self._pipeline = Pipeline(self._spark, self._lake, url=self._url, trigger="3 seconds")
        where = "in this process" if self._master.startswith("local") else f"on {self._master}"
        print(f"   Spark   {self._spark.version} {where}, after {time.perf_counter() - self._start:.0f} s")
        print(f"   lake    {self._lake}")
        return self

    def __exit__(self, *_: object) -> None:
        self._spark.stop()

    def start_pipeline(self) -> None:
        """Start the pipeline, which writes events to the lake during all further steps."""
        self._begin("1. Start the pipeline for all queues")
        print("   >>> query = Pipeline(spark, lake).run()", flush=True)
        self._query = self._pipeline.run()

    def send(self, jobs: int, write_id: str) -> None:
        """Send a job for each row, except jobs that this write has already sent."""
        self._begin("2. Send a job for each row of a DataFrame; a worker runs them")
        names = F.array(*map(F.lit, TASKS))
        rows = self._spark.range(jobs).select(
            F.get(names, (F.col("id") % len(TASKS)).cast("int")).alias("task"),
            F.floor(F.col("id") / len(TASKS)).alias("order"),
        )
        for queue in sorted(set(QUEUES.values())):
            tasks = [task for task in TASKS if QUEUES[task] == queue]
            queue_rows = rows.where(F.col("task").isin(tasks))
            print(f'   >>> enqueue(rows, "{queue}", name=F.col("task"), data=["order"])', flush=True)
            result = bulltask.spark.enqueue(
                queue_rows, queue, name=F.col("task"), data=["order"], write_id=write_id, url=self._url
            )
            duplicates = f", {result.duplicates:,} were already sent" if result.duplicates else ""
            print(f"   {result.added:9,} jobs in {result.seconds:.1f} s{duplicates}")

    def watch(self, jobs: int) -> None:
        """Wait until all jobs have finished and the lake has their events."""
        self._begin("3. The worker runs the jobs; the pipeline writes their events")
        pause, start, finished = threading.Event(), time.perf_counter(), 0
        while finished < jobs:
            pause.wait(3)
            if (error := self._query.exception()) is not None:
                raise error
            try:
                finished = count_finished_jobs()
                lag = sum(queue.lag_events or 0 for queue in self._pipeline.status().queues)
            except (BrokerUnavailableError, BrokerNotReadyError):  # it is down, or loading its data
                print("            the server is not available: the worker and the pipeline wait", flush=True)
                continue
            seconds = time.perf_counter() - start
            print(f"   {seconds:5.0f} s  {finished:9,} jobs finished, the lake is {lag:,} events behind", flush=True)
        self._query.processAllAvailable()
        self._query.stop()
        events = self._table("bronze.events").count()
        print(f"   {time.perf_counter() - start:5.0f} s  all {events:,} events are in the lake")

    def build(self) -> None:
        """Build and show the gold tables."""
        self._begin("4. Build the gold tables")
        print('   >>> Pipeline(spark, lake).build("gold", days=[today])', flush=True)
        today = datetime.now(UTC).date()
        self._pipeline.build("gold", days=sorted({self._first_day, today}))
        minutes = self._table("gold.task_minute").where("name IS NOT NULL")
        sums = {name: F.sum(name) for name in ("added", "completed", "failed", "requeued")}
        tasks = minutes.groupBy("name").agg(
            *(column.alias(name) for name, column in sums.items()),
            F.round(F.sum("busy_ms") / 1000, 1).alias("busy_s"),
        )
        tasks.orderBy("name").show(truncate=False)
        errors = self._table("gold.errors_day").select("name", "error_fingerprint", "count", "sample_job_ids")
        errors.orderBy(F.desc("count")).show(truncate=60)

    def query(self) -> list[str]:
        """Query a table without Spark; return the differences."""
        table = self._lake / "gold" / "task_minute"
        counts = "sum(added)::BIGINT AS added, sum(finished)::BIGINT AS finished, sum(failed)::BIGINT AS failed"
        sql = f"SELECT {counts} FROM minutes"
        self._begin("5. Any reader of Delta tables can query them, such as DuckDB")
        print(f'   >>> minutes = DeltaTable("{table}")')
        print(f"   >>> duckdb.sql({sql!r})", flush=True)
        with duckdb.connect() as connection:
            connection.register("minutes", DeltaTable(table).to_pyarrow_dataset())
            result = connection.sql(sql)
            print(result)
            by_duckdb = result.fetchall()
        sums = (F.sum(name) for name in ("added", "finished", "failed"))
        by_spark = [tuple(row) for row in self._table("gold.task_minute").agg(*sums).collect()]
        return [] if by_duckdb == by_spark else [f"DuckDB reads {by_duckdb}, Spark reads {by_spark}"]

    def check(self, jobs: int) -> list[str]:
        """Compare the tables with the expected outcomes; return the differences."""
        problems = []
        ended = {(row["name"], row["state"]): row["count"] for row in self._counts("silver.jobs", "state")}
        attempts = {(row["name"], row["outcome"]): row["count"] for row in self._counts("silver.attempts", "outcome")}
        for index, name in enumerate(TASKS):
            orders = range(len(range(index, jobs, len(TASKS))))
            failed, requeued = (sum(map(rule.get(name, never), orders)) for rule in (FAILS, RETRIES))
            expected = {"completed": len(orders) - failed, "failed": failed, "requeued": requeued}
            actual = {word: {**attempts, **ended}.get((name, word), 0) for word in expected}
            # If your server was killed, the worker released its jobs, which adds attempts.
            if {**actual, "requeued": min(actual["requeued"], requeued)} != expected:
                problems.append(f"{name}: silver has {actual}, but should have {expected}")
        if gaps := self._table("bronze.gaps").collect():
            problems.append(f"events were lost: {gaps}")
        return problems

    def report(self) -> None:
        """Write the report."""
        page = self._lake / "report.html"
        days = f"{self._first_day}..{datetime.now(UTC).date()}"
        arguments = ["pipeline", "report", "--lake", str(self._lake), "--days", days, "-o", str(page)]
        self._begin("6. Write a report")
        print(f"   $ bulltask {' '.join(arguments)}", flush=True)
        subprocess.run([sys.executable, "-m", "bulltask", *arguments], check=True, stdout=subprocess.DEVNULL)
        print(f"   Open {page} in a browser.\n")

    def _begin(self, step: str) -> None:
        print(f"\n{step} (after {time.perf_counter() - self._start:.0f} s)", flush=True)

    def _counts(self, name: str, by: str) -> list[Row]:
        return self._table(name).groupBy("name", by).count().collect()

    def _table(self, name: str) -> DataFrame:
        return self._pipeline.read(name)


@contextmanager
def redirect_jvm_log(log: Path) -> Iterator[None]:
    """Redirect the warnings of a JVM that is started in this block to a file, because it inherits standard error."""
    stderr = os.dup(2)
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def count_finished_jobs() -> int:
    """Return the number of finished jobs."""
    return sum(app.queue(queue).get_job_count_by_types("completed", "failed") for queue in set(QUEUES.values()))


def never(_: int) -> bool:
    """Return False: no job fails or is retried."""
    return False
