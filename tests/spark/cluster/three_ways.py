"""What users do on a cluster and through Spark Connect alike: read a batch, read a stream, and write, both ways.

A program of its own: its arguments are the URL of Redis and a directory; it prints what it has seen, as JSON.
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


def main(url: str, place: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    told: dict[str, Any] = {"homes": homes(spark), "report": write(spark, url, place)}
    told["jobs"] = rows(jobs(spark, states="wait", columns=["queue", "id", "name", "data"], url=url))
    columns = ["queue", "event_id", "event", "job_id"]
    told["events"] = rows(events(spark, columns=columns, url=url))
    streamed = stream_events(spark, max_events_per_trigger=150, url=url).select(columns).writeStream.format("parquet")
    streamed = streamed.option("path", f"{place}/out").option("checkpointLocation", f"{place}/out-checkpoint")
    end(streamed.trigger(availableNow=True).start())
    told["streamed"] = rows(spark.read.parquet(f"{place}/out"))
    json.dump(told, sys.stdout)
    spark.stop()


def write(spark: SparkSession, url: str, place: str) -> list[Any]:
    """Add jobs to the queues ``mail``, ``plain`` and ``feed``; return the results of those of ``mail``."""
    report = enqueue(spark.range(200, numPartitions=4), "mail", name="count", data=["id"], url=url)
    plain = spark.range(50).select(F.lit("plain").alias("name"), F.to_json(F.struct("id")).alias("data"))
    plain.write.format("bulltask").option("url", url).option("queue", "plain").mode("append").save()
    spark.range(100).write.parquet(f"{place}/in")
    feed = spark.readStream.schema("id long").parquet(f"{place}/in")
    checkpoint = f"{place}/in-checkpoint"
    end(enqueue_stream(feed, "feed", name="fed", data=["id"], checkpoint=checkpoint, available_now=True, url=url))
    found = gather(report, "mail", url=url).groupBy("state").count()
    return [report.rows, report.added, report.duplicated, rows(found)]


def homes(spark: SparkSession) -> list[str]:
    """Where bulltask is here, and where Spark's tasks find it."""
    home = F.udf(lambda _: str(Path(bulltask.__file__).absolute()), "string", useArrow=False)
    there = spark.range(8, numPartitions=4).select(home("id").alias("home")).distinct()
    return sorted({str(Path(bulltask.__file__).absolute()), *(row["home"] for row in there.collect())})


def end(query: StreamingQuery) -> None:
    query.awaitTermination()
    assert query.exception() is None


def rows(frame: DataFrame) -> list[list[Any]]:
    return [list(row) for row in frame.collect()]


if __name__ == "__main__":
    main(*sys.argv[1:])
