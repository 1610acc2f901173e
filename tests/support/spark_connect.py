"""A server of Spark Connect on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from bulltask.testing.wait import wait_until
from tests.support.processes import SESSION_VARIABLE
from tests.support.spark_cluster import free_port

__all__ = ["ConnectServer"]

HOST = "127.0.0.1"
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


class ConnectServer:
    """Responsible for a server with a Spark in it; a context manager that starts and ends both.

    Args:
        home: a SPARK_HOME.
        place: for its log.
        python: what Spark's Python processes run.
        conf: settings of Spark.

    Attributes:
        url: for clients, who say it in ``SPARK_REMOTE``.
        log: its output.
        pid: its process.
    """

    def __init__(self, home: Path, place: Path, python: Path, conf: Mapping[str, str]) -> None:
        self._port = free_port()
        self.url = f"sc://{HOST}:{self._port}"
        said = {"spark.connect.grpc.binding.address": HOST, "spark.connect.grpc.binding.port": self._port, **conf}
        options = [f"--conf={name}={value}" for name, value in said.items()]
        self._command: list[str | Path] = [
            home / "bin" / "spark-submit",
            "--master=local[2,2]",
            f"--class={SERVER}",
            *options,
        ]
        self._environ = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": str(python)}
        # Its Python processes outlive a test and end with it, so they have no mark, nor work where tests do.
        self._environ.pop(SESSION_VARIABLE, None)
        self.log = place / "connect.log"

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "spark-internal"], env=self._environ, stdout=log, stderr=log
            )
        self.pid = self._process.pid
        try:
            wait_until(self._listens, 120.0, "the server of Spark Connect")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _listens(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            socket.create_connection((HOST, self._port), 10).close()
        except OSError:
            return False
        return True
