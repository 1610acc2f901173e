"""A driver that is killed at any moment: the tables are those of one that nobody disturbed.

Three times in the suite; ``BULLTASK_KILLS=10`` for more of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import redis
from pyspark.sql import SparkSession

from bulltask.lake.arrow import partition_schema
from bulltask.lake.layout import Layout
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, Table
from bulltask.spark import Pipeline
from bulltask.spark.pipeline import PipelineOptions
from bulltask.spark.tables.lake_tables import latest, read_table
from bulltask.testing.wait import wait_until
from tests.spark.conftest import settings
from tests.support.event_writing import write_events
from tests.support.job_histories import histories
from tests.support.processes import MARK
from tests.support.programs import Program, run_program

KILLS = int(os.environ.get("BULLTASK_KILLS", "3"))

pytestmark = [
    pytest.mark.spark, pytest.mark.redis, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300 + 150 * KILLS)
]  # fmt: skip

OPTIONS: PipelineOptions = {"max_events_per_trigger": 300, "max_open": 0.9}

DRIVER = """
import json, sys
from bulltask.spark import Pipeline, session

root, url, conf, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
spark = session("killed", "local[2]", shuffle_partitions=2, conf=conf)
print(spark.sparkContext._gateway.proc.pid, flush=True)
Pipeline(spark, root, url=url, **options).run(available_now=True).awaitTermination()
print("done", flush=True)
"""


@pytest.fixture
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of Python that a JVM starts end with it, which takes a moment: they are nobody's leftovers."""
    monkeypatch.delenv(MARK)


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def line_of(driver: Program) -> str:
    """The next line that is no talk of the JVM's."""
    while line := driver.line():
        if line.isdecimal() or line == "done":
            return line
    return ""


def kill(driver: Program, jvm: int, dice: random.Random) -> None:
    """Kill the driver: alone, so that its JVM goes on until it notices, or both."""
    if dice.random() < 0.5:
        os.kill(jvm, signal.SIGKILL)
    driver.send(signal.SIGKILL)
    wait_until(lambda: not is_running(jvm), 60.0, "the end of the JVM")


def arrow_ids(layout: Layout) -> Counter[tuple[str, str]]:
    way = ds.partitioning(partition_schema(EVENTS), flavor="hive")
    table = ds.dataset(layout.table(EVENTS), format="parquet", partitioning=way).to_table(["queue", "event_id"])
    return Counter(zip(table["queue"].to_pylist(), table["event_id"].to_pylist(), strict=True))


def rows(spark: SparkSession, layout: Layout, table: Table) -> set[tuple[object, ...]]:
    """The rows that count; under which batch they were written is another matter."""
    found = latest(read_table(spark, layout, table), table).drop("ingest_id").toArrow()
    return set(zip(*(column.to_pylist() for column in found.columns), strict=True))


def test_the_tables_of_a_driver_that_is_killed_are_those_of_one_that_is_not(
    spark: SparkSession,
    broker_url: str,
    redis_client: redis.Redis,
    tmp_path: Path,
    unmarked: None,
    record_property: Callable[[str, object], None],
) -> None:
    seed = random.randrange(10**6)
    record_property("seed", seed)
    dice = random.Random(seed)
    events = [replace(one, queue=f"q{n}") for n in range(3) for one in histories(3 * seed + n, 30 + 15 * KILLS)]
    write_events(redis_client, events)
    layout, left = Layout(tmp_path / "lake"), KILLS
    ledger = Ledger(layout)
    arguments = [str(layout.root), broker_url, json.dumps(settings(tmp_path)), json.dumps(OPTIONS)]
    ended = ""
    while ended != "done":
        head = ledger.head()
        before = 0 if head is None else head.number
        with run_program(DRIVER, *arguments) as driver:
            jvm = int(line_of(driver))
            if left:
                left -= 1
                wait_until(partial(_has_begun, layout, before + dice.randrange(2)), 240.0, "a batch")
                threading.Event().wait(dice.uniform(0, 2.5))  # any moment of a batch, or of the next one
                kill(driver, jvm, dice)
            else:
                ended = line_of(driver)
    calmly: PipelineOptions = {**OPTIONS, "url": broker_url}
    Pipeline(spark, tmp_path / "calm", **calmly).run(available_now=True).awaitTermination()
    calm = Layout(tmp_path / "calm")
    expected = Counter((one.queue, one.event_id) for one in events)
    assert arrow_ids(layout) == expected
    by_spark = read_table(spark, layout, EVENTS).select("queue", "event_id").collect()
    assert Counter((row.queue, row.event_id) for row in by_spark) == expected
    for table in (ATTEMPTS, JOBS):
        assert rows(spark, layout, table) == rows(spark, calm, table)
    assert not layout.own("publishing.json").exists()


def _has_begun(layout: Layout, further: int) -> bool:
    """Whether a driver is at work at the batch behind so many."""
    head = Ledger(layout).head()
    return (0 if head is None else head.number) >= further and layout.own("staging").exists()
