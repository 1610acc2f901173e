"""A driver that is killed at any moment leaves the same tables as one that runs undisturbed.

Three times in the suite; ``BULLTASK_KILLS=10`` for more of it.
``--log-cli-level=WARNING`` shows what each kill has hit.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import redis
from pyspark.sql import SparkSession

from bulltask.lake.arrow import arrow_schema, partition_schema
from bulltask.lake.atomic_swap import finish_intents
from bulltask.lake.layout import Layout
from bulltask.lake.ledger import Ledger
from bulltask.lake.slo_config import Objective, SLOConfig
from bulltask.lake.tables import (
    ATTEMPTS,
    CAPACITY_MINUTE,
    COST_DAY,
    ERRORS_DAY,
    EVENTS,
    JOBS,
    SLO_DAY,
    TASK_MINUTE,
    Table,
)
from bulltask.spark import Pipeline
from bulltask.spark.lifecycle.fold import LifecycleEvent
from bulltask.spark.pipeline import PipelineOptions
from bulltask.spark.tables.lake_tables import latest, read_table
from bulltask.testing.wait import wait_until
from tests.spark.conftest import settings
from tests.support.event_writing import write_events
from tests.support.job_histories import histories
from tests.support.pipeline_kills import STEPS, interrupted_step, is_running
from tests.support.processes import SESSION_VARIABLE
from tests.support.programs import Program, run_program

KILLS = int(os.environ.get("BULLTASK_KILLS", "3"))

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(400 + 200 * KILLS)]

log = logging.getLogger(__name__)

MIDNIGHT_MS = 1_760_054_400_000
GOLD = (TASK_MINUTE, CAPACITY_MINUTE, ERRORS_DAY, SLO_DAY, COST_DAY)
PRICES = {"q1": 0.12}
TERMS = SLOConfig([Objective("wait", within=1, target=0.9), Objective("total", within=60, target=0.5)], PRICES)
OPTIONS: PipelineOptions = {"max_events_per_trigger": 300, "max_open": 0.9}

SESSION = """
import json, sys
from datetime import date
from bulltask.lake.slo_config import SLOConfig
from bulltask.spark import Pipeline, session
from tests.support.pipeline_kills import kill_before

root, conf, when = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
spark = session("killed", "local[2]", shuffle_partitions=2, conf=conf)
jvm = spark.sparkContext._gateway.proc.pid
if when:
    kill_before(*when, jvm)
print(jvm, flush=True)
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
class Aim:
    """A moment at which to kill.

    Attributes:
        pattern: before a file operation of the driver's, as `kill_before` takes it; what follows needs none.
        least, most: which of these operations.
        staged: or when a directory of that name is among what is staged; "" waits for the batch to begin.
        done: or when so many batches more are done.
        seconds: and then so much later at the most.
        hits: the step that this operation belongs to.
    """

    pattern: str = ""
    least: int = 1
    most: int = 1
    staged: str = ""
    done: int = 0
    seconds: float = 0.0
    hits: str = ""


AIMS = [
    Aim(staged="read", seconds=0.3),  # Redis is read
    Aim(r"os\.rename \S+/read/", 1, 2, hits="bronze"),
    Aim(staged=EVENTS.full_name, seconds=0.5),
    Aim(r"os\.rename .*(/ingest_id=|_pipeline/open_jobs/)", 1, 10, hits="publish"),
    Aim(r"os\.rename .*(/ingest_id=|_pipeline/open_jobs/)", 2, 3, hits="publish"),
    Aim(r"os\.rename \S+ \S+_pipeline/(batches/|head\.json)", 2, 2, hits="ledger"),
    Aim(r"os\.remove \S+publishing\.json", hits="ledger"),
    Aim(r"shutil\.rmtree \S+_pipeline/staging", 2, 2, hits="commit"),  # the first one is at the batch's begin
    Aim(done=1, seconds=0.2),
    Aim(seconds=3),
]


