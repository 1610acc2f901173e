"""Bronze, silver and gold are what was sent, although executors, Redis and the driver were killed with ``kill -9``.

Each round has its own server, events and lake. The tables are read with deltalake alone and compared, field by field,
with the events that were sent, with what `tests.support.lifecycle_oracle` derives from them, and with the tables that a
pipeline writes undisturbed. ``BULLTASK_KILLS=10 python -m tools spark-kills -k truth`` runs ten rounds of each kind,
``-k "truth and s3"`` those in an object store.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import redis

from bulltask.lake.ledger import BatchRecord, last_record
from bulltask.lake.storage import Lake
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, find_tables
from bulltask.testing.worker import wait_until
from tests.conftest import ServerFactory
from tests.support.event_writing import write_events
from tests.support.job_histories import histories
from tests.support.lifecycle_oracle import LifecycleEvent, lifecycle
from tests.support.object_store import BUCKET, object_store
from tests.support.pipeline_kills import (
    executors,
    interrupted_step,
    is_running,
    kill_executors,
    kill_redis,
    planned_batch_of,
)
from tests.support.processes import SESSION_VARIABLE
from tests.support.programs import Program, run_program
from tests.support.silver_rows import arrow_rows, assert_same, attempt_row, job_row
from tests.support.spark_cluster import SparkCluster
from tests.support.spark_jvm import SMALL_QUERIES, java_options, spark_home
from tests.support.stored_batches import assert_has_sent, rows_as_text, rows_of

ROUNDS = int(os.environ.get("BULLTASK_KILLS", "1"))
MIDNIGHT_MS = 1_760_054_400_000
GOLD = find_tables(["gold"])
KILLED, UNDISTURBED = {"max_events_per_trigger": 250}, {"max_events_per_trigger": 5_000}

pytestmark = [pytest.mark.extended, pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(200 + 200 * ROUNDS)]

log = logging.getLogger(__name__)

DRIVER = """
import json, sys
from bulltask.lake.reader import TableReader
from bulltask.lake.slo_config import Objective, SLOConfig
from bulltask.lake.tables import EVENTS
from bulltask.spark import Pipeline, session

url, conf, lakes, master = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
spark = session("truth", master, shuffle_partitions=2, conf=conf)
print(json.dumps([spark.sparkContext._gateway.proc.pid]), flush=True)
terms = SLOConfig([Objective("wait", threshold=1, target=0.9), Objective("total", threshold=60, target=0.5)], {"q1": 1})
for root, options in lakes:
    pipeline = Pipeline(spark, root, url=url, open_job_timeout=10**6, trigger="0 seconds", **options)
    pipeline.run(available_now=master == "local[2]").awaitTermination()
    pipeline.build("gold", days=TableReader(pipeline.lake).days(EVENTS), slo_config=terms)
print("done", flush=True)
"""


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[Mapping[str, str] | None]:
    """The storage options of an object store, or none for a directory."""
    with object_store() if request.param == "s3" else nullcontext() as options:
        yield options


def history(seed: int) -> list[LifecycleEvent]:
    """Generate events of jobs in three queues, before and after midnight."""
    events = [replace(event, queue=f"q{n}") for n in range(3) for event in histories(3 * seed + n, 20)]
    events.sort(key=lambda event: (event.event_ms, event.event_seq))
    shift_ms = MIDNIGHT_MS - events[len(events) // 2].event_ms
    return [replace(event, event_ms=event.event_ms + shift_ms) for event in events]


def read_line(driver: Program) -> str:
    """Return the next line that the program itself prints, without the JVM's; empty at its end."""
    while (line := driver.read_line()) and line != "done" and not line.startswith("["):
        log.info("%s", line)
    return line


def last_number(lake: Lake) -> int:
    """Return the number of the last batch."""
    return (last_record(lake) or BatchRecord()).number


@pytest.mark.parametrize("number", range(ROUNDS))
def test_the_tables_are_the_truth_after_executors_redis_and_the_driver_were_killed(  # noqa: PLR0917
    cluster: SparkCluster,
    forked_python: Path,
    server_factory: ServerFactory,
    store: Mapping[str, str] | None,
    tmp_path: Path,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.delenv(SESSION_VARIABLE)  # Spark's Python processes exit shortly after its JVMs
    monkeypatch.setenv("SPARK_HOME", str(spark_home(tmp_path / "home")))
    server, checkpoint = server_factory(appendonly=True), tmp_path / "checkpoint"
    lake = Lake(tmp_path / "lake") if store is None else Lake(f"s3://{BUCKET}/{number}", store)
    undisturbed = Lake(tmp_path / "undisturbed")
    conf = {
        **SMALL_QUERIES,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": java_options(tmp_path),
        "spark.local.dir": str(tmp_path / "local"),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": java_options(tmp_path),
        "spark.log.level": "OFF",
        "spark.ui.showConsoleProgress": "false",
    }
    killed = (lake.root, {**KILLED, "checkpoint": str(checkpoint), "storage_options": dict(store or {})})
    start = partial(run_program, DRIVER, server.url, json.dumps(conf), PYSPARK_PYTHON=str(forked_python))
    events = history(rng.randrange(10**6))
    events.append(LifecycleEvent("q0", "late", events[-1].event_ms + 2 * 10**9, 0, "added"))  # all others time out
    parts = events[: len(events) // 3], events[len(events) // 3 : len(events) // 2], events[len(events) // 2 :]
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        write_events(client, parts[0])
        with start(json.dumps([killed]), cluster.url) as driver:
            jvms = json.loads(read_line(driver))
            wait_until(lambda: planned_batch_of(checkpoint) >= 0, 200.0, "the first batch")
            threading.Event().wait(rng.uniform(0, 5))
            kill_executors(cluster.directory)
            write_events(client, parts[1])
            threading.Event().wait(rng.uniform(0, 4))
            kill_redis(server, rng.uniform(0, 1))
            write_events(client, parts[2])
            batches = rng.randrange(3)
            wait_until(lambda: last_number(lake) >= batches or driver.process.poll() is not None, 200.0, "batches")
            threading.Event().wait(rng.uniform(0, 2))
            assert driver.process.poll() is None, driver.read_rest()
            for pid in jvms if rng.random() < 0.5 else ():
                os.kill(pid, signal.SIGKILL)
            driver.send(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, jvms)), 100.0, "the end of the JVM")
        wait_until(lambda: not executors(cluster.directory), 100.0, "the end of the executors")
    step = interrupted_step(lake, checkpoint)
    log.warning("round %d: the driver was killed after batch %d: %s", number, last_number(lake), step)
    with start(json.dumps([killed, (undisturbed.root, UNDISTURBED)]), "local[2]") as driver:
        read_line(driver)
        assert read_line(driver) == "done", driver.read_rest()
        driver.process.wait(60)

    assert_has_sent(lake, events)
    jobs = lifecycle(events[:-1])
    assert_same(arrow_rows(rows_of(lake, JOBS)), [job_row(job) for job in jobs])
    assert_same(arrow_rows(rows_of(lake, ATTEMPTS)), [attempt_row(row) for job in jobs for row in job.attempts])
    assert not rows_of(lake, GAPS).num_rows
    for table in (EVENTS, ATTEMPTS, JOBS, *GOLD):
        rows = rows_as_text(lake, table)
        assert rows == rows_as_text(undisturbed, table), table.full_name
        assert rows, table.full_name
    log.warning("round %d: equal: %d events, %d jobs", number, len(events), len(jobs))
