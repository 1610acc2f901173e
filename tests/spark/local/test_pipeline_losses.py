"""The ways in which events are lost, through the whole pipeline: rows of bronze and gaps are all that was added."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import redis
from click.testing import CliRunner
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

from bulltask.cli.main import main
from bulltask.lake.layout import Layout
from bulltask.lake.tables import EVENTS
from bulltask.spark import Pipeline
from bulltask.spark.tables.batches import BatchWriter
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
    """Harm streams after the first batch of a query, and when the second one is planned."""
    write = BatchWriter.__call__

    def harmful(self: BatchWriter, batch: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            harm_what_is_planned(redis_client)
        write(self, batch, batch_id)
        if batch_id == 0:
            harm_what_is_not_planned(redis_client)

    return lambda: monkeypatch.setattr(BatchWriter, "__call__", harmful)


def rows(layout: Layout, queue: str) -> int:
    if not layout.table(EVENTS).is_dir():
        return 0
    events = ds.dataset(layout.table(EVENTS), format="parquet", partitioning="hive", ignore_prefixes=["_", "."])
    return int(events.count_rows(filter=ds.field("queue") == queue))


def test_rows_and_gaps_are_all_that_was_added_and_the_command_names_the_gaps(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis, tmp_path: Path, harmed: Callable[[], None]
) -> None:
    ids = {queue: fill(redis_client, 20, queue) for queue in QUEUES}
    pipeline = Pipeline(spark, tmp_path, url=broker_url, max_events_per_trigger=20, align=False)
    harmed()
    for _ in range(2):  # the second one reads recreated streams
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


@contextmanager
def files_hidden(queues: str) -> Iterator[None]:
    """The driver does not find the files of these queues: an executor has another directory under the same name."""
    write = DataFrameWriter.parquet

    def wrote(self: DataFrameWriter, path: str) -> None:
        write(self, path)
        for file in Path(path).glob(f"*/*/queue={queues}/*.parquet"):
            file.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataFrameWriter, "parquet", wrote)
        yield


def test_a_batch_whose_files_the_driver_does_not_find_stops_the_run_and_the_next_run_has_it_whole(
    spark: SparkSession, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    root = tmp_path / "lake"
    as_in_the_session = ("--conf", "spark.sql.shuffle.partitions=2")  # which all tests share
    run = ("-b", broker_url, "pipeline", "run", "--once", "--root", str(root), *as_in_the_session)
    layout, added = Layout(root), {"late": 0, "mail": 0}
    for hidden, missing in (("*", "late"), ("mail", "mail")):  # a lake's first batch, and a later one in part
        for queue in added:
            added[queue] += len(fill(redis_client, 20, queue))
        with files_hidden(hidden):
            failed = CliRunner().invoke(main, run)
        assert failed.exit_code == 1, failed.output
        said = failed.output.splitlines()[-1]
        assert said.startswith("Error: [BULLTASK_BATCH_INCOMPLETE]"), failed.output
        assert f"must have 20 events of queue {missing!r}, and its files have 0 events and 0 lost" in said
        assert f"{root} must be the same directory for the driver and for all executors" in said
        before = {queue: added[queue] - 20 for queue in added}
        assert {queue: rows(layout, queue) for queue in added} == before, "nothing of the batch is published"

        assert CliRunner().invoke(main, run).exit_code == 0
        assert {queue: rows(layout, queue) for queue in added} == added
