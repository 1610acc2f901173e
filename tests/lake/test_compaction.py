"""Days that are over become few files, and days that are not kept go; nothing else changes."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from bulltask.errors import ConfigError
from bulltask.lake.arrow import arrow_schema, partition_schema
from bulltask.lake.compaction import COMPACTED, compact
from bulltask.lake.expiration import expire, find_tables
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, TABLES, Table
from tests.support.lake import LakeBuilder, at

TOMORROW = date(2026, 11, 23)


def rows(lake: LakeBuilder, table: Table) -> list[dict[str, Any]]:
    partitions = ds.partitioning(partition_schema(table), flavor="hive")
    found = ds.dataset(str(lake.layout.table(table)), arrow_schema(table), "parquet", partitioning=partitions)
    read: list[dict[str, Any]] = found.to_table().to_pylist()
    return read


def files(lake: LakeBuilder, table: Table) -> int:
    return len(list(lake.layout.table(table).rglob("*.parquet")))


def some_events(lake: LakeBuilder, day: str, batches: int, **more: Any) -> None:
    begin = int(at(day).timestamp() * 1000)
    for batch in range(batches):
        lake.events([{"event_id": f"{begin + batch}-{n}", "event": "added", **more} for n in range(10)])


def test_the_files_of_a_day_that_is_over_become_one_and_the_rows_stay(lake: LakeBuilder) -> None:
    some_events(lake, "2026-11-21 10:00", 4)
    some_events(lake, "2026-11-22 10:00", 3, queue="{other}")
    some_events(lake, "2026-11-23 10:00", 2)
    before = {row["event_id"]: row | {"ingest_id": None} for row in rows(lake, EVENTS)}
    report = compact(lake.layout, "bronze.events", before=TOMORROW)
    assert (report.partitions, report.files_before, report.files_after) == (2, 7, 2)
    assert (report.rows_before, report.rows_after) == (70, 70)
    assert report.bytes_before > report.bytes_after > 0
    after = rows(lake, EVENTS)
    assert {row["event_id"]: row | {"ingest_id": None} for row in after} == before
    assert len(after) == 90
    assert files(lake, EVENTS) == 4
    assert compact(lake.layout, "bronze.events", before=TOMORROW).partitions == 0


@pytest.mark.slow
def test_files_are_about_as_large_as_is_wanted(lake: LakeBuilder) -> None:
    for batch in range(4):
        lake.events(
            [{"event_id": f"{1795305600000 + batch}-{n}", "extra": f"{n * 7919 % 104729}"} for n in range(9_000)]
        )
    whole = sum(file.stat().st_size for file in lake.layout.root.rglob("*.parquet"))
    report = compact(lake.layout, "bronze.events", before=date(2030, 1, 1), target_mb=whole / 1e6 / 3.5)
    assert report.partitions == 0, "they are as few as they may be"
    report = compact(lake.layout, "bronze.events", before=date(2030, 1, 1), target_mb=whole / 1e6 / 2)
    assert 1 <= report.files_after <= 2 < report.files_before
    assert len(rows(lake, EVENTS)) == 36_000


def test_of_rows_with_one_key_compaction_keeps_the_latest_in_silver(lake: LakeBuilder) -> None:
    done, job = at("2026-11-22 10:00"), {"job_id": "1", "finished_at": at("2026-11-22 10:00")}
    for later, state in enumerate(["failed", "completed", "failed"]):
        lake.jobs(
            [
                {**job, "incarnation": "5-0", "state": state, "as_of": at("2026-11-22 10:00", later)},
                {**job, "incarnation": None, "state": state, "as_of": at("2026-11-22 10:00", -later)},
                {"job_id": str(10 + later), "incarnation": None, "state": state, "finished_at": done},
            ]
        )  # fmt: skip
    report = compact(lake.layout, "silver.jobs", before=TOMORROW)
    assert (report.rows_before, report.rows_after) == (9, 5)
    found = {(row["job_id"], row["incarnation"]): (row["state"], row["as_of"]) for row in rows(lake, JOBS)}
    assert found == {
        ("1", "5-0"): ("failed", at("2026-11-22 10:00", 2)),
        ("1", None): ("failed", done),
        ("10", None): ("failed", done),
        ("11", None): ("completed", done),
        ("12", None): ("failed", done),
    }


def test_an_attempt_is_known_by_its_number_too(lake: LakeBuilder) -> None:
    for number in (1, 2):
        lake.attempts([{"job_id": "1", "incarnation": "5-0", "attempt": number, "ended_at": at("2026-11-22 10:00")}])
    assert compact(lake.layout, "silver.attempts", before=TOMORROW).rows_after == 2
    assert sorted(row["attempt"] for row in rows(lake, ATTEMPTS)) == [1, 2]


def test_files_of_a_batch_that_is_not_done_are_not_touched(lake: LakeBuilder) -> None:
    some_events(lake, "2026-11-22 10:00", 2)
    lake.events([{"event_id": "1795341600500-0", "event": "added"}], ingest="3f0c2a91-00000017")
    Ledger(lake.layout).announce("3f0c2a91-00000017")
    report = compact(lake.layout, "bronze.events", before=TOMORROW)
    assert (report.files_before, report.files_after) == (2, 1)
    lake.layout.remove("3f0c2a91-00000017")
    assert len(rows(lake, EVENTS)) == 20


def test_a_file_of_an_older_pipeline_with_fewer_columns_is_read(lake: LakeBuilder) -> None:
    import pyarrow.parquet as pq  # noqa: PLC0415 - one test writes a file by hand

    some_events(lake, "2026-11-22 10:00", 2)
    old = next(lake.layout.root.rglob("*.parquet"))
    pq.write_table(pq.read_table(old, partitioning=None).drop_columns(["extra"]), old)
    compact(lake.layout, "bronze.events", before=TOMORROW)
    assert [row["extra"] for row in rows(lake, EVENTS)] == [None] * 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"table": "gold.task_minute"}, "gold.task_minute.*cannot be compacted"),
        ({"table": "events"}, "bronze.events, bronze.gaps"),
        ({"table": "silver.jobs", "target_mb": 0}, "target_mb must be more than 0"),
    ],
)
def test_tables_that_cannot_be_compacted_are_rejected(lake: LakeBuilder, words: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compact(lake.layout, **{"before": TOMORROW, **words})


def test_expired_days_are_named_first_and_taken_away_when_that_is_meant(lake: LakeBuilder) -> None:
    some_events(lake, "2026-11-20 10:00", 2)
    some_events(lake, "2026-11-21 10:00", 1)
    some_events(lake, "2026-11-22 10:00", 1)
    lake.jobs([{"job_id": "1", "finished_at": at("2026-11-20 10:00")}])
    for own in (lake.layout.open_jobs, lake.layout.checkpoint):
        own.mkdir(parents=True)
    events = find_tables(["bronze.events"])
    named = expire(lake.layout, events, before=date(2026, 11, 22))
    assert [(one.table, one.day.day, one.files) for one in named] == [
        ("bronze.events", 20, 2),
        ("bronze.events", 21, 1),
    ]
    assert all(one.size for one in named)
    assert files(lake, EVENTS) == 4
    assert expire(lake.layout, events, before=date(2026, 11, 22), dry_run=False) == named
    assert lake.layout.days(EVENTS) == [date(2026, 11, 22)]
    assert lake.layout.days(JOBS) == [date(2026, 11, 20)]
    assert lake.layout.open_jobs.is_dir()
    assert lake.layout.checkpoint.is_dir()


def test_tables_are_named_one_by_one_or_by_layer() -> None:
    assert [table.full_name for table in find_tables(["silver", "bronze.gaps", "silver.jobs"])] == [
        "silver.attempts", "silver.jobs", "bronze.gaps",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"unknown table 'bronze.event'; did you mean 'bronze.events'"):
        find_tables(["bronze.event"])
    assert set(COMPACTED) == {name for name in TABLES if not name.startswith("gold")}


def test_the_nightly_commands_of_the_page_compact_before_they_build() -> None:
    """The other way round gold reads a file of each batch, queue and table: three times the CPU, measured."""
    page = Path(__file__).parents[2].joinpath("docs", "how-to", "pipeline.md").read_text()
    commands = page[page.index("## Retention") :]
    assert commands.index("pipeline compact --before") < commands.index("pipeline build gold --days")
