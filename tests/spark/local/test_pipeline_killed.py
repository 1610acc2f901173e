"""A driver that is killed at any moment leaves the same tables as one that is not interrupted.

Two drivers are killed, the first with its JVM; ``python -m tools spark-kills`` kills more.
``--log-cli-level=WARNING`` shows each interrupted step.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from bulltask.lake.ledger import BatchRecord, last_record
from bulltask.lake.reader import TableReader
from bulltask.lake.slo_config import Objective, SLOConfig
from bulltask.lake.storage import Lake
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, Table, find_tables
from bulltask.spark import Pipeline
from bulltask.spark.lake_tables import latest, read_table
from bulltask.spark.pipeline import PipelineOptions
from bulltask.testing.worker import wait_until
from tests.conftest import ServerFactory
from tests.spark.conftest import settings
from tests.support.attached_driver import gateway_variables, release
from tests.support.event_writing import write_events
from tests.support.job_histories import histories
from tests.support.lifecycle_oracle import LifecycleEvent
from tests.support.object_store import BUCKET, object_store
from tests.support.pipeline_kills import STEPS, interrupted_step, is_running, last_batch_of, planned_batch_of
from tests.support.processes import SESSION_VARIABLE
from tests.support.programs import Program, run_program
from tests.support.stored_batches import assert_has_sent, rows_as_text

KILLS = int(os.environ.get("BULLTASK_KILLS", "2"))

pytestmark = [pytest.mark.extended, pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(400 + 200 * KILLS)]

log = logging.getLogger(__name__)

MIDNIGHT_MS = 1_760_054_400_000
GOLD = find_tables(["gold"])
PRICES = {"q1": 0.12}
TERMS = SLOConfig([Objective("wait", threshold=1, target=0.9), Objective("total", threshold=60, target=0.5)], PRICES)
OPTIONS: PipelineOptions = {"max_events_per_trigger": 300, "open_job_timeout": 0.9}

SESSION = """
import json, os, sys
from datetime import date
from bulltask.lake.slo_config import SLOConfig
from bulltask.spark import Pipeline, session
from tests.support.attached_driver import attach
from tests.support.object_store import BUCKET, object_store
from tests.support.pipeline_kills import kill_before

if "PYSPARK_GATEWAY_PORT" in os.environ:
    attach()
root, conf, when = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
spark = session("killed", "local[2]", shuffle_partitions=2, conf=conf)
process = spark.sparkContext._gateway.proc
jvm = [process.pid] if process else []
if when:
    kill_before(*when, *jvm)
print(json.dumps(jvm), flush=True)
"""
STREAM = SESSION + """
Pipeline(spark, root, url=sys.argv[4], **json.loads(sys.argv[5])).run(available_now=True).awaitTermination()
print("done", flush=True)
"""  # fmt: skip
BUILD = SESSION + """
days, slo_config = [date.fromisoformat(day) for day in sys.argv[5:]], SLOConfig(price_per_hour=json.loads(sys.argv[4]))
Pipeline(spark, root).build("gold", days=days, slo_config=slo_config)
print("done", flush=True)
"""  # fmt: skip


@dataclass(frozen=True)
class KillPoint:
    """A moment at which a driver is killed.

    Attributes:
        pattern: An operation of the driver on the lake, before which `kill_before` kills it. Without a pattern, the
            other attributes define the moment.
        first, last: The range from which the number of the operation is drawn.
        batches: Wait until this number of further batches have finished; 0 waits until one is planned.
        seconds: The maximum random delay after that.
        step: The step of a batch to which the operation belongs.
    """

    pattern: str = ""
    first: int = 1
    last: int = 1
    batches: int = 0
    seconds: float = 0.0
    step: str = ""


KILL_POINTS = [
    KillPoint(seconds=0.3),  # Redis is being read
    KillPoint("begin commit bronze.events", 1, 2, step="read"),
    KillPoint("end commit bronze.events", 1, 2, step="fold"),
    KillPoint(r"(begin|end) write silver\.\w+", 1, 8, step="fold"),
    KillPoint("begin commit silver.attempts", 1, 2, step="fold"),
    KillPoint("end commit silver.attempts", 1, 2, step="silver"),
    KillPoint("begin commit _pipeline.open_jobs", 1, 2, step="silver"),
    KillPoint("end commit _pipeline.open_jobs", 1, 2, step="commit"),
    KillPoint(batches=1, seconds=0.2),
    KillPoint(seconds=3),
]


@pytest.fixture
def without_session_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not count a JVM's Python processes as left over: they exit shortly after it."""
    monkeypatch.delenv(SESSION_VARIABLE)


def read_output(driver: Program) -> str:
    """Return the next line that the program prints; skip the JVM's log."""
    while line := driver.read_line():
        if line == "done" or re.fullmatch(r"\[\d*\]", line):
            return line
    return ""


