"""Whether the lake keeps up with the events of four queues: ``python benchmarks/pipeline.py [--seconds 60]``.

A process of its own lets Redis write histories of jobs at a steady rate, 20,000 events/s unless told otherwise (a
quarter of it while Java compiles), into rings of 100,000 entries, as BullMQ's scripts write them: 2 in 100 jobs fail,
4 in 100 are tried again. Meanwhile ``Pipeline.run`` feeds a lake. It prints a line for each batch and then what counts:
events/s, how far the lake is behind at the end, what was lost, and the CPU time of the pipeline for 100,000 events.

Needs Java, ``bulltask[spark]`` and a ``redis-server`` in the path, which it starts and ends. Exit code 1: something
was lost, or rows and losses are not what was added.
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
from bulltask.lake.ledger import BatchRecord, Ledger
from bulltask.lake.tables import EVENTS
from bulltask.spark import Pipeline, session
from bulltask.testing.server import RedisServer

QUEUES = ("mail", "images", "reports", "billing")
PER_JOB = 4.16
CONF = {"spark.ui.showConsoleProgress": "false", "spark.driver.memory": "2g", "spark.log.level": "ERROR"}
TICKS = 20  # in a second

LIVES = """
-- KEYS[1] events, KEYS[2] meta; ARGV: first new job, one behind the last, ring, how many ids a tick has
local add = function(...) redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', ...) end
local first, behind, n = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
redis.call('HSET', KEYS[2], 'opts.maxLenEvents', ARGV[3])
local names = {'send_mail', 'resize_image', 'charge_card', 'report_pdf'}
for id = first, behind - 1 do
  add('event', 'added', 'jobId', id, 'name', names[id % 4 + 1])
  add('event', 'waiting', 'jobId', id)
end
for id = math.max(1, first - n), behind - n - 1 do
  add('event', 'active', 'jobId', id, 'prev', 'waiting')
end
for id = math.max(1, first - 2 * n), behind - 2 * n - 1 do
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


def generate(url: str, rate: int, ring: int, is_warm: Event, stop: Event) -> None:
    """Write events until told to stop, a quarter of them until Java is warm."""
    most = max(1, round(rate / PER_JOB / len(QUEUES) / TICKS))
    each = max(1, most // 4)
    with redis.Redis.from_url(url) as client:
        lives = client.register_script(LIVES)
        at, place = time.monotonic(), 1
        while not stop.is_set():
            for queue in QUEUES:
                keys = [f"bull:{{{queue}}}:events", f"bull:{{{queue}}}:meta"]
                lives(keys=keys, args=[place, place + each, ring, each])
            place += each
            if is_warm.is_set() and each < most:
                each, place = most, place + most  # what follows looks back by this many jobs
            at = max(at + 1 / TICKS, time.monotonic() - 1)
            stop.wait(max(0.0, at - time.monotonic()))


def added(client: redis.Redis) -> int:
    """How many events were ever written."""
    return sum(client.xinfo_stream(f"bull:{{{queue}}}:events")["entries-added"] for queue in QUEUES)


def events_of(record: BatchRecord) -> int:
    return sum(queue.events for queue in record.queues.values())


class Watch(threading.Thread):
    """Prints each batch as it is done, and what was added but not read by then."""

    def __init__(self, ledger: Ledger, client: redis.Redis, began: float) -> None:
        super().__init__(daemon=True)
        self.ledger, self.client, self.began, self.ended = ledger, client, began, threading.Event()
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
                    f"{time.monotonic() - self.began:6.1f} s  batch {number:3}  {events:8,} events  "
                    f"{sum(head.steps_ms.values()):6} ms ({steps})  behind {lag:8,}  open {head.open_job_events:,}",
                    flush=True,
                )


def catch_up(watch: Watch, client: redis.Redis, query: StreamingQuery) -> None:
    """Wait until all is read; not for long, as what was lost never is."""
    deadline = time.monotonic() + 120
    while watch.read < added(client) and query.isActive and time.monotonic() < deadline:
        watch.ended.wait(0.1)


@dataclass
class Moment:
    """What was done at one time."""

    at: float
    read: int
    added: int
    cpu_us: int


def measure(options: argparse.Namespace, place: Path) -> int:
    """Run it all; return the exit code."""
    spark = session("bench", "local[2]", conf=CONF)
    stop, is_warm = (multiprocessing.get_context("spawn").Event() for _ in range(2))
    with (
        RedisServer.start(place / "redis", flavour="redis") as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        arguments = (server.url, options.rate, options.ring, is_warm, stop)
        maker = multiprocessing.get_context("spawn").Process(target=generate, args=arguments, daemon=True)
        maker.start()
        while any(not client.exists(f"bull:{{{queue}}}:events") for queue in QUEUES):
            stop.wait(0.05)
        pipeline = Pipeline(
            spark, place / "lake", url=server.url, trigger=options.trigger, max_events_per_trigger=options.batch
        )
        ledger, query = Ledger(pipeline.layout), pipeline.run()
        watch = Watch(ledger, client, time.monotonic())
        watch.start()

        def now() -> Moment:
            others = sum(tree_cpu_us(pid) for pid in (server.pid, maker.pid) if pid)
            return Moment(time.monotonic(), watch.read, added(client), tree_cpu_us(os.getpid()) - others)

        query.awaitTermination(options.warm_up)
        is_warm.set()
        begun = now()
        query.awaitTermination(options.seconds)
        ended = now()
        stop.set()
        maker.join()
        catch_up(watch, client, query)
        query.stop()
        watch.ended.set()
        pipeline.run(available_now=True).awaitTermination()
        rows = ds.dataset(pipeline.layout.table(EVENTS), format="parquet").count_rows()
        head = ledger.head()
        lost = 0 if head is None else sum(head.lost.values())
        spark.stop()
        return show(options, begun, ended, (rows, lost, added(client)))


def show(options: argparse.Namespace, begun: Moment, ended: Moment, counts: tuple[int, int, int]) -> int:
    """Print what counts; return the exit code."""
    rows, lost, whole = counts
    seconds, read, cpu_s = ended.at - begun.at, ended.read - begun.read, (ended.cpu_us - begun.cpu_us) / 1e6
    is_whole = rows + lost == whole
    print(f"\nwritten   {(ended.added - begun.added) / seconds:10,.0f} events/s for {seconds:.0f} s", end="")
    print(f", 4 queues, rings of {options.ring:,}")
    print(f"read      {read / seconds:10,.0f} events/s")
    print(f"behind    {ended.added - ended.read:10,} events at the end, {begun.added - begun.read:,} at the beginning")
    print(f"CPU       {cpu_s / max(read, 1) * 1e5:10.2f} s for 100,000 events; {cpu_s / seconds:.2f} cores")
    print(f"lost      {lost:10,}")
    print(f"in bronze {rows:10,} rows; rows and lost are {'all' if is_whole else 'NOT ALL'} of {whole:,} added")
    return int(lost > 0 or not is_whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long to measure (60)")
    parser.add_argument("--warm-up", type=float, default=40, help="seconds before, while Java compiles (40)")
    parser.add_argument("--rate", type=int, default=20_000, help="events/s (20000)")
    parser.add_argument("--ring", type=int, default=100_000, help="entries of each queue's stream (100000)")
    parser.add_argument("--batch", type=int, default=200_000, help="events of a batch at the most (200000)")
    parser.add_argument("--trigger", default="5 seconds", help="how often a batch is made (5 seconds)")
    with tempfile.TemporaryDirectory(prefix="bulltask-bench-") as place:
        return measure(parser.parse_args(), Path(place))


if __name__ == "__main__":
    sys.exit(main())
