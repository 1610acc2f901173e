"""A task writes the events that it reads to files, and describes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from bulltask.lake.ledger import QueueRecord
from bulltask.lake.storage import Lake
from bulltask.lake.tables import EVENTS
from bulltask.spark import bronze
from bulltask.spark.bronze import ReadPart, merge_parts, write_events
from bulltask.spark.source import columns
from bulltask.spark.source.columns import arrow_schema, event_record_batch, gap_entry
from bulltask.spark.source.offsets import EventGap, LossReason, StreamId

MAX_MS = 2**64 - 2


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def page(queue: str, *ids: str) -> pa.RecordBatch:
    entries = [(entry_id.encode(), [b"event", b"added", b"jobId", b"j"]) for entry_id in ids]
    return event_record_batch(arrow_schema(columns.EVENTS), queue, entries)


@pytest.mark.parametrize(
    ("tasks", "first", "last"),
    [
        ([["5-1", "5-20"], ["5-30", "6-0"]], "5-1", "6-0"),
        ([["7-0", f"{2**63 - 1}-0"]], "7-0", f"{2**63 - 1}-0"),
        ([[f"{MAX_MS}-3"], ["7-0", f"{MAX_MS - 1}-7"]], "7-0", f"{MAX_MS}-3"),
        ([[f"{MAX_MS}-{2**64 - 2}", f"{MAX_MS}-{2**64 - 1}"]], f"{MAX_MS}-{2**64 - 2}", f"{MAX_MS}-{2**64 - 1}"),
        ([["10-0", "11-0"], ["9-0"]], "9-0", "11-0"),
    ],
)
def test_first_and_last_ids_of_a_batch_are_redis_stream_ids(
    lake: Lake, tasks: Sequence[Sequence[str]], first: str, last: str
) -> None:
    parts = [write_events(lake, [page("mail", *ids), page("other", "1-1")]) for ids in tasks]
    read = merge_parts(ReadPart.from_json(part.to_json()) for part in parts)
    assert read.queues["mail"] == QueueRecord(sum(map(len, tasks)), first, last)
    assert read.queues["other"] == QueueRecord(len(tasks), "1-1", "1-1")
    lake.commit(EVENTS, read.files)
    snapshot = lake.open(EVENTS)
    assert snapshot is not None
    assert sum(file.rows for file in snapshot.files()) == sum(map(len, tasks)) + len(tasks)


def test_a_task_writes_one_file_for_each_day_and_memory_limit(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [page("mail", "5-0"), page("mail", "6-0", "86400000-0"), page("photos", "7-0", f"{MAX_MS}-1")]
    part = write_events(lake, pages)
    assert [(file.partition, file.rows) for file in part.files] == [
        ("1970-01-01", 3),
        ("1970-01-02", 1),
        ("9999-12-31", 1),
    ]
    assert part.files[0].low["queue"] == "mail"
    assert part.files[0].high["queue"] == "photos"
    monkeypatch.setattr(bronze, "_MAX_BYTES", 1)
    assert len(write_events(lake, pages[:2]).files) == 3


def test_a_gap_is_described_and_counted_but_no_event(lake: Lake) -> None:
    gap = EventGap("mail", StreamId(5, 0), StreamId(9, 0), 4, exact=True, loss_reason=LossReason.TRIMMED)
    entries = [gap_entry(gap)]
    part = write_events(lake, [event_record_batch(arrow_schema(columns.EVENTS), "mail", entries), page("mail", "9-0")])
    assert part.queues == {"mail": QueueRecord(1, "9-0", "9-0", lost=4, gaps=1)}
    (described,) = part.gaps
    assert (described["last_id_before"], described["first_id_after"], described["lost"]) == ("5-0", "9-0", 4)
    assert merge_parts([part, part]).queues == {"mail": QueueRecord(2, "9-0", "9-0", lost=8, gaps=2)}


def test_a_task_without_events_writes_no_file(lake: Lake) -> None:
    assert write_events(lake, []) == ReadPart([], {}, [])
    assert not list(Path(lake.root).rglob("*"))
