"""Measure the streaming source with many queues, and beside many foreign keys: ``benchmarks/queues.py``.

For 1 queue and for ``--queues`` queues with ``--events`` events each, it prints the seconds of planning and reading a
batch without Spark, its tasks, and the events per second in relation to one queue with as many events. With
``--spark``, a streaming query with an empty ``foreachBatch`` and one with the pipeline read such a batch, too. Then it
prints Redis' CPU time for idle triggers, without and beside ``--foreign`` keys.

Needs ``bulltask[spark]`` and ``redis-server``, which it starts and stops; ``--spark`` needs Java.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from pyspark.sql.streaming.datasource import ReadMaxRows

sys.path.insert(0, str(Path(__file__).parent.parent))

from bulltask.spark.source.columns import EVENTS
from bulltask.spark.source.options import StreamOptions, read_options
from bulltask.spark.source.readers import EventsStreamReader
from bulltask.testing.worker import RedisServer

ROUNDS = 3
TRIGGER_S = 10


def fill(client: redis.Redis, queues: int, events: int) -> None:
    """Add events to each queue, four for each job."""
    pipeline = client.pipeline(transaction=False)
    for queue in range(queues):
        base = f"bull:{{q{queue}}}"
        pipeline.hset(f"{base}:meta", mapping={"opts.maxLenEvents": "100000"})
        pipeline.zadd("bulltask:queues", {f"{{q{queue}}}": time.time() * 1000})
        for number in range(events):
            job = str(number // 4)
            fields: dict[Any, Any] = [
                {"event": "added", "jobId": job, "name": "send"},
                {"event": "waiting", "jobId": job},
                {"event": "active", "jobId": job, "prev": "waiting"},
                {"event": "completed", "jobId": job, "returnvalue": '{"ok":true}', "prev": "active"},
            ][number % 4]
            pipeline.xadd(f"{base}:events", fields)
        if queue % 50 == 49:
            pipeline.execute()
    pipeline.execute()


class Query:
    """Calls a reader as Spark does."""

    def __init__(self, url: str) -> None:
        options = read_options(StreamOptions, {"url": url, "queue": "*"})
        self.reader = EventsStreamReader(options, EVENTS)
        self.offset = self._json(self.reader.initialOffset())

    def batch(self) -> tuple[float, float, int, int]:
        """Read a batch; return the seconds of planning and reading, and the number of tasks and rows."""
        start = time.perf_counter()
        end = self.trigger()
        parts = self.reader.partitions(self.offset, end)
        planned = time.perf_counter()
        rows = sum(batch.num_rows for part in parts for batch in self.reader.read(part))
        self.offset = end
        return planned - start, time.perf_counter() - planned, len(parts), rows

    def trigger(self) -> Any:
        """Plan a batch, as an idle trigger does."""
        end = self._json(self.reader.latestOffset(self.offset, ReadMaxRows(200_000)))
        self.reader.reportLatestOffset()
        return end

    @staticmethod
    def _json(offset: Any) -> Any:
        return json.loads(json.dumps(offset))


@contextmanager
def server(directory: str) -> Iterator[tuple[str, redis.Redis]]:
    with (
        tempfile.TemporaryDirectory(dir=directory) as own,
        RedisServer.start(own, flavor="redis", extra=["--enable-debug-command", "local"]) as running,
        redis.Redis.from_url(running.url) as client,
    ):
        yield running.url, client


def without_spark(directory: str, queues: int, events: int) -> float:
    """Print the time of a batch; return the seconds."""
    with server(directory) as (url, client):
        fill(client, queues, 4)
        query = Query(url)
        query.batch()
        rounds = []
        for _ in range(ROUNDS):
            fill(client, queues, events)
            rounds.append(query.batch())
        planning, reading, tasks, rows = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(
            f"{queues:6,} queues x {events:6,} events: planning {planning:6.3f} s, reading {reading:6.3f} s, "
            f"{tasks:5.0f} tasks, {rows:,.0f} rows",
            flush=True,
        )
        return planning + reading


def with_spark(directory: str, spark: Any, queues: int, events: int, name: str, start: Callable[..., Any]) -> float:
    """Print the time of a trigger with a batch; return the seconds."""
    with server(directory) as (url, client), tempfile.TemporaryDirectory(dir=directory) as files:
        fill(client, queues, events)
        query = start(spark, url, files)
        seconds, seen, total = list[float](), -1, queues * events
        while len(seconds) < 1 + ROUNDS:  # the first one warms up the JVM
            query.awaitTermination(0.2)
            progress = query.lastProgress
            if progress is None or progress["batchId"] <= seen or not progress["numInputRows"]:
                continue
            seen = progress["batchId"]
            if progress["numInputRows"] >= total:  # otherwise, the trigger came while events were added
                seconds.append(progress["durationMs"]["triggerExecution"] / 1000)
            fill(client, queues, events)
        query.stop()
        median = statistics.median(seconds[1:])
        print(f"{queues:6,} queues x {events:6,} events, {name}: {median:6.2f} s a batch", flush=True)
        return median


def start_empty(spark: Any, url: str, files: str) -> Any:
    source = spark.readStream.format("bulltask").options(url=url, queue="*", table="events").load()
    writer = source.writeStream.foreachBatch(lambda batch, _: batch.write.format("noop").mode("append").save())
    return writer.option("checkpointLocation", files + "/checkpoint").trigger(processingTime="2 seconds").start()


def start_pipeline(spark: Any, url: str, files: str) -> Any:
    from bulltask.spark import Pipeline  # noqa: PLC0415 - slow

    return Pipeline(spark, files + "/lake", url=url, trigger="2 seconds").run()


def idle(directory: str, queues: int, foreign: int, triggers: int) -> float:
    """Print Redis' CPU time for idle triggers; return the milliseconds of one."""
    with server(directory) as (url, client):
        fill(client, queues, 4)
        if foreign:
            client.execute_command("DEBUG", "POPULATE", foreign, "foreign", 10)
        query, pause = Query(url), threading.Event()
        query.batch()

        def cpu_ms() -> float:
            used: Any = client.info("cpu")
            return 1000 * (used["used_cpu_user"] + used["used_cpu_sys"])

        base_ms = cpu_ms()
        pause.wait(TRIGGER_S)
        base_ms = cpu_ms() - base_ms  # what Redis does without a client
        query.trigger()  # it makes the calls that have been saved
        start_ms = cpu_ms()
        for _ in range(triggers):
            begun = time.monotonic()
            query.trigger()
            pause.wait(max(0.0, TRIGGER_S - (time.monotonic() - begun)))
        each_ms = (cpu_ms() - start_ms) / triggers - base_ms
        print(
            f"idle, {queues} queues, {foreign:9,} foreign keys: {each_ms:8.2f} ms of Redis' CPU a trigger, "
            f"{each_ms / TRIGGER_S / 10:.3f} % of a core with a trigger of {TRIGGER_S} s",
            flush=True,
        )
        return each_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--queues", default="200,1000", help="numbers of queues (200,1000)")
    parser.add_argument("--events", type=int, default=20, help="events of each queue (20)")
    parser.add_argument("--foreign", type=int, default=1_000_000, help="foreign keys (1000000)")
    parser.add_argument("--triggers", type=int, default=5, help="idle triggers; 0: do not measure them (5)")
    parser.add_argument("--spark", action="store_true", help="run streaming queries, too")
    options = parser.parse_args()
    numbers = [int(number) for number in options.queues.split(",")]
    with tempfile.TemporaryDirectory(prefix="bulltask-bench-") as directory:
        for queues in numbers:
            one = without_spark(directory, 1, queues * options.events)
            many = without_spark(directory, queues, options.events)
            print(
                f"       {queues:,} queues take {many / one:.1f} times as long as one with as many events", flush=True
            )
        if options.spark:
            from bulltask.spark import session  # noqa: PLC0415 - slow

            spark = session("bench", "local[2]", conf={"spark.ui.showConsoleProgress": "false"})
            for name, start in {"empty foreachBatch": start_empty, "pipeline": start_pipeline}.items():
                for queues in numbers:
                    with_spark(directory, spark, queues, options.events, name, start)
            spark.stop()
        if options.triggers:
            alone = idle(directory, 4, 0, options.triggers)
            beside = idle(directory, 4, options.foreign, options.triggers)
            print(f"       beside {options.foreign:,} foreign keys: {beside / alone:.1f} times as much", flush=True)


if __name__ == "__main__":
    main()