@pytest.fixture
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes that a JVM starts end with it, a moment later: do not count them as left over."""
    monkeypatch.delenv(SESSION_VARIABLE)


def line_of(driver: Program) -> str:
    """The next line that is no talk of the JVM's."""
    while line := driver.read_line():
        if line.isdecimal() or line == "done":
            return line
    return ""


def kill(driver: Program, jvm: int, rng: random.Random) -> None:
    """Kill the driver alone, so that its JVM runs until it notices, or both."""
    if rng.random() < 0.5:
        os.kill(jvm, signal.SIGKILL)
    driver.send(signal.SIGKILL)


def killed_at(aim: Aim, rng: random.Random, layout: Layout, program: str, *words: str) -> None:
    """Run a driver and kill it."""
    head = Ledger(layout).head()
    before = 0 if head is None else head.number
    left = set(layout.internal("staging").glob("*"))  # by drivers that were killed before

    def is_there() -> bool:
        found = Ledger(layout).head()
        staged = (place for place in layout.internal("staging").glob("*") if place not in left)
        has_begun = any((place / aim.staged).exists() for place in staged)
        return (0 if found is None else found.number) >= before + aim.done and (aim.done > 0 or has_begun)

    when = [aim.pattern, rng.randint(aim.least, aim.most)] if aim.pattern else None
    conf = json.dumps(settings(layout.root.parent))
    with run_program(program, str(layout.root), conf, json.dumps(when), *words) as driver:
        jvm = int(line_of(driver))
        if aim.pattern:
            assert driver.process.wait(300) == -signal.SIGKILL, f"nothing of the kind was done: {aim}"
        else:
            wait_until(is_there, 300.0, f"the moment {aim}")
            threading.Event().wait(rng.uniform(0, aim.seconds))
            kill(driver, jvm, rng)
        wait_until(lambda: not is_running(jvm), 100.0, "the end of the JVM")


def ran_to_its_end(layout: Layout, program: str, *words: str) -> None:
    with run_program(program, str(layout.root), json.dumps(settings(layout.root.parent)), "null", *words) as driver:
        jvm = int(line_of(driver))
        assert line_of(driver) == "done"
        driver.close_stdin(100)
        wait_until(lambda: not is_running(jvm), 100.0, "the end of the JVM")


def aims(rng: random.Random) -> Iterator[Aim]:
    """All aims in any order, and then again."""
    while True:
        yield from rng.sample(AIMS, len(AIMS))


def arrow_ids(layout: Layout) -> Counter[tuple[str, str]]:
    way = ds.partitioning(partition_schema(EVENTS), flavor="hive")
    table = ds.dataset(layout.table(EVENTS), format="parquet", partitioning=way).to_table(["queue", "event_id"])
    return Counter(zip(table["queue"].to_pylist(), table["event_id"].to_pylist(), strict=True))


def rows(spark: SparkSession, layout: Layout, table: Table) -> set[tuple[object, ...]]:
    """The rows that count; under which batch they were written is another matter."""
    found = latest(read_table(spark, layout, table), table).drop("ingest_id").toArrow()
    return set(zip(*(column.to_pylist() for column in found.columns), strict=True))


def gold_days(layout: Layout) -> dict[tuple[str, str], list[str]]:
    """Of each gold table and day, its rows as Arrow sees them: all columns, in any order."""
    found: dict[tuple[str, str], list[str]] = {}
    for table in GOLD:
        for row in (
            ds.dataset(layout.table(table), arrow_schema(table), "parquet", partitioning="hive").to_table().to_pylist()
        ):
            found.setdefault((table.name, row["dt"]), []).append(repr(row))
    return {place: sorted(rows) for place, rows in found.items()}


