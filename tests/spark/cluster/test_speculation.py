"""A task that hangs on one host is copied to another one, which wins: both have sent, and every job is there once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.spark.conftest import QUICK_JVM, thin_home
from tests.support.spark_cluster import SparkCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(500),
    pytest.mark.skipif("CI" not in os.environ, reason="a cluster takes both cores for half a minute: CI=1 runs it"),
]

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20",
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": QUICK_JVM,
    "spark.log.level": "OFF",
}

PROGRAM = """
import json

import redis
from pyspark import TaskContext
from pyspark.sql import functions as F

from bulltask.spark import enqueue

URL, ROWS = sys.argv[1], 400
HALF = ROWS // 2


def data_of(number):
    task = TaskContext.get()
    part, copy = task.partitionId(), task.attemptNumber()
    if number % HALF == 0 or (part, copy, number) == (0, 0, HALF - 1):
        with redis.Redis.from_url(URL) as plain:
            plain.sadd("tries", f"{part}:{copy}")
            if number % HALF:
                plain.blpop("never", 200)  # hangs until Spark ends it, because the copy has won
            while (part, copy) == (0, 1) and plain.llen("bull:{default}:wait") < HALF + 20:
                plain.blpop("never", 0.1)
    # Long, as Spark hands rows over by the 64 kB.
    return json.dumps({"n": number, "text": "x" * 4_000})


rows = spark.range(ROWS, numPartitions=2)
data = F.udf(data_of, "string", useArrow=False)("id")
told = []
with redis.Redis.from_url(URL, decode_responses=True) as plain:
    for way in ("enqueue", "format"):
        plain.flushdb()
        report = [ROWS, None, None]
        if way == "enqueue":
            made = enqueue(rows, "default", name="count", data=data, url=URL)
            report = [made.rows, made.added, made.duplicated]
        else:
            jobs = rows.select(F.lit("count").alias("name"), data.alias("data"))
            jobs.write.format("bulltask").option("url", URL).option("queue", "default").mode("append").save()
        told.append([report, plain.lrange("bull:{default}:wait", 0, -1), sorted(plain.smembers("tries"))])
print(json.dumps(told))
"""


def test_a_task_and_its_copy_on_another_host_add_each_job_once(
    broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    if shutil.which("java") is None:
        pytest.fail("the Spark tests need Java (a JRE, 17 or newer)")
    with SparkCluster(thin_home(tmp_path / "home"), tmp_path, QUICK_JVM) as cluster:
        told: Any = cluster.run(PROGRAM, broker_url, conf=SPECULATION)
    for _, jobs, tries in told:
        assert {"0:0", "0:1"} <= set(tries), "nothing was copied"
        assert len(set(jobs)) == len(jobs) == 400
    rows, added, duplicated = told[0][0]
    assert rows == added + duplicated == 400
    assert duplicated >= 20, "the copy has found nothing that the task had sent"
