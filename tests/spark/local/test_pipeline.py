"""The pipeline writes each event to a lake once, even after crashes; lost events are counted."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from bulltask.errors import ConfigError, LakeInUseError
from bulltask.lake.history import History
from bulltask.lake.ledger import last_record, records
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, Table
from bulltask.spark import Pipeline, batches
from bulltask.spark.lake_tables import latest, read_table
from tests.support import silver_rows
from tests.support.event_writing import write_events
from tests.support.job_histories import histories
from tests.support.lifecycle_oracle import LifecycleEvent, lifecycle
from tests.support.object_store import SECRET, STORES, Store
from tests.support.programs import run_program
from tests.support.silver_rows import assert_same, attempt_row, job_row

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

Make = Callable[..., Pipeline]


@pytest.fixture
def pipeline(spark: SparkSession, broker_url: str, tmp_path: Path) -> Make:
    return lambda **options: Pipeline(spark, tmp_path / "lake", url=broker_url, **options)


def run(pipeline: Pipeline) -> None:
    pipeline.run(available_now=True).awaitTermination()


def arrow_rows(lake: Lake, table: Table) -> list[dict[str, object]]:
    """Read a table's rows with Arrow instead of Spark."""
    return TableReader(lake).rows(table)


def events_of(queue: str, seed: int, jobs: int = 5) -> list[LifecycleEvent]:
    return [replace(event, queue=queue) for event in histories(seed, jobs)]


def ids(events: list[LifecycleEvent]) -> Counter[tuple[object, object]]:
    return Counter((event.queue, event.event_id) for event in events)


def ids_in(lake: Lake) -> Counter[tuple[object, object]]:
    return Counter((row["queue"], row["event_id"]) for row in arrow_rows(lake, EVENTS))


def test_a_query_has_settings_of_its_own_unless_the_session_has_them(pipeline: Make, spark: SparkSession) -> None:
    codegen = "spark.sql.codegen.wholeStage"

    def settings() -> tuple[str, str]:
        query: Any = pipeline().run()
        stream = query._jsq.streamingQuery()
        query.stop()
        manager = stream.offsetLog().fileManager().getClass().getSimpleName()
        return manager, stream.sparkSessionForStream().conf().get(codegen)

    spark.conf.unset(codegen)  # it was that of the tests
    try:
        assert settings() == ("FileSystemBasedCheckpointFileManager", "false")
        assert spark.conf.get(codegen, None) is None
        spark.conf.set(codegen, "true")
        assert settings() == ("FileSystemBasedCheckpointFileManager", "true")
        assert spark.conf.get(codegen) == "true"
    finally:
        spark.conf.set(codegen, "false")


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
    lake = pipeline().lake
    assert ids_in(lake) == ids(mails + others)
    by_spark = read_table(spark, lake, EVENTS).select("queue", "event_id", "event_ms", "event").collect()
    assert Counter((row.queue, row.event_id) for row in by_spark) == ids(mails + others)
    assert {(row.event_id, row.event) for row in by_spark} == {
        (event.event_id, event.event) for event in mails + others
    }
    written = list(records(lake))
    assert [record.number for record in written] == [*range(len(written), 0, -1)]
    assert len(written) > 3
    assert sum(seen.events for record in written for seen in record.queues.values()) == len(mails) + len(others)
    assert written[0].last_ids == {"mail": mails[-1].event_id, "a,b %x": others[-1].event_id}
    assert written[0].newest_event_ms == max(event.event_ms for event in mails + others)


def test_events_and_losses_in_gap_rows_account_for_all_added_events(pipeline: Make, redis_client: redis.Redis) -> None:
    events = events_of("mail", 3, 30)
    write_events(redis_client, events[:30])
    run(pipeline())
    write_events(redis_client, events[30:])
    redis_client.xtrim("bull:mail:events", maxlen=17, approximate=False)
    run(pipeline())
    lake = pipeline().lake
    (gap,) = arrow_rows(lake, GAPS)
    assert (gap["queue"], gap["lost"], gap["exact"], gap["loss_reason"]) == (
        "mail",
        len(events) - 30 - 17,
        True,
        "trimmed",
    )
    assert (gap["last_id_before"], gap["first_id_after"]) == (events[29].event_id, events[-17].event_id)
    assert ids_in(lake) == ids(events[:30] + events[-17:])
    head = last_record(lake)
    assert head is not None
    assert head.lost == {"mail": gap["lost"]}
    assert (head.queues["mail"].gaps, head.queues["mail"].events) == (1, 17)
    assert len(ids_in(lake)) + head.lost["mail"] == redis_client.xinfo_stream("bull:mail:events")["entries-added"]


