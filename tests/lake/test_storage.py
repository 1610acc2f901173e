"""The lake's tables are Delta tables: commits of batches and rewrites, and what delta-rs does not check itself."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow.parquet import ParquetFile

from bulltask.errors import ConfigError, LakeError, LakeInUseError
from bulltask.lake.ledger import BatchRecord, last_record
from bulltask.lake.reader import TableReader, dataset_of
from bulltask.lake.storage import DataFile, Lake, Snapshot, arrow_schema, batch_prefix
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, Column, Kind, Table
from tests.support.lake import LakeBuilder, at

FUTURE = replace(JOBS, columns=(*JOBS.columns, Column("mood", Kind.TEXT, "a column of a later version")))


def job(job_id: str, **fields: Any) -> dict[str, Any]:
    return {"job_id": job_id, "state": "completed", "finished_at": at("2026-11-22 10:00"), **fields}


def snapshot(lake: Lake, table: Table = JOBS) -> Snapshot:
    opened = lake.open(table)
    assert opened is not None
    return opened


def job_ids(lake: Lake) -> list[str]:
    return sorted(row["job_id"] for row in TableReader(lake).rows(JOBS))


def merge(lake: Lake, since: Snapshot) -> list[DataFile]:
    """Write the rows of a snapshot to one file."""
    return lake.write(since.table, dataset_of(lake, since.table, since.files()).to_table(), "merged")


def test_a_batch_that_is_committed_again_later_adds_nothing(lake: LakeBuilder) -> None:
    """delta-rs accepts a later commit with the same number or a lower one."""
    lake.jobs([job("a")], batch=7)
    rows = pa.Table.from_pylist([{**job("again"), "queue": "mail", "dt": "2026-11-22"}], arrow_schema(JOBS))
    for number in (7, 6):
        files = lake.lake.write(JOBS, rows, batch_prefix(number))
        assert not Lake(lake.root).commit(JOBS, files, batch=number)
    assert job_ids(lake.lake) == ["a"]
    assert snapshot(lake.lake).batch == 7


def test_two_processes_that_commit_the_same_batch_at_once_cannot_both_succeed(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.jobs([job("a")], batch=1)
    rows = pa.Table.from_pylist([{**job("b"), "queue": "mail", "dt": "2026-11-22"}], arrow_schema(JOBS))
    first, second = Lake(lake.root), Lake(lake.root)
    opened = second.open(JOBS)
    assert opened is not None
    monkeypatch.setattr(second, "open", lambda _: opened)  # it has not seen the other's commit
    assert first.commit(JOBS, first.write(JOBS, rows, batch_prefix(2)), batch=2)
    with pytest.raises(LakeInUseError, match=r"another process has changed .*silver/jobs at the same time"):
        second.commit(JOBS, second.write(JOBS, rows, batch_prefix(2)), batch=2)
    assert job_ids(lake.lake) == ["a", "b"]


def test_of_two_rewrites_of_the_same_version_only_the_first_succeeds(lake: LakeBuilder) -> None:
    lake.jobs([job("a")]).jobs([job("b")])
    since = snapshot(lake.lake)
    first, second = (merge(lake.lake, since) for _ in range(2))
    assert lake.lake.commit(JOBS, first, replaced=since.files(), since=since)
    with pytest.raises(LakeInUseError, match="nothing was written: try again"):
        Lake(lake.root).commit(JOBS, second, replaced=since.files(), since=since)
    assert job_ids(lake.lake) == ["a", "b"]


def test_a_rewrite_keeps_rows_that_a_batch_has_added_meanwhile(lake: LakeBuilder) -> None:
    lake.jobs([job("a")], batch=1).jobs([job("b")], batch=2)
    since = snapshot(lake.lake)
    merged = merge(lake.lake, since)
    LakeBuilder(lake.root).jobs([job("c")], batch=3)
    assert lake.lake.commit(JOBS, merged, replaced=since.files(), since=since)
    assert job_ids(lake.lake) == ["a", "b", "c"]
    assert snapshot(lake.lake).batch == 3


def test_of_several_claims_at_once_one_wins(lake: LakeBuilder) -> None:
    rows = pa.Table.from_pylist([{**job("a"), "queue": "mail", "dt": "2026-11-22"}], arrow_schema(JOBS))
    start = threading.Barrier(3)

    def claim(_: int) -> Lake | None:
        start.wait(10)
        with suppress(LakeInUseError):
            return copy.copy(Lake(lake.root).claim())  # as it is sent to Spark Connect's server
        return None

    def can_write(claimed: Lake | None) -> bool:
        with suppress(LakeInUseError):
            if claimed is not None:
                claimed.commit(JOBS, claimed.write(JOBS, rows, batch_prefix(1)), batch=1)
                return True
        return False

    with ThreadPoolExecutor(3) as pool:
        claims = list(pool.map(claim, range(3)))  # before one of them writes, all have claimed
    assert [can_write(claimed) for claimed in claims].count(True) == 1
    assert job_ids(lake.lake) == ["a"]


def test_the_record_of_the_last_batch_outlasts_a_claim(lake: LakeBuilder) -> None:
    """The log of the pipeline's state is kept for six hours; every 20th commit removes what is older."""
    for number in range(1, 19):
        lake.open_events([], number, BatchRecord(number=number))
    log = lake.root / "_pipeline" / "open_jobs" / "_delta_log"
    old = time.time() - timedelta(hours=7).total_seconds()
    for path in log.iterdir():
        os.utime(path, (old, old))
    assert last_record(Lake(lake.root).claim()) == BatchRecord(number=18)
    assert len(list(log.glob("*.json"))) < 5


