"""Measure the pipeline: ``benchmarks/pipeline.py [keep-up|executors|queues|open-jobs|look-ups|growth]``.

``keep-up`` (default)
    Does the pipeline keep up with the events of four queues? A separate process writes job events to Redis at a
    constant rate, by default 30,000 events/s (a quarter of that while the JVM warms up), to streams of 200,000 entries,
    like BullMQ's scripts: 2% of the jobs fail, and 4% are retried. ``Pipeline.run`` writes them to a lake at the same
    time, with its default trigger of 10 s. The program prints a line for each batch, and a summary: events/s, the lag
    at the end, lost events, and the pipeline's CPU time per 100,000 events, after a warm-up: in its first minutes, the
    JVM spends more on compiling its own code than on batches. The exit code is 1 if events were lost, or if rows and
    losses do not add up to all events.
``executors``
    The same with 1, 2 and 4 executors of one core each, side by side: processes of their own, as in a cluster; and
    with 4 at twice the rate, so that each has as many events as one of two. The driver's CPU time is that of its JVM
    and its Python processes.
``queues``
    How long does a batch take with 20 events of each of 1, 200 and 1,000 queues?
``open-jobs``
    How long does a batch of 20,000 events take beside 0, 100,000 and 1,000,000 open jobs?
``look-ups``
    How long does a query for one job by id, or for two columns, take in a queue of 50,000 jobs?
``growth``
    How long do a batch, ``build gold``, a job's history, a search and a report take in a lake of many days, compared
    with one of a day? :mod:`benchmarks.lake_growth` generates the lakes.

Needs Java, ``bulltask[spark,report]`` and ``redis-server``, which it starts and stops. The exit code is 1 if a goal is
missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

import redis
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import lake_growth
from benchmarks.processes import executors_of, tree_cpu_us
from bulltask.cli.pipeline import QUICK_DRIVER
from bulltask.lake.ledger import BatchRecord, last_record, records_after
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake
from bulltask.lake.tables import EVENTS
from bulltask.spark import Pipeline, session
from bulltask.testing.worker import RedisServer

QUEUES = ("mail", "images", "reports", "billing")
EVENTS_PER_JOB = 4.16
CONF = {"spark.ui.showConsoleProgress": "false", "spark.driver.memory": "2g", "spark.log.level": "ERROR"}
TICKS = 20  # per second
WARM_UP_BATCHES = 5
DRIVER_MS_BEFORE = 258  # before lakes were Delta tables: `executors` with two, on the machine of benchmarks/README.md

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

    def __init__(self, lake: Lake, client: redis.Redis, started: float) -> None:
        super().__init__(daemon=True)
        self.lake, self.client, self.started, self.ended = lake, client, started, threading.Event()
        self.batch_ended = threading.Event()
        self.read = self.number = 0

    def run(self) -> None:
        log, versions = Path(self.lake.location(self.lake.open_events), "_delta_log"), 0
        while not self.ended.wait(0.5):
            if not log.is_dir() or versions == (versions := len(list(log.iterdir()))):
                continue  # reading the log would take more CPU time than some batches
            for record in records_after(self.lake, self.number):
                events = events_of(record)
                self.read += events
                self.number = record.number
                lag = added(self.client) - self.read - sum(record.lost.values())
                steps = " ".join(f"{name} {ms}" for name, ms in record.steps_ms.items())
                print(
                    f"{time.monotonic() - self.started:6.1f} s  batch {record.number:3}  {events:8,} events  "
                    f"{sum(record.steps_ms.values()):6} ms ({steps})  lag {lag:8,}  open {record.open_job_events:,}",
                    flush=True,
                )
            self.batch_ended.set()

    def wait_for_batch(self) -> None:
        """Wait until the current batch, or the next one, has ended, for at most a minute."""
        self.batch_ended.clear()
        self.batch_ended.wait(60)


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
    driver_us: int


@dataclass
class KeptUp:
    """How the pipeline kept up between two moments, and the rows, losses and events at the end."""

    start: Moment
    end: Moment
    rows: int
    lost: int
    events: int

    @property
    def read(self) -> int:
        """The events that were read between the two moments."""
        return self.end.read - self.start.read

    @property
    def seconds(self) -> float:
        """How long that took."""
        return self.end.at - self.start.at

    @property
    def missed(self) -> int:
        """1 if events were lost, or neither in the lake nor counted as lost; otherwise 0."""
        return int(self.lost > 0 or self.rows + self.lost != self.events)

    @property
    def cpu_ms(self) -> int:
        """CPU time per 100,000 events that were read."""
        return round(100 * (self.end.cpu_us - self.start.cpu_us) / max(self.read, 1))

    @property
    def driver_ms(self) -> int:
        """CPU time of the driver per 100,000 events that were read."""
        return round(100 * (self.end.driver_us - self.start.driver_us) / max(self.read, 1))


def keep_up(options: argparse.Namespace, spark: SparkSession, directory: Path) -> int:
    """Measure whether the pipeline keeps up with four queues; return the exit code."""
    return show(options, measure_keeping_up(options, spark, directory))


def executors(options: argparse.Namespace) -> int:
    """Measure 1, 2 and 4 executors, and 4 at twice the rate; return the exit code."""
    busier = argparse.Namespace(**vars(options) | {"rate": 2 * options.rate, "max_events": 2 * options.max_events})
    loads = ((1, options), (2, options), (4, options), (4, busier))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        results = [processes.submit(in_new_jvm, load, f"local-cluster[{n},1,1024]").result() for n, load in loads]
    print(f"\n{'executors of one core':32}" + "".join(f"{number:10}" for number, _ in loads))
    for name, value in (
        ("written, events/s", lambda it: f"{(it.end.added - it.start.added) / it.seconds:10,.0f}"),
        ("read, events/s", lambda it: f"{it.read / it.seconds:10,.0f}"),
        ("lag at the end, events", lambda it: f"{it.end.added - it.end.read:10,}"),
        ("CPU ms per 100,000 events", lambda it: f"{it.cpu_ms:10,}"),
        ("… of the driver", lambda it: f"{it.driver_ms:10,}"),
        ("lost", lambda it: f"{it.lost:10,}"),
    ):
        print(f"{name:32}" + "".join(map(value, results)))
    _, two, four, four_busier = (it.driver_ms for it in results)
    name = "CPU time of the driver for 100,000 events"
    goal(f"{name}, 4 executors at twice the rate", four_busier, None)
    return (
        max(it.missed for it in results)
        | goal(f"{name}, 2 executors", two, DRIVER_MS_BEFORE // 2)
        | goal(f"{name}, 4 executors", four, two - 1)
    )


def in_new_jvm(options: argparse.Namespace, master: str) -> KeptUp:
    """Measure in a process that has not started a JVM yet."""
    print(f"\n{master}, {options.rate:,} events/s", flush=True)
    with new_session(master) as spark, tempfile.TemporaryDirectory(prefix="bulltask-bench-") as directory:
        return measure_keeping_up(options, spark, Path(directory))


def measure_keeping_up(options: argparse.Namespace, spark: SparkSession, directory: Path) -> KeptUp:
    """Run the pipeline while another process writes events."""
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
        pipeline = Pipeline(spark, directory / "lake", url=server.url, trigger=options.trigger)
        query = pipeline.run()
        watch = Watch(Lake(pipeline.lake.root), client, time.monotonic())
        watch.start()

        def now() -> Moment:
            others = sum(tree_cpu_us(pid) for pid in (server.pid, generator.pid) if pid)
            cpu_us = tree_cpu_us(os.getpid()) - others
            driver_us = cpu_us - sum(map(tree_cpu_us, executors_of(os.getpid())))
            return Moment(time.monotonic(), watch.read, added(client), cpu_us, driver_us)

        query.awaitTermination(options.warm_up)
        while query.isActive and watch.number < WARM_UP_BATCHES:  # on a busy machine, the first ones take a minute
            query.awaitTermination(1)
        is_warm.set()
        watch.wait_for_batch()
        start = now()
        query.awaitTermination(options.seconds)
        watch.wait_for_batch()
        end = now()
        stop.set()
        generator.join()
        catch_up(watch, client, query)
        query.stop()
        watch.ended.set()
        pipeline.run(available_now=True).awaitTermination()
        reader = TableReader(pipeline.lake)
        rows = reader.count(EVENTS, reader.days(EVENTS))
        head = last_record(pipeline.lake)
        lost = 0 if head is None else sum(head.lost.values())
        return KeptUp(start, end, rows, lost, added(client))


def show(options: argparse.Namespace, kept: KeptUp) -> int:
    """Print the summary; return the exit code."""
    start, end, seconds = kept.start, kept.end, kept.seconds
    cores = (end.cpu_us - start.cpu_us) / 1e6 / seconds
    is_complete = kept.rows + kept.lost == kept.events
    print(f"\nwritten   {(end.added - start.added) / seconds:10,.0f} events/s for {seconds:.0f} s", end="")
    print(f", 4 queues, streams of {options.max_events:,}")
    print(f"read      {kept.read / seconds:10,.0f} events/s")
    print(f"lag       {end.added - end.read:10,} events at the end, {start.added - start.read:,} at the beginning")
    print(f"CPU       {kept.cpu_ms:10,} ms per 100,000 events; {cores:.2f} cores")
    print(f"lost      {kept.lost:10,}")
    print(f"in bronze {kept.rows:10,} rows; with the lost events, {'all' if is_complete else 'NOT ALL'}", end="")
    print(f" of {kept.events:,}")
    return (
        kept.missed
        | goal("CPU time for 100,000 events", kept.cpu_ms, 1_200)
        | goal(
            "age of the oldest event that is not in the lake after the last batch",
            round(1000 * (end.added - end.read) / options.rate),
            5_000,
        )
    )


LIFECYCLES = """
-- KEYS[1] events, KEYS[2] meta; ARGV: first new job, last new job + 1, whether they complete (1 or 0)
redis.call('HSET', KEYS[2], 'opts.maxLenEvents', 10000000)
for id = tonumber(ARGV[1]), ARGV[2] - 1 do
  redis.call('XADD', KEYS[1], '*', 'event', 'added', 'jobId', id, 'name', 'send_mail')
  redis.call('XADD', KEYS[1], '*', 'event', 'waiting', 'jobId', id)
  if ARGV[3] == '1' then
    redis.call('XADD', KEYS[1], '*', 'event', 'active', 'jobId', id, 'prev', 'waiting')
    redis.call('XADD', KEYS[1], '*', 'event', 'completed', 'jobId', id, 'returnvalue', 'null', 'prev', 'active')
  end