def run_and_kill(
    point: KillPoint,
    rng: random.Random,
    lake: Lake,
    checkpoint: Path,
    program: str,
    *arguments: str,
    attached_to: SparkSession | None = None,
) -> None:
    """Run a driver and kill it at the given point.

    It has its own JVM, which dies with it or a little later, unless it is attached to a session's JVM.
    """
    before = number_of(lake)

    def is_reached() -> bool:
        if point.batches:
            return number_of(lake) >= before + point.batches
        return planned_batch_of(checkpoint) > last_batch_of(checkpoint / "commits")

    when = [point.pattern, rng.randint(point.first, point.last)] if point.pattern else None
    conf = json.dumps(settings(checkpoint.parent))
    variables = {} if attached_to is None else gateway_variables(attached_to)
    with run_program(program, lake.root, conf, json.dumps(when), *arguments, **variables) as driver:
        jvms = json.loads(read_output(driver))
        if point.pattern:
            assert driver.process.wait(300) == -signal.SIGKILL, f"the driver did not reach {point}"
        else:
            wait_until(is_reached, 300.0, f"{point}")
            threading.Event().wait(rng.uniform(0, point.seconds))
            if rng.random() < 0.5:
                for pid in jvms:
                    os.kill(pid, signal.SIGKILL)
            driver.send(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, jvms)), 100.0, "the end of the JVM")
    if attached_to is not None:
        release(attached_to)


def number_of(lake: Lake) -> int:
    """Return the number of the last batch."""
    return (last_record(lake) or BatchRecord()).number


def kill_points(rng: random.Random) -> Iterator[KillPoint]:
    """Yield all kill points in random order, repeatedly."""
    while True:
        yield from rng.sample(KILL_POINTS, len(KILL_POINTS))


def arrow_ids(lake: Lake) -> Counter[tuple[str, str]]:
    rows = TableReader(lake).rows(EVENTS, columns=["queue", "event_id"])
    return Counter((row["queue"], row["event_id"]) for row in rows)


def rows(spark: SparkSession, lake: Lake, table: Table) -> set[tuple[object, ...]]:
    """Return the latest row of each key."""
    current = latest(read_table(spark, lake, table), table).toArrow()
    return set(zip(*(column.to_pylist() for column in current.columns), strict=True))


def gold_days(lake: Lake) -> dict[tuple[str, str], list[str]]:
    """Read the rows of each gold table and day with Arrow, and sort them."""
    days: dict[tuple[str, str], list[str]] = {}
    for table in GOLD:
        for row in TableReader(lake).rows(table):
            days.setdefault((table.name, row["dt"]), []).append(repr(row))
    return {key: sorted(rows) for key, rows in days.items()}


