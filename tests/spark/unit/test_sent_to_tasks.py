"""What Spark sends to its Python processes is acknowledged as soon as it is unpickled."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StringType, StructType

from bulltask.spark.sink import JobsStreamWriter, JobsWriter, vectorized_udf
from bulltask.spark.source.columns import select_columns
from bulltask.spark.source.options import EventsOptions, JobsOptions, StreamOptions, WriteOptions, read_options
from bulltask.spark.source.readers import EventsReader, EventsStreamReader, JobsReader

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="only Linux delays this acknowledgment")

_UNACKNOWLEDGED = slice(24, 28)  # in the system's struct tcp_info


def unacknowledged(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKNOWLEDGED.stop)
    return int(struct.unpack("I", info[_UNACKNOWLEDGED])[0])


ROWS = StructType().add("name", StringType()).add("data", StringType())
MAIL = {"queue": "mail"}


@pytest.mark.parametrize(
    "create",
    [
        lambda: JobsReader(read_options(JobsOptions, MAIL, {}), select_columns("jobs", None)),
        lambda: EventsReader(read_options(EventsOptions, MAIL, {}), select_columns("events", None)),
        lambda: EventsStreamReader(read_options(StreamOptions, MAIL, {}), select_columns("events", None)),
        lambda: JobsWriter(read_options(WriteOptions, MAIL, {}), ROWS, overwrite=False),
        lambda: JobsStreamWriter(read_options(WriteOptions, MAIL, {}), ROWS, overwrite=False),
        lambda: vectorized_udf(iter, StringType()).func,  # type: ignore[attr-defined]
    ],
    ids=["jobs", "events", "event stream", "write", "streaming write", "function of columns"],
)
def test_tcp_acknowledges_what_a_task_gets_when_it_is_unpickled(create: Callable[[], Any]) -> None:
    stored = cloudpickle.dumps(create())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as spark:
        process, _ = server.accept()
        with process:
            delayed = 0
            for _ in range(5):
                process.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
                spark.sendall(b"a task")
                process.recv(100)
                delayed += unacknowledged(spark)
                cloudpickle.loads(stored)
                assert unacknowledged(spark) == 0
            assert delayed > 0  # 5, unless this thread has paused for 40 ms
