"""The stream that feeds a lake: each event once, whatever happens to it; what is lost is counted."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from bulltask.errors import ConfigError, LakeInUseError
from bulltask.lake.arrow import partition_schema
from bulltask.lake.history import History
from bulltask.lake.layout import Layout
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, Table
from bulltask.spark import Pipeline
from bulltask.spark.lifecycle import sql as lifecycle_sql
from bulltask.spark.lifecycle.fold import LifecycleEvent
from bulltask.spark.tables.lake_tables import latest, read_table
from tests.support.event_writing import write_events
from tests.support.job_histories import histories
from tests.support.programs import run_program

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

Make = Callable[..., Pipeline]


@pytest.fixture
def pipeline(spark: SparkSession, broker_url: str, tmp_path: Path) -> Make:
    return lambda **more: Pipeline(spark, tmp_path / "lake", url=broker_url, **more)


def run(pipeline: Pipeline) -> None:
    pipeline.run(available_now=True).awaitTermination()


def arrow_rows(layout: Layout, table: Table) -> list[dict[str, object]]:
    """A table's rows by Arrow alone."""
    way = ds.partitioning(partition_schema(table), flavor="hive")
    found = ds.dataset(layout.table(table), format="parquet", partitioning=way, ignore_prefixes=["_", "."])
    rows: list[dict[str, object]] = found.to_table().to_pylist()
    return rows


def told(queue: str, seed: int, jobs: int = 5) -> list[LifecycleEvent]:
    return [replace(event, queue=queue) for event in histories(seed, jobs)]


def ids(events: list[LifecycleEvent]) -> Counter[tuple[object, object]]:
    return Counter((event.queue, event.event_id) for event in events)


def ids_in(layout: Layout) -> Counter[tuple[object, object]]:
    return Counter((row["queue"], row["event_id"]) for row in arrow_rows(layout, EVENTS))


def test_every_event_is_written_once_over_restarts_and_new_queues(
    pipeline: Make, redis_client: redis.Redis, spark: SparkSession
) -> None:
    mails, odd = told("mail", 1, 20), told("a,b %x", 2, 10)
    write_events(redis_client, mails[:50])
    run(pipeline(max_events_per_trigger=20))
    run(pipeline())  # nothing new
    write_events(redis_client, mails[50:])
    write_events(redis_client, odd)
    run(pipeline(max_events_per_trigger=60))
    layout = pipeline().layout
    assert ids_in(layout) == ids(mails + odd)
    by_spark = read_table(spark, layout, EVENTS).select("queue", "event_id", "event_ms", "event").collect()
    assert Counter((row.queue, row.event_id) for row in by_spark) == ids(mails + odd)
    assert {(row.event_id, row.event) for row in by_spark} == {(one.event_id, one.event) for one in mails + odd}
    records = list(Ledger(layout).records())
    assert [record.number for record in records] == [*range(len(records), 0, -1)]
    assert len(records) > 3
    assert sum(seen.events for record in records for seen in record.queues.values()) == len(mails) + len(odd)
    assert records[0].ends == {"mail": mails[-1].event_id, "a,b %x": odd[-1].event_id}
    assert records[0].clock_ms == max(event.event_ms for event in mails + odd)
    assert not layout.internal("staging").exists()


def test_losses_are_rows_and_rows_plus_losses_are_all_that_was_added(pipeline: Make, redis_client: redis.Redis) -> None:
    events = told("mail", 3, 30)
    write_events(redis_client, events[:30])
    run(pipeline())
    write_events(redis_client, events[30:])
    redis_client.xtrim("bull:mail:events", maxlen=17, approximate=False)
    run(pipeline())
    layout = pipeline().layout
    (gap,) = arrow_rows(layout, GAPS)
    assert (gap["queue"], gap["lost"], gap["exact"], gap["reason"]) == ("mail", len(events) - 30 - 17, True, "trimmed")
    assert (gap["after_id"], gap["first_id"]) == (events[29].event_id, events[-17].event_id)
    assert ids_in(layout) == ids(events[:30] + events[-17:])
    head = Ledger(layout).head()
    assert head is not None
    assert head.lost == {"mail": gap["lost"]}
    assert (head.queues["mail"].gaps, head.queues["mail"].events) == (1, 17)
    assert len(ids_in(layout)) + head.lost["mail"] == redis_client.xinfo_stream("bull:mail:events")["entries-added"]


