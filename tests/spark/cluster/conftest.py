"""One Spark cluster for all tests that need one: starting it takes ten CPU seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spark.conftest import need_java
from tests.support.spark_cluster import SparkCluster
from tests.support.spark_jvm import java_options, spark_home


@pytest.fixture(scope="session")
def cluster(
    session_id: str, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkCluster]:
    """A master and two workers. Executors exit with the application that they belong to."""
    need_java()
    directory = tmp_path_factory.mktemp("spark-cluster")
    with SparkCluster(spark_home(directory / "home"), directory, java_options()) as started:
        session_processes.update(started.pids)
        yield started
