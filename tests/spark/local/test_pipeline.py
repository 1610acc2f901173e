"""The pipeline writes each event to a lake once, even after crashes; lost events are counted."""

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
from bulltask.lake.files import partition_schema
from bulltask.lake.history import History
from bulltask.lake.storage import Layout, Ledger
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, Table
from bulltask.spark import Pipeline
from bulltask.spark.lake_tables import latest, read_table
from tests.support import silver_rows
from tests.support.event_writing import write_events
from tests.support.job_histories import histories
from tests.support.lifecycle_oracle import LifecycleEvent, lifecycle
from tests.support.programs import run_program
from tests.support.silver_rows import assert_same, attempt_row, job_row

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

Make = Callable[..., Pipeline]


@pytest.fixture
def pipeline(spark: SparkSession, broker_url: str, tmp_path: Path) -> Make:
    return lambda **options: Pipeline(spark, tmp_path / "lake", url=broker_url, **options)


def run(pipeline: Pipeline) -> None:
    pipeline.run(available_now=True).awaitTermination()


def arrow_rows(layout: Layout, table: Table) -> list[dict[str, object]]:
    """Read a table's rows with Arrow instead of Spark."""
    partitioning = ds.partitioning(partition_schema(table), flavor="hive")
    dataset = ds.dataset(layout.table(table), format="parquet", partitioning=partitioning, ignore_prefixes=["_", "."])
    rows: list[dict[str, object]] = dataset.to_table().to_pylist()
    return rows


def events_of(queue: str, seed: int, jobs: int = 5) -> list[LifecycleEvent]:
    return [replace(event, queue=queue) for event in histories(seed, jobs)]


def ids(events: list[LifecycleEvent]) -> Counter[tuple[object, object]]:
    return Counter((event.queue, event.event_id) for event in events)


def ids_in(layout: Layout) -> Counter[tuple[object, object]]:
    return Counter((row["queue"], row["event_id"]) for row in arrow_rows(layout, EVENTS))


def test_every_event_is_written_once_across_restarts_and_new_queues(
    pipeline: Make, redis_client: redis.Redis, spark: SparkSession
) -> None:
    mails, others = events_of("mail", 1, 20), events_of("a,b %x", 2, 10)
    write_events(redis_client, mails[:50])
    run(pipeline(max_events_per_trigger=20))
    run(pipeline())  # nothing new
    write_events(redis_client, mails[50:])
    write_events(redis_client, others)
    run(pipeline(max_events_per_trigger=60))
    layout = pipeline().layout
    assert ids_in(layout) == ids(mails + others)
    by_spark = read_table(spark, layout, EVENTS).select("queue", "event_id", "event_ms", "event").collect()
    assert Counter((row.queue, row.event_id) for row in by_spark) == ids(mails + others)
    assert {(row.event_id, row.event) for row in by_spark} == {
        (event.event_id, event.event) for event in mails + others
    }
    records = list(Ledger(layout).records())
    assert [record.number for record in records] == [*range(len(records), 0, -1)]
    assert len(records) > 3
    assert sum(seen.events for record in records for seen in record.queues.values()) == len(mails) + len(others)
    assert records[0].last_ids == {"mail": mails[-1].event_id, "a,b %x": others[-1].event_id}
    assert records[0].newest_event_ms == max(event.event_ms for event in mails + others)
    assert not layout.internal("staging").exists()


def test_events_and_losses_in_gap_rows_account_for_all_added_events(pipeline: Make, redis_client: redis.Redis) -> None:
    events = events_of("mail", 3, 30)
    write_events(redis_client, events[:30])
    run(pipeline())
    write_events(redis_client, events[30:])
    redis_client.xtrim("bull:mail:events", maxlen=17, approximate=False)
    run(pipeline())
    layout = pipeline().layout
    (gap,) = arrow_rows(layout, GAPS)
    assert (gap["queue"], gap["lost"], gap["exact"], gap["loss_reason"]) == (
        "mail",
        len(events) - 30 - 17,
        True,
        "trimmed",
    )
    assert (gap["last_id_before"], gap["first_id_after"]) == (events[29].event_id, events[-17].event_id)
    assert ids_in(layout) == ids(events[:30] + events[-17:])
    head = Ledger(layout).head()
    assert head is not None
    assert head.lost == {"mail": gap["lost"]}
    assert (head.queues["mail"].gaps, head.queues["mail"].events) == (1, 17)
    assert len(ids_in(layout)) + head.lost["mail"] == redis_client.xinfo_stream("bull:mail:events")["entries-added"]


