"""Spark for the tests: one session for all of them, because a JVM takes seconds to start and a gigabyte."""

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
from tests.support.spark_jvm import java_options, spark_home


@pytest.fixture
def queue(broker_url: str) -> Iterator[Queue]:
    with Queue("mail", broker_url) as made:
        yield made


@pytest.fixture
def manual_worker(queue: Queue) -> Iterator[ManualWorker]:
    """A manual worker of the queue ``mail``, one step at a time."""
    broker: Broker = queue.context.broker
    made = ManualWorker(broker, broker.keys("mail"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def spark(
    session_id: str, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """The session of these tests, with the source in it: two tasks at a time, each tried twice. Do not stop it."""
    need_java()
    place = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(spark_home(place / "home")))
        patch.delenv("PYSPARK_PYTHON", raising=False)  # the session chooses
        # The JVM starts Python processes of its own and ends with them: do not count them as left over.
        patch.delenv(SESSION_VARIABLE, raising=False)
        made = session("tests", "local[2,2]", shuffle_partitions=2, conf=settings(place))
        patch.setenv(SESSION_VARIABLE, session_id)
        gateway = made.sparkContext._gateway
        assert gateway is not None
        jvm = gateway.proc
        session_processes.add(jvm.pid)
        yield made
        made.stop()
        gateway.shutdown()
        jvm.stdin.close()  # at the end of its input the JVM ends
        jvm.wait(30)


@pytest.fixture(scope="session")
def session_tls_cluster(
    certificates: Certificates,
    session_id: str,
    session_processes: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    if shutil.which("redis-server") is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("the tests of TLS need redis-server, built with TLS")
    with Cluster.started(tmp_path_factory.mktemp("tls-cluster"), "redis", certificates=certificates) as made:
        session_processes.update(server.pid for server in made.servers)
        yield made


@pytest.fixture
def tls_cluster(session_tls_cluster: Cluster) -> Cluster:
    """A cluster of three nodes that speak TLS; it is empty when the test starts. Give slots back."""
    session_tls_cluster.flush()
    return session_tls_cluster


def need_java() -> None:
    """Skip a test where Java is missing; in CI it must not be."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        (pytest.fail if "CI" in os.environ else pytest.skip)("the Spark tests need Java (a JRE, 17 or newer)")


def settings(place: Path) -> dict[str, str]:
    return {
        "spark.driver.extraJavaOptions": java_options(place),
        "spark.driver.memory": "1g",
        "spark.local.dir": str(place / "local"),
        "spark.log.level": "OFF",
        # To write Java for a query and to compile it takes longer than to run it over the few rows of a test.
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.ui.showConsoleProgress": "false",
    }
