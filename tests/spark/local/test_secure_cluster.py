"""A real session with a Redis Cluster, TLS with client certificates, and users with minimal grants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from bulltask.queue import Queue
from bulltask.spark import enqueue, gather
from bulltask.spark.acl import READER, WRITER
from tests.support.certificates import Certificates
from tests.support.manual_worker import ManualWorker
from tests.support.redis_cluster import Cluster

pytestmark = [pytest.mark.extended, pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(600)]


@pytest.fixture
def urls(tls_cluster: Cluster, certificates: Certificates) -> Iterator[dict[str, str]]:
    """URLs of one node, for a user that only reads and a user that only writes."""
    users = {"reader": READER, "writer": WRITER}
    for client in tls_cluster.clients:
        for name, grants in users.items():
            client.execute_command("ACL", "SETUSER", name, "reset", "on", ">secret", *grants.rules(cluster=True))
    address = f"localhost:{tls_cluster.tls_ports[0]}/0?{certificates.query()}"
    yield {name: f"rediss://{name}:secret@{address}" for name in users}
    for client in tls_cluster.clients:
        client.acl_deluser(*users)


def test_jobs_are_written_enqueued_read_streamed_and_gathered(
    spark: SparkSession, tls_cluster: Cluster, urls: dict[str, str], tmp_path: Path
) -> None:
    queues = tls_cluster.queues(1)
    names = ",".join(queues)
    rows = spark.sql(
        f"SELECT explode(split('{names}', ',')) AS queue, 'send' AS name, '{{}}' AS data, concat('s', id) AS id "
        "FROM range(10)"
    )
    rows.write.format("bulltask").option("url", urls["writer"]).mode("append").save()
    report = enqueue(spark.range(20), queues[0], name="send", data=["id"], url=urls["writer"])
    assert (report.rows, report.added) == (20, 20)
    with Queue(queues[0], tls_cluster.broker_url) as queue:
        manual_worker = ManualWorker(queue.context.broker, queue.context.broker.keys(queues[0]))
        for number in range(15):  # the first ten are the write's jobs
            manual_worker.complete(number)
        manual_worker.close()

    source = {"url": urls["reader"], "queue": "*"}
    jobs = spark.read.format("bulltask").options(**source, state="wait,completed").load()
    counts = {row["queue"]: row["count"] for row in jobs.groupBy("queue").count().collect()}
    assert counts == dict(zip(queues, (30, 10, 10), strict=True))

    stream = spark.readStream.format("bulltask").options(**source, table="events", maxEventsPerTrigger="60").load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start(str(tmp_path / "events")).awaitTermination()
    events = pyarrow.parquet.read_table(tmp_path / "events").to_pylist()
    added = [(row["queue"], row["job_id"]) for row in events if row["event"] == "added"]
    assert len(added) == len(set(added)) == 50

    results = gather(report, queues[0], url=urls["reader"]).collect()
    assert sorted(row["return_value"] for row in results if row["state"] == "completed") == [
        "10",
        "11",
        "12",
        "13",
        "14",
    ]
    assert sum(row["state"] == "unfinished" for row in results) == 15
