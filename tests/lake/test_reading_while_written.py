"""The lake is read while the pipeline compacts it, expires days and writes batches anew."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import pytest

from bulltask.errors import LakeError
from bulltask.lake import History, listing
from bulltask.lake import read as reading
from bulltask.lake.atomic_swap import STEPS, AtomicSwap
from bulltask.lake.layout import Layout, list_directories
from bulltask.lake.listing import list_files
from bulltask.lake.tables import JOBS
from tests.support.lake import LakeBuilder, at

DAY = date(2026, 11, 20)


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    """Four jobs of two queues, in three directories."""
    made = LakeBuilder(tmp_path)
    for ids, queue in (("ab", "mail"), ("c", "mail"), ("d", "other")):
        made.jobs([{"job_id": one, "state": "failed", "finished_at": at("2026-11-20"), "queue": queue} for one in ids])
    return made


def found(layout: Layout, queue: str | None = None) -> list[str]:
    return [job.id for job in History(layout.root).search(queue=queue).jobs]


def compact(layout: Layout, reached: Callable[[str], None]) -> None:
    """Put one directory in the place of the two of queue mail, as the pipeline does."""
    place = layout.day(JOBS, DAY) / "queue=mail"
    old = sorted(place.iterdir())
    name = "ingest_id=compacted" if old[0].name != "ingest_id=compacted" else "ingest_id=again"
    with AtomicSwap(layout, reached) as swaps:
        new = swaps.new_directory()
        new.mkdir(parents=True)
        for number, file in enumerate(sorted(place.glob("*/*.parquet"))):
            shutil.copy(file, new / f"part-{number}.parquet")
        swaps.swap(new, place / name, old)


def test_at_every_moment_of_a_replacement_all_rows_are_there_once(lake: LakeBuilder) -> None:
    seen: dict[str, tuple[list[str], int]] = {}

    def look(step: str) -> None:
        files = list_files(lake.layout, JOBS, DAY)
        seen[step] = found(lake.layout), len({place for _, place in files})

    compact(lake.layout, look)
    assert {step: ids for step, (ids, _) in seen.items()} == {step: list("dcba") for step in STEPS}
    assert [directories for _, directories in seen.values()] == [3, 2, 2, 2, 2]


@pytest.mark.parametrize(("queue", "expected"), [("mail", "cba"), ("other", "d")])
def test_a_queue_is_read_alone_also_while_its_directory_is_replaced(
    lake: LakeBuilder, queue: str, expected: str
) -> None:
    def look(step: str) -> None:
        assert found(lake.layout, queue) == list(expected), step

    compact(lake.layout, look)


def test_a_day_that_is_being_taken_away_is_gone_when_that_is_decided(lake: LakeBuilder) -> None:
    def look(step: str) -> None:
        assert found(lake.layout) == (list("dcba") if step == "written" else []), step

    with AtomicSwap(lake.layout, look) as swaps:
        swaps.swap(None, None, [lake.layout.day(JOBS, DAY)])


def test_files_that_vanish_before_they_are_read_are_listed_again(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, real = list[int](), list_files

    def compacted_behind(*args: object) -> object:
        files = real(*args)  # type: ignore[arg-type]
        lists.append(len(files))
        if len(lists) == 1:
            compact(lake.layout, lambda step: None)
        return files

    monkeypatch.setattr(reading, "list_files", compacted_behind)
    assert found(lake.layout) == list("dcba")
    assert lists[:2] == [3, 3]


def test_a_replacement_that_comes_and_goes_while_directories_are_listed_is_noticed(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, real = list[str](), list_directories

    def compacted_meanwhile(path: Path) -> list[Path]:
        names = real(path)
        looks.append(path.name)
        if path.name == "queue=mail" and looks.count("queue=mail") == 1:
            compact(lake.layout, lambda step: None)
        return names

    monkeypatch.setattr(listing, "list_directories", compacted_meanwhile)
    places = {place.name for _, place in list_files(lake.layout, JOBS, DAY)}
    assert "ingest_id=compacted" in places
    assert len(places) == 2
    assert looks.count("queue=mail") == 2


def test_a_new_directory_that_goes_to_its_place_while_others_are_listed_is_noticed(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[str]()

    def look(step: str) -> None:
        if step != "intended":
            return
        place = lake.layout.day(JOBS, DAY) / "queue=mail"
        (new,) = (path for path in lake.layout.internal("new").glob("*/*") if path.is_dir())

        def moved_meanwhile(path: Path) -> list[Path]:
            names = list_directories(path)
            looks.append(path.name)
            if path == place and looks.count(place.name) == 1:
                shutil.rmtree(place)  # what another command does that finds the intent
                place.mkdir()
                new.rename(place / "ingest_id=compacted")
            return names

        monkeypatch.setattr(listing, "list_directories", moved_meanwhile)
        assert {one.name for _, one in list_files(lake.layout, JOBS, DAY)} >= {"ingest_id=compacted"}

    compact(lake.layout, look)
    assert looks.count("queue=mail") == 2


@pytest.mark.slow
def test_every_job_is_found_once_by_all_searches_while_directories_are_replaced_all_the_time(lake: LakeBuilder) -> None:
    done = threading.Event()

    def replace_all_the_time() -> None:
        while not done.is_set():
            compact(lake.layout, lambda step: None)

    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(replace_all_the_time)
        try:
            seen = [found(lake.layout) for _ in range(40)]
        finally:
            done.set()
        compacting.result()
    assert seen == [list("dcba")] * 40


def test_files_that_vanish_again_and_again_are_an_error(lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = lake.layout.day(JOBS, DAY) / "queue=mail" / "ingest_id=x"
    monkeypatch.setattr(reading, "list_files", lambda *_: [(gone / "part-0.parquet", gone)])
    with pytest.raises(LakeError, match="its files are replaced too often"):
        found(lake.layout)


def test_unfinished_files_are_skipped(lake: LakeBuilder) -> None:
    place = lake.layout.day(JOBS, DAY) / "queue=mail"
    (file,) = place.glob("ingest_id=test-00000001/*.parquet")
    for name in ("_temporary/0", ".hidden"):
        (place / name).mkdir(parents=True)
        shutil.copy(file, place / name / "part-0.parquet")
    for name in ("_SUCCESS", ".part-0.parquet.crc", "_half.parquet"):
        (file.parent / name).write_bytes(b"")
    assert len(list_files(lake.layout, JOBS, DAY)) == 3
    assert found(lake.layout) == list("dcba")