def history(seed: int, jobs: int) -> list[LifecycleEvent]:
    """Generate events of jobs in three queues, before and after midnight."""
    events = [replace(event, queue=f"q{n}") for n in range(3) for event in histories(3 * seed + n, jobs)]
    middle_ms = sorted(event.event_ms for event in events)[len(events) // 2]
    return [replace(event, event_ms=event.event_ms + MIDNIGHT_MS - middle_ms) for event in events]


def run_pipeline(spark: SparkSession, lake: Lake, url: str, options: PipelineOptions = OPTIONS) -> None:
    """Write all of bronze and silver.

    Use the batch limits of `OPTIONS`: a job that times out in one batch and continues in a later one has two rows.
    """
    all_options: PipelineOptions = {**options, "url": url}
    Pipeline(spark, lake, **all_options).run(available_now=True).awaitTermination()


def write_undisturbed(spark: SparkSession, root: Path, url: str, slo_config: SLOConfig) -> Lake:
    """Write bronze, silver and gold without interruption."""
    run_pipeline(spark, Lake(root), url)
    return build_gold(spark, Lake(root), slo_config)


def build_gold(spark: SparkSession, lake: Lake, slo_config: SLOConfig) -> Lake:
    Pipeline(spark, lake).build("gold", days=TableReader(lake).days(EVENTS), slo_config=slo_config)
    return lake


@pytest.fixture(params=["directory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Lake, PipelineOptions]]:
    """A lake, and the options of a pipeline that writes to it."""
    if request.param == "directory":
        yield Lake(tmp_path / "lake"), OPTIONS
        return
    with object_store() as settings_of_store:
        options: PipelineOptions = {**OPTIONS, "storage_options": settings_of_store}
        yield Lake(f"s3://{BUCKET}/lake", settings_of_store), {**options, "checkpoint": str(tmp_path / "checkpoint")}


@pytest.mark.usefixtures("without_session_variable")
def test_a_killed_driver_leaves_the_same_tables_as_an_uninterrupted_one(
    spark: SparkSession,
    broker_url: str,
    redis_client: redis.Redis,
    tmp_path: Path,
    rng: random.Random,
    storage: tuple[Lake, PipelineOptions],
) -> None:
    events = history(rng.randrange(10**6), 24 + 8 * KILLS)
    write_events(redis_client, events)
    (lake, options), kills = storage, Counter[str]()
    checkpoint = Pipeline(spark, lake, **options).checkpoint
    arguments = (broker_url, json.dumps(options))
    for number, point in zip(range(KILLS), kill_points(rng), strict=False):
        run_and_kill(point, rng, lake, checkpoint, STREAM, *arguments, attached_to=spark if number else None)
        step, found = interrupted_step(lake, checkpoint)
        assert point.step in {"", step}, found
        log.warning("kill %d of %d: %s; its lake: %s", number + 1, KILLS, step, found)
        kills[step] += 1
    log.warning("kills by step: %s", ", ".join(f"{step} {kills[step]}" for step in STEPS))
    run_pipeline(spark, lake, broker_url, options)
    undisturbed = write_undisturbed(spark, tmp_path / "undisturbed", broker_url, TERMS)
    assert_has_sent(lake, events)
    assert read_table(spark, lake, EVENTS).count() == len(events)
    build_gold(spark, lake, TERMS)
    for table in (EVENTS, ATTEMPTS, JOBS, *GOLD):
        rows = rows_as_text(lake, table)
        assert rows == rows_as_text(undisturbed, table), table.full_name
        assert rows, table.full_name
    log.warning("equal: %d events", len(events))


@pytest.mark.usefixtures("without_session_variable")
def test_a_killed_driver_of_one_broker_does_not_disturb_the_pipeline_of_another(
    spark: SparkSession,
    broker_url: str,
    redis_client: redis.Redis,
    tmp_path: Path,
    rng: random.Random,
    server_factory: ServerFactory,
) -> None:
    limits: PipelineOptions = {"max_events_per_trigger": 300}
    eu, us = (Lake(tmp_path / "lake", broker=name) for name in ("eu", "us"))
    events, first, second = (history(number + rng.randrange(10**5) * 9, 24) for number in (0, 3, 6))
    # No job is in two batches of us: one that is retried in a later batch has a row that the lake alone would not have.
    second = [replace(event, event_ms=event.event_ms + 3_600_000) for event in second]
    others = [*first, *second]
    write_events(redis_client, events)
    server = server_factory()
    checkpoint = Pipeline(spark, eu, **limits).checkpoint
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        write_events(client, first)
        options: PipelineOptions = {"url": server.url, "trigger": "100 milliseconds"}
        query = Pipeline(spark, us, **options).run()
        try:
            point = next(point for point in kill_points(rng) if point.pattern and "open_jobs" not in point.pattern)
            run_and_kill(point, rng, eu, checkpoint, STREAM, broker_url, json.dumps({**limits, "broker": "eu"}))
            log.warning("kill: %s; the lake of eu: %s", point.step, interrupted_step(eu, checkpoint)[1])
            write_events(client, second)
            wait_until(lambda: sum(arrow_ids(us).values()) == len(others), 100, "all events of us, while eu is dead")
        finally:
            query.stop()
    run_pipeline(spark, eu, broker_url, limits)
    for lake, url, expected, limit in ((eu, broker_url, events, limits), (us, server.url, others, PipelineOptions())):
        assert arrow_ids(lake) == Counter((f"{lake.broker}:{event.queue}", event.event_id) for event in expected)
        alone = Lake(tmp_path / lake.broker, broker=lake.broker)
        run_pipeline(spark, alone, url, limit)
        for table in (ATTEMPTS, JOBS):
            own = {row for row in rows(spark, lake, table) if f"{row[0]}".startswith(f"{lake.broker}:")}
            assert own == rows(spark, alone, table)


def test_a_killed_gold_build_leaves_old_or_new_rows_for_each_day(
    spark: SparkSession,
    broker_url: str,
    redis_client: redis.Redis,
    tmp_path: Path,
    without_session_variable: None,
    rng: random.Random,
) -> None:
    write_events(redis_client, history(rng.randrange(10**6), 40))
    lake = write_undisturbed(spark, tmp_path / "lake", broker_url, SLOConfig())
    old, slo_config = gold_days(lake), SLOConfig(price_per_hour=PRICES)
    arguments = (json.dumps(PRICES), *(day.isoformat() for day in TableReader(lake).days(EVENTS)))
    shutil.copytree(lake.root, tmp_path / "undisturbed")
    new = gold_days(build_gold(spark, Lake(tmp_path / "undisturbed"), slo_config))
    assert old != new
    for number in range(max(1, KILLS // 3)):
        # Each of the five tables is one commit.
        point = KillPoint(r"(begin|end) commit gold\.\w+", 1, 10)
        run_and_kill(point, rng, lake, tmp_path / "checkpoint", BUILD, *arguments, attached_to=spark)
        days = gold_days(lake)
        log.warning("kill %d of a build", number + 1)
        assert days.keys() == old.keys()
        assert all(rows in (old[key], new[key]) for key, rows in days.items())
    assert gold_days(build_gold(spark, lake, slo_config)) == new