def test_a_snapshot_does_not_change_when_others_commit(lake: LakeBuilder) -> None:
    lake.jobs([job("a")], batch=1)
    before = snapshot(lake.lake)
    lake.jobs([job("b")], batch=2)
    assert len(snapshot(lake.lake).files()) == 2
    assert [file.path.startswith("dt=2026-11-22/b000000001-") for file in before.files()] == [True]


@pytest.mark.slow
def test_commits_are_read_from_checkpoints(lake: LakeBuilder) -> None:
    """Without them, 500 commits take 70 ms each instead of 6."""
    for number in range(101):
        lake.write(ATTEMPTS, [], batch=number)
    log = lake.root / "silver" / "attempts" / "_delta_log"
    assert json.loads((log / "_last_checkpoint").read_text())["version"] == 99
    assert snapshot(Lake(lake.root), ATTEMPTS).batch == 100


def test_the_metadata_of_a_commit_is_that_of_its_table_only(lake: LakeBuilder) -> None:
    """Each table is a commit of its own."""
    lake.jobs([job("a")], batch=1)
    assert lake.lake.commit(JOBS, [], batch=2, metadata={"number": 2})
    assert lake.lake.commit(JOBS, [])
    assert snapshot(Lake(lake.root)).last_metadata() == {"number": 2}
    assert lake.lake.open(ATTEMPTS) is None
    assert snapshot(lake.lake).batch == 2


