"""Reading the lake while the pipeline compacts files, expires days and runs batches again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import pytest

from bulltask.errors import LakeError
from bulltask.lake import History, storage
from bulltask.lake import files as reading
from bulltask.lake.storage import STEPS, AtomicSwap, Layout, list_directories, list_files
from bulltask.lake.tables import JOBS
from tests.support.lake import LakeBuilder, at

DAY = date(2026, 11, 20)


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    """Return a lake with four jobs from two queues in three directories."""
    lake = LakeBuilder(tmp_path)
    for ids, queue in (("ab", "mail"), ("c", "mail"), ("d", "other")):
        fields = {"state": "failed", "finished_at": at("2026-11-20"), "queue": queue}
        lake.jobs([{"job_id": job_id, **fields} for job_id in ids])
    return lake


def job_ids(layout: Layout, queue: str | None = None) -> list[str]:
    return [job.id for job in History(layout.root).search(queue=queue).jobs]


def compact(layout: Layout, on_step: Callable[[str], None]) -> None:
    """Replace the two directories of queue mail with one, as the pipeline does."""
    directory = layout.day(JOBS, DAY) / "queue=mail"
    old = sorted(directory.iterdir())
    name = "ingest_id=compacted" if old[0].name != "ingest_id=compacted" else "ingest_id=compacted-again"
    with AtomicSwap(layout, on_step) as swaps:
        new = swaps.new_directory()
        new.mkdir(parents=True)
        for number, file in enumerate(sorted(directory.glob("*/*.parquet"))):
            shutil.copy(file, new / f"part-{number}.parquet")
        swaps.swap(new, directory / name, old)


def test_every_row_is_read_once_at_each_step_of_a_replacement(lake: LakeBuilder) -> None:
    results: dict[str, tuple[list[str], int]] = {}

    def check(step: str) -> None:
        files = list_files(lake.layout, JOBS, DAY)
        results[step] = job_ids(lake.layout), len({directory for _, directory in files})

    compact(lake.layout, check)
    assert {step: ids for step, (ids, _) in results.items()} == {step: list("dcba") for step in STEPS}
    assert [directories for _, directories in results.values()] == [3, 2, 2, 2, 2]


@pytest.mark.parametrize(("queue", "expected"), [("mail", "cba"), ("other", "d")])
def test_a_single_queue_can_be_read_while_its_directory_is_replaced(
    lake: LakeBuilder, queue: str, expected: str
) -> None:
    def check(step: str) -> None:
        assert job_ids(lake.layout, queue) == list(expected), step

    compact(lake.layout, check)


def test_a_day_is_no_longer_read_after_its_removal_is_recorded(lake: LakeBuilder) -> None:
    def check(step: str) -> None:
        assert job_ids(lake.layout) == (list("dcba") if step == "files-written" else []), step

    with AtomicSwap(lake.layout, check) as swaps:
        swaps.swap(None, None, [lake.layout.day(JOBS, DAY)])


def test_files_that_are_removed_before_they_are_read_are_listed_again(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, real = list[int](), list_files

    def list_then_compact(*args: object) -> object:
        files = real(*args)  # type: ignore[arg-type]
        counts.append(len(files))
        if len(counts) == 1:
            compact(lake.layout, lambda step: None)
        return files

    monkeypatch.setattr(reading, "list_files", list_then_compact)
    assert job_ids(lake.layout) == list("dcba")
    assert counts[:2] == [3, 3]


def test_a_replacement_while_directories_are_listed_is_detected(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited, real = list[str](), list_directories

    def list_then_compact(path: Path) -> list[Path]:
        names = real(path)
        visited.append(path.name)
        if path.name == "queue=mail" and visited.count("queue=mail") == 1:
            compact(lake.layout, lambda step: None)
        return names

    monkeypatch.setattr(storage, "list_directories", list_then_compact)
    names = {directory.name for _, directory in list_files(lake.layout, JOBS, DAY)}
    assert "ingest_id=compacted" in names
    assert len(names) == 2
    assert visited.count("queue=mail") == 2


def test_a_directory_that_is_moved_while_others_are_listed_is_detected(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited = list[str]()

    def check(step: str) -> None:
        if step != "intent-written":
            return
        directory = lake.layout.day(JOBS, DAY) / "queue=mail"
        (new,) = (path for path in lake.layout.internal("new").glob("*/*") if path.is_dir())

        def list_then_move(path: Path) -> list[Path]:
            names = list_directories(path)
            visited.append(path.name)
            if path == directory and visited.count(directory.name) == 1:
                shutil.rmtree(directory)  # as another command does that completes the intent
                directory.mkdir()
                new.rename(directory / "ingest_id=compacted")
            return names

        monkeypatch.setattr(storage, "list_directories", list_then_move)
        assert {path.name for _, path in list_files(lake.layout, JOBS, DAY)} >= {"ingest_id=compacted"}

    compact(lake.layout, check)
    assert visited.count("queue=mail") == 2


@pytest.mark.slow
def test_every_search_finds_each_job_once_during_replacements(lake: LakeBuilder) -> None:
    done = threading.Event()

    def replace_repeatedly() -> None:
        while not done.is_set():
            compact(lake.layout, lambda step: None)

    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(replace_repeatedly)
        try:
            results = [job_ids(lake.layout) for _ in range(40)]
        finally:
            done.set()
        compacting.result()
    assert results == [list("dcba")] * 40


def test_files_that_are_removed_repeatedly_are_an_error(lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = lake.layout.day(JOBS, DAY) / "queue=mail" / "ingest_id=x"
    monkeypatch.setattr(reading, "list_files", lambda *_: [(missing / "part-0.parquet", missing)])
    with pytest.raises(LakeError, match="its files are being replaced; try again"):
        job_ids(lake.layout)


def test_unfinished_files_are_skipped(lake: LakeBuilder) -> None:
    directory = lake.layout.day(JOBS, DAY) / "queue=mail"
    (file,) = directory.glob("ingest_id=test-00000001/*.parquet")
    for name in ("_temporary/0", ".hidden"):
        (directory / name).mkdir(parents=True)
        shutil.copy(file, directory / name / "part-0.parquet")
    for name in ("_SUCCESS", ".part-0.parquet.crc", "_half.parquet"):
        (file.parent / name).write_bytes(b"")
    assert len(list_files(lake.layout, JOBS, DAY)) == 3
    assert job_ids(lake.layout) == list("dcba")