def test_with_on_loss_fail_a_loss_fails_the_query(pipeline: Make, redis_client: redis.Redis) -> None:
    events = events_of("mail", 3, 30)
    write_events(redis_client, events[:30])
    run(pipeline(on_loss="fail"))
    write_events(redis_client, events[30:])
    redis_client.xtrim("bull:mail:events", maxlen=17, approximate=False)
    with pytest.raises(PySparkException, match="BULLTASK_EVENTS_LOST"):
        run(pipeline(on_loss="fail"))
    assert ids_in(pipeline().layout) == ids(events[:30])
    run(pipeline(on_loss="gap"))
    assert len(arrow_rows(pipeline().layout, GAPS)) == 1


def test_a_batch_that_spark_runs_again_is_not_written_again(pipeline: Make, redis_client: redis.Redis) -> None:
    events = events_of("mail", 4)
    write_events(redis_client, events)
    run(pipeline())
    layout = pipeline().layout
    last = max((layout.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink()
    redis_client.delete("bull:mail:events")  # the batch must not read Redis again
    run(pipeline())
    assert ids_in(layout) == ids(events)
    assert last.exists()


def test_a_batch_interrupted_during_its_renames_is_removed_and_rewritten(
    pipeline: Make, redis_client: redis.Redis
) -> None:
    events = events_of("mail", 5, 10)
    write_events(redis_client, events[:20])
    run(pipeline())
    layout, before = pipeline().layout, (pipeline().layout.internal("head.json")).read_text()
    shutil.copytree(layout.open_jobs, layout.internal("kept"))
    write_events(redis_client, events[20:])
    run(pipeline())
    ingest_id = json.loads(layout.internal("head.json").read_text())["ingest_id"]
    layout.internal("head.json").write_text(before)
    shutil.copytree(layout.internal("kept"), layout.open_jobs, dirs_exist_ok=True)
    layout.internal("batches", f"{ingest_id}.json").unlink()
    layout.internal("publishing.json").write_text(json.dumps({"ingest_id": ingest_id}))
    shutil.rmtree(layout.checkpoint)  # so that the next batch has a different number
    run(pipeline())
    assert ids_in(layout) == ids(events)
    assert ingest_id not in {row["ingest_id"] for row in arrow_rows(layout, EVENTS)}
    assert not layout.internal("publishing.json").exists()


def test_a_new_checkpoint_continues_after_the_lakes_last_event(pipeline: Make, redis_client: redis.Redis) -> None:
    events = events_of("mail", 6, 10)
    write_events(redis_client, events[:30])
    run(pipeline())
    shutil.rmtree(pipeline().layout.checkpoint)
    write_events(redis_client, events[30:])
    run(pipeline())
    assert ids_in(pipeline().layout) == ids(events)


def test_a_checkpoint_older_than_the_lake_is_rejected(
    pipeline: Make, redis_client: redis.Redis, tmp_path: Path
) -> None:
    events = events_of("mail", 7, 10)
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


def test_a_lake_is_written_by_one_pipeline_at_a_time(pipeline: Make, redis_client: redis.Redis) -> None:
    write_events(redis_client, events_of("mail", 8))
    running = pipeline(trigger="1 hour")
    query = running.run()
    try:
        with pytest.raises(LakeInUseError, match="is already writing to the lake"):
            pipeline().run()
        program = (
            "import sys\nfrom bulltask.lake.storage import Layout\nfrom bulltask.lake.storage import RunLock\n"
            "RunLock(Layout(sys.argv[1]))"
        )
        with run_program(program, str(running.layout.root)) as other:
            assert "LakeInUseError" in other.read_rest()
    finally:
        query.stop()
    run(pipeline())


def test_a_driver_killed_while_it_writes_the_first_offsets_does_not_block_the_lake(
    pipeline: Make, redis_client: redis.Redis
) -> None:
    events = events_of("mail", 8)
    write_events(redis_client, events)
    offsets = pipeline().layout.checkpoint / "offsets"
    offsets.mkdir(parents=True)
    (offsets / ".0.6b0f3c1e-temporary.tmp").write_text("v1")
    (offsets / ".0.6b0f3c1e-temporary.tmp.crc").write_bytes(b"crc")
    run(pipeline())
    assert ids_in(pipeline().layout) == ids(events)


def test_silver_written_in_batches_equals_silver_derived_from_all_events(
    pipeline: Make, redis_client: redis.Redis, spark: SparkSession
) -> None:
    mails, photos = events_of("mail", 12, 30), events_of("{photos}", 13, 20)
    write_events(redis_client, mails[:110])
    write_events(redis_client, photos[:30])
    run(pipeline(max_events_per_trigger=60, open_job_timeout=0.5))
    write_events(redis_client, mails[110:])
    write_events(redis_client, photos[30:])
    run(pipeline(open_job_timeout=0.5))
    late = replace(mails[-1], job_id="last", event_ms=mails[-1].event_ms + 60_000, event="added")
    write_events(redis_client, [late])
    run(pipeline(open_job_timeout=0.5))  # all open jobs time out
    layout = pipeline().layout
    assert ids_in(layout) == ids([*mails, *(replace(event, queue="photos") for event in photos), late])
    expected = lifecycle(mails + [replace(event, queue="photos") for event in photos])
    attempts = [attempt_row(attempt) for job in expected for attempt in job.attempts]
    for table, rows in ((ATTEMPTS, attempts), (JOBS, [job_row(job) for job in expected])):
        written = latest(read_table(spark, layout, table), table).drop("ingest_id").toArrow()
        assert_same(silver_rows.arrow_rows(written), rows)
        assert len(rows) > 50
    head = Ledger(layout).head()
    assert head is not None
    assert head.open_job_events == 1, "only the job 'last' is open"
    assert [path.name for path in layout.open_jobs.iterdir()] == [head.open_jobs_ingest_id]
    assert sum(record.jobs for record in Ledger(layout).records()) == len(arrow_rows(layout, JOBS))


def rows_of(frame: DataFrame) -> set[tuple[object, ...]]:
    columns = [column.to_pylist() for column in frame.toArrow().columns]
    return set(zip(*columns, strict=True))


def test_events_after_the_year_9999_are_stored_on_the_last_day_of_that_year(
    pipeline: Make, redis_client: redis.Redis, spark: SparkSession
) -> None:
    """The server's clock was far ahead for a moment; later event ids continue from there."""
    mails, future = events_of("mail", 1, 10), events_of("future", 2, 10)
    ids_of = [f"253402300800000-{n}" if n < len(future) // 2 else f"{2**64 - 2}-{n}" for n in range(len(future))]
    write_events(redis_client, mails[:50])
    for number, (event, entry_id) in enumerate(zip(future, ids_of, strict=True)):
        write_events(redis_client, [replace(event, event_ms=int(entry_id.partition("-")[0]), event_seq=number)])
    run(pipeline())
    write_events(redis_client, mails[50:])
    run(pipeline())
    layout = pipeline().layout
    assert ids_in(layout) == ids(mails) + Counter(("future", entry_id) for entry_id in ids_of)
    last = date(9999, 12, 31)
    assert {row["queue"] for row in arrow_rows(layout, EVENTS) if row["dt"] == str(last)} == {"future"}
    assert [str(day) for day in layout.days(EVENTS)] == ["2025-10-09", str(last)]
    head = Ledger(layout).head()
    assert head is not None
    assert head.last_ids == {"mail": mails[-1].event_id, "future": ids_of[-1]}
    assert head.newest_event_ms == mails[-1].event_ms, "a clock in the year 9999 would time out all jobs"
    assert History(layout.root).search(queue="future", state="failed").jobs[0].seen_at.year == last.year
    shutil.rmtree(layout.checkpoint)
    run(pipeline())
    assert ids_in(layout) == ids(mails) + Counter(("future", entry_id) for entry_id in ids_of)
    before = [future_rows(spark, layout, table) for table in (ATTEMPTS, JOBS)]
    assert all(before)
    pipeline().build("silver", days=[last])
    assert [future_rows(spark, layout, table) for table in (ATTEMPTS, JOBS)] == before


def future_rows(spark: SparkSession, layout: Layout, table: Table) -> set[tuple[object, ...]]:
    """Return the rows of the queue ``future`` without their batches' ids."""
    return rows_of(latest(read_table(spark, layout, table), table).where("queue = 'future'").drop("ingest_id"))


def test_files_are_stored_by_day_queue_and_batch(pipeline: Make, redis_client: redis.Redis) -> None:
    write_events(redis_client, events_of("mail", 9))
    run(pipeline())
    layout = pipeline().layout
    head = Ledger(layout).head()
    assert head is not None
    (directory,) = layout.written_directories(EVENTS, head.ingest_id)
    day = date.fromisoformat("2025-10-09")  # the day of the first ids of `histories`
    assert directory == layout.day(EVENTS, day) / "queue=mail" / f"ingest_id={head.ingest_id}"


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"on_loss": "ignore"}, ConfigError),
        ({"starting": "now"}, ConfigError),
        ({"open_job_timeout": -1}, ConfigError),
        ({"color": "red"}, TypeError),
    ],
)
def test_an_invalid_option_is_rejected_immediately(
    pipeline: Make, option: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(option))):
        pipeline(**option)
