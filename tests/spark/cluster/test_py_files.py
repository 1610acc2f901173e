"""bulltask as a zip for ``spark-submit``, on nodes with its dependencies but without bulltask."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import redis

from tests.spark.cluster.check_report import check_reads_and_writes
from tests.spark.cluster.python_environments import SITE_PACKAGES, environment
from tests.spark.cluster.test_writes import CONF
from tests.support.programs import ROOT
from tests.support.spark_cluster import SparkCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.timeout(600),
    pytest.mark.extended,  # a cluster takes both cores for half a minute
]


def wheel_as_zip(archive: Path) -> Path:
    """Create an archive with the contents of a wheel; building a wheel is tested with the Lua scripts."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in sorted((ROOT / "bulltask").rglob("*")):
            if path.is_file() and path.parent.name != "__pycache__":
                wheel.write(path, path.relative_to(ROOT))
        wheel.write(ROOT / "pyspark_bulltask.py", "pyspark_bulltask.py")
    return archive


def test_executors_without_bulltask_use_the_zip_passed_to_spark_submit(
    cluster: SparkCluster, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    python, archive = environment(tmp_path / "node", SITE_PACKAGES), wheel_as_zip(tmp_path / "bulltask.zip")
    conf = {**CONF, "spark.speculation": "false", "spark.sql.shuffle.partitions": "2"}
    conf |= {
        "spark.scheduler.minRegisteredResourcesRatio": "1",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "2m",
    }
    program = Path(__file__).with_name("read_and_write.py")
    report = cluster.submit(program, broker_url, str(tmp_path / "rows"), conf=conf, python=python, py_files=archive)
    homes = report.pop("homes")
    assert len(homes) == 3, "the driver and two executors, each with a copy"
    assert all(home.endswith("bulltask.zip/bulltask/__init__.py") for home in homes)
    check_reads_and_writes(report, redis_client)