end
"""
_JOBS_PER_CALL = 5_000


@dataclass
class Queues:
    """Queues on a server, and a pipeline that reads them."""

    url: str
    client: redis.Redis
    pipeline: Pipeline
    jobs: int = 0
    retried: Sequence[str] = ()

    def add(self, queues: int, jobs: int, *, complete: bool = True) -> None:
        """Write the events of new jobs to the first of the queues: two, or four if the jobs complete."""
        script = self.client.register_script(LIFECYCLES)
        for start in range(self.jobs + 1, self.jobs + jobs + 1, _JOBS_PER_CALL):
            limit = min(start + _JOBS_PER_CALL, self.jobs + jobs + 1)
            with self.client.pipeline(transaction=False) as calls:
                for number in range(queues):
                    keys = [f"bull:{{q{number:04}}}:events", f"bull:{{q{number:04}}}:meta"]
                    script(keys=keys, args=[start, limit, int(complete)], client=calls)
                calls.execute()
        for job_id in self.retried:
            for event, before in (("waiting", "failed"), ("active", "waiting"), ("completed", "active")):
                fields = {"event": event, "jobId": job_id, "prev": before}
                self.client.xadd(f"bull:{{{lake_growth.QUEUE}}}:events", fields)  # type: ignore[arg-type]
        self.jobs += jobs

    def batch_ms(self) -> int:
        """Write all events to the lake; return how long the batches took, without the start of the query."""
        query = self.pipeline.run(available_now=True)
        query.awaitTermination()
        return sum(progress.durationMs["triggerExecution"] for progress in query.recentProgress)

    def typical_ms(self, queues: int, jobs: int, rounds: int = 5) -> int:
        """Return how long a batch with events of some jobs of each queue usually takes, after two to warm up."""
        times = []
        for _ in range(rounds + 2):
            self.add(queues, jobs)
            times.append(self.batch_ms())
        return round(median(times[2:]))


@contextmanager
def queues_of_a_server(spark: SparkSession, directory: Path, lake: Path | None = None) -> Iterator[Queues]:
    """Run a server without queues."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        RedisServer.start(directory / "redis", flavor="redis") as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        yield Queues(server.url, client, Pipeline(spark, lake or directory / "lake", url=server.url))


