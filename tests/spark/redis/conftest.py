"""Fixtures of tests that drive the readers themselves: real servers, no JVM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import redis
from pyspark.sql.datasource import DataSourceReader

from bulltask.spark.connector.data_source import BulltaskSource
from tests.conftest import FLAVOUR
from tests.support.redis_cluster import Cluster

Rows = list[dict[str, Any]]
Read = Callable[..., Rows]


@pytest.fixture(scope="session")
def session_cluster(
    session_id: str, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster.started(tmp_path_factory.mktemp("cluster"), FLAVOUR) as made:
        session_processes.update(server.pid for server in made.servers)
        yield made


@pytest.fixture
def cluster(session_cluster: Cluster) -> Cluster:
    """A cluster of three nodes, which is empty when the test starts. Do not harm it, and give slots back."""
    session_cluster.flush()
    return session_cluster


@pytest.fixture
def reader_of(broker_url: str) -> Callable[..., DataSourceReader]:
    """Make a reader as Spark does, of all columns unless ``schema`` is given; options as in ``option()``."""

    def make(schema: Any = None, **options: str) -> DataSourceReader:
        source = BulltaskSource({"url": broker_url, "queue": "mail", **options})
        return source.reader(schema or source.schema())

    return make


@pytest.fixture
def rows_of() -> Callable[[DataSourceReader], Rows]:
    """Plan and read as Spark does: each partition by a copy of the reader that went to another process."""

    def read(reader: DataSourceReader, parts: Any = None) -> Rows:
        found: Rows = []
        for part in reader.partitions() if parts is None else parts:
            there, piece = cloudpickle.loads(cloudpickle.dumps((reader, part)))
            for batch in there.read(piece):
                found += batch.to_pylist()
        return found

    return read


@pytest.fixture
def read(reader_of: Callable[..., DataSourceReader], rows_of: Callable[..., Rows]) -> Read:
    """Read a table with these options."""
    return lambda schema=None, **options: rows_of(reader_of(schema, **options))


@pytest.fixture
def commands(broker_url: str) -> Iterator[Callable[[], list[str]]]:
    """What was sent to the server since the last look, by MONITOR."""
    asker = redis.Redis.from_url(broker_url, decode_responses=True)
    with asker, asker.monitor() as monitor:

        def seen() -> list[str]:
            asker.echo("up to here")
            found: list[str] = []
            for told in monitor.listen():
                if "up to here" in told["command"]:
                    return found
                found.append(told["command"])
            return found

        yield seen
