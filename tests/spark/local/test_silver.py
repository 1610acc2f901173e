"""Silver rebuilt by Spark from all events equals silver written by batches."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from bulltask.lake.tables import ATTEMPTS, JOBS
from bulltask.spark.repair import derived_silver
from tests.support.batch_lake import NEVER, BatchLake, histories_in_queues, split_randomly
from tests.support.job_histories import far_future_histories, histories, random_events, remove_ranges
from tests.support.silver_rows import arrow_rows, assert_same

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.mark.parametrize("times_out", [False, True])
def test_silver_rebuilt_from_all_events_equals_silver_of_batches_in_random_histories(
    spark: SparkSession, times_out: bool, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(11)
    event_lists = histories_in_queues("whole", 60, lambda seed: histories(seed, 4))
    event_lists += histories_in_queues("gaps", 60, lambda seed: remove_ranges(histories(seed, 4), random.Random(seed)))
    event_lists += histories_in_queues("noise", 30, lambda seed: random_events(seed, 40))
    far = [
        event
        for events in histories_in_queues("far", 20, lambda seed: far_future_histories(seed, 2))
        for event in events
    ]
    lake = BatchLake()
    lake.add_batch(far)
    for batch in zip(*(split_randomly(events, 6, rng) for events in event_lists), strict=True):
        lake.add_batch([event for part in batch for event in part])
    time_out_before_ms = max(event.event_ms for events in event_lists for event in events) - 700 if times_out else NEVER
    lake.add_batch([], time_out_before_ms)
    with derived_silver(spark.createDataFrame(lake.bronze.combine_chunks()), time_out_before_ms) as silver:
        rebuilt = {table: frame.toArrow() for table, frame in silver.items()}
    for table, written in ((ATTEMPTS, lake.latest_attempts()), (JOBS, lake.latest_jobs())):
        actual, expected = (
            without_open_jobs(lake, rows) for rows in (rebuilt[table].select(written.column_names), written)
        )
        record_property(table.full_name, actual.num_rows)
        assert_same(arrow_rows(actual), arrow_rows(expected))
        assert sorted(actual["dt"].to_pylist()) == sorted(expected["dt"].to_pylist())
        assert actual.schema.types == expected.schema.types
        assert actual.num_rows > 250


def without_open_jobs(lake: BatchLake, rows: pa.Table) -> pa.Table:
    """Leave out open jobs: only batches write a row of a finished job before its manual retry."""
    assert lake.open_events is not None
    return rows.join(lake.open_events.select(["queue", "job_id"]), ["queue", "job_id"], join_type="left anti")
