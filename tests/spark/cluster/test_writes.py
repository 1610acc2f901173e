"""Writes on a cluster: a task that hangs on one host is copied to another one, and an executor dies in mid-write.

The first has sent a part of its jobs, the second sends all of them, and every job is there once.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.spark_cluster import SparkCluster
from tests.support.spark_jvm import java_options, spark_home

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.timeout(600),
    pytest.mark.skipif("CI" not in os.environ, reason="a cluster takes both cores for half a minute: CI=1 runs it"),
]

CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20",
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": java_options(),
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": java_options(),
    "spark.log.level": "OFF",
}

PROGRAM = """
import json
import os
import signal

import redis
from pyspark import TaskContext
from pyspark.sql import functions as F

from bulltask.spark import enqueue

URL, ROWS = sys.argv[1], 400
HALF = ROWS // 2


def data_of(number, end):
    task = TaskContext.get()
    part, copy = task.partitionId(), task.attemptNumber()
    if number % HALF == 0 or (part, copy, number) == (0, 0, HALF - 1):
        with redis.Redis.from_url(URL) as plain:
            plain.sadd("tries", f"{part}:{copy}")
            # Until all jobs of the other part have been sent, and some of this one.
            while part == 0 and (number or copy) and plain.llen("bull:{default}:wait") < HALF + 20:
                plain.blpop("never", 0.1)
            if number % HALF and end == "hang":
                plain.blpop("never", 200)  # until Spark ends it, because the copy has won
            elif number % HALF:
                # This process is a child of Spark's Python daemon, which is one of the executor.
                executor = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
                os.kill(executor, signal.SIGKILL)
    # Long, as Spark hands rows over by the 64 kB.
    return json.dumps({"n": number, "text": "x" * 4_000})


rows = spark.range(ROWS, numPartitions=2)
made = F.udf(data_of, "string", useArrow=False)
told = []
with redis.Redis.from_url(URL, decode_responses=True) as plain:
    for way, end in (("enqueue", "hang"), ("format", "hang"), ("enqueue", "kill")):
        plain.flushdb()
        data, report = made("id", F.lit(end)), [ROWS, None, None]
        if way == "enqueue":
            found = enqueue(rows, "default", name="count", data=data, url=URL)
            report = [found.rows, found.added, found.duplicated]
        else:
            jobs = rows.select(F.lit("count").alias("name"), data.alias("data"))
            jobs.write.format("bulltask").option("url", URL).option("queue", "default").mode("append").save()
        told.append([report, plain.lrange("bull:{default}:wait", 0, -1), sorted(plain.smembers("tries"))])
print(json.dumps(told))
"""


def test_tasks_that_hang_or_die_on_one_host_run_on_another_and_each_job_is_added_once(
    broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    if shutil.which("java") is None:
        pytest.fail("the Spark tests need Java (a JRE, 17 or newer)")
    with SparkCluster(spark_home(tmp_path / "home"), tmp_path, java_options()) as cluster:
        told: Any = cluster.run(PROGRAM, broker_url, conf=CONF)
    assert len(told) == 3
    for _, jobs, tries in told:
        assert {"0:0", "0:1"} <= set(tries), "nothing ran again"
        assert len(set(jobs)) == len(jobs) == 400
    for (rows, added, duplicated), _, _ in (told[0], told[2]):
        assert rows == added + duplicated == 400
        assert duplicated >= 20, "the second has found nothing that the first had sent"
