"""Measure whether the pipeline keeps up with the events of four queues: ``benchmarks/pipeline.py [--seconds 60]``.

A separate process writes job events to Redis at a constant rate, by default 20,000 events/s (a quarter of that while
the JVM warms up), to streams of 100,000 entries, like BullMQ's scripts: 2% of the jobs fail, and 4% are retried.
``Pipeline.run`` writes them to a lake at the same time. The program prints a line for each batch, and a
summary: events/s, the lag at the end, lost events, and the pipeline's CPU time per 100,000 events.

Needs Java, ``bulltask[spark]`` and ``redis-server``, which it starts and stops. The exit code is 1 if events were
lost, or if rows and losses do not add up to all events.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import pyarrow.dataset as ds
import redis
from pyspark.sql.streaming.query import StreamingQuery

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.processes import tree_cpu_us
from bulltask.lake.storage import BatchRecord, Ledger
from bulltask.lake.tables import EVENTS
from bulltask.spark import Pipeline, session
from bulltask.testing.worker import RedisServer

QUEUES = ("mail", "images", "reports", "billing")
EVENTS_PER_JOB = 4.16
CONF = {"spark.ui.showConsoleProgress": "false", "spark.driver.memory": "2g", "spark.log.level": "ERROR"}
TICKS = 20  # per second

WRITE_EVENTS = """
-- KEYS[1] events, KEYS[2] meta; ARGV: first new job, last new job + 1, stream length, new jobs per tick
local add = function(...) redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', ...) end
local first, limit, n = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
redis.call('HSET', KEYS[2], 'opts.maxLenEvents', ARGV[3])
local names = {'send_mail', 'resize_image', 'charge_card', 'report_pdf'}
for id = first, limit - 1 do
  add('event', 'added', 'jobId', id, 'name', names[id % 4 + 1])
  add('event', 'waiting', 'jobId', id)
end
for id = math.max(1, first - n), limit - n - 1 do
  add('event', 'active', 'jobId', id, 'prev', 'waiting')
end
for id = math.max(1, first - 2 * n), limit - 2 * n - 1 do
  if id % 25 == 1 then
    add('event', 'delayed', 'jobId', id, 'delay', '1760000000000')
    add('event', 'waiting', 'jobId', id, 'prev', 'delayed')
    add('event', 'active', 'jobId', id, 'prev', 'waiting')
  end
  if id % 50 == 0 then
    local reason = 'TimeoutError: no answer from 10.0.0.' .. id % 256
    add('event', 'failed', 'jobId', id, 'failedReason', reason, 'prev', 'active')
    add('event', 'retries-exhausted', 'jobId', id, 'attemptsMade', '3')
  else
    add('event', 'completed', 'jobId', id, 'returnvalue', '{"ok":true,"id":' .. id .. '}', 'prev', 'active')
  end
