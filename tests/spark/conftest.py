"""Fixtures for the Spark tests, which share one Spark session: a JVM takes seconds to start, and a gigabyte."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from bulltask.queue import Queue
from bulltask.spark import session
from bulltask.transport.broker import Broker
from tests.support.certificates import Certificates
from tests.support.manual_worker import ManualWorker
from tests.support.processes import SESSION_VARIABLE
from tests.support.redis_cluster import Cluster
from tests.support.spark_jvm import SMALL_QUERIES, java_options, spark_home
from tests.support.spark_python import spark_python


@pytest.fixture
def queue(broker_url: str) -> Iterator[Queue]:
    with Queue("mail", broker_url) as opened:
        yield opened


@pytest.fixture
def manual_worker(queue: Queue) -> Iterator[ManualWorker]:
    """A worker for the queue ``mail`` that a test runs step by step."""
    broker: Broker = queue.context.broker
    worker = ManualWorker(broker, broker.keys("mail"))
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def forked_python(session_processes: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program for ``PYSPARK_PYTHON``: it forks Python processes, which takes less time than starting them."""
    need_java()
    with spark_python(tmp_path_factory.mktemp("spark-python") / "python") as (program, server):
        session_processes.add(server)
        yield program


@pytest.fixture(scope="session")
def spark(
    forked_python: Path, session_id: str, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """The shared session with the data source: two tasks at a time, at most two attempts each. Do not stop it."""
    directory = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(spark_home(directory / "home")))
        patch.setenv("PYSPARK_PYTHON", str(forked_python))
        # The JVM starts Python processes and exits with them: do not count them as left over.
        patch.delenv(SESSION_VARIABLE, raising=False)
        shared = session("tests", "local[2,2]", shuffle_partitions=2, conf=settings(directory))
        patch.setenv(SESSION_VARIABLE, session_id)
        gateway = shared.sparkContext._gateway
        assert gateway is not None
        jvm = gateway.proc
        session_processes.add(jvm.pid)
        yield shared
        shared.stop()
        gateway.shutdown()
        jvm.stdin.close()  # the JVM exits at the end of its input
        jvm.wait(30)


@pytest.fixture(scope="session")
def session_tls_cluster(
    certificates: Certificates,
    session_id: str,
    session_processes: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    if shutil.which("redis-server") is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("the TLS tests need a redis-server built with TLS")
    with Cluster.started(tmp_path_factory.mktemp("tls-cluster"), "redis", certificates=certificates) as cluster:
        session_processes.update(server.pid for server in cluster.servers)
        yield cluster


@pytest.fixture
def tls_cluster(session_tls_cluster: Cluster) -> Cluster:
    """A cluster of three nodes with TLS; it is empty when the test starts. Move slots back after use."""
    session_tls_cluster.flush()
    return session_tls_cluster


def need_java() -> None:
    """Skip a test if Java is missing; fail it in CI."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        (pytest.fail if "CI" in os.environ else pytest.skip)("the Spark tests need Java (a JRE, 17 or newer)")


def settings(directory: Path) -> dict[str, str]:
    return {
        **SMALL_QUERIES,
        "spark.driver.extraJavaOptions": java_options(directory),
        "spark.driver.memory": "1g",
        "spark.local.dir": str(directory / "local"),
        "spark.log.level": "OFF",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.showConsoleProgress": "false",
    }
