"""A Spark Connect server on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from bulltask.testing.worker import wait_until
from tests.support.processes import SESSION_VARIABLE
from tests.support.spark_cluster import free_port
from tests.support.spark_jvm import conf_options

__all__ = ["ConnectServer"]

HOST = "127.0.0.1"
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


class ConnectServer:
    """A Spark Connect server with a local Spark; as a context manager, it starts and stops the server.

    Args:
        home: A SPARK_HOME.
        directory: The directory for the log.
        python: The interpreter of Spark's Python processes.
        conf: Spark settings.

    Attributes:
        url: The URL for ``SPARK_REMOTE``.
        log: The file with its output.
        pid: The process id.
    """

    def __init__(self, home: Path, directory: Path, python: Path, conf: Mapping[str, str]) -> None:
        self._port = free_port()
        self.url = f"sc://{HOST}:{self._port}"
        settings = {"spark.connect.grpc.binding.address": HOST, "spark.connect.grpc.binding.port": self._port, **conf}
        self._command: list[str | Path] = [
            home / "bin" / "spark-submit",
            "--master=local[2,2]",
            f"--class={SERVER}",
            *conf_options(settings),
        ]
        self._environ = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": str(python)}
        # Its Python processes outlive a test, so they must not count as leftovers; they exit with the server.
        self._environ.pop(SESSION_VARIABLE, None)
        self.log = directory / "connect.log"

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "spark-internal"], env=self._environ, stdout=log, stderr=log
            )
        self.pid = self._process.pid
        try:
            wait_until(self._listens, 120.0, "the Spark Connect server")
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