def test_with_on_loss_fail_a_loss_fails_the_query(pipeline: Make, redis_client: redis.Redis) -> None:
    events = events_of("mail", 3, 30)
    write_events(redis_client, events[:30])
    run(pipeline(on_loss="fail"))
    write_events(redis_client, events[30:])
    redis_client.xtrim("bull:mail:events", maxlen=17, approximate=False)
    with pytest.raises(PySparkException, match="BULLTASK_EVENTS_LOST"):
        run(pipeline(on_loss="fail"))
    assert ids_in(pipeline().lake) == ids(events[:30])
    run(pipeline(on_loss="gap"))
    assert len(arrow_rows(pipeline().lake, GAPS)) == 1


def test_a_batch_that_spark_runs_again_is_not_written_again(pipeline: Make, redis_client: redis.Redis) -> None:
    events = events_of("mail", 4)
    write_events(redis_client, events)
    run(pipeline())
    lake = pipeline().lake
    last = max((pipeline().checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink()
    redis_client.delete("bull:mail:events")  # the batch must not read Redis again
    run(pipeline())
    assert ids_in(lake) == ids(events)
    assert last.exists()


def test_a_new_checkpoint_continues_after_the_lakes_last_event(pipeline: Make, redis_client: redis.Redis) -> None:
    events = events_of("mail", 6, 10)
    write_events(redis_client, events[:30])
    run(pipeline())
    shutil.rmtree(pipeline().checkpoint)
    write_events(redis_client, events[30:])
    run(pipeline())
    assert ids_in(pipeline().lake) == ids(events)


def test_a_checkpoint_older_than_the_lake_is_rejected(
    pipeline: Make, redis_client: redis.Redis, tmp_path: Path
) -> None:
    events = events_of("mail", 7, 10)
    lake = pipeline().lake
    write_events(redis_client, events[:20])
    run(pipeline())
    shutil.copytree(pipeline().checkpoint, tmp_path / "old")
    for part in (events[20:30], events[30:]):
        write_events(redis_client, part)
        run(pipeline())
    shutil.rmtree(pipeline().checkpoint)
    shutil.copytree(tmp_path / "old", pipeline().checkpoint)
    with pytest.raises(PySparkException, match="the checkpoint is older than the lake"):
        run(pipeline())
    shutil.rmtree(pipeline().checkpoint)
    run(pipeline())
    assert ids_in(lake) == ids(events)


def test_a_lake_is_written_by_one_pipeline_at_a_time(pipeline: Make, redis_client: redis.Redis) -> None:
    write_events(redis_client, events_of("mail", 8))
    running = pipeline(trigger="1 hour")
    query = running.run()
    try:
        with pytest.raises(LakeInUseError, match="is already writing to the lake"):
            pipeline().run()
        program = "import sys\nfrom bulltask.lake.storage import Lake, RunLock\nRunLock(Lake(sys.argv[1]))"
        with run_program(program, running.lake.root) as other:
            assert "LakeInUseError" in other.read_rest()
    finally:
        query.stop()
    run(pipeline())


def test_a_driver_killed_while_it_writes_the_first_offsets_does_not_block_the_lake(
    pipeline: Make, redis_client: redis.Redis
) -> None:
    events = events_of("mail", 8)
    write_events(redis_client, events)
    offsets = pipeline().checkpoint / "offsets"
    offsets.mkdir(parents=True)
    (offsets / ".0.6b0f3c1e-temporary.tmp").write_text("v1")
    (offsets / ".0.6b0f3c1e-temporary.tmp.crc").write_bytes(b"crc")
    run(pipeline())
    assert ids_in(pipeline().lake) == ids(events)


@pytest.mark.parametrize("by_executors", [False, True], ids=["driver", "executors"])
def test_silver_written_in_batches_equals_silver_derived_from_all_events(
    pipeline: Make,
    redis_client: redis.Redis,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    by_executors: bool,
) -> None:
    monkeypatch.setattr(batches, "_MIN_EVENTS_FOR_EXECUTORS", 30 if by_executors else 10**9)
    monkeypatch.setattr(batches, "_ROWS_PER_TASK", 20)
    monkeypatch.setattr(batches, "_MIN_ROWS_BY_SHARD", 20)
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
    lake = pipeline().lake
    assert ids_in(lake) == ids([*mails, *(replace(event, queue="photos") for event in photos), late])
    expected = lifecycle(mails + [replace(event, queue="photos") for event in photos])
    attempts = [attempt_row(attempt) for job in expected for attempt in job.attempts]
    for table, rows in ((ATTEMPTS, attempts), (JOBS, [job_row(job) for job in expected])):
        written = latest(read_table(spark, lake, table), table).toArrow()
        assert_same(silver_rows.arrow_rows(written), rows)
        assert len(rows) > 50
    head = last_record(lake)
    assert head is not None
    assert head.open_job_events == 1, "only the job 'last' is open"
    assert sum(record.jobs for record in records(lake)) == len(arrow_rows(lake, JOBS))


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
    lake = pipeline().lake
    assert ids_in(lake) == ids(mails) + Counter(("future", entry_id) for entry_id in ids_of)
    last = date(9999, 12, 31)
    assert {row["queue"] for row in arrow_rows(lake, EVENTS) if row["dt"] == str(last)} == {"future"}
    assert [str(day) for day in TableReader(lake).days(EVENTS)] == ["2025-10-09", str(last)]
    head = last_record(lake)
    assert head is not None
    assert head.last_ids == {"mail": mails[-1].event_id, "future": ids_of[-1]}
    assert head.newest_event_ms == mails[-1].event_ms, "a clock in the year 9999 would time out all jobs"
    assert History(lake.root).search(queue="future", state="failed").jobs[0].seen_at.year == last.year
    shutil.rmtree(pipeline().checkpoint)
    run(pipeline())
    assert ids_in(lake) == ids(mails) + Counter(("future", entry_id) for entry_id in ids_of)
    before = [future_rows(spark, lake, table) for table in (ATTEMPTS, JOBS)]
    assert all(before)
    pipeline().build("silver", days=[last])
    assert [future_rows(spark, lake, table) for table in (ATTEMPTS, JOBS)] == before


def future_rows(spark: SparkSession, lake: Lake, table: Table) -> set[tuple[object, ...]]:
    """Return the rows of the queue ``future`` alone."""
    return rows_of(latest(read_table(spark, lake, table), table).where("queue = 'future'"))


def test_a_day_of_a_batch_is_one_file_for_each_task_whatever_the_number_of_queues(
    pipeline: Make, redis_client: redis.Redis
) -> None:
    for queue in ("mail", "photos"):
        write_events(redis_client, events_of(queue, 9))
    run(pipeline())
    table = pipeline().lake.open(EVENTS)
    assert table is not None
    assert table.partitions == ["2025-10-09"], "the day of the first ids of `histories`"
    assert len(table.files()) <= 2
    assert table.batch == 1


@pytest.mark.parametrize(("store", "bucket"), STORES)
def test_a_lake_in_an_object_store_needs_no_checkpoint_and_shows_no_credentials(
    *,
    store: Store,
    bucket: str,
    spark: SparkSession,
    broker_url: str,
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    events = events_of("mail", 15, 10)
    with store() as options:
        pipeline = Pipeline(spark, f"{bucket}/lake", url=broker_url, storage_options=options)
        assert pipeline.checkpoint.is_relative_to(tmp_path / "state" / "bulltask")
        write_events(redis_client, events[:30])
        query = pipeline.run(available_now=True)
        query.awaitTermination()
        query.explain(extended=True)
        shutil.rmtree(pipeline.checkpoint)
        write_events(redis_client, events[30:])
        run(pipeline)
        by_spark = pipeline.read("bronze.events")
        by_spark.explain(extended=True)
        assert Counter((row.queue, row.event_id) for row in by_spark.collect()) == ids(events)
        assert ids_in(pipeline.lake) == ids(events)
        assert next(iter(pipeline.status().queues)).lag_events == 0
    printed = "".join(capfd.readouterr())
    assert "bulltask_pipeline" in printed
    assert SECRET not in f"{printed}{query.lastProgress}{pipeline.lake!r}"


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
