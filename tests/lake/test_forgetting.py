"""Forgotten jobs are gone from all tables and from all files of the lake."""

from __future__ import annotations

import re
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.errors import ConfigError, LakeError, LakeInUseError
from bulltask.lake import History
from bulltask.lake.ledger import BatchRecord, last_record
from bulltask.lake.maintenance import Forgotten, forget, jobs_where, jobs_with_id, maintain
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake, RunLock
from bulltask.lake.tables import (
    ATTEMPTS,
    ERRORS_DAY,
    EVENTS,
    FORGOTTEN,
    JOBS,
    OPEN_EVENTS,
    SNAPSHOTS,
    TASK_MINUTE,
    Table,
)  # fmt: skip
from tests.support.command_output import json_of
from tests.support.lake import LakeBuilder, at

END = at("2026-11-22 10:00")
MS = 1795341600000


@pytest.fixture
def lake(lake: LakeBuilder) -> LakeBuilder:
    """Return a lake with the jobs ada, bob and eve of queue mail, and another ada of queue other; bob is open."""
    people, batches = {"ada": 1, "bob": 2, "eve": 3}, ("added", "active", "failed")
    for number, name in enumerate(batches):
        rows = [{"event_id": f"{MS + number}-{seq}", "event": name, "job_id": job} for job, seq in people.items()]
        lake.events([*rows, {"event_id": f"{MS}-{number}", "event": name, "job_id": "ada", "queue": "other"}])
    for state in ("active", "failed"):
        lake.jobs([{"job_id": job, "state": state, "finished_at": END} for job in ("ada", "eve")])
    lake.jobs([{"job_id": "ada", "queue": "other", "state": "completed", "finished_at": END}])
    lake.attempts([{"job_id": job, "outcome": "failed", "ended_at": END} for job in ("ada", "eve")])
    lake.snapshots([{"id": job, "data": f'{{"to": "{job}@x.org"}}', "snapshot_at": END} for job in people])
    lake.gold("errors_day", [
        {"name": "send", "count": 2, "last_seen": END, "sample_job_ids": ["eve", "ada"], "sample_failed_reason": "no"},
        {"name": "pay", "count": 1, "last_seen": END, "sample_job_ids": ["eve"], "sample_failed_reason": "eve"},
    ])  # fmt: skip
    lake.gold("task_minute", [{"name": "send", "minute": END, "added": 3}])
    events = [{"job_id": job, "event_ms": MS, "event_seq": seq, "event": "added"} for job, seq in people.items()]
    lake.open_events(events, batch=1, record=BatchRecord(number=1, last_ids={"mail": f"{MS}-3"}))
    return lake


def ids(lake: LakeBuilder, table: Table, column: str = "job_id") -> list[tuple[str, str]]:
    return sorted({(row["queue"], row[column]) for row in TableReader(Lake(lake.root)).rows(table)})


def texts_in_files(lake: LakeBuilder) -> set[str]:
    """Return all texts in all files of the lake's tables, of any version, and of their logs."""
    found = {path.read_text() for path in lake.root.rglob("*.json")}
    for path in lake.root.rglob("*.parquet"):
        for row in pq.ParquetFile(path).read().to_pylist():
            found.update(str(value) for value in row.values())
    return found


def test_a_job_is_gone_from_all_tables_and_from_all_files(lake: LakeBuilder) -> None:
    maintain(lake.lake)  # earlier versions have its rows in other files
    assert any(re.search(r"\bada\b", text) for text in texts_in_files(lake))
    results = forget(lake.lake, jobs_with_id(lake.lake, "ada", "mail"))
    done = {result.table: (result.rows, result.files) for result in results}
    assert done["bronze.events"] == (3, 1)
    assert (done["silver.attempts"], done["bronze.jobs"], done["gold.errors_day"]) == ((1, 1), (1, 1), (1, 1))
    assert done["silver.jobs"] == (1, 1)
    assert done["_pipeline.open_jobs"] == (1, 1)
    assert ids(lake, EVENTS) == [("mail", "bob"), ("mail", "eve"), ("other", "ada")]
    assert ids(lake, JOBS) == [("mail", "eve"), ("other", "ada")]
    assert ids(lake, ATTEMPTS) == [("mail", "eve")]
    assert ids(lake, SNAPSHOTS, "id") == [("mail", "bob"), ("mail", "eve")]
    assert History(lake.root).job("ada", "mail") is None
    forget(lake.lake, jobs_with_id(lake.lake, "ada"))
    assert not [text for text in texts_in_files(lake) if re.search(r"\bada\b", text)]


def test_sums_in_gold_do_not_change_but_samples_do(lake: LakeBuilder) -> None:
    forget(lake.lake, {("mail", "ada")})
    errors = {row["name"]: row for row in TableReader(lake.lake).rows(ERRORS_DAY)}
    assert (errors["send"]["count"], errors["send"]["sample_job_ids"]) == (2, ["eve"])
    assert (errors["send"]["sample_failed_reason"], errors["pay"]["sample_failed_reason"]) == (None, "eve")
    assert [row["added"] for row in TableReader(lake.lake).rows(TASK_MINUTE)] == [3]


