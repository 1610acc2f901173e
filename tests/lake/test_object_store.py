"""A lake in an object store is read, maintained and searched like one in a directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.errors import LakeInUseError
from bulltask.lake import History
from bulltask.lake.ledger import last_record
from bulltask.lake.maintenance import forget, maintain, parse_retention
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import DataFile, Lake, RunLock
from bulltask.lake.tables import EVENTS, JOBS, OPEN_EVENTS, Table
from tests.support.job_histories import histories
from tests.support.lake import LakeBuilder, at
from tests.support.object_store import SECRET, STORES, Store
from tests.support.programs import run_program
from tests.support.stored_batches import StoredBatches, ids_of, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.parametrize(("store", "bucket"), STORES)]


@pytest.fixture
def options(store: Store) -> Iterator[Mapping[str, str]]:
    with store() as options:
        yield options


def test_a_lake_in_an_object_store_is_searched_maintained_and_forgets(
    bucket: str, options: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = LakeBuilder(f"{bucket}/lake", options)
    for day in (20, 21, 21):
        lake.events([{"event_id": "1795305600000-0", "event": "added", "job_id": "a", "dt": f"2026-11-{day}"}])
    for job_id in ("a", "b"):
        lake.jobs([{"job_id": job_id, "state": "completed", "finished_at": at("2026-11-21 10:00")}])
    events, jobs = maintain(lake.lake, keep=parse_retention(["bronze=3"]), today=date(2026, 11, 23))
    assert (events.expired_files, events.files_before, events.files_after, jobs.rows_after) == (1, 2, 1, 2)
    assert [job.id for job in History(lake.lake.root, options).search().jobs] == ["b", "a"]
    done = {result.table: result for result in forget(lake.lake, {("mail", "a")})}
    assert (done["bronze.events"].rows, done["silver.jobs"].rows) == (2, 1)
    assert done["silver.jobs"].old_files == 3
    assert TableReader(lake.lake).rows(EVENTS) == []
    args = ["history", "search", "--lake", lake.lake.root]
    for name, value in options.items():  # as a user sets them
        if "KEY" in name:
            monkeypatch.setenv(name, value)
        else:
            args += ["--storage-option", f"{name}={value}"]
    shown = CliRunner().invoke(main, args)
    assert shown.exit_code == 0, shown.output
    assert "completed" in shown.output
    assert SECRET not in f"{lake.lake!r}{History(lake.lake.root, options)!r}{JOBS!r}"


def test_a_pipeline_and_forget_never_write_at_the_same_time(
    bucket: str, options: Mapping[str, str], tmp_path: Path
) -> None:
    """An object store has no locks: the one that begins later stops the other before its next commit."""
    events = histories(3, 6)
    root, middle = f"{bucket}/forgetting", len(events) // 2
    lake, begun = Lake(root, options), list[StoredBatches]()
    StoredBatches(RunLock(lake).lake, tmp_path / "checkpoint").write(0, events[:middle])
    (*_, open_job) = rows_of(lake, OPEN_EVENTS).select(["queue", "job_id"]).to_pylist()
    job = (open_job["queue"], open_job["job_id"])

    class ForgettingLake(Lake):
        """A lake in which a pipeline begins while a command replaces the files of the pipeline's state."""

        def write(self, table: Table, rows: Any, prefix: str) -> list[DataFile]:
            if table is OPEN_EVENTS and not begun:
                begun.append(StoredBatches(RunLock(Lake(root, options)).lake, tmp_path / "checkpoint"))
                begun[0].write(1, events[middle:])
            return super().write(table, rows, prefix)

    with pytest.raises(LakeInUseError, match="another 'bulltask pipeline run' or 'forget' has begun to write"):
        forget(ForgettingLake(root, options), {job})
    assert ids_of(lake) == sorted((event.queue, event.event_id) for event in events)
    head = last_record(lake)
    assert head is not None
    assert head.number == 2
    forget(lake, {job})
    assert job not in {(row["queue"], row["job_id"]) for row in TableReader(lake).rows(EVENTS)}
    with pytest.raises(LakeInUseError, match="another 'bulltask pipeline run' or 'forget' has begun to write"):
        begun[0].write(2, events)
    assert last_record(lake) == head


COMMITS = """
import json
import sys
from tests.support.lake import LakeBuilder
name, root, options = sys.argv[1], sys.argv[2], json.loads(sys.stdin.readline())
lake = LakeBuilder(root, options)
print("ready", flush=True)
sys.stdin.readline()
for number in range(10):
    lake.events([{"event_id": f"1795305600000-{number}", "event": name, "dt": "2026-11-21"}])
print("done", flush=True)
"""


def test_commits_of_two_processes_at_once_lose_nothing(bucket: str, options: Mapping[str, str]) -> None:
    """A store must refuse to replace a commit: delta-rs then makes it the next one."""
    root = f"{bucket}/shared"
    with run_program(COMMITS, "one", root) as one, run_program(COMMITS, "two", root) as two:
        for program in (one, two):
            program.write_line(json.dumps(dict(options)))
            assert program.read_line() == "ready"
        for program in (one, two):
            program.write_line("go")
        assert [program.read_line() for program in (one, two)] == ["done", "done"]
    lake = Lake(root, options)
    assert sorted((row["event"], row["event_seq"]) for row in TableReader(lake).rows(EVENTS)) == sorted(
        (name, number) for name in ("one", "two") for number in range(10)
    )