@pytest.mark.parametrize("rows", [40_000])
def test_a_program_that_reads_a_table_exits_cleanly(lake: LakeBuilder, rows: int) -> None:
    """In some versions, DeltaTable.to_pyarrow_dataset().to_table() aborts when the interpreter exits."""
    lake.jobs([job(f"{number}") for number in range(rows)])
    program = (
        "import sys; from bulltask.lake.reader import *; from bulltask.lake.storage import Lake; "
        "from bulltask.lake.tables import JOBS; lake = Lake(sys.argv[1]); "
        "print(dataset_of(lake, JOBS, lake.open(JOBS).files()).to_table().num_rows)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, lake.root], capture_output=True, text=True, check=False, timeout=50
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{rows}\n", "")


def test_a_column_of_a_later_version_is_added_and_is_null_in_older_rows(lake: LakeBuilder) -> None:
    lake.jobs([job("old")])
    assert TableReader(Lake(lake.root)).rows(FUTURE, job_ids=["old"])[0]["mood"] is None
    rows = [{**job("new", mood="fine"), "queue": "mail", "dt": "2026-11-22"}]
    files = lake.lake.write(FUTURE, pa.Table.from_pylist(rows, arrow_schema(FUTURE)), "later")
    assert lake.lake.commit(FUTURE, files)
    moods = {row["job_id"]: row["mood"] for row in TableReader(lake.lake).rows(FUTURE)}
    assert moods == {"old": None, "new": "fine"}
    lake.jobs([job("newest")])  # an older version may still add rows
    assert sorted(DeltaTable(lake.root / "silver" / "jobs").to_pandas()["job_id"]) == ["new", "newest", "old"]
    since = snapshot(lake.lake)
    with pytest.raises(LakeError, match="has columns of a newer version of bulltask, which would be lost: mood"):
        lake.lake.commit(JOBS, merge(lake.lake, since), replaced=since.files(), since=since)


def test_files_of_a_killed_write_are_deleted_after_a_week_and_replaced_files_as_well(lake: LakeBuilder) -> None:
    lake.jobs([job("a")]).jobs([job("b")])
    since = snapshot(lake.lake)
    (orphan,) = merge(lake.lake, since)
    assert lake.lake.vacuum(JOBS) == 0, "a running process may still commit it"
    old = (lake.root / "silver" / "jobs" / orphan.path).stat().st_mtime - timedelta(days=8).total_seconds()
    os.utime(lake.root / "silver" / "jobs" / orphan.path, (old, old))
    assert lake.lake.vacuum(JOBS, dry_run=True) == lake.lake.vacuum(JOBS) == 1
    lake.lake.commit(JOBS, merge(lake.lake, since), replaced=since.files(), since=since)
    assert lake.lake.vacuum(JOBS) == 0, "readers of the old version may still need them"
    assert lake.lake.vacuum(JOBS, timedelta(0), never_committed=False) == 2
    assert job_ids(lake.lake) == ["a", "b"]


def test_files_that_the_driver_does_not_have_are_not_committed(lake: LakeBuilder) -> None:
    """An executor may have another directory at the lake's path, whatever the command that writes."""
    lake.jobs([job("a")]).jobs([job("b")])
    since = snapshot(lake.lake)
    (file,) = merge(lake.lake, since)
    (lake.root / "silver" / "jobs" / file.path).unlink()
    rewrites: list[dict[str, Any]] = [{}, {"replaced": since.files(), "since": since}]
    for rewrite in rewrites:
        with pytest.raises(LakeError, match=r"\[BULLTASK_LAKE_NOT_SHARED\] .* Nothing was added to the table"):
            lake.lake.commit(JOBS, [file], **rewrite)
    assert job_ids(lake.lake) == ["a", "b"]


def test_a_glob_finds_rows_that_the_table_no_longer_has(lake: LakeBuilder) -> None:
    """This is why the documentation opens the tables with readers of Delta."""
    lake.jobs([job("a")]).jobs([job("a", state="failed", as_of=at("2026-11-22 11:00"))])
    since = snapshot(lake.lake)
    assert lake.lake.commit(JOBS, merge(lake.lake, since)[:1], replaced=since.files(), since=since)
    assert len(list(lake.root.glob("silver/jobs/*/*.parquet"))) == 3
    assert len(snapshot(lake.lake).files()) == 1


def test_credentials_are_not_shown_but_sent_to_executors() -> None:
    lake = Lake("s3a://bucket/lake/", {"AWS_SECRET_ACCESS_KEY": "very-secret"})
    assert repr(lake) == "Lake('s3://bucket/lake')"
    assert copy.copy(lake)._options == lake._options


@pytest.mark.parametrize("root", ["", "hdfs://head:9000/lake", "s3://"])
def test_a_root_that_cannot_be_a_lake_is_rejected(root: str) -> None:
    with pytest.raises(ConfigError):
        Lake(root)


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    lake = Lake(f"file://{tmp_path}/lake")
    assert lake.directory == tmp_path / "lake"
    with pytest.raises(LakeError, match="there is no lake in"):
        lake.check()
    assert not (tmp_path / "lake").exists()


def test_statistics_skip_files_in_which_a_job_cannot_be(lake: LakeBuilder) -> None:
    lake.events([{"event_id": "1795305600000-0", "event": "added", "job_id": "a"}])
    lake.events([{"event_id": "1795305600001-0", "event": "added", "job_id": "b"}])
    for file in snapshot(lake.lake, EVENTS).files():
        if file.low["job_id"] == "a":
            (lake.root / "bronze" / "events" / file.path).write_bytes(b"not to be read")
    (row,) = TableReader(lake.lake).rows(EVENTS, job_ids=["b"])
    assert row["event_ms"] == 1795305600001


def test_bloom_filters_skip_files_whose_statistics_include_a_random_id(lake: LakeBuilder) -> None:
    for day, job_ids in ((20, "az"), (21, "bmy"), (22, "cx")):
        lake.jobs({"job_id": job_id, "finished_at": at(f"2026-11-{day} 10:00")} for job_id in job_ids)
    for file in snapshot(lake.lake, JOBS).files(["2026-11-20", "2026-11-22"]):
        path = lake.root / "silver" / "jobs" / file.path
        end = ParquetFile(path).metadata.row_group(0).column(1).bloom_filter_offset
        content = path.read_bytes()
        path.write_bytes(content[:4] + bytes(end - 4) + content[end:])  # no rows can be read
    (row,) = TableReader(lake.lake).rows(JOBS, job_ids=["m"])
    assert row["dt"] == "2026-11-21"


@pytest.mark.parametrize("job_id", ["it's", "a\\'b", '"', "a\nb", "\0", "%_", "漢字 🐂", ""])
def test_a_job_is_looked_up_by_any_id(lake: LakeBuilder, job_id: str) -> None:
    lake.jobs({"job_id": name, "finished_at": at("2026-11-20 10:00")} for name in (job_id, "other"))
    assert [row["job_id"] for row in TableReader(lake.lake).rows(JOBS, job_ids=[job_id])] == [job_id]
