"""Compaction merges past days' files, and expiration removes old days. Other data does not change."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from bulltask.errors import ConfigError
from bulltask.lake.files import COMPACTED, arrow_schema, compact, partition_schema
from bulltask.lake.storage import Ledger, expire, find_tables
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, TABLES, Table
from tests.support.lake import LakeBuilder, at

TOMORROW = date(2026, 11, 23)


def rows(lake: LakeBuilder, table: Table) -> list[dict[str, Any]]:
    partitions = ds.partitioning(partition_schema(table), flavor="hive")
    dataset = ds.dataset(str(lake.layout.table(table)), arrow_schema(table), "parquet", partitioning=partitions)
    read: list[dict[str, Any]] = dataset.to_table().to_pylist()
    return read


def files(lake: LakeBuilder, table: Table) -> int:
    return len(list(lake.layout.table(table).rglob("*.parquet")))


def add_events(lake: LakeBuilder, day: str, batches: int, **fields: Any) -> None:
    begin = int(at(day).timestamp() * 1000)
    for batch in range(batches):
        lake.events([{"event_id": f"{begin + batch}-{n}", "event": "added", **fields} for n in range(10)])


def test_the_files_of_a_past_day_are_merged_without_changing_rows(lake: LakeBuilder) -> None:
    add_events(lake, "2026-11-21 10:00", 4)
    add_events(lake, "2026-11-22 10:00", 3, queue="{other}")
    add_events(lake, "2026-11-23 10:00", 2)
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
def test_compacted_files_are_about_as_large_as_the_target(lake: LakeBuilder) -> None:
    for batch in range(4):
        lake.events(
            [{"event_id": f"{1795305600000 + batch}-{n}", "extra": f"{n * 7919 % 104729}"} for n in range(9_000)]
        )
    total = sum(file.stat().st_size for file in lake.layout.root.rglob("*.parquet"))
    report = compact(lake.layout, "bronze.events", before=date(2030, 1, 1), target_mb=total / 1e6 / 3.5)
    assert report.partitions == 0, "the number of files is already minimal"
    report = compact(lake.layout, "bronze.events", before=date(2030, 1, 1), target_mb=total / 1e6 / 2)
    assert 1 <= report.files_after <= 2 < report.files_before
    assert len(rows(lake, EVENTS)) == 36_000


def test_compaction_of_silver_keeps_the_latest_row_of_each_key(lake: LakeBuilder) -> None:
    end, job = at("2026-11-22 10:00"), {"job_id": "1", "finished_at": at("2026-11-22 10:00")}
    for later, state in enumerate(["failed", "completed", "failed"]):
        lake.jobs(
            [
                {**job, "incarnation": "5-0", "state": state, "as_of": at("2026-11-22 10:00", later)},
                {**job, "incarnation": None, "state": state, "as_of": at("2026-11-22 10:00", -later)},
                {"job_id": str(10 + later), "incarnation": None, "state": state, "finished_at": end},
            ]
        )  # fmt: skip
    report = compact(lake.layout, "silver.jobs", before=TOMORROW)
    assert (report.rows_before, report.rows_after) == (9, 5)
    latest = {(row["job_id"], row["incarnation"]): (row["state"], row["as_of"]) for row in rows(lake, JOBS)}
    assert latest == {
        ("1", "5-0"): ("failed", at("2026-11-22 10:00", 2)),
        ("1", None): ("failed", end),
        ("10", None): ("failed", end),
        ("11", None): ("completed", end),
        ("12", None): ("failed", end),
    }


def test_the_key_of_an_attempt_includes_its_number(lake: LakeBuilder) -> None:
    for number in (1, 2):
        lake.attempts([{"job_id": "1", "incarnation": "5-0", "attempt": number, "ended_at": at("2026-11-22 10:00")}])
    assert compact(lake.layout, "silver.attempts", before=TOMORROW).rows_after == 2
    assert sorted(row["attempt"] for row in rows(lake, ATTEMPTS)) == [1, 2]


def test_files_of_an_unfinished_batch_are_not_compacted(lake: LakeBuilder) -> None:
    add_events(lake, "2026-11-22 10:00", 2)
    lake.events([{"event_id": "1795341600500-0", "event": "added"}], ingest_id="3f0c2a91-00000017")
    Ledger(lake.layout).begin_publishing("3f0c2a91-00000017")
    report = compact(lake.layout, "bronze.events", before=TOMORROW)
    assert (report.files_before, report.files_after) == (2, 1)
    lake.layout.remove("3f0c2a91-00000017")
    assert len(rows(lake, EVENTS)) == 20


def test_a_file_from_an_older_pipeline_with_fewer_columns_is_read(lake: LakeBuilder) -> None:
    import pyarrow.parquet as pq  # noqa: PLC0415 - only this test writes a file itself

    add_events(lake, "2026-11-22 10:00", 2)
    old = next(lake.layout.root.rglob("*.parquet"))
    pq.write_table(pq.read_table(old, partitioning=None).drop_columns(["extra"]), old)
    compact(lake.layout, "bronze.events", before=TOMORROW)
    assert [row["extra"] for row in rows(lake, EVENTS)] == [None] * 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "gold.task_minute"}, "gold.task_minute.*cannot be compacted"),
        ({"table": "events"}, "bronze.events, bronze.gaps"),
        ({"table": "silver.jobs", "target_mb": 0}, "target_mb must be more than 0"),
    ],
)
def test_tables_that_cannot_be_compacted_are_rejected(lake: LakeBuilder, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compact(lake.layout, **{"before": TOMORROW, **arguments})


def test_expired_days_are_listed_by_default_and_removed_without_dry_run(lake: LakeBuilder) -> None:
    add_events(lake, "2026-11-20 10:00", 2)
    add_events(lake, "2026-11-21 10:00", 1)
    add_events(lake, "2026-11-22 10:00", 1)
    lake.jobs([{"job_id": "1", "finished_at": at("2026-11-20 10:00")}])
    for folder in (lake.layout.open_jobs, lake.layout.checkpoint):
        folder.mkdir(parents=True)
    events = find_tables(["bronze.events"])
    expired = expire(lake.layout, events, before=date(2026, 11, 22))
    assert [(item.table, item.day.day, item.files) for item in expired] == [
        ("bronze.events", 20, 2),
        ("bronze.events", 21, 1),
    ]
    assert all(item.size for item in expired)
    assert files(lake, EVENTS) == 4
    assert expire(lake.layout, events, before=date(2026, 11, 22), dry_run=False) == expired
    assert lake.layout.days(EVENTS) == [date(2026, 11, 22)]
    assert lake.layout.days(JOBS) == [date(2026, 11, 20)]
    assert lake.layout.open_jobs.is_dir()
    assert lake.layout.checkpoint.is_dir()


def test_tables_may_be_selected_by_name_or_by_layer() -> None:
    assert [table.full_name for table in find_tables(["silver", "bronze.gaps", "silver.jobs"])] == [
        "silver.attempts", "silver.jobs", "bronze.gaps",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"unknown table 'bronze.event'; did you mean 'bronze.events'"):
        find_tables(["bronze.event"])
    assert set(COMPACTED) == {name for name in TABLES if not name.startswith("gold")}


def test_the_documented_nightly_commands_compact_before_they_build() -> None:
    """In reverse order, gold reads a file for each batch, queue and table, which takes three times the CPU time."""
    page = Path(__file__).parents[2].joinpath("docs", "how-to", "pipeline.md").read_text()
    commands = page[page.index("## Retention") :]
    assert commands.index("pipeline compact --before") < commands.index("pipeline build gold --days")
