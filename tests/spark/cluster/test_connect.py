"""Spark Connect: a client without Java and py4j supports everything that a local session supports."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis

from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake
from bulltask.lake.tables import ATTEMPTS, EVENTS, TASK_MINUTE
from bulltask.queue import Queue
from tests.spark.cluster.check_report import check_reads_and_writes
from tests.spark.cluster.python_environments import SITE_PACKAGES, environment
from tests.spark.conftest import need_java, settings
from tests.support.programs import ROOT
from tests.support.spark_connect import ConnectServer
from tests.support.spark_jvm import spark_home

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.timeout(600),
    pytest.mark.extended,  # a server and its clients take both cores for half a minute
    pytest.mark.skipif("CI" not in os.environ, reason="needs 250 MB of packages: CI=1 runs it"),
]

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def thin_packages() -> Path:
    """The directory with the thin client and its dependencies; ``make`` installs them if they are missing."""
    home = ROOT / ".venv" / "connect"
    with Path(__file__).with_name("requirements-connect.txt").open() as requirements:
        fcntl.flock(requirements, fcntl.LOCK_EX)  # one pytest-xdist worker installs, the others wait
        stamp = [".venv/connect/installed.stamp"]
        done = subprocess.run(["make", *stamp], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = home.glob("lib/python3.*/site-packages")
    return packages


@pytest.fixture(scope="module")
def server(
    thin_packages: Path, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConnectServer]:
    need_java()
    directory = tmp_path_factory.mktemp("connect")
    # The server's Python processes are also clients, if a query calls a function for each batch.
    python = environment(directory / "python", SITE_PACKAGES, thin_packages, ROOT)
    conf = {**settings(directory), "spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}
    # The server's Python processes outlive a test and use this directory: it must not be the test's directory.
    with TemporaryDirectory(prefix="connect", ignore_cleanup_errors=True) as local:
        conf["spark.local.dir"] = local
        with ConnectServer(spark_home(directory / "home"), directory, python, conf) as started:
            session_processes.add(started.pid)
            yield started


@pytest.fixture
def run(server: ConnectServer, thin_packages: Path, tmp_path: Path) -> Run:
    """Return a function that runs a program of this directory with the thin client and returns the JSON it prints."""
    python = environment(tmp_path / "client", thin_packages, SITE_PACKAGES, ROOT)
    (site_packages,) = (tmp_path / "client").glob("lib/python3.*/site-packages")
    (site_packages / "py4j.py").write_text("raise ModuleNotFoundError('no py4j', name='py4j')\n")

    def run(program: str, *args: str) -> Any:
        done = subprocess.run(
            [python, Path(__file__).with_name(program), *args],
            env={**os.environ, "SPARK_REMOTE": server.url, "PATH": "/nowhere"},
            capture_output=True, text=True, check=False, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + server.log.read_text()
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_thin_client_runs_reads_streaming_queries_and_writes(
    run: Run, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    report = run("read_and_write.py", broker_url, str(tmp_path / "rows"))
    report.pop("homes")
    check_reads_and_writes(report, redis_client)


def test_a_thin_client_continues_the_query_of_a_killed_client(
    run: Run, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    root = str(tmp_path / "lake")
    with Queue("mail", broker_url) as queue:
        add(queue, 100)
        assert run("exit_during_query.py", broker_url, root) is True
        add(queue, 100)
        assert run("run_pipeline.py", broker_url, root) == [200, 0, 0]
    reader = TableReader(Lake(root))
    entries: Any = redis_client.xrange("bull:{mail}:events")
    ids = [row["event_id"] for row in reader.rows(EVENTS, columns=("event_id",))]
    assert sorted(ids) == sorted(entry_id for entry_id, _ in entries)
    assert len(entries) >= 400
    assert not reader.days(ATTEMPTS), "no job was started"
    assert sum(row["added"] for row in reader.rows(TASK_MINUTE)) == 200


def add(queue: Queue, jobs: int) -> None:
    for number in range(jobs):
        queue.add("send", {"n": number})