end
"""


def generate(url: str, rate: int, max_events: int, is_warm: Event, stop: Event) -> None:
    """Write events until ``stop`` is set; at a quarter of the rate until ``is_warm`` is set."""
    full = max(1, round(rate / EVENTS_PER_JOB / len(QUEUES) / TICKS))
    per_tick = max(1, full // 4)
    with redis.Redis.from_url(url) as client:
        write_events = client.register_script(WRITE_EVENTS)
        at, first = time.monotonic(), 1
        while not stop.is_set():
            for queue in QUEUES:
                keys = [f"bull:{{{queue}}}:events", f"bull:{{{queue}}}:meta"]
                write_events(keys=keys, args=[first, first + per_tick, max_events, per_tick])
            first += per_tick
            if is_warm.is_set() and per_tick < full:
                per_tick, first = full, first + full  # the script also continues the jobs of the two previous ticks
            at = max(at + 1 / TICKS, time.monotonic() - 1)
            stop.wait(max(0.0, at - time.monotonic()))


def added(client: redis.Redis) -> int:
    """Return the number of events that were ever written."""
    return sum(client.xinfo_stream(f"bull:{{{queue}}}:events")["entries-added"] for queue in QUEUES)


def events_of(record: BatchRecord) -> int:
    return sum(queue.events for queue in record.queues.values())


class Watch(threading.Thread):
    """A thread that prints each committed batch and the lag."""

    def __init__(self, ledger: Ledger, client: redis.Redis, started: float) -> None:
        super().__init__(daemon=True)
        self.ledger, self.client, self.started, self.ended = ledger, client, started, threading.Event()
        self.read = 0

    def run(self) -> None:
        number = 0
        while not self.ended.wait(0.05):
            head = self.ledger.head()
            if head is not None and head.number > number:
                number, events = head.number, events_of(head)
                self.read += events
                lag = added(self.client) - self.read - sum(head.lost.values())
                steps = " ".join(f"{name} {ms}" for name, ms in head.steps_ms.items())
                print(
                    f"{time.monotonic() - self.started:6.1f} s  batch {number:3}  {events:8,} events  "
                    f"{sum(head.steps_ms.values()):6} ms ({steps})  lag {lag:8,}  open {head.open_job_events:,}",
                    flush=True,
                )


def catch_up(watch: Watch, client: redis.Redis, query: StreamingQuery) -> None:
    """Wait until all events are read, with a timeout for lost events."""
    deadline = time.monotonic() + 120
    while watch.read < added(client) and query.isActive and time.monotonic() < deadline:
        watch.ended.wait(0.1)


@dataclass
class Moment:
    """Counters at one moment."""

    at: float
    read: int
    added: int
    cpu_us: int


def measure(options: argparse.Namespace, directory: Path) -> int:
    """Run the measurement; return the exit code."""
    spark = session("bench", "local[2]", conf=CONF)
    stop, is_warm = (multiprocessing.get_context("spawn").Event() for _ in range(2))
    with (
        RedisServer.start(directory / "redis", flavor="redis") as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        arguments = (server.url, options.rate, options.max_events, is_warm, stop)
        generator = multiprocessing.get_context("spawn").Process(target=generate, args=arguments, daemon=True)
        generator.start()
        while any(not client.exists(f"bull:{{{queue}}}:events") for queue in QUEUES):
            stop.wait(0.05)
        pipeline = Pipeline(
            spark,
            directory / "lake",
            url=server.url,
            trigger=options.trigger,
            max_events_per_trigger=options.max_events_per_trigger,
        )
        ledger, query = Ledger(pipeline.layout), pipeline.run()
        watch = Watch(ledger, client, time.monotonic())
        watch.start()

        def now() -> Moment:
            others = sum(tree_cpu_us(pid) for pid in (server.pid, generator.pid) if pid)
            return Moment(time.monotonic(), watch.read, added(client), tree_cpu_us(os.getpid()) - others)

        query.awaitTermination(options.warm_up)
        is_warm.set()
        start = now()
        query.awaitTermination(options.seconds)
        end = now()
        stop.set()
        generator.join()
        catch_up(watch, client, query)
        query.stop()
        watch.ended.set()
        pipeline.run(available_now=True).awaitTermination()
        rows = ds.dataset(pipeline.layout.table(EVENTS), format="parquet").count_rows()
        head = ledger.head()
        lost = 0 if head is None else sum(head.lost.values())
        spark.stop()
        return show(options, start, end, (rows, lost, added(client)))


def show(options: argparse.Namespace, start: Moment, end: Moment, counts: tuple[int, int, int]) -> int:
    """Print the summary; return the exit code."""
    rows, lost, total = counts
    seconds, read, cpu_s = end.at - start.at, end.read - start.read, (end.cpu_us - start.cpu_us) / 1e6
    is_complete = rows + lost == total
    print(f"\nwritten   {(end.added - start.added) / seconds:10,.0f} events/s for {seconds:.0f} s", end="")
    print(f", 4 queues, streams of {options.max_events:,}")
    print(f"read      {read / seconds:10,.0f} events/s")
    print(f"lag       {end.added - end.read:10,} events at the end, {start.added - start.read:,} at the beginning")
    print(f"CPU       {cpu_s / max(read, 1) * 1e5:10.2f} s per 100,000 events; {cpu_s / seconds:.2f} cores")
    print(f"lost      {lost:10,}")
    print(f"in bronze {rows:10,} rows; with the lost events, {'all' if is_complete else 'NOT ALL'} of {total:,}")
    return int(lost > 0 or not is_complete)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="duration of the measurement (60)")
    parser.add_argument("--warm-up", type=float, default=40, help="seconds of JIT warm-up (40)")
    parser.add_argument("--rate", type=int, default=20_000, help="events/s (20000)")
    parser.add_argument("--max-events", type=int, default=100_000, help="length of each queue's stream (100000)")
    parser.add_argument(
        "--max-events-per-trigger", type=int, default=200_000, help="maximum number of events in a batch (200000)"
    )
    parser.add_argument("--trigger", default="5 seconds", help="interval between batches (5 seconds)")
    with tempfile.TemporaryDirectory(prefix="bulltask-bench-") as directory:
        return measure(parser.parse_args(), Path(directory))


if __name__ == "__main__":
    sys.exit(main())
