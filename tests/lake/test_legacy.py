"""A lake of an older version is converted in place, even if the conversion is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.errors import ConfigError, LakeError, LakeInUseError
from bulltask.lake import History
from bulltask.lake.ledger import last_record
from bulltask.lake.legacy import migrate
from bulltask.lake.reader import TableReader, dataset_of
from bulltask.lake.storage import Lake, RunLock
from bulltask.lake.tables import EVENTS, GAPS, JOBS, OPEN_EVENTS, TABLES, TASK_MINUTE
from tests.support.command_output import json_of
from tests.support.lake import LakeBuilder, at
from tests.support.old_lake import OldLakeBuilder

LAST = "3f0c2a91-00000002"
MS = 1795305600000


def event(number: int, day: int, queue: str = "mail") -> dict[str, Any]:
    event_ms = MS + (day - 22) * 86_400_000
    return {
        "queue": queue, "event_id": f"{event_ms}-{number}", "event_ms": event_ms, "event_seq": number,
        "event": "added", "job_id": f"{number}", "dt": f"2026-11-{day}",
    }  # fmt: skip


def job(state: str, minute: int) -> dict[str, Any]:
    moment = at(f"2026-11-22 10:{minute:02}")
    return {"queue": "mail", "job_id": "1", "state": state, "finished_at": moment, "as_of": moment, "dt": "2026-11-22"}


@pytest.fixture
def old(tmp_path: Path) -> OldLakeBuilder:
    """Return a lake with three batches, of which the last wrote a job again, and half of a fourth batch."""
    old = OldLakeBuilder(tmp_path / "lake")
    for batch in range(3):
        old.write(EVENTS, [event(batch, 20), event(batch, 22, "a{b}%")], f"3f0c2a91-0000000{batch}")
    old.write(JOBS, [job("failed", 1)], "3f0c2a91-00000001")
    old.write(JOBS, [job("completed", 2)], LAST)
    gold = {"queue": "mail", "name": "send", "minute": at("2026-11-22 10:00"), "added": 3, "complete": True}
    old.write(TASK_MINUTE, [{**gold, "run_histogram_ms": [(1, 2)], "dt": "2026-11-22"}])
    open_events = [{"queue": "mail", "job_id": "9", "event_ms": MS, "event_seq": 9, "event": "added", "name": "send"}]
    old.head(LAST, open_events, number=3, last_ids={"mail": f"{MS}-2"}, lost={"mail": 4}, oldest_open_event_ms=MS)
    old.write(EVENTS, [event(7, 22), event(7, 23)], "3f0c2a91-00000003")
    old.publishing("3f0c2a91-00000003")
    return old


def content(root: Path) -> dict[str, Any]:
    """Return what a converted lake contains."""
    lake = Lake(root)
    reader, state = TableReader(lake), lake.open(OPEN_EVENTS)
    assert state is not None
    tables: dict[str, Any] = {
        name: sorted(map(repr, reader.rows(table))) for name, table in TABLES.items() if lake.open(table) is not None
    }
    return {
        **tables,
        "open": dataset_of(lake, OPEN_EVENTS, state.files()).to_table().to_pylist(),
        "record": last_record(lake),
    }


def check(root: Path) -> None:
    lake = Lake(root)
    reader = TableReader(lake)
    assert sorted((row["queue"], row["event_id"], row["dt"]) for row in reader.rows(EVENTS)) == sorted(
        (queue, event(batch, day)["event_id"], f"2026-11-{day}")
        for batch in range(3)
        for queue, day in (("mail", 20), ("a{b}%", 22))
    )
    assert [(row["job_id"], row["state"]) for row in reader.rows(JOBS)] == [("1", "completed")]
    (minute,) = reader.rows(TASK_MINUTE)
    assert (minute["queue"], minute["added"], minute["run_histogram_ms"]) == ("mail", 3, [(1, 2)])
    converted = content(root)
    (opened,) = converted["open"]
    assert (opened["job_id"], opened["event"], opened["batch"], opened["shard"]) == ("9", "added", 3, "all")
    record = converted["record"]
    assert (record.number, record.last_ids, record.lost) == (3, {"mail": f"{MS}-2"}, {"mail": 4})
    assert (record.open_job_events, record.idle_since_ms) == (1, MS)
    assert not [path for pattern in ("queue=*", "part-*") for path in root.rglob(pattern)]
    assert sorted(path.name for path in (root / "_pipeline").iterdir()) == ["lock", "open_jobs"]


def test_a_lake_is_converted_and_its_old_files_are_deleted(old: OldLakeBuilder) -> None:
    events, jobs, minutes = migrate(Lake(old.root))
    assert (events.table, events.days, events.files_before, events.files_after) == ("bronze.events", 3, 6, 2)
    assert (events.rows_before, events.rows_after) == (6, 6)
    assert (jobs.rows_before, jobs.rows_after, minutes.rows_after) == (2, 1, 1)
    check(old.root)
    assert [found.state for found in History(old.root).search().jobs] == ["completed"]
    with pytest.raises(ConfigError, match="there is nothing to convert"):
        migrate(Lake(old.root))


def test_a_dry_run_changes_nothing(old: OldLakeBuilder) -> None:
    before = sorted(old.root.rglob("*"))
    events, *_ = migrate(Lake(old.root), dry_run=True)
    assert (events.files_before, events.files_after, events.rows_before, events.rows_after) == (6, 0, 6, 0)
    assert sorted(old.root.rglob("*")) == before


KILLED = """
import os, signal, sys
from pathlib import Path
import bulltask.lake.legacy as legacy
from bulltask.lake.storage import Lake

