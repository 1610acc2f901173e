"""bulltask as a zip for ``spark-submit``, on nodes that have what it depends on, and not bulltask itself."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import redis

from tests.spark.cluster.checks import check_three_ways
from tests.spark.cluster.environments import HERE, environment
from tests.spark.cluster.test_writes import CONF
from tests.spark.conftest import need_java
from tests.support.programs import ROOT
from tests.support.spark_cluster import SparkCluster
from tests.support.spark_jvm import java_options, spark_home

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.timeout(600),
    pytest.mark.skipif("CI" not in os.environ, reason="a cluster takes both cores for half a minute: CI=1 runs it"),
]


def wheel_as_zip(archive: Path) -> Path:
    """Make what a wheel is, but for its name; the build of one is tested with the Lua scripts."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        for path in sorted((ROOT / "bulltask").rglob("*")):
            if path.is_file() and path.parent.name != "__pycache__":
                made.write(path, path.relative_to(ROOT))
    return archive


def test_two_workers_without_bulltask_work_with_the_zip_of_spark_submit(
    broker_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_java()
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python, archive = environment(tmp_path / "node", HERE), wheel_as_zip(tmp_path / "bulltask.zip")
    conf = {**CONF, "spark.speculation": "false", "spark.sql.shuffle.partitions": "2"}
    conf |= {
        "spark.scheduler.minRegisteredResourcesRatio": "1",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "2m",
    }
    program = Path(__file__).with_name("three_ways.py")
    with SparkCluster(spark_home(tmp_path / "home"), tmp_path, java_options(), python) as cluster:
        told = cluster.submit(program, broker_url, str(tmp_path / "rows"), conf=conf, py_files=archive)
    homes = told.pop("homes")
    assert len(homes) == 3, "the driver and two executors, each with a copy"
    assert all(home.endswith("bulltask.zip/bulltask/__init__.py") for home in homes)
    check_three_ways(told, redis_client)
