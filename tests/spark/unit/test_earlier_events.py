"""Earlier events of a batch's jobs are read only from files that may contain them."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from bulltask.lake.files import Staging, arrow_schema, write_file
from bulltask.lake.storage import Layout
from bulltask.lake.tables import EVENTS
from bulltask.spark.batches import earlier_events, read_open_events
from bulltask.spark.lifecycle import LIFECYCLE_COLUMNS
from tests.support.lifecycle_oracle import LifecycleEvent
from tests.support.silver_rows import events_table


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def write_batch(layout: Layout, batch: int, *events: LifecycleEvent) -> list[Path]:
    """Write a batch of events; return its files."""
    staging = Staging(layout, f"3f0c2a91-{batch:08d}")
    rows = []
    for entry in events:
        at = datetime.fromtimestamp(entry.event_ms / 1000, UTC)
        rows.append({**asdict(entry), "event_id": entry.event_id, "event_at": at, "dt": str(at.date())})
    staging.write(EVENTS, pa.Table.from_pylist(rows, arrow_schema(EVENTS)))
    staging.publish((EVENTS,))
    return [
        file
        for directory in layout.written_directories(EVENTS, f"3f0c2a91-{batch:08d}")
        for file in directory.iterdir()
    ]


def event(job_id: str | None, ms: int, queue: str = "mail") -> LifecycleEvent:
    return LifecycleEvent(queue, job_id, 1_760_000_000_000 + ms, 0, "active", prev="waiting")  # type: ignore[arg-type]  # drained has no job


def look_up(layout: Layout, *jobs: tuple[str, str]) -> list[LifecycleEvent] | None:
    keys = pa.table({"queue": [queue for queue, _ in jobs], "job_id": [job_id for _, job_id in jobs]})
    table = earlier_events(layout, keys)
    return (
        None
        if table is None
        else sorted((LifecycleEvent(**row) for row in table.to_pylist()), key=lambda event: event.event_ms)
    )


def corrupt_rows(file: Path) -> None:
    """Overwrite a file's rows with zeros; keep its metadata."""
    content = file.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    file.write_bytes(content[:4] + bytes(len(content) - footer - 4) + content[-footer:])


def test_all_earlier_events_of_the_given_jobs_are_found_on_any_day(layout: Layout) -> None:
    day_ms = 86_400_000
    wanted = [event("a", 0), event("a", day_ms), event("c", 2 * day_ms, "{photos}")]
    others = [event("b", 1), event("a", 2, "{photos}"), event(None, 3), replace(event("c", 4), event="drained")]
    write_batch(layout, 1, wanted[0], *others)
    write_batch(layout, 2, wanted[1], wanted[2])
    assert look_up(layout, ("mail", "a"), ("{photos}", "c")) == wanted
    assert look_up(layout, ("mail", "z"), ("gone", "a")) is None


def test_a_lake_without_events_has_no_earlier_events(layout: Layout) -> None:
    assert look_up(layout, ("mail", "a")) is None


def test_only_files_that_may_contain_the_job_ids_are_read(layout: Layout) -> None:
    for batch, ids in enumerate(["bd", "km", "tx", "éö"]):
        for file in write_batch(layout, batch, *(event(job_id, batch) for job_id in ids)):
            if ids != "km":
                corrupt_rows(file)
    corrupt_rows(*write_batch(layout, 9, event(None, 5)))
    assert look_up(layout, ("mail", "k"), ("mail", "a"), ("mail", "zz")) == [event("k", 1)]
    with pytest.raises(OSError):  # noqa: PT011 - Arrow's message may change
        look_up(layout, ("mail", "c"))


def test_open_events_are_read_from_files_of_any_writer(layout: Layout) -> None:
    events = [event("a", 0), event("b", 1)]
    write_file(layout.open_jobs / "batch", events_table(events))
    (layout.open_jobs / "batch" / "_SUCCESS").touch()
    table = read_open_events(layout, "batch")
    assert table.column_names == list(LIFECYCLE_COLUMNS)
    assert [LifecycleEvent(**row) for row in table.to_pylist()] == events
