"""The ways in which events are lost, through the whole pipeline: rows of bronze and gaps are all that was added."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import redis
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from bulltask.cli.main import main
from bulltask.lake.layout import Layout
from bulltask.lake.tables import EVENTS
from bulltask.spark import Pipeline
from bulltask.spark.tables.batches import Batches
from tests.support.event_writing import fill

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

QUEUES = ("anew", "deleted", "late", "trimmed")


def stream(queue: str) -> str:
    return f"bull:{{{queue}}}:events"


def harm_what_is_not_planned(client: redis.Redis) -> None:
    client.xtrim(stream("trimmed"), 4, approximate=False)
    client.delete(stream("deleted"), stream("anew"))
    fill(client, 3, "anew")


def harm_what_is_planned(client: redis.Redis) -> None:
    client.xtrim(stream("late"), 4, approximate=False)


@pytest.fixture
def harmed(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Harm streams behind the first batch of a query, and when the second one is planned."""
    write = Batches.__call__

    def harmful(self: Batches, batch: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            harm_what_is_planned(redis_client)
        write(self, batch, batch_id)
        if batch_id == 0:
            harm_what_is_not_planned(redis_client)

    return lambda: monkeypatch.setattr(Batches, "__call__", harmful)


def rows(layout: Layout, queue: str) -> int:
    events = ds.dataset(layout.table(EVENTS), format="parquet", partitioning="hive", ignore_prefixes=["_", "."])
    return int(events.count_rows(filter=ds.field("queue") == queue))


def test_rows_and_gaps_are_all_that_was_added_and_the_command_names_the_gaps(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis, tmp_path: Path, harmed: Callable[[], None]
) -> None:
    ids = {queue: fill(redis_client, 20, queue) for queue in QUEUES}
    pipeline = Pipeline(spark, tmp_path, url=broker_url, max_events_per_trigger=20, align=False)
    harmed()
    for _ in range(2):  # what is there anew, the second one reads
        pipeline.run(available_now=True).awaitTermination()

    said = CliRunner().invoke(main, ["pipeline", "gaps", "--root", str(tmp_path), "--json"])
    assert said.exit_code == 3, said.output
    found = {gap["queue"]: gap for gap in json.loads(said.output)}
    assert {queue: (gap["reason"], gap["lost"], gap["exact"]) for queue, gap in found.items()} == {
        "anew": ("recreated", 15, False),
        "deleted": ("gone", 15, False),
        "late": ("at-read", 11, True),
        "trimmed": ("trimmed", 11, True),
    }
    added = {**dict.fromkeys(QUEUES, 20), "anew": 23}
    assert {queue: rows(pipeline.layout, queue) + found[queue]["lost"] for queue in QUEUES} == added
    assert {queue: gap["after_id"] for queue, gap in found.items()} == {queue: ids[queue][4] for queue in QUEUES}
    assert [found[queue]["first_id"] for queue in ("late", "trimmed")] == [ids["late"][16], ids["trimmed"][16]]
