"""Spark Connect: a client that has no Java and no py4j does what a session of its own would."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.dataset as ds
import pytest
import redis

from bulltask.lake.layout import Layout
from bulltask.lake.tables import ATTEMPTS, EVENTS
from bulltask.queue import Queue
from tests.spark.cluster.checks import check_three_ways
from tests.spark.cluster.environments import HERE, environment
from tests.spark.conftest import need_java, settings
from tests.support.programs import ROOT
from tests.support.spark_connect import ConnectServer
from tests.support.spark_jvm import spark_home

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.timeout(600),
    pytest.mark.skipif("CI" not in os.environ, reason="needs 250 MB more of packages, and both cores: CI=1 runs it"),
]

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def thin_packages() -> Path:
    """Where the thin client and what it needs are installed; make does it, unless they are there."""
    home = ROOT / ".venv" / "connect"
    with Path(__file__).with_name("requirements-connect.txt").open() as requirements:
        fcntl.flock(requirements, fcntl.LOCK_EX)  # one of pytest-xdist's workers installs, the others wait
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
    place = tmp_path_factory.mktemp("connect")
    # A server's own Python processes are clients too, where a stream has a function for each batch.
    python = environment(place / "python", HERE, thin_packages, ROOT)
    conf = {**settings(place), "spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}
    # Its Python processes outlive a test, and work under its local directory: so that is not where tests work.
    with TemporaryDirectory(prefix="connect", ignore_cleanup_errors=True) as local:
        conf["spark.local.dir"] = local
        with ConnectServer(spark_home(place / "home"), place, python, conf) as made:
            session_processes.add(made.pid)
            yield made


@pytest.fixture
def run(server: ConnectServer, thin_packages: Path, tmp_path: Path) -> Run:
    """Run a program of this directory by the thin client; return the JSON that it prints last."""
    python = environment(tmp_path / "client", thin_packages, HERE, ROOT)
    (own,) = (tmp_path / "client").glob("lib/python3.*/site-packages")
    (own / "py4j.py").write_text("raise ModuleNotFoundError('no py4j', name='py4j')\n")

    def run(program: str, *args: str) -> Any:
        done = subprocess.run(
            [python, Path(__file__).with_name(program), *args],
            env={**os.environ, "SPARK_REMOTE": server.url, "PATH": "/nowhere"},
            capture_output=True, text=True, check=False, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + server.log.read_text()
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_thin_client_reads_streams_and_writes(
    run: Run, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    told = run("three_ways.py", broker_url, str(tmp_path / "rows"))
    told.pop("homes")
    check_three_ways(told, redis_client)


def test_a_thin_client_feeds_a_lake_and_continues_the_stream_of_one_that_was_killed(
    run: Run, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    root = str(tmp_path / "lake")
    with Queue("mail", broker_url) as queue:
        add(queue, 100)
        assert run("leave_a_stream.py", broker_url, root) is True
        add(queue, 100)
        assert run("feed_a_lake.py", broker_url, root) == [200, 0, 0]
    layout = Layout(root)
    entries: Any = redis_client.xrange("bull:{mail}:events")
    found = ds.dataset(layout.table(EVENTS), format="parquet", ignore_prefixes=["_", "."]).to_table()["event_id"]
    assert sorted(found.to_pylist()) == sorted(at for at, _ in entries)
    assert len(entries) >= 400
    assert not layout.days(ATTEMPTS), "no job was taken"


def add(queue: Queue, jobs: int) -> None:
    for number in range(jobs):
        queue.add("send", {"n": number})