def many_queues(_: argparse.Namespace, spark: SparkSession, directory: Path) -> int:
    """Measure batches of 20 events of each of many queues; return the exit code."""
    missed = 0
    for queues, goal_ms in ((1, None), (200, 3_000), (1_000, 8_000)):
        with queues_of_a_server(spark, directory / f"{queues}") as measured:
            missed |= goal(f"a batch of {queues:,} queues x 20 events", measured.typical_ms(queues, 5), goal_ms)
    return missed


def open_jobs(options: argparse.Namespace, spark: SparkSession, directory: Path) -> int:
    """Measure batches beside many open jobs; return the exit code."""
    missed, first = 0, None
    for number in (0, 100_000, 1_000_000):
        if number > options.max_open_jobs:
            continue
        with queues_of_a_server(spark, directory / f"{number}") as measured:
            measured.add(1, number, complete=False)
            measured.batch_ms()
            typical = measured.typical_ms(1, 5_000)
        first = first or typical
        missed |= goal(f"a batch of 20,000 events beside {number:,} open jobs", typical, round(1.5 * first))
    return missed


JOBS = """
-- KEYS[1] completed, KEYS[2] the prefix of jobs; ARGV[1] the number of jobs
for id = 1, tonumber(ARGV[1]) do
  redis.call('HSET', KEYS[2] .. id, 'name', 'send_mail', 'data', '{"to":"' .. string.rep('x', 1000) .. '"}',
    'opts', '{}', 'timestamp', 1760000000000 + id, 'finishedOn', 1760000001000 + id, 'returnvalue', 'null', 'atm', 1)
  redis.call('ZADD', KEYS[1], 1760000001000 + id, id)
end
"""


