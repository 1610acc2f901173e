"""Rows of bronze and gaps account for all events, whatever the reason for the losses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from bulltask.cli.main import main
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake
from bulltask.lake.tables import EVENTS
from bulltask.spark import Pipeline, batches
from bulltask.spark.batches import BatchWriter
from bulltask.spark.bronze import ReadPart, merge_parts
from tests.support.event_writing import fill

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

QUEUES = ("recreated", "deleted", "late", "trimmed")


def stream(queue: str) -> str:
    return f"bull:{{{queue}}}:events"


def damage_unplanned_events(client: redis.Redis) -> None:
    client.xtrim(stream("trimmed"), 4, approximate=False)
    client.delete(stream("deleted"), stream("recreated"))
    fill(client, 3, "recreated")


def damage_planned_events(client: redis.Redis) -> None:
    client.xtrim(stream("late"), 4, approximate=False)


@pytest.fixture
def damage(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that enables damage after the first batch of a query and after planning the second."""
    write = BatchWriter.__call__

    def damage_and_write(self: BatchWriter, batch: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            damage_planned_events(redis_client)
        write(self, batch, batch_id)
        if batch_id == 0:
            damage_unplanned_events(redis_client)

    return lambda: monkeypatch.setattr(BatchWriter, "__call__", damage_and_write)


def count_rows(lake: Lake, queue: str) -> int:
    if lake.open(EVENTS) is None:
        return 0
    reader = TableReader(lake)
    return reader.count(EVENTS, reader.days(EVENTS), queue)


def test_rows_and_gaps_account_for_all_added_events(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis, tmp_path: Path, damage: Callable[[], None]
) -> None:
    ids = {queue: fill(redis_client, 20, queue) for queue in QUEUES}
    pipeline = Pipeline(spark, tmp_path, url=broker_url, max_events_per_trigger=20, align=False)
    damage()
    for _ in range(2):  # the second run reads recreated streams
        pipeline.run(available_now=True).awaitTermination()

    result = CliRunner().invoke(main, ["pipeline", "gaps", "--lake", str(tmp_path), "--json"])
    assert result.exit_code == 3, result.output
    gaps = {gap["queue"]: gap for gap in json.loads(result.output)}
    assert {queue: (gap["loss_reason"], gap["lost"], gap["exact"]) for queue, gap in gaps.items()} == {
        "recreated": ("stream-recreated", 15, False),
        "deleted": ("stream-deleted", 15, False),
        "late": ("trimmed-during-read", 11, True),
        "trimmed": ("trimmed", 11, True),
    }
    added = {**dict.fromkeys(QUEUES, 20), "recreated": 23}
    assert {queue: count_rows(pipeline.lake, queue) + gaps[queue]["lost"] for queue in QUEUES} == added
    assert {queue: gap["last_id_before"] for queue, gap in gaps.items()} == {queue: ids[queue][4] for queue in QUEUES}
    assert [gaps[queue]["first_id_after"] for queue in ("late", "trimmed")] == [ids["late"][16], ids["trimmed"][16]]


@contextmanager
def hide_file(lake: Lake) -> Iterator[None]:
    """Hide a file of a task from the driver, as if an executor had another directory of the same name."""

    def merge_and_hide(parts: Iterable[ReadPart]) -> ReadPart:
        read = merge_parts(parts)
        Path(lake.location(EVENTS), read.files[-1].path).unlink()
        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "merge_parts", merge_and_hide)
        yield


def test_a_batch_with_a_missing_file_fails_and_the_next_run_writes_it(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    root = tmp_path / "lake"
    conf = ("--conf", "spark.sql.shuffle.partitions=2")  # as in the shared session
    run = ("-b", broker_url, "pipeline", "run", "--once", "--lake", str(root), *conf)
    lake, added = Lake(root), {"late": 0, "mail": 0}
    for _ in range(2):  # the first batch, and a later one
        for queue in added:
            added[queue] += len(fill(redis_client, 20, queue))
        with hide_file(lake):
            failed = CliRunner().invoke(main, run)
        assert failed.exit_code == 1, failed.output
        message = failed.output.splitlines()[-1]
        assert message.startswith("Error: [BULLTASK_LAKE_NOT_SHARED]"), failed.output
        assert f"{root} must be the same directory for the driver and for all executors" in message
        before = {queue: added[queue] - 20 for queue in added}
        assert {queue: count_rows(lake, queue) for queue in added} == before, "part of the batch was committed"

        assert CliRunner().invoke(main, run).exit_code == 0
        assert {queue: count_rows(lake, queue) for queue in added} == added
