"""Real workers for tasks with ``spark=True``; each child that runs such a task starts a JVM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.conftest import need_java, settings
from tests.support.spark_jvm import spark_home
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

SPARK_TASKS = '''
import signal
import subprocess

from bulltask.spark import current_session


def processes():
    """Return the process ids of the JVM, the child and the supervisor."""
    context = current_session().sparkContext
    return {"jvm": context._gateway.proc.pid, "child": os.getpid(), "supervisor": os.getppid()}


@app.task(spark=True, name="add_up")
def add_up(numbers):
    spark = current_session()
    group = spark.sparkContext.getLocalProperty("spark.jobGroup.id")
    total = spark.range(numbers, numPartitions=4).selectExpr("sum(id)").first()[0]
    return {"total": total, "group": group, "sigint": signal.getsignal(signal.SIGINT).__module__, **processes()}


@app.task(bind=True, spark=True, name="stop_it")
def stop_it(self):
    spark = current_session()
    self.update_progress("nearly")
    spark.range(3).count()
    spark.stop()
    return "stopped"


@app.task(bind=True, spark=True, name="work_long", max_retries=1, retry_backoff=0.01)
def work_long(self, gate):
    """Run an action that waits until the gate is open."""
    spark, url = current_session(), os.environ["JOURNAL_URL"]

    def wait(part):
        client = redis.Redis.from_url(url, socket_timeout=None)
        client.xadd("journal", {"what": "on spark", "gate": gate, "pid": os.getpid()})
        client.blpop(f"gate:{gate}", 600)
        yield from part

    record("start", job=self.request.id, **processes())
    return spark.sparkContext.parallelize(range(2), 2).mapPartitions(wait).count()
'''


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    """A harness for real workers, which are stopped after the test."""
    started = WorkerHarness(broker_url, tmp_path, record_property)
    yield started
    started.close()


@pytest.fixture
def spark_worker(harness: WorkerHarness, tmp_path: Path) -> Callable[..., Worker]:
    """Return a function that starts a worker with one child, a fast-starting JVM, and further settings."""
    need_java()
    home = spark_home(tmp_path / "home")

    def start(**options: Any) -> Worker:
        conf = {**settings(tmp_path / "spark"), "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": 2}
        worker_settings = {"spark_master": "local[2]", "spark_conf": json.dumps(conf), **options}
        return harness.worker(SPARK_TASKS, children=1, settings=worker_settings, environ={"SPARK_HOME": str(home)})

    return start
