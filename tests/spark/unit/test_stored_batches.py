"""Batches in a lake: each event once, silver as if derived from all events, and each commit made after any kill."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bulltask.errors import LakeError, LakeInUseError
from bulltask.lake.ledger import BatchRecord, last_record, records
from bulltask.lake.storage import DataFile, Lake, Snapshot
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, OPEN_EVENTS, TABLES, Table
from bulltask.spark import batches, open_jobs
from bulltask.spark.batches import complete
from bulltask.spark.open_jobs import SHARDS, FoldPlan, fold
from tests.support.batch_lake import split_randomly
from tests.support.job_histories import histories
from tests.support.lifecycle_oracle import LifecycleEvent, lifecycle
from tests.support.object_store import BUCKET, SECRET, object_store
from tests.support.silver_rows import arrow_rows, assert_same, attempt_row, job_row
from tests.support.stored_batches import StoredBatches, ids_of, rows_of

GAP = {
    "queue": "mail",
    "last_id_before": "0-0",
    "first_id_after": "1760000000000-0",
    "lost": 3,
    "exact": True,
    "loss_reason": "trimmed",
}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


@pytest.fixture
def driver(lake: Lake, tmp_path: Path) -> StoredBatches:
    return StoredBatches(lake, tmp_path / "checkpoint")


def events_of(*seeds: int, jobs: int = 4) -> list[LifecycleEvent]:
    """Return the events of some queues, one after the other in time."""
    return [
        replace(event, queue=f"q{seed}", event_ms=event.event_ms + 10_000_000 * number)
        for number, seed in enumerate(seeds)
        for event in histories(seed, jobs)
    ]


def assert_has(lake: Lake, events: Sequence[LifecycleEvent]) -> None:
    """Assert that the lake has these events, once each, and that its record matches."""
    assert ids_of(lake) == sorted((event.queue, event.event_id) for event in events)
    head = last_record(lake)
    assert head is not None
    assert head.open_job_events == rows_of(lake, OPEN_EVENTS).num_rows


@pytest.mark.slow
def test_batches_have_each_event_once_and_silver_equals_all_events_folded_together(
    driver: StoredBatches, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_MAX_OPEN_FILES", 5)
    monkeypatch.setattr(batches, "_MIN_ROWS_BY_SHARD", 30)
    monkeypatch.setattr(open_jobs, "_MANY_ROWS", 10)
    rng, events = random.Random(1), events_of(1, 2, 3, jobs=15)
    for number, part in enumerate(split_randomly(events, 25, rng)):
        driver.write(number, part)
    assert_has(lake, events)
    late = LifecycleEvent("q1", "late", events[-1].event_ms + 2 * 10**9, 0, "added")
    driver.write(25, [late])  # all other jobs time out
    assert rows_of(lake, OPEN_EVENTS)["job_id"].to_pylist() == ["late"]
    jobs = lifecycle(events)
    assert_same(arrow_rows(rows_of(lake, JOBS)), [job_row(job) for job in jobs])
    assert_same(arrow_rows(rows_of(lake, ATTEMPTS)), [attempt_row(row) for job in jobs for row in job.attempts])
    assert len(jobs) > 30
    table = lake.open(OPEN_EVENTS)
    assert table is not None
    assert len(table.files()) <= 5 + SHARDS
    on_disk = {
        path.name for path in Path(lake.location(OPEN_EVENTS)).rglob("*.parquet") if "_delta_log" not in str(path)
    }
    assert on_disk == {Path(file.path).name for file in table.files()}, "replaced files are deleted"


def test_jobs_without_events_for_the_timeout_are_written_with_their_last_state(tmp_path: Path, lake: Lake) -> None:
    driver = StoredBatches(lake, tmp_path / "checkpoint", open_job_timeout_ms=1_000)
    first = LifecycleEvent("mail", "old", 1_000, 0, "added", name="send")
    other = replace(first, job_id="other", event_ms=1_500)
    driver.write(0, [first])
    driver.write(1, [other])
    assert rows_of(lake, JOBS).num_rows == 0
    driver.write(2, [replace(first, job_id="new", event_ms=2_100)])
    assert rows_of(lake, JOBS)["job_id"].to_pylist() == ["old"]
    assert sorted(rows_of(lake, OPEN_EVENTS)["job_id"].to_pylist()) == ["new", "other"]
    head = last_record(lake)
    assert head is not None
    assert (head.open_job_events, head.idle_since_ms) == (2, 1_500)


def test_shards_fold_the_same_rows_as_the_driver(driver: StoredBatches, lake: Lake, tmp_path: Path) -> None:
    events = events_of(4, 5, jobs=20)
    driver.write(0, events[:100])
    shutil.copytree(lake.root, tmp_path / "copy")
    driver.write(1, events[100:])
    copy, snapshot = Lake(tmp_path / "copy"), lake.open(EVENTS)
    assert snapshot is not None
    files = [file for file in snapshot.files() if file not in _files(copy, EVENTS)]
    for file in files:
        target = Path(copy.location(EVENTS), file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(lake.location(EVENTS), file.path), target)
    copy.commit(EVENTS, files, batch=2)
    plan = FoldPlan(2, files, _files(copy, OPEN_EVENTS), rewrites=False, by_shard=False, time_out_before_ms=0)
    results = [fold(copy, plan, shards) for shards in ((0, 3, 5), (1, 2), (4, 6, 7))]
    changes = sum(result.open_after - result.open_before for result in results)
    for table, name in ((ATTEMPTS, "attempts"), (JOBS, "jobs"), (OPEN_EVENTS, "open_jobs")):
        copy.commit(table, [file for result in results for file in getattr(result, name)], batch=2)
        assert _sorted(rows_of(copy, table)) == _sorted(rows_of(lake, table))
    rewritten = _files(copy, OPEN_EVENTS)
    plan = FoldPlan(3, [], rewritten, rewrites=True, by_shard=True, time_out_before_ms=0)
    results = [fold(copy, plan, shards) for shards in ((0, 3, 5), (1, 2), (4, 6, 7))]
    new = [file for result in results for file in result.open_jobs]
    copy.commit(OPEN_EVENTS, new, batch=3, replaced=rewritten)
    assert len({file.partition for file in new}) > 4
    assert _sorted(rows_of(copy, OPEN_EVENTS)) == _sorted(rows_of(lake, OPEN_EVENTS))
    head = last_record(lake)
    assert head is not None
    before = list(records(lake))[1].open_job_events
    assert before + changes == head.open_job_events == rows_of(copy, OPEN_EVENTS).num_rows
    assert sum(result.open_after for result in results) == head.open_job_events


def _files(lake: Lake, table: Table) -> list[DataFile]:
    snapshot = lake.open(table)
    return [] if snapshot is None else snapshot.files()


def _sorted(rows: pa.Table) -> list[str]:
    return sorted(repr(row) for row in rows.select(sorted(rows.column_names)).to_pylist())


class Killed(BaseException):
    """The process is killed."""


class FragileLake(Lake):
    """A lake whose process is killed before its n-th write or commit, or after it."""

    left = 10**9

    def write(self, *args: Any, **options: Any) -> list[DataFile]:
        files: list[DataFile] = self._step(super().write, *args, **options)
        return files

    def commit(self, *args: Any, **options: Any) -> bool:
        return bool(self._step(super().commit, *args, **options))

    def delete(self, *args: Any) -> None:
        self._step(super().delete, *args)

    def _step(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._maybe_kill()
        result = function(*args, **options)
        self._maybe_kill()
        return result

    def _maybe_kill(self) -> None:
        self.left -= 1
        if not self.left:
            raise Killed


EVENTS_OF_TWO_BATCHES = events_of(6, jobs=8)
MIDDLE = len(EVENTS_OF_TWO_BATCHES) // 2
NEVER = 10**8


def write_and_kill(lake: FragileLake, checkpoint: Path, kill_at: int) -> bool:
    """Write two batches, kill the second one at a step, and write it again; return whether there was such a step."""
    first, second = EVENTS_OF_TWO_BATCHES[:MIDDLE], EVENTS_OF_TWO_BATCHES[MIDDLE:]
    StoredBatches(lake, checkpoint).write(0, first)
    lake.left = kill_at
    driver = StoredBatches(lake, checkpoint)
    try:
        driver.write(1, second, [GAP])
    except Killed:
        lake.left = NEVER
        table = lake.open(EVENTS)
        was_read = table is not None and table.batch == 2
        complete(lake)
        assert number_of(lake) == (2 if was_read else 1)
        driver = StoredBatches(lake, checkpoint)
        driver.write(1, second, [GAP])
        assert driver.reads == (0 if was_read else 1)
        assert number_of(lake) == 2
        return True
    return False


def number_of(lake: Lake) -> int:
    return (last_record(lake) or BatchRecord()).number


def assert_same_tables(lake: Lake, other: Lake) -> None:
    for table in (EVENTS, ATTEMPTS, JOBS, OPEN_EVENTS):
        assert _sorted(rows_of(lake, table)) == _sorted(rows_of(other, table)), table.full_name
    assert [gap["lost"] for gap in rows_of(lake, GAPS).to_pylist()] == [3]


@pytest.mark.slow
def test_a_batch_killed_at_any_step_is_completed_without_reading_its_events_again(tmp_path: Path) -> None:
    calm = FragileLake(tmp_path / "calm" / "lake")
    assert not write_and_kill(calm, tmp_path / "calm" / "checkpoint", NEVER)
    assert_has(calm, EVENTS_OF_TWO_BATCHES)
    kill_at, was_killed = 0, True
    while was_killed:
        kill_at += 1
        lake = FragileLake(tmp_path / f"{kill_at}" / "lake")
        was_killed = write_and_kill(lake, tmp_path / f"{kill_at}" / "checkpoint", kill_at)
        assert_same_tables(lake, calm)
    assert kill_at > 15


@pytest.mark.extended
def test_a_lake_in_an_object_store_survives_kills_and_never_shows_its_credentials(tmp_path: Path) -> None:
    calm = FragileLake(tmp_path / "lake")
    write_and_kill(calm, tmp_path / "calm", NEVER)
    with object_store() as options:
        for kill_at in range(1, 20, 3):
            lake = FragileLake(f"s3a://{BUCKET}/lake-{kill_at}", options)
            assert write_and_kill(lake, tmp_path / f"{kill_at}", kill_at)
            assert_same_tables(lake, calm)
        wrong = Lake("s3://no-such-bucket/lake", options)
        with pytest.raises(Exception, match="no-such-bucket") as failure:
            wrong.create(EVENTS)
        assert SECRET not in f"{failure.value!r}{wrong!r}{wrong}"


def test_two_batches_may_be_completed_by_two_processes_at_once(driver: StoredBatches, lake: Lake) -> None:
    """Both make the same commits; each table accepts one of them."""
    driver.write(0, events_of(7))
    others = [Lake(lake.root), Lake(lake.root)]
    for other in others:
        complete(other)
    assert [record.number for record in records(lake)] == [1]


class OvertakenLake(FragileLake):
    """A lake at one of whose steps another driver starts, completes the batch, and writes one more."""

    overtake: Callable[[], None]

    def open(self, table: Table) -> Snapshot | None:
        self._maybe_kill()
        return super().open(table)

    def _maybe_kill(self) -> None:
        self.left -= 1
        if not self.left:
            self.overtake()


@pytest.mark.slow
def test_a_driver_cannot_commit_after_another_one_has_started_at_any_step(tmp_path: Path) -> None:
    """In an object store, nothing prevents two drivers: both may then finish a killed batch, one of them too late."""
    first, rest = EVENTS_OF_TWO_BATCHES[:MIDDLE], EVENTS_OF_TWO_BATCHES[MIDDLE:]
    late = [replace(event, event_ms=event.event_ms + 10**7) for event in rest]
    calm = Lake(tmp_path / "calm")
    for number, events in enumerate((first, rest, late)):
        StoredBatches(calm, tmp_path / "checkpoint-calm").write(number, events)
    step, refused, has_step = -1, 0, True
    while has_step:
        step += 2
        checkpoint = tmp_path / f"checkpoint-{step}"
        lake = OvertakenLake(tmp_path / f"{step}").claim()
        driver = StoredBatches(lake, checkpoint)
        driver.write(0, first)

        def overtake(root: str = lake.root, checkpoint: Path = checkpoint) -> None:
            other = Lake(root).claim()
            complete(other)
            start = number_of(other)
            for number, events in enumerate((rest, late), start=1):
                if number >= start:
                    StoredBatches(other, checkpoint).write(number, events)

        lake.left, lake.overtake = step, overtake
        try:
            driver.write(1, rest)
        except LakeInUseError:
            refused += 1
        has_step = lake.left <= 0
        for table in (EVENTS, ATTEMPTS, JOBS, OPEN_EVENTS) if has_step else ():
            assert _sorted(rows_of(lake, table)) == _sorted(rows_of(calm, table)), f"{table.full_name} at step {step}"
    assert refused > 6


def test_a_batch_that_spark_asks_for_again_is_skipped(driver: StoredBatches, lake: Lake) -> None:
    driver.write(0, events_of(8))
    driver.write(0, events_of(8))
    assert driver.reads == 1
    assert_has(lake, events_of(8))


def test_a_checkpoint_older_than_the_lake_is_rejected(driver: StoredBatches, lake: Lake, tmp_path: Path) -> None:
    driver.write(0, events_of(9))
    driver.write(1, events_of(10))
    with pytest.raises(LakeError, match="the checkpoint is older than the lake"):
        driver.write(0, events_of(9))
    other = StoredBatches(lake, tmp_path / "other")
    other.write(0, events_of(11))
    with pytest.raises(LakeError, match="the checkpoint is older than the lake"):
        driver.write(2, events_of(12))
    assert_has(lake, events_of(9) + events_of(10) + events_of(11))


def test_tables_are_plain_delta_tables(driver: StoredBatches, lake: Lake) -> None:
    driver.write(0, events_of(14), [GAP])
    names = [name for name, table in TABLES.items() if lake.open(table) is not None]
    assert names == ["bronze.events", "bronze.gaps", "silver.attempts", "silver.jobs"]
