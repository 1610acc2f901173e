"""A standalone Spark cluster on this machine with workers on two hosts, 127.0.0.1 and 127.0.0.2.

Spark runs speculative copies of a task only on another host, so a local session runs none.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

from bulltask.testing.worker import wait_until
from tests.support.spark_jvm import conf_options

__all__ = ["SparkCluster"]

HOSTS = ("127.0.0.1", "127.0.0.2")
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"


class SparkCluster:
    """A master and two workers with one core each; as a context manager, it starts and stops them.

    Args:
        home: A SPARK_HOME.
        directory: The directory for logs and work files.
        java: The JVMs' options.

    Attributes:
        directory: That directory.
        url: The URL of the master.
    """

    def __init__(self, home: Path, directory: Path, java: str) -> None:
        self._home, self.directory = home, directory
        self._environ = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": java,
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "PYSPARK_PYTHON": sys.executable,
        }
        self._environ.pop("PYTHONPATH", None)  # executors would find bulltask there
        self._port, self._web_port = free_port(), free_port()
        self.url = f"spark://{HOSTS[0]}:{self._port}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._start(MASTER, HOSTS[0], "--port", str(self._port), "--webui-port", str(self._web_port))
        wait_until(lambda: self._status() is not None, 90.0, "the master")
        for host in HOSTS:
            work = ["--work-dir", str(self.directory / f"work-{host}")]
            self._start(WORKER, host, "--cores", "1", "--memory", "600m", "--webui-port", "0", *work, self.url)
        wait_until(lambda: (self._status() or {}).get("aliveworkers") == len(HOSTS), 90.0, "two workers")
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):  # workers stop their executors
            process.terminate()
        for process in self._processes:
            process.wait(60)

    @property
    def pids(self) -> list[int]:
        """The process ids of the master and the workers."""
        return [process.pid for process in self._processes]

    def run(self, program: str, *args: str, conf: Mapping[str, str]) -> Any:
        """Run a program with a session ``spark`` on the cluster; return the JSON in its last line of output."""
        header = "import sys\nfrom bulltask.spark import session\n"
        header += f"spark = session('tests', {self.url!r}, conf={dict(conf)!r})\n"
        return self._run_for_json([sys.executable, "-c", header + program + "\nspark.stop()\n", *args])

    def submit(self, program: Path, *args: str, conf: Mapping[str, str], python: Path, py_files: Path) -> Any:
        """Run a program with ``spark-submit``; return the JSON in its last line of output.

        Args:
            program: The program's file.
            args: The program's arguments.
            conf: Spark settings.
            python: The interpreter of the driver and of Spark's Python processes.
            py_files: An archive for ``--py-files``.
        """
        options = [f"--master={self.url}", f"--py-files={py_files}", *conf_options(conf)]
        return self._run_for_json([self._home / "bin" / "spark-submit", *options, program, *args], python)

    def _run_for_json(self, command: Sequence[str | Path], python: str | Path = sys.executable) -> Any:
        done = subprocess.run(
            command,
            env={**self._environ, "PYSPARK_PYTHON": str(python)},
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr  # spark-submit writes both to standard output
        return json.loads(done.stdout.splitlines()[-1])

    def _start(self, kind: str, host: str, *args: str) -> None:
        with (self.directory / f"{kind.rpartition('.')[2]}-{host}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [self._home / "bin" / "spark-class", kind, "--host", host, *args],
                    env={**self._environ, "SPARK_LOCAL_IP": host},
                    cwd=self.directory,
                    stdout=log,
                    stderr=log,
                )
            )

    def _status(self) -> dict[str, Any] | None:
        try:
            with urlopen(f"http://{HOSTS[0]}:{self._web_port}/json/", timeout=10) as page:
                status: dict[str, Any] = json.load(page)
                return status
        except (URLError, ConnectionError, TimeoutError, ValueError):  # not ready, or an HTML error page
            return None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOSTS[0], 0))
        port: int = listener.getsockname()[1]
        return port
