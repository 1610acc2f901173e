"""Reads of all jobs while a thousand of them a second and more go from state to state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from bulltask.clock import mono_ms
from bulltask.queue import Queue
from bulltask.spark.source.jobs_source import JobsPartition
from bulltask.spark.source.schemas import JOBS
from bulltask.transport.broker import Broker
from tests.support.load_generator import LoadGenerator
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import EVERY_STATE, add, age_jobs

pytestmark = [pytest.mark.redis, pytest.mark.slow]

MOVED = 5_000
"""So many jobs end while reads are under way: a thousand a second where five reads take five seconds, as they do on a
busy machine. On one that is busier still it takes more reads, and the number of jobs is the same."""

READS, MOST_READS = 5, 100
FEW = StructType([JOBS["id"], JOBS["state"]])
FINE = {"state": EVERY_STATE, "minRowsPerPartition": "100", "numPartitions": "4"}


def test_reads_while_a_thousand_jobs_a_second_move_miss_none_and_have_none_twice(
    reader_of: Callable[..., DataSourceReader],
    rows_of: Callable[..., list[dict[str, Any]]],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
) -> None:
    old = add(queue, 300)
    for _ in old:
        manual_worker.complete()
    age_jobs(redis_client, "completed", lambda number: number + 1)  # they are cut by time
    broker: Broker = queue.context.broker
    reads = moved = took_ms = most = 0
    with LoadGenerator(broker, manual_worker.keys) as load:
        load.wait_for(500)
        while reads < READS or (moved < MOVED and reads < MOST_READS):
            ended, there, began_ms = load.finished[:], {*old, *load.added}, mono_ms()

            reader = reader_of(FEW, **FINE)
            parts = reader.partitions()
            rows = rows_of(reader, parts)

            took_ms += mono_ms() - began_ms
            moved += len(load.finished) - len(ended)
            reads += 1
            states = {row["id"]: row["state"] for row in rows}
            assert len(rows) == len(states), Counter(row["id"] for row in rows).most_common(3)
            assert not there - states.keys(), "jobs that were there all the time are missing"
            assert {states[one] for one in (*old, *ended)} == {"completed", "failed"}
            assert sum(isinstance(part, JobsPartition) and not part.ids for part in parts) >= 2
            most = max(most, len({part.state for part in parts if isinstance(part, JobsPartition)}))

    said = f"{moved:,} jobs moved during {reads} reads, {moved / took_ms * 1_000:,.0f} a second"
    assert moved >= MOVED, said
    assert most >= 5, "all states but those of flows and of a paused queue"
