"""Maintenance merges files, removes old days and deletes files that are no longer needed. Other rows do not change."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from bulltask.errors import ConfigError, LakeInUseError
from bulltask.lake import History
from bulltask.lake.ledger import BatchRecord
from bulltask.lake.maintenance import Maintenance, maintain, parse_retention
from bulltask.lake.reader import TableReader, dataset_of
from bulltask.lake.storage import Lake
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, OPEN_EVENTS, Table, find_tables
from tests.support.lake import LakeBuilder, at

TODAY = date(2026, 11, 23)


def rows(lake: LakeBuilder, table: Table) -> list[dict[str, Any]]:
    return TableReader(Lake(lake.root)).rows(table)


def files(lake: LakeBuilder, table: Table) -> int:
    snapshot = Lake(lake.root).open(table)
    assert snapshot is not None
    return len(snapshot.files())


def add_events(lake: LakeBuilder, day: str, batches: int, **fields: Any) -> None:
    begin = int(at(day).timestamp() * 1000)
    for batch in range(batches):
        lake.events([{"event_id": f"{begin + batch}-{n}", "event": "added", **fields} for n in range(10)])


def dataset_of_events(lake: LakeBuilder) -> Any:
    snapshot = lake.lake.open(EVENTS)
    assert snapshot is not None
    return dataset_of(lake.lake, EVENTS, snapshot.files()).to_table()


def result_of(table: Table, results: list[Maintenance]) -> Maintenance:
    return next(result for result in results if result.table == table.full_name)


def test_the_files_of_past_days_are_merged_without_changing_rows(lake: LakeBuilder) -> None:
    add_events(lake, "2026-11-21 10:00", 4)
    add_events(lake, "2026-11-22 10:00", 3, queue="{other}")
    add_events(lake, "2026-11-23 10:00", 2)
    before = {row["event_id"]: row for row in rows(lake, EVENTS)}
    planned = result_of(EVENTS, maintain(lake.lake, today=TODAY, dry_run=True))
    assert (planned.merged_days, planned.files_before, planned.files_after, files(lake, EVENTS)) == (2, 7, 0, 9)
    done = result_of(EVENTS, maintain(lake.lake, today=TODAY))
    assert (done.merged_days, done.files_before, done.files_after) == (2, 7, 2)
    assert (done.rows_before, done.rows_after, done.deleted_files) == (70, 70, 0), "readers may need them for a week"
    assert done.bytes_before > done.bytes_after > 0
    after = rows(lake, EVENTS)
    assert {row["event_id"]: row for row in after} == before
    assert len(after) == 90
    assert files(lake, EVENTS) == 4
    assert result_of(EVENTS, maintain(lake.lake, today=TODAY)).merged_days == 0


@pytest.mark.slow
def test_the_files_of_the_current_day_are_merged_when_there_are_many(lake: LakeBuilder) -> None:
    for _ in range(101):
        lake.gaps([{"detected_at": at("2026-11-23"), "last_id_before": "1-0", "lost": 1, "exact": True}])
    (gaps,) = maintain(lake.lake, today=TODAY)
    assert (gaps.files_before, gaps.files_after, gaps.rows_after) == (101, 1, 101)


@pytest.mark.slow
def test_merged_files_are_about_as_large_as_the_target(lake: LakeBuilder) -> None:
    for batch in range(4):
        lake.events(
            [{"event_id": f"{1795305600000 + batch}-{n}", "extra": f"{n * 7919 % 104729}"} for n in range(9_000)]
        )
    total_mb = sum(file.stat().st_size for file in lake.root.rglob("*.parquet")) / 1e6
    (done,) = maintain(lake.lake, today=TODAY, target_mb=total_mb / 3.5)
    assert done.merged_days == 0, "the number of files is already minimal"
    (done,) = maintain(lake.lake, today=TODAY, target_mb=total_mb / 1.9)
    assert (done.files_before, done.files_after) == (4, 2)
    assert len(rows(lake, EVENTS)) == 36_000
    add_events(lake, "2026-11-22 12:00", 2)
    (done,) = maintain(lake.lake, today=TODAY, target_mb=total_mb / 3)
    assert (done.files_before, done.files_after) == (2, 1), "large files stay as they are"


def test_maintenance_of_silver_keeps_the_latest_row_of_each_key(lake: LakeBuilder) -> None:
    end, job = at("2026-11-22 10:00"), {"job_id": "1", "finished_at": at("2026-11-22 10:00")}
    for later, state in enumerate(["failed", "completed", "failed"]):
        lake.jobs(
            [
                {**job, "incarnation": "5-0", "state": state, "as_of": at("2026-11-22 10:00", later)},
                {**job, "incarnation": None, "state": state, "as_of": at("2026-11-22 10:00", -later)},
                {"job_id": str(10 + later), "incarnation": None, "state": state, "finished_at": end},
            ]
        )  # fmt: skip
    done = result_of(JOBS, maintain(lake.lake, today=TODAY))
    assert (done.rows_before, done.rows_after) == (9, 5)
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
    assert result_of(ATTEMPTS, maintain(lake.lake, today=TODAY)).rows_after == 2
    assert sorted(row["attempt"] for row in rows(lake, ATTEMPTS)) == [1, 2]


def test_days_are_removed_that_are_older_than_a_table_is_kept(lake: LakeBuilder) -> None:
    for day, batches in (("2026-11-20", 2), ("2026-11-21", 1), ("2026-11-22", 1)):
        add_events(lake, f"{day} 10:00", batches)
    lake.jobs([{"job_id": "1", "finished_at": at("2026-11-20 10:00")}])
    keep = parse_retention(["bronze=2", "silver=400"])
    planned = maintain(lake.lake, keep=keep, today=TODAY, dry_run=True)
    assert (result_of(EVENTS, planned).expired_days, result_of(EVENTS, planned).expired_files) == (2, 3)
    assert files(lake, EVENTS) == 4
    done = maintain(lake.lake, keep=keep, today=TODAY)
    assert (result_of(EVENTS, done).expired_days, result_of(JOBS, done).expired_days) == (2, 0)
    assert TableReader(lake.lake).days(EVENTS) == [date(2026, 11, 22)]
    assert TableReader(lake.lake).days(JOBS) == [date(2026, 11, 20)]


def test_an_earlier_version_can_be_read_after_maintenance(lake: LakeBuilder) -> None:
    add_events(lake, "2026-11-21 10:00", 2)
    before = lake.lake.open(EVENTS)
    assert before is not None
    maintain(lake.lake, keep=parse_retention(["bronze.events=1"]), today=TODAY)
    assert rows(lake, EVENTS) == []
    assert all((lake.root / "bronze" / "events" / file.path).exists() for file in before.files())


def test_the_pipelines_state_is_not_touched(lake: LakeBuilder) -> None:
    """Its newest commits are the records of batches: a checkpoint could remove them from the log."""
    lake.write(OPEN_EVENTS, [], batch=1)
    before = lake.lake.open(OPEN_EVENTS)
    maintain(lake.lake)
    assert before is lake.lake.open(OPEN_EVENTS)


def test_files_of_an_unfinished_batch_are_not_merged(lake: LakeBuilder) -> None:
    """The pipeline finishes a killed batch from its files in bronze."""
    add_events(lake, "2026-11-22 10:00", 2)
    (file,) = lake.lake.write(EVENTS, dataset_of_events(lake), "read-by-a-task")
    lake.lake.commit(EVENTS, [file], batch=3, metadata={"number": 3, "part": {"files": [{"path": file.path}]}})
    for number, merged in ((2, 2), (3, 2)):
        lake.open_events([], number, BatchRecord(number=number))
        (done,) = maintain(lake.lake, today=TODAY)
        assert (done.files_before, done.files_after) == (merged, 1)
        snapshot = Lake(lake.root).open(EVENTS)
        assert snapshot is not None
        assert (file.path in {file.path for file in snapshot.files()}) == (number == 2)


def test_a_rewrite_that_was_overtaken_is_computed_again(lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    add_events(lake, "2026-11-22 10:00", 3)
    real, calls = Lake.commit, list[str]()

    def commit_later(self: Lake, table: Table, *args: Any, **options: Any) -> bool:
        calls.append(table.full_name)
        if len(calls) == 1:
            maintain(Lake(lake.root), today=TODAY)
        return real(self, table, *args, **options)

    monkeypatch.setattr(Lake, "commit", commit_later)
    maintain(lake.lake, today=TODAY)
    assert len(rows(lake, EVENTS)) == 30
    assert files(lake, EVENTS) == 1
    written = list((lake.root / "bronze" / "events").glob("dt=*/*.parquet"))
    assert len(written) == 3 + 1, "the file of the overtaken rewrite is deleted"


def test_a_rewrite_that_is_always_overtaken_is_an_error(lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    add_events(lake, "2026-11-22 10:00", 3)

    def commit_never(self: Lake, table: Table, *args: Any, **options: Any) -> bool:
        raise LakeInUseError("another process has changed it")

    monkeypatch.setattr(Lake, "commit", commit_never)
    with pytest.raises(LakeInUseError):
        maintain(lake.lake, today=TODAY)


@pytest.mark.slow
@pytest.mark.slow
def test_every_search_finds_each_job_once_while_batches_and_maintenance_commit(lake: LakeBuilder) -> None:
    finished = {"state": "failed", "finished_at": at("2026-11-20")}
    lake.jobs([{"job_id": job_id, **finished} for job_id in "abc"])
    done = threading.Event()

    def write_batches() -> int:
        writer, number = LakeBuilder(lake.root), 0
        while not done.is_set():
            number += 1
            writer.jobs([{"job_id": "d", **finished, "as_of": at("2026-11-20", number)}], batch=number)
            writer.open_events([], number, BatchRecord(number=number))
        return number

    def maintain_repeatedly() -> int:
        merges = 0
        while not done.is_set():
            merges += result_of(JOBS, maintain(Lake(lake.root), today=TODAY)).merged_days
        return merges

    with ThreadPoolExecutor(2) as pool:
        writing, maintaining = pool.submit(write_batches), pool.submit(maintain_repeatedly)
        try:
            found = [[job.id for job in History(lake.root).search().jobs] for _ in range(60)]
        finally:
            done.set()
        assert writing.result() > 10
        assert maintaining.result() > 3
    assert [ids for ids in found if ids not in (list("cba"), list("dcba"))] == []
    snapshot = Lake(lake.root).open(JOBS)
    assert snapshot is not None
    assert snapshot.batch == writing.result()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["bronze.event=3"], "unknown table 'bronze.event'; did you mean 'bronze.events'"),
        (["bronze"], "invalid retention 'bronze': write it like bronze.events=90"),
        (["bronze=0"], "invalid retention 'bronze=0'"),
    ],
)
def test_an_invalid_retention_is_rejected(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_retention(texts)


def test_the_retention_of_a_table_counts_more_than_that_of_its_layer() -> None:
    keep = parse_retention(["bronze.events=3", "bronze=90"])
    assert {table.full_name: days for table, days in keep.items()} == {
        "bronze.events": 3, "bronze.gaps": 90, "bronze.jobs": 90, "bronze.backfills": 90,
    }  # fmt: skip


def test_an_invalid_target_size_is_rejected(lake: LakeBuilder) -> None:
    with pytest.raises(ConfigError, match="target_mb must be more than 0"):
        maintain(lake.lake, target_mb=0)


def test_tables_may_be_selected_by_name_or_by_layer() -> None:
    assert [table.full_name for table in find_tables(["silver", "bronze.gaps", "silver.jobs"])] == [
        "silver.attempts", "silver.jobs", "bronze.gaps",
    ]  # fmt: skip


def test_the_documented_nightly_commands_build_gold_after_maintenance() -> None:
    """In reverse order, gold reads a file for each batch and table, which takes three times the CPU time."""
    page = Path(__file__).parents[2].joinpath("docs", "how-to", "pipeline.md").read_text()
    commands = page[page.index("## Retention") :]
    assert commands.index("pipeline maintain") < commands.index("pipeline build gold --days")
