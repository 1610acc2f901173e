"""Writes on a cluster add every job once, even if a task runs twice.

A task hangs on one host and is started on another (speculation), or its executor is killed during the write. The first
attempt sends some of its jobs, the second all of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.spark_cluster import SparkCluster
from tests.support.spark_jvm import java_options

pytestmark = [
    pytest.mark.spark,
    pytest.mark.redis,
    pytest.mark.timeout(600),
    pytest.mark.extended,  # a cluster takes both cores for half a minute
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


def data_of(number, failure):
    task = TaskContext.get()
    partition, attempt = task.partitionId(), task.attemptNumber()
    if number % HALF == 0 or (partition, attempt, number) == (0, 0, HALF - 1):
        with redis.Redis.from_url(URL) as client:
            client.sadd("attempts", f"{partition}:{attempt}")
            # Wait until all jobs of the other partition have been sent, and some of this partition.
            while partition == 0 and (number or attempt) and client.llen("bull:{default}:wait") < HALF + 20:
                client.blpop("never", 0.1)
            if number % HALF and failure == "hang":
                client.blpop("never", 200)  # until Spark kills this attempt, because the other has finished
            elif number % HALF:
                # This process is a child of Spark's Python daemon, which is a child of the executor.
                executor = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
                os.kill(executor, signal.SIGKILL)
    # Long data, because Spark transfers rows in blocks of 64 kB.
    return json.dumps({"n": number, "text": "x" * 4_000})


rows = spark.range(ROWS, numPartitions=2)
data_column = F.udf(data_of, "string", useArrow=False)
reports = []
with redis.Redis.from_url(URL, decode_responses=True) as client:
    for method, failure in (("enqueue", "hang"), ("format", "hang"), ("enqueue", "kill")):
        client.flushdb()
        data, report = data_column("id", F.lit(failure)), [ROWS, None, None]
        if method == "enqueue":
            written = enqueue(rows, "default", name="count", data=data, url=URL)
            report = [written.rows, written.added, written.duplicates]
        else:
            jobs = rows.select(F.lit("count").alias("name"), data.alias("data"))
            jobs.write.format("bulltask").option("url", URL).option("queue", "default").mode("append").save()
        reports.append([report, client.lrange("bull:{default}:wait", 0, -1), sorted(client.smembers("attempts"))])
print(json.dumps(reports))
"""


def test_each_job_is_added_once_if_tasks_hang_or_executors_are_killed(cluster: SparkCluster, broker_url: str) -> None:
    reports: Any = cluster.run(PROGRAM, broker_url, conf=CONF)
    assert len(reports) == 3
    for _, jobs, attempts in reports:
        assert {"0:0", "0:1"} <= set(attempts), "no task ran again"
        assert len(set(jobs)) == len(jobs) == 400
    for (rows, added, duplicates), _, _ in (reports[0], reports[2]):
        assert rows == added + duplicates == 400
        assert duplicates >= 20, "the second attempt found no jobs from the first one"
