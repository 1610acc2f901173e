"""Silver rebuilt by Spark from all events at once has the rows that batches wrote."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from bulltask.lake.tables import ATTEMPTS, JOBS
from bulltask.spark.tables.rebuild import derived_silver
from tests.support.batch_lake import NEVER, BatchLake, histories_in_queues, split_randomly
from tests.support.job_histories import far_future_histories, histories, random_events, remove_ranges
from tests.support.silver_rows import arrow_rows, assert_same

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.mark.parametrize("is_given_up", [False, True])
def test_silver_of_all_events_is_what_batches_wrote_in_150_random_histories(
    spark: SparkSession, is_given_up: bool, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(11)
    told = histories_in_queues("whole", 60, lambda seed: histories(seed, 4))
    told += histories_in_queues("holes", 60, lambda seed: remove_ranges(histories(seed, 4), random.Random(seed)))
    told += histories_in_queues("noise", 30, lambda seed: random_events(seed, 40))
    late = [
        event
        for events in histories_in_queues("far", 20, lambda seed: far_future_histories(seed, 2))
        for event in events
    ]
    lake = BatchLake()
    lake.add_batch(late)
    for batch in zip(*(split_randomly(events, 6, rng) for events in told), strict=True):
        lake.add_batch([event for part in batch for event in part])
    give_up_ms = max(event.event_ms for events in told for event in events) - 700 if is_given_up else NEVER
    lake.add_batch([], give_up_ms)
    with derived_silver(spark.createDataFrame(lake.bronze.combine_chunks()), give_up_ms) as silver:
        at_once = {table: frame.toArrow() for table, frame in silver.items()}
    for table, batchwise in ((ATTEMPTS, lake.latest_attempts()), (JOBS, lake.latest_jobs())):
        found, expected = (closed(lake, rows) for rows in (at_once[table].select(batchwise.column_names), batchwise))
        record_property(table.full_name, found.num_rows)
        assert_same(arrow_rows(found), arrow_rows(expected))
        assert sorted(found["dt"].to_pylist()) == sorted(expected["dt"].to_pylist())
        assert found.schema.types == expected.schema.types
        assert found.num_rows > 300


def closed(lake: BatchLake, rows: pa.Table) -> pa.Table:
    """Leave out open jobs: of one that was retried by hand, only batches have written the row of before."""
    assert lake.open_events is not None
    return rows.join(lake.open_events.select(["queue", "job_id"]), ["queue", "job_id"], join_type="left anti")
