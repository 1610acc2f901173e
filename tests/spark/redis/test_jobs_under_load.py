"""Every job is read exactly once while at least a thousand jobs a second change states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from bulltask.jobs.clock import mono_ms
from bulltask.queue import Queue
from bulltask.spark.source.columns import JOBS
from bulltask.spark.source.readers import JobsPartition
from bulltask.transport.broker import Broker
from tests.support.load_generator import LoadGenerator
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import EVERY_STATE, add, age_jobs

pytestmark = [pytest.mark.redis, pytest.mark.slow]

MIN_MOVED = 5_000
"""The jobs that must finish during the reads: a thousand a second if five reads take five seconds, as on a busy
machine. A busier machine needs more reads for the same number of jobs."""

MIN_READS, MAX_READS = 5, 100
COLUMNS = StructType([JOBS["id"], JOBS["state"]])
OPTIONS = {"state": EVERY_STATE, "minRowsPerPartition": "100", "numPartitions": "4"}


def test_every_job_is_read_once_while_a_thousand_a_second_change_states(
    make_reader: Callable[..., DataSourceReader],
    read_rows: Callable[..., list[dict[str, Any]]],
    queue: Queue,
    manual_worker: ManualWorker,
    redis_client: redis.Redis,
) -> None:
    old = add(queue, 300)
    for _ in old:
        manual_worker.complete()
    age_jobs(redis_client, "completed", lambda number: number + 1)  # they are partitioned by time
    broker: Broker = queue.context.broker
    reads = moved = took_ms = max_states = 0
    with LoadGenerator(broker, manual_worker.keys) as load:
        load.wait_for(500)
        while reads < MIN_READS or (moved < MIN_MOVED and reads < MAX_READS):
            finished, existing, start_ms = load.finished[:], {*old, *load.added}, mono_ms()

            reader = make_reader(COLUMNS, **OPTIONS)
            parts = reader.partitions()
            rows = read_rows(reader, parts)

            took_ms += mono_ms() - start_ms
            moved += len(load.finished) - len(finished)
            reads += 1
            states = {row["id"]: row["state"] for row in rows}
            assert len(rows) == len(states), Counter(row["id"] for row in rows).most_common(3)
            assert not existing - states.keys(), "jobs that existed before the read are missing"
            assert {states[job_id] for job_id in (*old, *finished)} == {"completed", "failed"}
            shares = [share for part in parts if isinstance(part, JobsPartition) for share in part.shares]
            assert sum(bool(share.ranges) for share in shares) >= 2
            max_states = max(max_states, len(set(states.values())))

    summary = f"{moved:,} jobs moved during {reads} reads, {moved / took_ms * 1_000:,.0f} a second"
    assert moved >= MIN_MOVED, summary
    assert max_states >= 5, "all states except those of flows and of a paused queue"
