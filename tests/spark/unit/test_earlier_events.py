"""What was before a batch: found in the files that may have it, and in no others."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from bulltask.lake.arrow import arrow_schema
from bulltask.lake.layout import Layout
from bulltask.lake.staging import Staging, write_file
from bulltask.lake.tables import EVENTS
from bulltask.spark.lifecycle.fold import LIFECYCLE_COLUMNS, LifecycleEvent
from bulltask.spark.tables.state import earlier_events, read_open_events
from tests.support.silver_rows import events_table


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def put(layout: Layout, batch: int, *events: LifecycleEvent) -> list[Path]:
    """Write a batch of events; return its files."""
    staging = Staging(layout, f"3f0c2a91-{batch:08d}")
    rows = []
    for one in events:
        at = datetime.fromtimestamp(one.event_ms / 1000, UTC)
        rows.append({**asdict(one), "event_id": one.event_id, "event_at": at, "dt": str(at.date())})
    staging.write(EVENTS, pa.Table.from_pylist(rows, arrow_schema(EVENTS)))
    staging.publish((EVENTS,))
    return [file for place in layout.written(EVENTS, f"3f0c2a91-{batch:08d}") for file in place.iterdir()]


def event(job_id: str | None, ms: int, queue: str = "mail") -> LifecycleEvent:
    return LifecycleEvent(queue, job_id, 1_760_000_000_000 + ms, 0, "active", prev="waiting")  # type: ignore[arg-type]  # drained has none


def asked(layout: Layout, *jobs: tuple[str, str]) -> list[LifecycleEvent] | None:
    keys = pa.table({"queue": [queue for queue, _ in jobs], "job_id": [job_id for _, job_id in jobs]})
    found = earlier_events(layout, keys)
    return (
        None
        if found is None
        else sorted((LifecycleEvent(**row) for row in found.to_pylist()), key=lambda one: one.event_ms)
    )


def spoil(file: Path) -> None:
    """Keep a file's metadata, but not its rows."""
    content = file.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    file.write_bytes(content[:4] + bytes(len(content) - footer - 4) + content[-footer:])


def test_all_events_of_the_jobs_asked_for_are_found_whatever_day_they_are_of(layout: Layout) -> None:
    day_ms = 86_400_000
    wanted = [event("a", 0), event("a", day_ms), event("c", 2 * day_ms, "{photos}")]
    others = [event("b", 1), event("a", 2, "{photos}"), event(None, 3), replace(event("c", 4), event="drained")]
    put(layout, 1, wanted[0], *others)
    put(layout, 2, wanted[1], wanted[2])
    assert asked(layout, ("mail", "a"), ("{photos}", "c")) == wanted
    assert asked(layout, ("mail", "z"), ("gone", "a")) is None


def test_a_lake_without_events_has_no_earlier_events(layout: Layout) -> None:
    assert asked(layout, ("mail", "a")) is None


def test_only_files_that_may_have_a_job_are_read(layout: Layout) -> None:
    for batch, ids in enumerate(["bd", "km", "tx", "éö"]):
        for file in put(layout, batch, *(event(one, batch) for one in ids)):
            if ids != "km":
                spoil(file)
    spoil(*put(layout, 9, event(None, 5)))
    assert asked(layout, ("mail", "k"), ("mail", "a"), ("mail", "zz")) == [event("k", 1)]
    with pytest.raises(OSError):  # noqa: PT011 - Arrow's message may change
        asked(layout, ("mail", "c"))


def test_open_events_are_read_whoever_wrote_the_file(layout: Layout) -> None:
    events = [event("a", 0), event("b", 1)]
    write_file(layout.carry / "one", events_table(events))
    (layout.carry / "one" / "_SUCCESS").touch()
    found = read_open_events(layout, "one")
    assert found.column_names == list(LIFECYCLE_COLUMNS)
    assert [LifecycleEvent(**row) for row in found.to_pylist()] == events