def look_ups(_: argparse.Namespace, spark: SparkSession, directory: Path) -> int:
    """Measure queries on the jobs in a queue; return the exit code."""
    jobs, queue = 50_000, lake_growth.QUEUE
    with queues_of_a_server(spark, directory) as measured:
        measured.client.register_script(JOBS)(keys=[f"bull:{{{queue}}}:completed", f"bull:{{{queue}}}:"], args=[jobs])

        def typical_ms(**options: str) -> int:
            frame = spark.read.format("bulltask").options(url=measured.url, queue=queue, **options).load()
            times = [
                lake_growth.measured_ms(lambda: frame.write.format("noop").mode("append").save()) for _ in range(16)
            ]
            return round(median(times[8:]))  # the JVM compiles the others' code

        every = typical_ms()
        goal(f"all of {jobs:,} jobs", every, None)
        return goal("two columns of them", typical_ms(columns="id,name"), every // 2) | goal(
            "one of them by its id", typical_ms(id=str(jobs // 2)), every // 10
        )


def growth(options: argparse.Namespace, spark: SparkSession, directory: Path) -> int:
    """Measure lakes of one and of many days, with increasing and with random ids; return the exit code."""
    missed = 0
    for random_ids in (False, True):
        times: dict[str, list[int]] = {}
        for days in (1, options.days):
            root = directory / f"{days} days"
            started = time.monotonic()
            job_id = lake_growth.write_lake(root, days, options.jobs_per_day, random_ids=random_ids)
            lake_growth.build_all_gold(spark, root, days)
            print(f"wrote a lake of {days} days x {options.jobs_per_day:,} jobs in {time.monotonic() - started:.0f} s")
            for name, measure in lake_growth.reads(spark, root, job_id).items():
                rounds = [lake_growth.measured_ms(measure) for _ in range(options.rounds)]
                times.setdefault(name, []).append(round(median(rounds[1:])))
                print(f"{days:3} days  {name:45} {rounds}", flush=True)
            with queues_of_a_server(spark, directory / f"server of {days}", root) as measured:
                times.setdefault("a batch of 20,000 events", []).append(measured.typical_ms(1, 5_000))
                measured.retried = [job_id]
                times.setdefault("the same with a retried job of the lake", []).append(measured.typical_ms(1, 5_000))
            shutil.rmtree(root)
        for name, (one, many) in times.items():
            text = f"{name}, {'random' if random_ids else 'increasing'} ids, {options.days} days"
            missed |= goal(text, many, max(round(1.5 * one), 100))
    return missed


def goal(name: str, ms: int, goal_ms: int | None) -> int:
    """Print a result beside its goal; return 1 if it is missed."""
    missed = goal_ms is not None and ms > goal_ms
    aim = "" if goal_ms is None else f"  goal {goal_ms:7,} ms  {'MISSED' if missed else 'met'}"
    print(f"{name:75} {ms:7,} ms{aim}", flush=True)
    return int(missed)


MEASUREMENTS = {
    "keep-up": keep_up,
    "queues": many_queues,
    "open-jobs": open_jobs,
    "look-ups": look_ups,
    "growth": growth,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measurement", nargs="?", choices=[*MEASUREMENTS, "executors"], default="keep-up")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the measurement (60)")
    parser.add_argument("--warm-up", type=float, default=240, help="seconds of JIT warm-up (240)")
    parser.add_argument("--rate", type=int, default=30_000, help="events/s (30000)")
    parser.add_argument("--max-events", type=int, default=200_000, help="length of each queue's stream (200000)")
    parser.add_argument("--trigger", default="10 seconds", help="interval between batches (10 seconds)")
    parser.add_argument("--max-open-jobs", type=int, default=1_000_000, help="for open-jobs (1000000)")
    parser.add_argument("--days", type=int, default=90, help="for growth (90)")
    parser.add_argument("--jobs-per-day", type=int, default=1_000_000, help="for growth (1000000)")
    parser.add_argument("--rounds", type=int, default=4, help="for growth: the first one is to warm up (4)")
    parser.add_argument("--master", default="local[2]", help="Spark's master (local[2])")
    options = parser.parse_args()
    if options.measurement == "executors":
        return executors(options)
    builds = options.measurement == "growth"
    with (
        new_session(options.master, builds=builds) as spark,
        tempfile.TemporaryDirectory(prefix="bulltask-bench-") as directory,
    ):
        return MEASUREMENTS[options.measurement](options, spark, Path(directory))


@contextmanager
def new_session(master: str, *, builds: bool = False) -> Iterator[SparkSession]:
    """Run a session, like that of ``bulltask pipeline run``, or of ``build``."""
    spark = session("bench", master, conf=CONF if builds else CONF | QUICK_DRIVER)
    try:
        yield spark
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
