"""Earlier events of a batch's jobs are read only from files that may contain them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from bulltask.errors import LakeError
from bulltask.lake.storage import Lake
from bulltask.lake.tables import EVENTS
from bulltask.spark.bronze import write_events
from bulltask.spark.open_jobs import earlier_events
from tests.support.lake import LakeBuilder
from tests.support.lifecycle_oracle import LifecycleEvent
from tests.support.silver_rows import events_table
from tests.support.stored_batches import event_batches

DAY_MS = 86_400_000


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def write_batch(lake: Lake, batch: int, *events: LifecycleEvent) -> list[Path]:
    """Write a batch of events; return its files."""
    files = write_events(lake, event_batches(events)).files
    lake.commit(EVENTS, files, batch=batch)
    return [Path(lake.location(EVENTS), file.path) for file in files]


def event(job_id: str | None, ms: int, queue: str = "mail") -> LifecycleEvent:
    return LifecycleEvent(queue, job_id, 1_760_000_000_000 + ms, 0, "active", prev="waiting")  # type: ignore[arg-type]  # drained has no job


def look_up(lake: Lake, *jobs: tuple[str, str], new: tuple[LifecycleEvent, ...] = ()) -> list[LifecycleEvent] | None:
    keys = pa.table({"queue": [queue for queue, _ in jobs], "job_id": [job_id for _, job_id in jobs]})
    table = earlier_events(lake, events_table(new), keys)
    if table is None:
        return None
    return sorted((LifecycleEvent(**row) for row in table.to_pylist()), key=lambda event: event.event_ms)


def corrupt_rows(file: Path) -> None:
    """Overwrite a file's rows with zeros; keep its metadata."""
    content = file.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    file.write_bytes(content[:4] + bytes(len(content) - footer - 4) + content[-footer:])


def test_all_earlier_events_of_the_given_jobs_are_found_on_any_day(lake: Lake) -> None:
    wanted = [event("a", 0), event("a", DAY_MS), event("c", 2 * DAY_MS, "{photos}")]
    others = [event("b", 1), event("a", 2, "{photos}"), event(None, 3), replace(event("c", 4), event="drained")]
    write_batch(lake, 1, wanted[0], *others)
    write_batch(lake, 2, wanted[1], wanted[2])
    assert look_up(lake, ("mail", "a"), ("{photos}", "c")) == wanted
    assert look_up(lake, ("mail", "z"), ("gone", "a")) is None


def test_the_batchs_own_events_are_not_earlier_events(lake: Lake) -> None:
    write_batch(lake, 1, event("a", 0))
    write_batch(lake, 2, event("a", 1), event("a", 2))
    assert look_up(lake, ("mail", "a"), new=(event("a", 1), event("a", 2))) == [event("a", 0)]


def test_a_lake_without_events_has_no_earlier_events(lake: Lake) -> None:
    lake.create(EVENTS)
    assert look_up(lake, ("mail", "a")) is None


def test_only_files_that_may_contain_the_job_ids_are_read(lake: Lake) -> None:
    for batch, ids in enumerate(["bd", "km", "tx", "éö"]):
        for file in write_batch(lake, batch, *(event(job_id, batch) for job_id in ids)):
            if ids != "km":
                corrupt_rows(file)
    for file in write_batch(lake, 9, event("k", 5, "photos")):
        corrupt_rows(file)
    assert look_up(lake, ("mail", "k"), ("mail", "a"), ("mail", "zz")) == [event("k", 1)]
    with pytest.raises(LakeError, match="bronze/events cannot be read"):
        look_up(lake, ("mail", "c"))


def test_events_before_the_job_was_added_are_not_read(lake: Lake) -> None:
    """One more day is read, because clocks may differ. The ids of a file do not tell which jobs it has."""
    builder, files = LakeBuilder(lake.root), {}
    for day in (0, 3, 5):
        at_day = datetime(2025, 10, 9, 9, tzinfo=UTC) + timedelta(days=day)
        events = [event(f"{letter}{day}", day * DAY_MS) for letter in "amz"]
        files[day] = write_batch(lake, day, *events)
        job = {"state": "failed", "created_at": at_day, "finished_at": at_day}
        builder.jobs({**job, "job_id": f"{letter}{day}"} for letter in "amz")
    for file in files[0]:
        corrupt_rows(file)
    assert look_up(lake, ("mail", "m5"), ("mail", "a3")) == [event("a3", 3 * DAY_MS), event("m5", 5 * DAY_MS)]
    with pytest.raises(LakeError):
        look_up(lake, ("mail", "m5"), ("mail", "m9"))
