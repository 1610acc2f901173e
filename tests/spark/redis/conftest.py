"""Fixtures for tests that call the readers directly: real servers, no JVM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import redis
from pyspark.sql.datasource import DataSourceReader

from bulltask.spark.connector import BulltaskSource

Rows = list[dict[str, Any]]
Read = Callable[..., Rows]
END = "end of the commands of this call"


@pytest.fixture
def make_reader(broker_url: str) -> Callable[..., DataSourceReader]:
    """Create a reader as Spark does, for all columns unless ``schema`` is given; options as in ``option()``."""

    def make(schema: Any = None, **options: str) -> DataSourceReader:
        source = BulltaskSource({"url": broker_url, "queue": "mail", **options})
        return source.reader(schema or source.schema())

    return make


@pytest.fixture
def read_rows() -> Callable[[DataSourceReader], Rows]:
    """Plan and read as Spark does: each partition by a pickled copy of the reader."""

    def read(reader: DataSourceReader, parts: Any = None) -> Rows:
        rows: Rows = []
        for part in reader.partitions() if parts is None else parts:
            copy, partition = cloudpickle.loads(cloudpickle.dumps((reader, part)))
            for batch in copy.read(partition):
                rows += batch.to_pylist()
        return rows

    return read


@pytest.fixture
def read(make_reader: Callable[..., DataSourceReader], read_rows: Callable[..., Rows]) -> Read:
    """Read a table with these options."""
    return lambda schema=None, **options: read_rows(make_reader(schema, **options))


@pytest.fixture
def commands(broker_url: str) -> Iterator[Callable[[], list[str]]]:
    """Return a function that returns the commands that the server has received since the last call; uses MONITOR."""
    client = redis.Redis.from_url(broker_url, decode_responses=True)
    with client, client.monitor() as monitor:

        def since_last_call() -> list[str]:
            client.echo(END)
            received: list[str] = []
            for entry in monitor.listen():
                if END in entry["command"]:
                    break
                received.append(entry["command"])
            return received

        yield since_last_call
