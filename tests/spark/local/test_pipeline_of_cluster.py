"""The pipeline of a Redis Cluster writes the events of queues on all nodes once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from bulltask.queue import Queue
from bulltask.spark import Pipeline
from tests.support.event_writing import fill
from tests.support.queue_contents import add
from tests.support.redis_cluster import Cluster

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(300)]


def ids_in(cluster: Cluster, queues: list[str]) -> Counter[tuple[str, str]]:
    return Counter(
        (queue, str(entry_id))
        for queue in queues
        for entry_id, _ in cluster.client_of(queue).xrange(f"bull:{{{queue}}}:events")  # type: ignore[union-attr]
    )


def test_events_of_queues_on_all_nodes_are_in_the_lake_once(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    pipeline = Pipeline(spark, tmp_path / "lake", url=cluster.url, max_events_per_trigger=50)
    *first, of_node_only, new = cluster.queues(2)
    for queues in (first, [*first, of_node_only, new]):  # some queues are new in the second run
        for name in queues:
            if name == of_node_only:
                fill(cluster.client_of(name), 20, name)
            else:
                with Queue(name, cluster.broker_url) as queue:
                    add(queue, 10)
        pipeline.run(available_now=True).awaitTermination()
        written = ds.dataset(tmp_path / "lake" / "bronze" / "events", format="parquet", partitioning="hive")
        rows = written.to_table(columns=["queue", "event_id"]).to_pylist()
        assert Counter((row["queue"], row["event_id"]) for row in rows) == ids_in(cluster, queues)
    status = pipeline.status()
    assert {queue.queue: (queue.lag_events, queue.lost) for queue in status.queues} == dict.fromkeys(queues, (0, 0))
