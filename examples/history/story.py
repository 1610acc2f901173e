"""What the demo does, in its order: the stream of events, jobs from a DataFrame, tables, a report."""

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

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as fn
from tasks import FAILS, QUEUES, RETRIES, app

import bulltask.spark
from bulltask.errors import BrokerNotReadyError, BrokerUnavailableError
from bulltask.spark import Pipeline

RING = 1_000_000
"""Events that Redis keeps per queue: enough for the whole demo if the stream is slow (docs/how-to/spark.md)."""

CONF = {"spark.driver.memory": "2g", "spark.ui.showConsoleProgress": "false"}
TASKS = tuple(QUEUES)


class Story:
    """Responsible for Spark's session, the pipeline and what is shown of them.

    Args:
        url: of the server.
        server: what to call it.
        root: directory of the lake.
        master: where Spark runs.
        conf: further settings of Spark.
    """

    def __init__(self, url: str, server: str, root: Path, master: str, conf: Mapping[str, str]) -> None:
        self._url, self._server, self._root, self._begin = url, server, root, time.perf_counter()
        self._master, self._conf = master, {**CONF, **conf}
        self._first_day = datetime.now(UTC).date()

    def __enter__(self) -> Self:
        print(f"\n   server  {self._server}")
        for queue in set(QUEUES.values()):
            app.queue(queue).set_meta({"opts.maxLenEvents": RING})
        with jvm_writes_to(self._root / "spark.log"):
            self._spark: SparkSession = bulltask.spark.session("demo", self._master, conf=self._conf)
        self._pipeline = Pipeline(self._spark, self._root, url=self._url, trigger="3 seconds")
        where = "in this process" if self._master.startswith("local") else f"on {self._master}"
        print(f"   Spark   {self._spark.version} {where}, after {time.perf_counter() - self._begin:.0f} s")
        print(f"   lake    {self._root}")
        return self

    def __exit__(self, *_: object) -> None:
        self._spark.stop()

    def stream(self) -> None:
        """Let the events flow into the lake, from now on and beside all that follows."""
        print(
            "\n1. A stream waits for the events of all queues\n   >>> query = Pipeline(spark, root).run()", flush=True
        )
        self._query = self._pipeline.run()
        self._query.processAllAvailable()  # nothing yet, unless this demo goes on: now it has started up

    def send(self, jobs: int, write_id: str) -> None:
        """Make a job of each row; those that this write has made already are not made again."""
        print("\n2. A DataFrame becomes jobs, a row each; a worker runs them at once")
        names = fn.array(*map(fn.lit, TASKS))
        rows = self._spark.range(jobs).select(
            fn.get(names, (fn.col("id") % len(TASKS)).cast("int")).alias("task"),
            fn.floor(fn.col("id") / len(TASKS)).alias("order"),
        )
        for queue in sorted(set(QUEUES.values())):
            mine = rows.where(fn.col("task").isin([task for task, of in QUEUES.items() if of == queue]))
            print(f'   >>> enqueue(rows, "{queue}", name=fn.col("task"), data=["order"])', flush=True)
            report = bulltask.spark.enqueue(
                mine, queue, name=fn.col("task"), data=["order"], write_id=write_id, url=self._url
            )
            known = f", {report.duplicated:,} were there before" if report.duplicated else ""
            print(f"   {report.added:9,} jobs in {report.seconds:.1f} s{known}")

    def follow(self, jobs: int) -> None:
        """Look on until all jobs are done and the lake has their events."""
        print("\n3. The stream follows the worker", flush=True)
        pause, begin, done = threading.Event(), time.perf_counter(), 0
        while done < jobs:
            pause.wait(5)
            if (error := self._query.exception()) is not None:
                raise error
            try:
                done = jobs_done()
                behind = sum(queue.lag_events or 0 for queue in self._pipeline.status().queues)
            except (BrokerUnavailableError, BrokerNotReadyError):  # it is gone, or back and loading its data
                print("            the server does not answer: worker and stream wait for it", flush=True)
                continue
            seconds = time.perf_counter() - begin
            print(f"   {seconds:5.0f} s  {done:9,} jobs done, the lake is {behind:,} events behind", flush=True)
        self._query.processAllAvailable()
        self._query.stop()
        events = self._table("bronze/events").count()
        print(f"   {time.perf_counter() - begin:5.0f} s  all {events:,} events are in the lake")

    def build(self) -> None:
        """Make the tables that people ask."""
        print('\n4. Tables\n   >>> Pipeline(spark, root).build("gold", days=[today])')
        today = datetime.now(UTC).date()
        self._pipeline.build("gold", days=sorted({self._first_day, today}))
        minutes = self._table("gold/task_minute").where("name IS NOT NULL")
        sums = {name: fn.sum(name) for name in ("enqueued", "completed", "failed", "retried")}
        tasks = minutes.groupBy("name").agg(
            *(column.alias(name) for name, column in sums.items()),
            fn.round(fn.sum("busy_ms") / 1000, 1).alias("busy_s"),
        )
        tasks.orderBy("name").show(truncate=False)
        errors = self._table("gold/errors_day").select("name", "error_fingerprint", "count", "sample_job_ids")
        errors.orderBy(fn.desc("count")).show(truncate=60)

    def check(self, jobs: int) -> list[str]:
        """Compare the tables with what has to become of each job; return what is not so."""
        faults = []
        ended = {(row["name"], row["state"]): row["count"] for row in self._counts("silver/jobs", "state")}
        tried = {(row["name"], row["outcome"]): row["count"] for row in self._counts("silver/attempts", "outcome")}
        for place, name in enumerate(TASKS):
            orders = range(len(range(place, jobs, len(TASKS))))
            failed, retried = (sum(map(rule.get(name, never), orders)) for rule in (FAILS, RETRIES))
            wanted = {"completed": len(orders) - failed, "failed": failed, "retry": retried}
            found = {word: {**tried, **ended}.get((name, word), 0) for word in wanted}
            # What a worker had in hand when a server of yours was killed, it gives back: an attempt more.
            if {**found, "retry": min(found["retry"], retried)} != wanted:
                faults.append(f"{name}: silver has {found}, and should have {wanted}")
        if (self._root / "bronze/gaps").exists():
            faults.append(f"events were lost: {self._table('bronze/gaps').collect()}")
        return faults

    def report(self) -> None:
        """Write the page for people."""
        page = self._root / "report.html"
        days = f"{self._first_day}..{datetime.now(UTC).date()}"
        words = ["pipeline", "report", "--root", str(self._root), "--days", days, "-o", str(page)]
        print(f"5. A page for people\n   $ bulltask {' '.join(words)}", flush=True)
        subprocess.run([sys.executable, "-m", "bulltask", *words], check=True, stdout=subprocess.DEVNULL)
        print(f"   Open {page} in a browser.\n")

    def _counts(self, name: str, by: str) -> list[Row]:
        return self._table(name).groupBy("name", by).count().collect()

    def _table(self, name: str) -> DataFrame:
        return self._spark.read.parquet(str(self._root / name))


@contextmanager
def jvm_writes_to(log: Path) -> Iterator[None]:
    """Let the JVM that is started now write its warnings into a file: it takes over this process' standard error."""
    own = os.dup(2)
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def jobs_done() -> int:
    """How many jobs have come to their end."""
    return sum(app.queue(queue).get_job_count_by_types("completed", "failed") for queue in set(QUEUES.values()))


def never(_: int) -> bool:
    """What most tasks do when it comes to failing."""
    return False
