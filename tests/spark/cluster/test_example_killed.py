"""The pipeline example on a cluster whose executors are killed during a write has every job once."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from bulltask.testing.wait import wait_until
from tests.support.example_history import check_lake, count_sent_jobs, run_example, run_worker
from tests.support.spark_cluster import SparkCluster
from tests.support.spark_jvm import java_options

COUNT = int(os.environ.get("BULLTASK_JOBS", "12000"))
CONF = {
    "spark.driver.extraJavaOptions": java_options(),
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
}

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.timeout(900),
    pytest.mark.skipif("CI" not in os.environ, reason="a cluster takes both cores for a minute: CI=1 runs it"),
]

log = logging.getLogger(__name__)


def executors(directory: Path) -> Iterator[int]:
    """Yield the executor processes of a cluster, whose working directories are below the cluster's directory."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        process = Path(entry.path)
        try:
            is_in_cluster = (process / "cwd").readlink().is_relative_to(directory)
            if is_in_cluster and b"CoarseGrainedExecutorBackend" in (process / "cmdline").read_bytes():
                yield int(entry.name)
        except OSError:
            continue


def test_every_job_is_in_the_tables_once_after_all_executors_were_killed(
    cluster: SparkCluster, forked_python: Path, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    root = tmp_path / "lake"
    conf_values = {**CONF, "spark.executor.extraJavaOptions": java_options(tmp_path)}
    conf = [word for name, value in conf_values.items() for word in ("--conf", f"{name}={value}")]
    words = ("--jobs", str(COUNT), "--master", cluster.url, *conf)
    with run_example(broker_url, root, forked_python, *words) as run:
        wait_until(lambda: count_sent_jobs(redis_client) > COUNT * 0.25 or run.poll() is not None, 300.0, "jobs")
        killed = list(executors(cluster.directory))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        sent = count_sent_jobs(redis_client)
        log.warning("killed %d executors when %d of %d jobs were sent", len(killed), sent, COUNT)
        assert killed
        assert sent < COUNT, "the executors were killed after they had written all jobs"
        with run_worker(broker_url) as running_worker:
            assert run.wait(600) == 0, root.with_suffix(".log").read_text()
            assert running_worker.poll() is None
    assert "were already sent" in root.with_suffix(".log").read_text(), "no job was sent again"
    check_lake(root, redis_client, COUNT)