def test_with_on_loss_fail_a_loss_fails_the_stream_and_nothing_is_written(
    pipeline: Make, redis_client: redis.Redis
) -> None:
    events = told("mail", 3, 30)
    write_events(redis_client, events[:30])
    run(pipeline(on_loss="fail"))
    write_events(redis_client, events[30:])
    redis_client.xtrim("bull:mail:events", maxlen=17, approximate=False)
    with pytest.raises(PySparkException, match="BULLTASK_EVENTS_LOST"):
        run(pipeline(on_loss="fail"))
    assert ids_in(pipeline().layout) == ids(events[:30])
    run(pipeline(on_loss="gap"))
    assert len(arrow_rows(pipeline().layout, GAPS)) == 1


def test_a_batch_that_spark_asks_for_again_is_not_written_again(pipeline: Make, redis_client: redis.Redis) -> None:
    events = told("mail", 4)
    write_events(redis_client, events)
    run(pipeline())
    layout = pipeline().layout
    last = max((layout.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink()
    redis_client.delete("bull:mail:events")  # what was read need not be there any more
    run(pipeline())
    assert ids_in(layout) == ids(events)
    assert last.exists()


def test_a_batch_that_was_killed_during_its_renames_is_removed_and_written_again(
    pipeline: Make, redis_client: redis.Redis
) -> None:
    events = told("mail", 5, 10)
    write_events(redis_client, events[:20])
    run(pipeline())
    layout, before = pipeline().layout, (pipeline().layout.internal("head.json")).read_text()
    shutil.copytree(layout.open_jobs, layout.internal("kept"))
    write_events(redis_client, events[20:])
    run(pipeline())
    ingest = json.loads(layout.internal("head.json").read_text())["ingest"]
    layout.internal("head.json").write_text(before)
    shutil.copytree(layout.internal("kept"), layout.open_jobs, dirs_exist_ok=True)
    layout.internal("batches", f"{ingest}.json").unlink()
    layout.internal("publishing.json").write_text(json.dumps({"ingest": ingest}))
    shutil.rmtree(layout.checkpoint)  # so another batch than that one comes next
    run(pipeline())
    assert ids_in(layout) == ids(events)
    assert ingest not in {row["ingest_id"] for row in arrow_rows(layout, EVENTS)}
    assert not layout.internal("publishing.json").exists()


def test_a_new_checkpoint_continues_after_the_lakes_last_event(pipeline: Make, redis_client: redis.Redis) -> None:
    events = told("mail", 6, 10)
    write_events(redis_client, events[:30])
    run(pipeline())
    shutil.rmtree(pipeline().layout.checkpoint)
    write_events(redis_client, events[30:])
    run(pipeline())
    assert ids_in(pipeline().layout) == ids(events)


def test_a_checkpoint_that_is_older_than_the_lake_is_refused(
    pipeline: Make, redis_client: redis.Redis, tmp_path: Path
) -> None:
    events = told("mail", 7, 10)
    layout = pipeline().layout
    write_events(redis_client, events[:20])
    run(pipeline())
    shutil.copytree(layout.checkpoint, tmp_path / "old")
    for part in (events[20:30], events[30:]):
        write_events(redis_client, part)
        run(pipeline())
    shutil.rmtree(layout.checkpoint)
    shutil.copytree(tmp_path / "old", layout.checkpoint)
    with pytest.raises(PySparkException, match="the checkpoint is older than the lake"):
        run(pipeline())
    shutil.rmtree(layout.checkpoint)
    run(pipeline())
    assert ids_in(layout) == ids(events)


def test_a_lake_is_fed_by_one_stream_at_a_time(pipeline: Make, redis_client: redis.Redis) -> None:
    write_events(redis_client, told("mail", 8))
    made = pipeline(trigger="1 hour")
    query = made.run()
    try:
        with pytest.raises(LakeInUseError, match="already writes to the lake"):
            pipeline().run()
        program = (
            "import sys\nfrom bulltask.lake.layout import Layout\nfrom bulltask.lake.lock import RunLock\n"
            "RunLock(Layout(sys.argv[1]))"
        )
        with run_program(program, str(made.layout.root)) as other:
            assert "LakeInUseError" in other.read_rest()
    finally:
        query.stop()
    run(pipeline())


def test_silver_of_batches_is_silver_of_all_events(
    pipeline: Make, redis_client: redis.Redis, spark: SparkSession
) -> None:
    mails, photos = told("mail", 12, 30), told("{photos}", 13, 20)
    write_events(redis_client, mails[:110])
    write_events(redis_client, photos[:30])
    run(pipeline(max_events_per_trigger=60, max_open=0.5))
    write_events(redis_client, mails[110:])
    write_events(redis_client, photos[30:])
    run(pipeline(max_open=0.5))
    late = replace(mails[-1], job_id="last", event_ms=mails[-1].event_ms + 60_000, event="added")
    write_events(redis_client, [late])
    run(pipeline(max_open=0.5))  # gives up all that is open
    layout = pipeline().layout
    assert ids_in(layout) == ids([*mails, *(replace(event, queue="photos") for event in photos), late])
    events = read_table(spark, layout, EVENTS)
    for table, at_once in ((ATTEMPTS, lifecycle_sql.attempts(events)), (JOBS, lifecycle_sql.jobs(events))):
        names = [name for name in at_once.columns if name != "dt"]
        found = rows_of(latest(read_table(spark, layout, table), table).select(names))
        expected = rows_of(at_once.where("job_id <> 'last'").select(names))
        assert found == expected
        assert len(found) > 50
    head = Ledger(layout).head()
    assert head is not None
    assert head.open_job_events == 1, "the last one is open"
    assert [path.name for path in layout.open_jobs.iterdir()] == [head.open_jobs_ingest]
    assert sum(record.jobs for record in Ledger(layout).records()) == len(arrow_rows(layout, JOBS))


def rows_of(frame: DataFrame) -> set[tuple[object, ...]]:
    columns = [column.to_pylist() for column in frame.toArrow().columns]
    return set(zip(*columns, strict=True))


def test_events_after_the_year_9999_are_of_its_last_day_and_do_no_harm(
    pipeline: Make, redis_client: redis.Redis, spark: SparkSession
) -> None:
    """The server's clock was far ahead for a moment: all later ids follow it, and jobs continue."""
    mails, mad = told("mail", 1, 10), told("mad", 2, 10)
    ids_of = [f"253402300800000-{n}" if n < len(mad) // 2 else f"{2**64 - 2}-{n}" for n in range(len(mad))]
    write_events(redis_client, mails[:50])
    for number, (one, entry_id) in enumerate(zip(mad, ids_of, strict=True)):
        write_events(redis_client, [replace(one, event_ms=int(entry_id.partition("-")[0]), event_seq=number)])
    run(pipeline())
    write_events(redis_client, mails[50:])
    run(pipeline())
    layout = pipeline().layout
    assert ids_in(layout) == ids(mails) + Counter(("mad", entry_id) for entry_id in ids_of)
    last = date(9999, 12, 31)
    assert {row["queue"] for row in arrow_rows(layout, EVENTS) if row["dt"] == str(last)} == {"mad"}
    assert [str(day) for day in layout.days(EVENTS)] == ["2025-10-09", str(last)]
    head = Ledger(layout).head()
    assert head is not None
    assert head.ends == {"mail": mails[-1].event_id, "mad": ids_of[-1]}
    assert head.clock_ms == mails[-1].event_ms, "by a mad clock all jobs would be given up"
    assert History(layout.root).search(queue="mad", state="failed").jobs[0].seen_at.year == last.year
    shutil.rmtree(layout.checkpoint)
    run(pipeline())
    assert ids_in(layout) == ids(mails) + Counter(("mad", entry_id) for entry_id in ids_of)
    by_batches = [that_count(spark, layout, table) for table in (ATTEMPTS, JOBS)]
    assert all(by_batches)
    pipeline().build("silver", days=[last])
    assert [that_count(spark, layout, table) for table in (ATTEMPTS, JOBS)] == by_batches


def that_count(spark: SparkSession, layout: Layout, table: Table) -> set[tuple[object, ...]]:
    """The rows of the queue with the wrong clock, without the columns that say who wrote them."""
    return rows_of(latest(read_table(spark, layout, table), table).where("queue = 'mad'").drop("ingest_id"))


def test_files_are_stored_by_day_queue_and_batch(pipeline: Make, redis_client: redis.Redis) -> None:
    write_events(redis_client, told("mail", 9))
    run(pipeline())
    layout = pipeline().layout
    head = Ledger(layout).head()
    assert head is not None
    (place,) = layout.written_directories(EVENTS, head.ingest)
    day = date.fromisoformat("2025-10-09")  # of the ids that the histories begin with
    assert place == layout.day(EVENTS, day) / "queue=mail" / f"ingest_id={head.ingest}"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"on_loss": "ignore"}, ConfigError),
        ({"starting": "now"}, ConfigError),
        ({"max_open": -1}, ConfigError),
        ({"colour": "red"}, TypeError),
    ],
)
def test_a_wrong_option_is_refused_at_once(pipeline: Make, wrong: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        pipeline(**wrong)