def history(seed: int, jobs: int) -> list[LifecycleEvent]:
    """What jobs of three queues went through, at either side of a midnight."""
    told = [replace(one, queue=f"q{n}") for n in range(3) for one in histories(3 * seed + n, jobs)]
    middle = sorted(one.event_ms for one in told)[len(told) // 2]
    return [replace(one, event_ms=one.event_ms + MIDNIGHT_MS - middle) for one in told]


def calmly(spark: SparkSession, root: Path, url: str, slo_config: SLOConfig) -> Layout:
    """Make bronze, silver and gold without a disturbance.

    In batches that end where those of `OPTIONS` do: a job that is given up at the end of one and goes on in a later
    one has a row of each moment.
    """
    options: PipelineOptions = {**OPTIONS, "url": url}
    Pipeline(spark, root, **options).run(available_now=True).awaitTermination()
    return built(spark, Layout(root), slo_config)


def built(spark: SparkSession, layout: Layout, slo_config: SLOConfig) -> Layout:
    Pipeline(spark, layout.root).build("gold", days=layout.days(EVENTS), slo_config=slo_config)
    return layout


def test_the_tables_of_a_driver_that_is_killed_are_those_of_one_that_is_not(
    spark: SparkSession,
    broker_url: str,
    redis_client: redis.Redis,
    tmp_path: Path,
    unmarked: None,
    rng: random.Random,
) -> None:
    events = history(rng.randrange(10**6), 24 + 8 * KILLS)
    write_events(redis_client, events)
    layout, hit = Layout(tmp_path / "lake"), Counter[str]()
    words = (broker_url, json.dumps(OPTIONS))
    for number, aim in zip(range(KILLS), aims(rng), strict=False):
        killed_at(aim, rng, layout, STREAM, *words)
        seen, shown = interrupted_step(layout)
        # What an earlier kill has left of the same batch may look like another step from outside.
        step = aim.hits or seen
        log.warning("kill %d of %d: %s; its lake: %s", number + 1, KILLS, step, shown)
        hit[step] += 1
    log.warning("kills by step: %s", ", ".join(f"{step} {hit[step]}" for step in STEPS))
    ran_to_its_end(layout, STREAM, *words)
    calm = calmly(spark, tmp_path / "calm", broker_url, TERMS)
    expected = Counter((one.queue, one.event_id) for one in events)
    assert arrow_ids(layout) == expected
    by_spark = read_table(spark, layout, EVENTS).select("queue", "event_id").collect()
    assert Counter((row.queue, row.event_id) for row in by_spark) == expected
    for table in (ATTEMPTS, JOBS):
        assert rows(spark, layout, table) == rows(spark, calm, table)
    gold = gold_days(built(spark, layout, TERMS))
    assert gold == gold_days(calm)
    assert {name for name, _ in gold} == {table.name for table in GOLD}
    log.warning("equal: %d events, rows of gold %s", len(events), {place: len(found) for place, found in gold.items()})
    assert not layout.internal("publishing.json").exists()


def test_a_killed_build_of_gold_leaves_old_or_new_rows_of_each_day(
    spark: SparkSession,
    broker_url: str,
    redis_client: redis.Redis,
    tmp_path: Path,
    unmarked: None,
    rng: random.Random,
) -> None:
    write_events(redis_client, history(rng.randrange(10**6), 40))
    layout = calmly(spark, tmp_path / "lake", broker_url, SLOConfig())
    old, slo_config = gold_days(layout), SLOConfig(price_per_hour=PRICES)
    words = (json.dumps(PRICES), *(day.isoformat() for day in layout.days(EVENTS)))
    shutil.copytree(layout.root, tmp_path / "calm")
    new = gold_days(built(spark, Layout(tmp_path / "calm"), slo_config))
    assert old != new
    for number in range(max(1, KILLS // 3)):
        # Each day of each table is moved away and put into its place: five tables, two days, twenty moves and more.
        aim = Aim(r"(os\.rename|os\.remove|rmtree) \S*(gold/|intents/|trash/)", 1, 20)
        killed_at(aim, rng, layout, BUILD, *words)
        moves, seen = finish_intents(layout), gold_days(layout)
        log.warning("kill %d of a build: %d moves were left to do", number + 1, moves)
        assert seen.keys() == old.keys()
        assert all(rows in (old[place], new[place]) for place, rows in seen.items())
        assert not any(any(layout.internal(room).glob("*")) for room in ("new", "trash"))
    ran_to_its_end(layout, BUILD, *words)
    assert gold_days(layout) == new