kill_at, steps = int(sys.argv[2]), 0

def counted(function):
    def call(*args, **options):
        global steps
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return call

for owner, name in ((Lake, "write"), (Lake, "commit"), (legacy.shutil, "rmtree"), (Path, "unlink")):
    setattr(owner, name, counted(getattr(owner, name)))
legacy.migrate(Lake(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_conversion_that_is_killed_at_any_step_is_continued(old: OldLakeBuilder) -> None:
    """A single lake is killed at its first step, then at the second of the rest, and so on until it is converted."""
    kills = 0
    for kill_at in range(1, 60):
        program = [sys.executable, "-c", KILLED, str(old.root), str(kill_at)]
        code = subprocess.run(program, check=False, timeout=60).returncode
        if code == 0:
            break
        assert code == -SIGKILL
        kills += 1
        with pytest.raises(LakeError, match="migrate-lake"):
            TableReader(Lake(old.root))
    assert kills > 4
    check(old.root)


def test_a_replacement_that_an_older_version_was_killed_in_is_finished(old: OldLakeBuilder) -> None:
    directory = old.root / "bronze/events/dt=2026-11-20/queue=mail"
    new = old.root / "_pipeline/new/x/1"
    new.mkdir(parents=True)
    for number, file in enumerate(sorted(directory.glob("*/*.parquet"))):
        (new / f"part-{number}.parquet").write_bytes(file.read_bytes())
    names = [f'"bronze/events/dt=2026-11-20/queue=mail/{path.name}"' for path in directory.iterdir()]
    intents = old.root / "_pipeline/intents"
    intents.mkdir()
    (intents / "x.json").write_text(
        '{"new": "_pipeline/new/x/1", "target": "bronze/events/dt=2026-11-20/queue=mail/ingest_id=compact-1", '
        f'"old": [{", ".join(names)}]}}'
    )
    migrate(Lake(old.root))
    check(old.root)


def test_other_commands_name_the_command_that_converts_the_lake(old: OldLakeBuilder) -> None:
    new_row = {"id": "1", "snapshot_at": at("2026-11-22")}
    for use in (
        History,
        lambda root: RunLock(Lake(root)),
        lambda root: last_record(Lake(root)),
        lambda root: LakeBuilder(root).snapshots([new_row]),
    ):
        with pytest.raises(LakeError, match=r"older version of bulltask: 'bulltask pipeline migrate-lake --lake /.*'"):
            use(old.root)
    assert not list(old.root.rglob("_delta_log"))


def test_a_lake_that_a_pipeline_writes_is_not_converted(old: OldLakeBuilder) -> None:
    lake = Lake(old.root)
    lake.is_migrating = True
    with RunLock(lake), pytest.raises(LakeInUseError):
        migrate(Lake(old.root))


def test_a_lake_in_an_object_store_has_never_had_the_old_layout() -> None:
    with pytest.raises(ConfigError, match="in file systems only"):
        migrate(Lake("s3://bucket/lake"))


def test_the_command_converts_a_lake_with_yes_only(old: OldLakeBuilder) -> None:
    def run(*args: str) -> Result:
        return CliRunner().invoke(main, ["pipeline", "migrate-lake", "--lake", str(old.root), *args])

    planned = run()
    assert planned.exit_code == 0, planned.output
    assert planned.output.endswith("Dry run: nothing was changed. Run the command again with --yes.\n")
    assert "bronze.events" in planned.output
    document = json_of(run("--yes", "--json"), "pipeline migrate-lake")
    assert not document["dry_run"]
    check(old.root)
    again = run()
    assert again.exit_code == 1
    assert again.output.startswith("Error: there is nothing to convert in")


@pytest.mark.parametrize("table", [GAPS])
def test_a_lake_without_a_batch_is_converted(tmp_path: Path, table: Any) -> None:
    old = OldLakeBuilder(tmp_path)
    old.write(table, [{"queue": "mail", "last_id_before": "1-0", "detected_at": at("2026-11-22"), "dt": "2026-11-22"}])
    with pytest.raises(LakeError, match="migrate-lake"):  # files beside the old ones would be mistaken for converted
        LakeBuilder(tmp_path).gaps([{"last_id_before": "2-0", "detected_at": at("2026-11-22")}])
    migrate(Lake(tmp_path))
    assert len(TableReader(Lake(tmp_path)).rows(table)) == 1
    assert last_record(Lake(tmp_path)) is None