def test_the_pipelines_record_stays_the_last_one(lake: LakeBuilder) -> None:
    before = last_record(lake.lake)
    assert before is not None
    forget(lake.lake, {("mail", "ada")})
    state = Lake(lake.root).open(OPEN_EVENTS)
    assert state is not None
    assert (last_record(Lake(lake.root)), state.batch) == (before, 1)
    newest = state.handle.history(4)
    assert any("bulltask" in entry for entry in newest), "the log of this table is kept for a few hours only"
    forget(lake.lake, {("mail", "nobody")})
    later = Lake(lake.root).open(OPEN_EVENTS)
    assert later is not None
    newest = later.handle.history(later.version - state.version)
    assert any("bulltask" in entry for entry in newest), "a vacuum may make the log drop old commits"


def test_a_dry_run_counts_and_changes_nothing(lake: LakeBuilder) -> None:
    before = sorted(lake.root.rglob("*"))
    results = {result.table: result for result in forget(lake.lake, {("mail", "ada")}, dry_run=True)}
    assert results["bronze.events"] == Forgotten("bronze.events", 3, 3, 0)
    assert sorted(lake.root.rglob("*")) == before


def test_jobs_are_selected_by_a_condition_on_a_table(lake: LakeBuilder) -> None:
    assert jobs_where(lake.lake, SNAPSHOTS, "data LIKE '%bob@x.org%'") == {("mail", "bob")}
    assert jobs_where(lake.lake, JOBS, "state = 'completed'") == {("other", "ada")}
    with pytest.raises(ConfigError, match=r"'stat = 1' is not a condition on silver.jobs: .*No field named stat"):
        jobs_where(lake.lake, JOBS, "stat = 1")
    with pytest.raises(ConfigError, match=r"gold.errors_day has no rows of single jobs: use one of bronze.events"):
        jobs_where(lake.lake, ERRORS_DAY, "true")


def test_a_killed_command_leaves_the_rows_by_which_it_finds_the_jobs(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, committed = Lake.commit, list[str]()

    def commit_some(self: Lake, table: Table, *args: Any, **options: Any) -> bool:
        if table is SNAPSHOTS:
            raise SystemExit
        committed.append(table.full_name)
        return real(self, table, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Lake, "commit", commit_some)
        with pytest.raises(SystemExit):
            forget(lake.lake, {("mail", "ada")}, last=SNAPSHOTS)
    assert len(committed) == 5
    again = jobs_where(lake.lake, SNAPSHOTS, "data LIKE '%ada%'")
    assert again == {("mail", "ada")}
    forget(lake.lake, again, last=SNAPSHOTS)
    assert ("mail", "ada") not in ids(lake, SNAPSHOTS, "id")


def test_an_id_in_two_queues_needs_the_queue(lake: LakeBuilder) -> None:
    with pytest.raises(ConfigError, match="several queues have a job 'ada': mail, other; choose one"):
        jobs_with_id(lake.lake, "ada")
    assert jobs_with_id(lake.lake, "nobody") == set()


def test_nothing_is_forgotten_while_a_pipeline_runs(lake: LakeBuilder) -> None:
    with RunLock(lake.lake), pytest.raises(LakeInUseError):
        forget(lake.lake, {("mail", "ada")})


def test_an_unfinished_batch_must_be_finished_first(lake: LakeBuilder) -> None:
    lake.events([{"event_id": f"{MS + 9}-0", "event": "added", "job_id": "ada"}], batch=2)
    with pytest.raises(
        LakeError, match=r"the last batch in .* is not finished.*run --once' first; nothing was removed"
    ):
        forget(lake.lake, {("mail", "ada")})


def test_the_command_records_what_it_removed_without_the_ids(lake: LakeBuilder) -> None:
    def run(*args: str) -> Result:
        return CliRunner().invoke(main, ["pipeline", "forget", "--lake", str(lake.root), *args])

    selection = ["--table", "bronze.jobs", "--where", "data LIKE '%ada@x.org%'"]
    planned = run(*selection)
    assert planned.exit_code == 0, planned.output
    assert planned.output.startswith("1 job selected\n")
    assert planned.output.endswith("Dry run: nothing was changed. Run the command again with --yes.\n")
    done = json_of(run(*selection, "--yes", "--reason", "request 17", "--json"), "pipeline forget")
    assert (done["dry_run"], done["jobs"]) == (False, 1)
    rows = TableReader(lake.lake).rows(FORGOTTEN)
    assert {(row["reason"], row["jobs"]) for row in rows} == {("request 17", 1)}
    assert {row["table_name"]: row["rows"] for row in rows}["bronze.events"] == 3
    assert run(*selection).output == "No such jobs.\n"
    assert run("--job", "ada", "--where", "true").exit_code == run().exit_code == 2
    assert run("--job", "eve", "--yes").output.startswith("1 job removed\n")
