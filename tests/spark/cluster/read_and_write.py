"""A program that reads and writes in batch and streaming queries, on a cluster or with Spark Connect.

Arguments: the URL of Redis and a directory. It prints a report as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import bulltask
from bulltask.spark import enqueue, enqueue_stream, events, gather, jobs, register, stream_events


def main(url: str, directory: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    report: dict[str, Any] = {"homes": homes(spark), "report": write(spark, url, directory)}
    report["jobs"] = rows(jobs(spark, states="wait", columns=["queue", "id", "name", "data"], url=url))
    columns = ["queue", "event_id", "event", "job_id"]
    report["events"] = rows(events(spark, columns=columns, url=url))
    streamed = stream_events(spark, max_events_per_trigger=150, url=url).select(columns).writeStream.format("parquet")
    streamed = streamed.option("path", f"{directory}/out").option("checkpointLocation", f"{directory}/out-checkpoint")
    wait_for_end(streamed.trigger(availableNow=True).start())
    report["streamed"] = rows(spark.read.parquet(f"{directory}/out"))
    json.dump(report, sys.stdout)
    spark.stop()


def write(spark: SparkSession, url: str, directory: str) -> list[Any]:
    """Add jobs to the queues ``mail``, ``plain`` and ``feed``; return the results of the jobs in ``mail``."""
    report = enqueue(spark.range(200, numPartitions=4), "mail", name="count", data=["id"], url=url)
    plain = spark.range(50).select(F.lit("plain").alias("name"), F.to_json(F.struct("id")).alias("data"))
    plain.write.format("bulltask").option("url", url).option("queue", "plain").mode("append").save()
    spark.range(100).write.parquet(f"{directory}/in")
    feed = spark.readStream.schema("id long").parquet(f"{directory}/in")
    checkpoint = f"{directory}/in-checkpoint"
    wait_for_end(
        enqueue_stream(feed, "feed", name="fed", data=["id"], checkpoint=checkpoint, available_now=True, url=url)
    )
    states = gather(report, "mail", url=url).groupBy("state").count()
    return [report.rows, report.added, report.duplicates, rows(states)]


def homes(spark: SparkSession) -> list[str]:
    """Return bulltask's paths in the driver and in Spark's tasks."""
    home = F.udf(lambda _: str(Path(bulltask.__file__).absolute()), "string", useArrow=False)
    in_tasks = spark.range(8, numPartitions=4).select(home("id").alias("home")).distinct()
    return sorted({str(Path(bulltask.__file__).absolute()), *(row["home"] for row in in_tasks.collect())})


def wait_for_end(query: StreamingQuery) -> None:
    query.awaitTermination()
    assert query.exception() is None


def rows(frame: DataFrame) -> list[list[Any]]:
    return [list(row) for row in frame.collect()]


if __name__ == "__main__":
    main(*sys.argv[1:])
