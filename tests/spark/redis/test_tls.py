"""Reads and writes of DataFrames over TLS, with a client certificate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StringType, StructField, StructType

from bulltask.errors import BrokerAuthError, ConfigError
from bulltask.queue import Queue
from bulltask.spark.sink import JobsWriter, TaskCommit
from bulltask.spark.source.options import StreamOptions, WriteOptions, read_options
from tests.support.certificates import Certificates, TlsServer
from tests.support.fake_query import FakeQuery
from tests.support.queue_contents import add

pytestmark = pytest.mark.redis

COLUMNS = StructType([StructField("name", StringType()), StructField("data", StringType())])


@pytest.fixture
def broker_url(tls_server: TlsServer) -> str:
    """All tests in this file use TLS."""
    return tls_server.url


def test_jobs_events_and_counts_are_read_over_tls(queue: Queue, read: Callable[..., Any]) -> None:
    ids = add(queue, 20)
    assert {row["id"] for row in read(state="wait", numPartitions="2", minRowsPerPartition="5")} == set(ids)
    assert [row["job_id"] for row in read(table="events") if row["event"] == "added"] == ids
    assert {row["state"]: row["jobs"] for row in read(table="counts", queue="*")}["wait"] == 20


def test_a_stream_is_read_over_tls(queue: Queue, broker_url: str) -> None:
    query = FakeQuery(broker_url)
    ids = add(queue, 5)
    query.run_until_idle()
    assert [row["job_id"] for row in query.rows if row["event"] == "added"] == ids


def test_jobs_are_written_over_tls(broker_url: str, queue: Queue) -> None:
    writer = JobsWriter(read_options(WriteOptions, {"url": broker_url, "queue": "mail"}), COLUMNS, overwrite=False)
    rows = pa.RecordBatch.from_pylist([{"name": "send", "data": json.dumps({"n": n})} for n in range(10)])
    commit = writer.write(iter([rows]))
    assert isinstance(commit, TaskCommit)
    assert commit.counts == {"added": 10}
    assert queue.get_job_counts("wait") == {"wait": 10}


def test_planning_fails_if_the_certificate_is_not_trusted(
    tls_server: TlsServer, certificates: Certificates, make_reader: Callable[..., DataSourceReader]
) -> None:
    url = f"rediss://localhost:{tls_server.port}/0?ssl_ca_certs={certificates.untrusted_authority}"
    with pytest.raises(BrokerAuthError, match="add ssl_ca_certs=FILE"):
        make_reader(url=url).partitions()


def test_a_misspelled_url_parameter_is_rejected() -> None:
    url = "rediss://:secret@localhost/0?ssl_ca_cert=a.pem"
    with pytest.raises(
        ConfigError, match=r"\[BULLTASK_OPTION_INVALID\] option url .* has an unknown option ssl_ca_cert"
    ) as caught:
        read_options(StreamOptions, {"url": url, "queue": "mail"}, {})
    assert "secret" not in str(caught.value)
